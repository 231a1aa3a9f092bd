"""A family of one's own: the worked example in tests/assets/families, from the command line to logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.export import register_family
from ostinato.export.kernels.attention.reference import rotate
from ostinato.export.layers.rotary import RotaryEmbedding
from ostinato.export.models import FAMILIES, find_family, registry
from ostinato.runner.cli import main

from ..conftest import ROOT
from .conversations import converse, errors

EXAMPLE = ROOT / "tests" / "assets" / "families" / "parallel.py"
LAYERS, HIDDEN, HEADS, INNER, VOCAB = 2, 64, 4, 128, 97


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    registry._registered.clear()


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(HIDDEN, generator=generator)

    found = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator), "model.norm.weight": norm()}
    found["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        here = f"model.layers.{layer}."
        found[f"{here}input_layernorm.weight"] = norm()
        found |= {f"{here}self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN) for name in "qkvo"}
        found |= {f"{here}mlp.{name}_proj.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{here}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = {
        "model_type": "parallel",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def plain_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [T, VOCAB] in plain PyTorch."""

    def normed(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    count = tokens.shape[1]
    cos, sin = RotaryEmbedding(HIDDEN // HEADS, 10000.0)(torch.arange(count))
    x = weights["model.embed_tokens.weight"][tokens[0]]
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        h = normed(x, f"{here}.input_layernorm")
        q, k, v = (
            (h @ weights[f"{here}.self_attn.{name}_proj.weight"].t()).unflatten(1, (HEADS, -1)) for name in "qkv"
        )
        q, k, v = (part.transpose(0, 1) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        gate, up = (h @ weights[f"{here}.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + attended @ weights[f"{here}.self_attn.o_proj.weight"].t()
        x = x + (F.silu(gate) * up) @ weights[f"{here}.mlp.down_proj.weight"].t()
    return normed(x, "model.norm") @ weights["lm_head.weight"].t()


def test_from_the_command_line(checkpoint: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Exported and recompiled; both have the logits of plain PyTorch."""
    module = ["--family-module", str(EXAMPLE)]
    artifact, again = tmp_path / "artifact", tmp_path / "again"
    assert main(["export", *module, "--model", str(checkpoint), "--output", str(artifact)]) == 0
    assert main(["recompile", *module, str(artifact), "--output", str(again)]) == 0
    generator = torch.Generator().manual_seed(2)
    for path in (artifact, again):
        with load_program(path) as program:
            for length in (130, 2, 1):
                tokens = torch.randint(VOCAB, (1, length + 3), generator=generator)
                found = errors(converse(program, tokens, length), plain_logits(weights, tokens)[length - 1 :])
                assert max(found) < 1e-4, found


def test_without_the_module(checkpoint: Path, fails: Callable[..., str], tmp_path: Path) -> None:
    said = fails("export", "--model", checkpoint, "--output", tmp_path / "artifact")
    assert "unsupported model type 'parallel'" in said and "a model of your own: --family-module" in said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "no such Python file"),
        ("import torch", "registers no family: it must call ostinato.export.register_family"),
        ("1 / 0", "cannot be loaded as a family module: ZeroDivisionError"),
        ("def", "cannot be loaded as a family module: SyntaxError"),
    ],
)
def test_modules_that_are_refused(
    checkpoint: Path, fails: Callable[..., str], tmp_path: Path, code: str | None, message: str
) -> None:
    module = tmp_path / "mine.py"
    if code is not None:
        module.write_text(code)
    said = fails("export", "--family-module", module, "--model", checkpoint, "--output", tmp_path / "artifact")
    assert message in said and str(module) in said


def test_types_that_are_taken() -> None:
    with pytest.raises(ExportError, match="the model type 'llama' has a family here already"):
        register_family(find_family("llama"))
    registry.load_family_module(EXAMPLE)
    first = find_family("parallel")
    registry.load_family_module(EXAMPLE)
    assert find_family("parallel") is not first and first not in FAMILIES
    registry._registered.clear()
    with pytest.raises(CheckpointError, match="unsupported model type 'parallel'"):
        find_family("parallel")
