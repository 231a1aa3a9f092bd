"""Bad input: a clear error of our own, exit status 2, nothing lost, no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ostinato.delegate import InputError, OptionError, Program, Target, load_program
from ostinato.delegate.artifact import Manifest, MethodRecord
from ostinato.runner import Engine
from ostinato.runner.cli import main

from .delegate.helpers import GRAPH, bring_to, eager_answers, same_state, state, step_inputs
from .modules import MAX_SEQ_LEN, VOCAB
from .processes import CLI

Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(word, ...)`: run the command in this process, expect exit status 2; returns the one error line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        return lines[0]

    return run


@pytest.fixture
def talking_artifact(recurrent_artifact: Path, capitals_checkpoint: Path, tmp_path: Path) -> Path:
    """The toy module with a real tokenizer, whose ids are mostly beyond the toy's vocabulary."""
    folder = Path(shutil.copytree(recurrent_artifact, tmp_path / "talking"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(capitals_checkpoint / name, folder / name)
    return folder


@pytest.fixture
def checkpoint(capitals_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(capitals_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def relu_artifact(exported: Callable[..., Path]) -> Path:
    """A program that is not a language model."""
    from ostinato.export import export_program

    return exported("relu", lambda path: export_program({"forward": (nn.ReLU(), (torch.zeros(2),), None)}, path))


# --- artifacts


@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["inspect"]], ids=["run", "inspect"])
def test_not_an_artifact(fails: Fails, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello")
    assert "no such folder" in fails(*command, tmp_path / "nothing")
    assert "not a folder" in fails(*command, tmp_path / "file.txt")
    assert "not an artifact: it has no model.pte" in fails(*command, tmp_path)


@pytest.mark.parametrize("name", ["model.pte", "model.ptd"])
@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["inspect"]], ids=["run", "inspect"])
def test_damaged_artifact(fails: Fails, command: list[str], talking_artifact: Path, name: str) -> None:
    path = talking_artifact / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert f"{name} is cut short" in fails(*command, talking_artifact)
    path.write_bytes(b"\0" * 100 + content[100:])
    assert name in fails(*command, talking_artifact)


def test_damaged_artifact_in_a_process_of_its_own(talking_artifact: Path) -> None:
    path = talking_artifact / "model.ptd"
    path.write_bytes(path.read_bytes()[:700])
    done = subprocess.run([*CLI, "run", str(talking_artifact), "--prompt", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_no_language_model(fails: Fails, relu_artifact: Path) -> None:
    assert "takes input [2]" in fails("run", relu_artifact, "--prompt", "x")
    with (
        pytest.raises(OptionError, match=r"no method 'decode'; its methods are: forward"),
        load_program(relu_artifact) as program,
    ):
        program.load_method("decode")


def test_no_tokenizer(fails: Fails, recurrent_artifact: Path) -> None:
    assert "has no tokenizer.json" in fails("run", recurrent_artifact, "--prompt", "hello")


# Deeper than any parser goes.
DEEP = ["[" * 100_000, '{"a": ' * 100_000]
NO_UTF8 = b'{"model": "\xff\xfe"}'


def asked(fails: Fails, artifact: Path) -> str:
    return fails("run", artifact, "--prompt", "hello")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": 3}', "\0\0", *DEEP, '{"version": "1.0", "model": ' + DEEP[0]]
)
def test_broken_tokenizer(fails: Fails, talking_artifact: Path, content: str) -> None:
    (talking_artifact / "tokenizer.json").write_text(content)
    assert "tokenizer.json cannot be read" in fails("run", talking_artifact, "--prompt", "hello")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer_files_that_are_no_utf8(fails: Fails, talking_artifact: Path, name: str) -> None:
    (talking_artifact / name).write_bytes(NO_UTF8)
    assert f"{name} cannot be read" in asked(fails, talking_artifact)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer_files_that_are_folders(fails: Fails, talking_artifact: Path, name: str) -> None:
    (talking_artifact / name).unlink(missing_ok=True)
    (talking_artifact / name).mkdir()
    assert f"{name} cannot be read" in asked(fails, talking_artifact)


@pytest.mark.parametrize("content", DEEP, ids=["array", "object"])
def test_tokenizer_config_nested_too_deeply(fails: Fails, talking_artifact: Path, content: str) -> None:
    path = talking_artifact / "tokenizer_config.json"
    path.write_text(content)
    assert f"{path} cannot be read: its JSON is nested too deeply" in asked(fails, talking_artifact)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_tokenizer_config_that_is_no_object(fails: Fails, talking_artifact: Path, content: str) -> None:
    (talking_artifact / "tokenizer_config.json").write_text(content)
    assert "tokenizer_config.json cannot be read: expected an object" in asked(fails, talking_artifact)


@pytest.mark.parametrize("template", [3, {"a": 1}, True, [{"name": "default", "template": 3}]])
def test_chat_template_of_another_type(fails: Fails, talking_artifact: Path, template: object) -> None:
    (talking_artifact / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert "chat_template must be text, or a list of named texts" in asked(fails, talking_artifact)


@pytest.mark.parametrize("template", [[], [3, None], [{"name": []}], [{"template": "x"}]])
def test_chat_templates_without_a_default(fails: Fails, talking_artifact: Path, template: object) -> None:
    (talking_artifact / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert "no chat template: pass --raw" in asked(fails, talking_artifact)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ " + "(" * 100_000, "{{ messages[0].a.b }}"]
)
def test_chat_template_that_fails(fails: Fails, talking_artifact: Path, template: str) -> None:
    (talking_artifact / "chat_template.jinja").write_text(template)
    assert "the chat template cannot be rendered" in asked(fails, talking_artifact)


@pytest.mark.parametrize("record", [MethodRecord, Target, Manifest])
@pytest.mark.parametrize("content", DEEP, ids=["array", "object"])
@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["inspect"], ["bench"]], ids=["run", "inspect", "bench"])
def test_records_nested_too_deeply(
    fails: Fails,
    recurrent_artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    record: type[MethodRecord],
    content: str,
) -> None:
    """As they would come out of the two files, whose hashes are compared later."""
    from_bytes = record.from_bytes
    monkeypatch.setattr(record, "from_bytes", lambda data: from_bytes(content.encode()))
    assert "cannot be read: its JSON is nested too deeply" in fails(*command, recurrent_artifact)


def test_a_record_nested_too_deeply_in_the_file(fails: Fails, talking_artifact: Path) -> None:
    path = talking_artifact / "model.pte"
    content = path.read_bytes()
    begin = content.index(b'{"buffer_specs"')
    path.write_bytes(content[:begin] + b"[" * 1500 + content[begin + 1500 :])
    # Python 3.12 reads as deep as this, and then misses the end.
    assert "a method's record in model.pte cannot be read: " in fails("inspect", talking_artifact)


def test_a_prompt_that_is_no_text(fails: Fails, talking_artifact: Path) -> None:
    """As Python hands on an argument that is no UTF-8."""
    for words in ([], ["--raw"]):
        prompt = b"caf\xe9".decode(errors="surrogateescape")
        assert "not valid Unicode" in fails("run", talking_artifact, "--prompt", prompt, *words)


def test_broken_tokenizer_config(fails: Fails, talking_artifact: Path) -> None:
    path = talking_artifact / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text("{")
    assert "tokenizer_config.json cannot be read" in fails("run", talking_artifact, "--prompt", "hello")
    for template in ("{% for %}", "{{ raise_exception('no') }}", "{{ messages.nothing.at.all }}"):
        path.write_text(json.dumps({**config, "chat_template": template}))
        assert "the chat template cannot be rendered" in fails("run", talking_artifact, "--prompt", "hello")
    path.unlink()
    assert "no chat template: pass --raw" in fails("run", talking_artifact, "--prompt", "hello")


# --- prompts and options


def test_prompts(fails: Fails, talking_artifact: Path) -> None:
    for prompt in ("", "   "):
        assert "the prompt is empty" in fails("run", talking_artifact, "--prompt", prompt)
    assert "the prompt is empty" in fails("run", talking_artifact, "--prompt", "", "--raw")
    error = fails("run", talking_artifact, "--prompt", "a b c d " * 20)
    assert f"leaves no room for an answer in max_seq_len {MAX_SEQ_LEN}" in error
    # Ids of a real vocabulary in a toy's.
    assert f"'tokens': values must lie in 0..{VOCAB - 1}" in fails("run", talking_artifact, "--prompt", "hi", "--raw")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number of 0 or more, got -1.0"),
        (["--temperature", "nan"], "temperature must be a number of 0 or more, got nan"),
        (["--top-k", "-1"], "top_k must be 0 (off) or more, got -1"),
        (["--top-p", "0"], "top_p must be more than 0 and at most 1, got 0.0"),
        (["--min-p", "1.5"], "min_p must be 0 (off) to 1, got 1.5"),
        (["--top-p", "1.5"], "top_p must be more than 0 and at most 1, got 1.5"),
        (["--max-new-tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
        (["--seed", str(1 << 80)], "seed must be 0 to 2**64 - 1"),
        (["--seed", "-1"], "seed must be"),
    ],
)
def test_options_of_run(fails: Fails, talking_artifact: Path, words: list[str], message: str) -> None:
    assert message in fails("run", talking_artifact, "--prompt", "a", *words)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["bake"],
        ["run"],
        ["run", "x"],
        ["run", "x", "--prompt", "y", "--top-k", "many"],
        ["export", "--model", "x", "--output", "y", "--quant", "int8"],
        ["export", "--model", "x", "--output", "y", "--group-size", "few"],
        ["export", "--model", "x", "--output", "y", "--load-format", "gguf"],
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: ostinato" in capsys.readouterr().err


def test_tokens_of_generate(recurrent_artifact: Path) -> None:
    with Engine.load(recurrent_artifact) as engine:
        before = state(engine.program)
        for tokens, message in (
            ([], "the prompt is empty"),
            ([1] * MAX_SEQ_LEN, "leaves no room"),
            ([1, VOCAB], f"values must lie in 0..{VOCAB - 1}, got 1..{VOCAB}"),
            ([-1, 2], "got -1..2"),
            ([-1], "got -1..-1"),
        ):
            with pytest.raises(InputError, match=message):
                list(engine.generate_tokens(tokens))
        assert same_state(before, state(engine.program))
        assert len(list(engine.generate_tokens([1] * (MAX_SEQ_LEN - 1), ignore_eos=True))) == 1


# --- execute

LONG = torch.int64
GOOD = step_inputs(1)
BAD_INPUTS: list[tuple[str, Any, str]] = [
    ("no inputs", (), "takes a sequence of 2 inputs"),
    ("one input", GOOD[:1], "takes a sequence of 2 inputs .*got 1 inputs"),
    ("three inputs", (*GOOD, GOOD[1]), "got 3 inputs"),
    ("a tensor", GOOD[0], "takes a sequence of 2 inputs"),
    ("a list", ([[1]], [1]), "'tokens': expected a tensor .*got list"),
    ("None", (GOOD[0], None), "'input_pos': expected a tensor .*got NoneType"),
    ("an int", (GOOD[0], 1), "'input_pos': expected a tensor .*got int"),
    ("dtype", (GOOD[0].int(), GOOD[1]), r"'tokens': expected \[1, 1\] int64, got \[1, 1\] int32"),
    ("float", (GOOD[0], GOOD[1].float()), r"'input_pos': expected \[1\] int64, got \[1\] float32"),
    ("rank", (GOOD[0][0], GOOD[1]), r"'tokens': expected \[1, 1\] int64, got \[1\]"),
    ("batch", (GOOD[0].repeat(2, 1), GOOD[1]), r"'tokens': expected \[1, 1\] int64, got \[2, 1\]"),
    ("length", (GOOD[0].repeat(1, 3), GOOD[1].repeat(3)), r"'tokens': .*got \[1, 3\]"),
    ("empty", (torch.zeros(1, 0, dtype=LONG), torch.zeros(0, dtype=LONG)), r"'tokens': .*got \[1, 0\]"),
    ("scalar", (GOOD[0], torch.tensor(1)), r"'input_pos': expected \[1\] int64, got \[\]"),
    ("swapped", (GOOD[1], GOOD[0]), "'tokens': expected"),
    ("device", (GOOD[0], GOOD[1].to("meta")), "'input_pos': it is on meta"),
    ("id too large", (torch.tensor([[VOCAB]]), GOOD[1]), rf"'tokens': values must lie in 0..{VOCAB - 1}, got"),
    ("id below 0", (torch.tensor([[-1]]), GOOD[1]), "'tokens': values must lie in"),
    ("past the end", (GOOD[0], torch.tensor([MAX_SEQ_LEN])), rf"'input_pos': values must lie in 0..{MAX_SEQ_LEN - 1}"),
    ("before 0", (GOOD[0], torch.tensor([-1])), "'input_pos': values must lie in"),
]


@pytest.fixture
def program(recurrent_artifact: Path) -> Iterator[Program]:
    with load_program(recurrent_artifact) as loaded:
        yield loaded


@pytest.mark.parametrize("phase", ["disabled", "warmup", "capture", "replay"])
def test_wrong_inputs_in_each_phase(program: Program, phase: str) -> None:
    decode = program.load_method("decode", {} if phase == "disabled" else {**GRAPH, "cuda_graph_warmup_steps": 1})
    made = bring_to(decode, phase)
    before = state(program)
    for what, inputs, message in BAD_INPUTS:
        with pytest.raises(InputError, match=f"method 'decode'.*{message}"):
            decode.execute(inputs)
        assert same_state(before, state(program)), what
        assert decode.stats.phase == phase, what
    torch.testing.assert_close(decode.execute(step_inputs(made))[0], eager_answers(made + 1)[-1])


def test_wrong_inputs_of_a_dynamic_method(program: Program) -> None:
    prefill = program.load_method("prefill")
    before = state(program)
    for tokens, positions, message in (
        (1, 1, rf"'tokens': expected \[1, T=2..{MAX_SEQ_LEN - 1}\] int64, got \[1, 1\]"),
        (MAX_SEQ_LEN, MAX_SEQ_LEN, r"'tokens': expected"),
        (5, 4, "'input_pos': its length 4 differs from 5, the length of 'tokens'"),
    ):
        with pytest.raises(InputError, match=message):
            prefill.execute((torch.zeros(1, tokens, dtype=LONG), torch.arange(positions)))
    with pytest.raises(InputError, match=f"got 30..{MAX_SEQ_LEN}"):
        prefill.execute((torch.zeros(1, 3, dtype=LONG), torch.arange(30, 33)))
    assert same_state(before, state(program))


def test_unknown_backend_option(program: Program) -> None:
    with pytest.raises(OptionError, match=r"unknown backend option 'cuda_graph'.*; the options are: cuda_graph_early"):
        program.load_method("decode", {"cuda_graph": "decode"})


# --- checkpoints and exports


@pytest.fixture
def export_fails(fails: Fails, tmp_path: Path) -> Fails:
    """`export_fails(checkpoint, word, ...)`; nothing is left in the folder of --output."""
    parent = tmp_path / "parent"

    def run(model: Path, *words: object) -> str:
        error = fails("export", "--model", model, "--output", parent / "artifact", *words)
        assert not parent.exists() or list(parent.iterdir()) == []
        return error

    return run


def test_no_checkpoint(export_fails: Fails, tmp_path: Path) -> None:
    assert "no such folder" in export_fails(tmp_path / "nothing")
    assert "it has no config.json" in export_fails(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"qwen3_5_moe_text"', '{"model_type": "qwen3_5_moe_text"}']
)
def test_broken_config(export_fails: Fails, checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert "config.json" in export_fails(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "many"),
        ("hidden_size", -1),
        ("num_experts", []),
        ("num_experts", 2.5),
        ("layer_types", 4),
        ("layer_types", "full"),
        ("rope_parameters", "none"),
        ("max_position_embeddings", "long"),
        ("text_config", 3),
    ],
)
def test_config_of_wrong_types(export_fails: Fails, checkpoint: Path, key: str, value: object) -> None:
    change(checkpoint, **{key: value})
    assert "config.json" in export_fails(checkpoint)


def change(checkpoint: Path, **settings: object) -> None:
    """Set settings of config.json."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
    ],
)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_json_nested_too_deeply(export_fails: Fails, checkpoint: Path, name: str, text: str) -> None:
    (checkpoint / name).write_text(text)
    error = export_fails(checkpoint)
    assert error == f"error: {checkpoint / name} cannot be read: its JSON is nested too deeply"


def test_unsupported_model_type(export_fails: Fails, checkpoint: Path) -> None:
    for model_type in ("llama", None, 3):
        (checkpoint / "config.json").write_text(json.dumps({"model_type": model_type}))
        error = export_fails(checkpoint)
        assert f"unsupported model type {model_type!r}" in error
        assert "supported are: qwen3_5_moe_text, qwen3_5_moe" in error


@pytest.mark.parametrize("words", [[], ["--quant", "int4", "--group-size", 32, "--hqq"]], ids=["plain", "int4"])
def test_shard_missing(export_fails: Fails, checkpoint: Path, words: list[object]) -> None:
    name = "model-00003-of-00004.safetensors"
    (checkpoint / name).unlink()
    assert f"lacks 1 of 4 shards: {name}" in export_fails(checkpoint, *words)


def test_shard_cut_short(export_fails: Fails, checkpoint: Path) -> None:
    path = checkpoint / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path.name} cannot be read" in export_fails(checkpoint)


def test_tensors_that_do_not_fit(export_fails: Fails, checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model-00001-of-00004.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.input_layernorm.weight"
    assert name in tensors
    norm = tensors.pop(name)
    save_file({**tensors, "model.surprise": norm.clone()}, path)
    error = export_fails(checkpoint)
    assert f"missing (1): {name}" in error
    assert "unexpected (1): model.surprise" in error
    save_file({**tensors, name: torch.zeros(3)}, path)
    assert f"tensor {name!r} of the checkpoint has shape [3]" in export_fails(checkpoint)


@pytest.mark.parametrize("added", [3, [3], {"id": 1}, [{"content": "a"}], [{"id": "1"}], [{"id": 2**70}]])
def test_added_tokens_of_another_form(export_fails: Fails, checkpoint: Path, added: object) -> None:
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": added}))
    assert f"{path}: added_tokens must be a list of objects with an id each" in export_fails(checkpoint)


@pytest.mark.parametrize("ends", ["2", [2, None], 2.5, {"id": 2}, True, -1, [2**31]])
def test_ends_that_are_no_ids(export_fails: Fails, checkpoint: Path, ends: object) -> None:
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ends}))
    assert f"{path}: eos_token_id must be an id or a list of ids, got {ends!r}" in export_fails(checkpoint)


def test_options_of_export(export_fails: Fails, capitals_checkpoint: Path) -> None:
    for length in (-1, 0, 3, 1 << 40):
        assert f"got {length}" in export_fails(capitals_checkpoint, "--max-seq-len", length)
    for chunk in (-1, 0, 2, 64, 1 << 40):
        error = export_fails(capitals_checkpoint, "--max-seq-len", 64, "--prefill-chunk", chunk)
        assert f"--prefill-chunk must be 3 to 63 (max_seq_len - 1), got {chunk}" in error


@pytest.mark.parametrize("positions", (1, 3))
def test_model_without_room_for_an_answer(export_fails: Fails, checkpoint: Path, positions: int) -> None:
    change(checkpoint, max_position_embeddings=positions)
    error = export_fails(checkpoint)
    assert f"config.json: max_position_embeddings must be 4 or more, got {positions}" in error


def test_parameter_that_no_memory_holds(export_fails: Fails, checkpoint: Path) -> None:
    change(checkpoint, vocab_size=2**31 - 1, hidden_size=2**20)
    error = export_fails(checkpoint, "--load-format", "dummy")
    assert "parameter 'model.embed_tokens.weight' is [2147483647, 1048576], 9007199.3 GB: more memory than" in error


def test_options_of_quantisation(export_fails: Fails, capitals_checkpoint: Path) -> None:
    for size in (-32, 0, 16, 48, 256):
        error = export_fails(capitals_checkpoint, "--quant", "int4", "--group-size", size)
        assert f"unsupported group size {size}; supported are: 32, 64, 128" in error
    for words in (["--group-size", 32], ["--hqq"]):
        assert f"{words[0]} says how to quantise: give --quant int4 as well" in export_fails(
            capitals_checkpoint, *words
        )


def test_shapes_that_int4_cannot_take(export_fails: Fails, checkpoint: Path) -> None:
    # Without --group-size it is 128.
    error = export_fails(checkpoint, "--quant", "int4")
    assert "group size 128 does not divide moe_intermediate_size (64); --group-size 32, 64 would" in error
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shared_expert_intermediate_size": 96}))
    error = export_fails(checkpoint, "--quant", "int4", "--group-size", 32)
    assert "int4 needs shared_expert_intermediate_size to be a multiple of 64, the config has 96" in error


def test_config_alone(export_fails: Fails, capitals_checkpoint: Path, tmp_path: Path) -> None:
    """There are no weights to read. Random ones are drawn when asked for, and the artifact holds the same as Python."""
    from ostinato.export.models import build_network, read_config
    from ostinato.export.weights.stream import QuantizedWeights, materialise

    config = json.loads((capitals_checkpoint / "config.json").read_text())
    folder, output = tmp_path / "config", tmp_path / "dummy"
    folder.mkdir()
    one_layer = {**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (folder / "config.json").write_text(json.dumps(one_layer))
    error = export_fails(folder)
    assert f"{folder} holds no .safetensors file" in error and "--load-format dummy" in error

    words = ["export", "--model", folder, "--output", output, "--load-format", "dummy", "--max-seq-len", 8]
    assert main([str(word) for word in (*words, "--quant", "int4", "--group-size", 32)]) == 0
    family, model_config = read_config(folder)
    network = build_network(model_config, 8, torch.float32, group_size=32)
    dummy = family.dummy_weights(network, torch.device("cpu"))
    materialise(network, QuantizedWeights(network, dummy, torch.device("cpu")))
    assert not (output / "tokenizer.json").exists()
    with load_program(output) as program, torch.no_grad():
        assert program.metadata["get_quantization"] == "int4 g32"
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        for method, tokens, positions in ((prefill, [[5, 6, 7]], [0, 1, 2]), (decode, [[8]], [3])):
            inputs = torch.tensor(tokens), torch.tensor(positions)
            torch.testing.assert_close(method.execute(inputs)[0], network(*inputs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(export_fails: Fails, capitals_checkpoint: Path) -> None:
    assert "device 'cuda' needs an NVIDIA GPU" in export_fails(capitals_checkpoint, "--device", "cuda")


@pytest.mark.parametrize("wanted", [None, "no-such-compiler"])
def test_no_compiler(
    export_fails: Fails,
    capitals_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wanted: str | None,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if wanted:
        monkeypatch.setenv("CXX", wanted)
    error = export_fails(capitals_checkpoint)
    assert ("'no-such-compiler', does not exist" if wanted else "apt-get install g++") in error
