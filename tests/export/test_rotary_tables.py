"""A family whose layers take turns with two rotary embeddings, one of them with a sliding window: a program of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.export import Family, LanguageModel, Link, export_model, register_family
from ostinato.export.kernels.attention.reference import rotate
from ostinato.export.layers.build import Build
from ostinato.export.layers.rotary import RotaryEmbedding, RotaryTables, angles_of
from ostinato.export.models import registry
from ostinato.export.models.dense import (
    NAMES,
    SLIDING,
    SPREADS,
    DecoderLayer,
    DenseConfig,
    Differences,
    check_limits,
    read_config,
)
from ostinato.runner import Engine

from .conversations import converse, errors
from .models.dense_references import make_dense

HEADS, WINDOW = 4, 24
THETAS = {"local": 100.0, "global": 1e6}


def config(data: Mapping[str, Any]) -> DenseConfig:
    return read_config(Differences(qkv_bias=True, windowed_by="use_sliding_window"), data)


class TwoTablesLayer(DecoderLayer):
    """A decoder layer with the local angles where it has a window, and else with the global ones."""

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        (link,) = super().links(prefix, step, streamed)
        table = "global" if self.self_attn.window is None else "local"
        return [replace(link, inputs=("x", "input_pos", "slots", *angles_of(table)))]


def network(config: DenseConfig, build: Build) -> LanguageModel:
    tables = RotaryTables({name: RotaryEmbedding(config.attention.head_dim, theta) for name, theta in THETAS.items()})
    layers = [TwoTablesLayer(config, layer_type, build) for layer_type in config.layer_types]
    return LanguageModel(config, build, layers, tables)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_family(Family(("two-tables",), config, network, check_limits, NAMES, SPREADS))
    yield
    registry._registered.clear()


def plain_logits(weights: Mapping[str, Tensor], types: list[str], tokens: Tensor) -> Tensor:
    """Logits [T, vocab] in plain PyTorch."""

    def normed(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    at = torch.arange(tokens.shape[1])
    x = weights["model.embed_tokens.weight"][tokens[0]]
    for index, layer_type in enumerate(types):
        here = f"model.layers.{index}"
        h = normed(x, f"{here}.input_layernorm")
        q, k, v = (linear(h, f"{here}.self_attn.{name}_proj").unflatten(1, (-1, 16)) for name in "qkv")
        local = layer_type == SLIDING
        cos, sin = RotaryEmbedding(16, THETAS["local" if local else "global"])(at)
        q, k, v = (part.transpose(0, 1) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        seen = at[None, :] <= at[:, None]
        if local:
            seen &= at[None, :] > at[:, None] - WINDOW
        k, v = (part.repeat_interleave(HEADS // len(part), 0) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
        x = x + linear(attended, f"{here}.self_attn.o_proj")
        h = normed(x, f"{here}.post_attention_layernorm")
        h = F.silu(linear(h, f"{here}.mlp.gate_proj")) * linear(h, f"{here}.mlp.up_proj")
        x = x + linear(h, f"{here}.mlp.down_proj")
    return linear(normed(x, "model.norm"), "lm_head")


def test_two_rotary_embeddings(tmp_path: Path) -> None:
    """Prompts, steps and batches have the logits of plain PyTorch, and two page groups."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW}
    reference = make_dense(tmp_path / "checkpoint", changes | {"layer_types": types})
    settings = tmp_path / "checkpoint" / "config.json"
    settings.write_text(settings.read_text().replace('"qwen2"', '"two-tables"'))
    weights = dict(reference.model.named_parameters())
    export_model(tmp_path / "checkpoint", tmp_path / "artifact", max_seq_len=256)
    with load_program(tmp_path / "artifact") as program:
        assert [group.name for group in program.capacity.groups] == [f"window {WINDOW}", "global"]
        for length in (200, 64, 1):
            tokens = reference.tokens(length + 4, seed=length)
            found = errors(converse(program, tokens, length), plain_logits(weights, types, tokens)[length - 1 :])
            assert max(found) < 1e-4, found
    with Engine.load(tmp_path / "artifact", sessions=2) as engine:
        sessions = [engine.open_session() for _ in range(2)]
        for length, session in zip((5, 90), sessions, strict=True):
            session.prefill(reference.tokens(length)[0].tolist())
        for _ in range(6):
            engine.step(sessions)
        for length, session in zip((5, 90), sessions, strict=True):
            logits = plain_logits(weights, types, torch.tensor([session.tokens[:-1]]))
            assert session.tokens[length:] == logits[length - 1 :].argmax(1).tolist()
