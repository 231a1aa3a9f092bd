"""Bad input to a program: a clear error of our own, exit status 2, nothing lost, no traceback."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ostinato.delegate import ArtifactError, InputError, OptionError, Program, Target, load_program
from ostinato.delegate.artifact.names import FORMAT_VERSION
from ostinato.delegate.artifact.records import Manifest, MethodRecord
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.cli import COMMANDS, main

from .conftest import Fails
from .delegate.helpers import GRAPH, bring_to, eager_answers, same_state, state, step_inputs
from .modules import MAX_SEQ_LEN, VOCAB
from .processes import CLI


@pytest.fixture
def talking_artifact(recurrent_artifact: Path, capitals_checkpoint: Path, tmp_path: Path) -> Path:
    """The toy module with a real tokenizer, whose ids are mostly beyond the toy's vocabulary."""
    folder = Path(shutil.copytree(recurrent_artifact, tmp_path / "talking"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(capitals_checkpoint / name, folder / name)
    return folder


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


@pytest.mark.parametrize("name", ["model.pte", "model.ptd"])
@pytest.mark.parametrize(
    "command", [["run", "--prompt", "x"], ["inspect"], ["bench"], ["bench", "--batch", "2"]], ids=" ".join
)
def test_an_artifact_of_an_older_format(fails: Fails, talking_artifact: Path, command: list[str], name: str) -> None:
    path = talking_artifact / name
    content = path.read_bytes()
    older, now = FORMAT_VERSION - 1, b'"version": %d' % FORMAT_VERSION
    assert now in content
    # Of the same length, as offsets in the file say.
    path.write_bytes(content.replace(now, (b'"version": %d' % older).ljust(len(now))))
    assert fails(*command, talking_artifact) == (
        f"error: the artifact has format version {older}, this runtime reads version {FORMAT_VERSION}: "
        "export the model again with this version of ostinato"
    )


def test_no_language_model(relu_artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"takes input \[2\]"):
        Engine.load(relu_artifact)
    with (
        pytest.raises(OptionError, match=r"no method 'decode'; its methods are: forward"),
        load_program(relu_artifact) as program,
    ):
        program.load_method("decode")


def test_no_tokenizer(fails: Fails, recurrent_artifact: Path) -> None:
    with mock.patch.object(Engine, "__init__", side_effect=AssertionError("nothing is loaded for it")):
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
    """JSON that is nested too deeply is refused. The test changes the records as they are read: hashes are compared later."""
    from_bytes = record.from_bytes
    monkeypatch.setattr(record, "from_bytes", lambda data: from_bytes(content.encode()))
    assert "cannot be read: its JSON is nested too deeply" in fails(*command, recurrent_artifact)


def test_a_record_nested_too_deeply_in_the_file(fails: Fails, talking_artifact: Path) -> None:
    path = talking_artifact / "model.pte"
    content = path.read_bytes()
    begin = content.index(b'{"buffer_specs"')
    path.write_bytes(content[:begin] + b"[" * 1500 + content[begin + 1500 :])
    # Python 3.12 parses JSON of this depth, and then reports that the end is missing.
    assert "a method's record in model.pte cannot be read: " in fails("inspect", talking_artifact)


def test_a_prompt_that_is_no_text(fails: Fails, talking_artifact: Path) -> None:
    """The prompt is a command-line argument that is not valid UTF-8, as Python decodes it."""
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


# --- memory


@pytest.mark.parametrize("words", [["--sessions", 10**8], ["--kv-tokens", 10**9], ["--sessions", 10**30]])
def test_more_memory_than_there_is(fails: Fails, capitals_artifact: Path, words: list[object]) -> None:
    error = fails("run", capitals_artifact, "--prompt", "x", *words)
    figures = r"needs [\d.]+ GB of the host's memory for mutable buffers; [\d.]+ GB are available"
    assert re.search(figures, error), error
    if words[0] == "--sessions":
        assert re.search(figures, fails("bench", capitals_artifact, "--batch", words[1], "-p", 2, "-n", 2))


# --- prompts and options


def test_prompts(fails: Fails, talking_artifact: Path) -> None:
    for prompt in ("", "   "):
        assert "the prompt is empty" in fails("run", talking_artifact, "--prompt", prompt)
    assert "the prompt is empty" in fails("run", talking_artifact, "--prompt", "", "--raw")
    error = fails("run", talking_artifact, "--prompt", "a b c d " * 20)
    assert f"leaves no room for an answer in max_seq_len {MAX_SEQ_LEN}" in error
    # The ids are those of a real vocabulary; the toy's is smaller.
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
        ["bake"],
        ["--print-completion", "dos"],
        ["--print-completion"],
        ["run"],
        ["run", "x"],
        ["run", "x", "--prompt", "y", "--top-k", "many"],
        ["run", "x", "--promt", "y"],
        ["run", "x", "--prompt", "y", "--chat-template-kwargs", "[]"],
        ["run", "x", "--prompt", "y", "--chat-template-kwargs", "{enable_thinking: false}"],
        ["run", "x", "--prompt", "y", "--chat-template-kwargs", "[" * 100_000],
        ["recompile", "x"],
        ["export", "--model", "x", "--output", "y", "--quant", "int3"],
        ["export", "--model", "x", "--output", "y", "--group-size", "few"],
        ["export", "--model", "x", "--output", "y", "--load-format", "gguf"],
        ["export", "--model", "x", "--output", "y", "--n-cpu-moe", "few"],
        ["export", "--model", "x", "--output", "y", "--cpu-moe", "--n-cpu-moe", "2"],
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    command = words[0] if words[0] in COMMANDS else ""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(f"(see {' '.join(('ostinato', command)).strip()} --help)")


def test_options_of_inspect(fails: Fails, recurrent_artifact: Path) -> None:
    assert "--top must be 0 or more, got -3" in fails("inspect", recurrent_artifact, "--top", -3)


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


def test_arguments_of_another_type(recurrent_artifact: Path) -> None:
    with Engine.load(recurrent_artifact) as engine, engine.open_session() as session:
        for tokens in ("hello", ["1"], [1.5], 7, None):
            with pytest.raises(InputError, match="token ids, whole numbers; got "):
                session.prefill(tokens)  # type: ignore[arg-type]
            with pytest.raises(InputError, match="token ids, whole numbers; got "):
                engine.generate_tokens(tokens)  # type: ignore[arg-type]
        session.prefill(torch.tensor([1, 2]))  # type: ignore[arg-type]
        assert session.tokens == [1, 2]
        with pytest.raises(InputError, match="token ids, whole numbers; got "):
            session.append("7")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="sampling_params must be SamplingParams, got 'greedy'"):
            session.sampling_params = "greedy"  # type: ignore[assignment]
        assert session.sampling_params == SamplingParams()
        for take in (engine.open_session, lambda params: engine.generate_tokens([1], sampling_params=params)):
            with pytest.raises(OptionError, match=r"sampling_params must be SamplingParams, got \{\}"):
                take({})  # type: ignore[arg-type]
    for options in ({"temperature": "hot"}, {"top_k": 1.5}, {"seed": "x"}, {"top_p": None}):
        (name,) = options
        with pytest.raises(OptionError, match=rf"^{name} must be a (whole )?number, got "):
            SamplingParams(**options)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be more than 0, 1 is off; got 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be -2 to 2, 0 is off; got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -2 to 2, 0 is off; got nan"),
        ({"logit_bias": {5: 101}}, r"logit_bias must be -100 to 100 for each token, got \{5: 101\}"),
        ({"logit_bias": [5]}, r"logit_bias must map token ids to numbers, got \[5\]"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers, got "),
        ({"min_tokens": -1}, r"min_tokens must be 0 \(off\) or more, got -1"),
        ({"stop_token_ids": ["x"]}, r"stop_token_ids must be token ids, got \['x'\]"),
        ({"stop_token_ids": 7}, "stop_token_ids must be token ids, got 7"),
        ({"logprobs": 21}, "logprobs must be 0 to 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be 0 to 20, got -1"),
    ]
    for given, message in wrong:
        with pytest.raises(OptionError, match=f"^{message}"):
            SamplingParams(**given)
    with pytest.raises(OptionError, match="cuda_graph must be True or False, got 'maybe'"):
        Engine.load(recurrent_artifact, cuda_graph="maybe")  # type: ignore[arg-type]


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
        assert decode.stats.next_phase == phase, what
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
