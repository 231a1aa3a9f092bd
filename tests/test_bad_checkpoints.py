"""Bad checkpoints and impossible exports: a clear error of our own, exit status 2, nothing left behind, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ostinato.delegate import ExportError, load_program
from ostinato.export import export_model
from ostinato.runner.cli import main

from .comparison import relative_error
from .conftest import CAPITALS, Fails, only_methods
from .export.networks import CONFIGS, of_group, with_room

# Bound of the error of logits: on a CPU, the inputs of four-bit weights are bytes.
BYTES_COST = 5e-2


@pytest.fixture
def checkpoint(capitals_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(capitals_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def export_fails(fails: Fails, tmp_path: Path) -> Fails:
    """`export_fails(checkpoint, word, ...)`: return the error line; nothing is left in the folder of --output."""
    parent = tmp_path / "parent"

    def run(model: Path, *words: object) -> str:
        error = fails("export", "--model", model, "--output", parent / "artifact", *words)
        assert not parent.exists() or list(parent.iterdir()) == []
        return error

    return run


def test_no_checkpoint(export_fails: Fails, tmp_path: Path) -> None:
    assert "no such folder" in export_fails(tmp_path / "nothing")
    assert "it has no config.json" in export_fails(tmp_path)
    (tmp_path / "file").write_text("hello")
    assert f"not a folder, and no GGUF file, which would begin with GGUF: {tmp_path / 'file'}" in export_fails(
        tmp_path / "file"
    )
    (tmp_path / "model.gguf").write_text("hello")
    assert f"for model.gguf give --model {tmp_path / 'model.gguf'}" in export_fails(tmp_path)


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
    """Change settings in config.json."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "generation_config.json",
        "tokenizer_config.json",
    ],
)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_json_nested_too_deeply(export_fails: Fails, checkpoint: Path, name: str, text: str) -> None:
    (checkpoint / name).write_text(text)
    error = export_fails(checkpoint)
    assert error == f"error: {checkpoint / name} cannot be read: its JSON is nested too deeply"


def test_unsupported_model_type(export_fails: Fails, checkpoint: Path) -> None:
    for model_type in ("gpt2", None, 3):
        (checkpoint / "config.json").write_text(json.dumps({"model_type": model_type}))
        error = export_fails(checkpoint)
        assert f"unsupported model type {model_type!r}" in error
        assert "supported are: llama, mistral, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_moe" in error


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


@pytest.mark.parametrize(("dtype", "stored"), [(torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str)
def test_weights_of_another_dtype(export_fails: Fails, checkpoint: Path, dtype: torch.dtype, stored: str) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model-00001-of-00004.safetensors"
    name = "model.layers.0.input_layernorm.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(dtype)}, path)
    expected = f"tensor {name!r} of the checkpoint is stored as {stored}; an export takes BF16, F16, F32, F64"
    assert expected in export_fails(checkpoint)


@pytest.mark.parametrize("text", ["{}", "[" * 100_000, '{"a":' * 100_000], ids=["empty", "lists", "objects"])
def test_a_tokenizer_of_another_form(export_fails: Fails, checkpoint: Path, text: str) -> None:
    path = checkpoint / "tokenizer.json"
    path.write_text(text)
    assert f"{path} cannot be read: " in export_fails(checkpoint)


@pytest.mark.parametrize("added", [3, [3], {"id": 1}, [{"content": "a"}], [{"id": "1"}], [{"id": 2**70}]])
def test_added_tokens_of_another_form(export_fails: Fails, checkpoint: Path, added: object) -> None:
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": added}))
    assert f"{path} cannot be read: " in export_fails(checkpoint)


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
        assert f"unsupported group size {size} for int4; supported are: 32, 64, 128" in error
    for words in (["--group-size", 32], ["--hqq"]):
        assert f"{words[0]} says how to quantise: give --quant as well" in export_fails(capitals_checkpoint, *words)


@pytest.mark.parametrize("count", (-1, 41))
def test_experts_on_the_host_of_layers_that_are_not_there(export_fails: Fails, count: int) -> None:
    error = export_fails(CONFIGS / "Qwen3.5-35B-A3B", "--load-format", "dummy", "--n-cpu-moe", count)
    assert f"--n-cpu-moe must be 0 to 40, the model's layers with experts; got {count}" in error


@pytest.mark.parametrize("words", (["--cpu-moe"], ["--n-cpu-moe", 1], ["--n-cpu-moe", -1]), ids=str)
def test_experts_on_the_host_of_a_model_without(export_fails: Fails, words: list[object]) -> None:
    error = export_fails(CONFIGS / "Qwen3.5-0.8B", "--load-format", "dummy", *words)
    assert "--cpu-moe and --n-cpu-moe are for models with experts; 'qwen3_5" in error and "has none" in error


def test_what_cpu_moe_is_in_python(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cpu_moe must be True, False or a number of layers, got 'all'"):
        export_model(CAPITALS, tmp_path / "artifact", cpu_moe="all")  # type: ignore[arg-type]


def test_dtypes_of_states(export_fails: Fails, capitals_checkpoint: Path, tmp_path: Path) -> None:
    error = export_fails(capitals_checkpoint, "--state-dtype", "bfloat16")
    assert "--state-dtype bfloat16 is for GPUs: on a CPU recurrent states are float32" in error
    error = export_fails(CONFIGS / "Llama-3.1-8B", "--load-format", "dummy", "--state-dtype", "bfloat16")
    assert "--state-dtype is for models with recurrent states; 'llama' has none" in error
    with pytest.raises(ExportError, match="unknown state dtype 'half'; the dtypes are: float32, bfloat16"):
        export_model(CAPITALS, tmp_path / "artifact", state_dtype="half")


def test_shapes_that_int4_cannot_take(export_fails: Fails, checkpoint: Path) -> None:
    # The default of --group-size is 128.
    error = export_fails(checkpoint, "--quant", "int4")
    assert "group size 128 does not divide moe_intermediate_size (64); --group-size 32, 64 would" in error
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shared_expert_intermediate_size": 96}))
    error = export_fails(checkpoint, "--quant", "int4", "--group-size", 32)
    assert "int4 needs shared_expert_intermediate_size to be a multiple of 64, the config has 96" in error


def test_config_alone(export_fails: Fails, capitals_checkpoint: Path, tmp_path: Path) -> None:
    """A folder with only a config is refused, because it has no weights. With --load-format dummy the artifact has the random
    weights that Python has."""
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
    with only_methods("decode"):
        assert main([str(word) for word in (*words, "--quant", "int4", "--group-size", 32)]) == 0
    family, model_config = read_config(folder)
    network = with_room(build_network(model_config, 8, torch.float32, quant=of_group(32)))
    dummy = family.dummy_weights(network, torch.device("cpu"))
    materialise(network, QuantizedWeights(network, dummy, torch.device("cpu")))
    assert not (output / "tokenizer.json").exists()
    with load_program(output) as program, torch.no_grad():
        assert program.metadata["get_quantization"] == "int4 g32"
        decode = program.load_method("decode")
        for position, token in enumerate((5, 6, 7, 8)):
            inputs = torch.tensor([[token]]), torch.tensor([position]), torch.tensor([0])
            assert relative_error(decode.execute(inputs)[0], network(*inputs)) < BYTES_COST


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


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "does not work (exit status 1): set CXX"),
        ("exit 0", "does not work (exit status 0): set CXX"),
        ("echo 'no license' >&2; exit 3", "does not work (no license): set CXX"),
        (
            "echo \"<stdin>:1:10: fatal error: 'omp.h' file not found\" >&2; exit 1",
            "finds no omp.h, which an export needs",
        ),
    ],
)
def test_a_compiler_that_does_not_work(
    export_fails: Fails,
    capitals_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    message: str,
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert f"the C++ compiler {compiler} {message}" in export_fails(capitals_checkpoint)
