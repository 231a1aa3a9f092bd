"""The number of bytes that a decode step moves, from the config's numbers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.delegate.artifact.records import Growth, StateKind
from ostinato.export.kernels import Kernels
from ostinato.export.layers.state import state_forms
from ostinato.export.models import LanguageModel, build_network, read_config
from ostinato.export.models.traffic import decode_bytes, kv_bytes_per_token

from ..networks import of_group

CONFIGS = Path(__file__).resolve().parents[2] / "assets" / "configs"
FLOAT32, BFLOAT16 = 4, 2


def built(name: str, group_size: int | None, kernels: type[Kernels] = Kernels) -> LanguageModel:
    config = read_config(CONFIGS / name)[1]
    return build_network(config, 64, torch.bfloat16, kernels=kernels, quant=of_group(group_size))


def settings(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / name / "config.json").read_text())["text_config"])


def mixer_bytes(c: dict[str, Any], element: float) -> float:
    """Return the bytes that a step moves for all layers without their feed-forward parts: weights and norms are read, state
    is read and written.

    `element` is the number of bytes per element of a quantised matrix.
    """
    hidden, kinds = c["hidden_size"], c["layer_types"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    convolved = 2 * keys + values
    linear = (convolved + values) * hidden * element + hidden * values * element
    linear += 2 * c["linear_num_value_heads"] * hidden * BFLOAT16
    linear += convolved * c["linear_conv_kernel_dim"] * BFLOAT16
    linear += (2 * c["linear_num_value_heads"] + c["linear_value_head_dim"]) * FLOAT32
    state = (c["linear_conv_kernel_dim"] - 1) * convolved * BFLOAT16
    state += values * c["linear_key_head_dim"] * FLOAT32
    queries, cached = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    full = (2 * queries + 2 * cached) * hidden * element + hidden * queries * element + 2 * c["head_dim"] * FLOAT32
    norms = (2 * len(kinds) + 1) * hidden * FLOAT32
    return kinds.count("linear_attention") * (linear + 2 * state) + kinds.count("full_attention") * full + norms


def moe_bytes(c: dict[str, Any], element: float) -> float:
    """Return the bytes of all feed-forward parts: router, chosen experts, shared expert and its gate."""
    hidden, chosen = c["hidden_size"], c["num_experts_per_tok"] * c["moe_intermediate_size"]
    experts = 3 * (chosen + c["shared_expert_intermediate_size"]) * hidden * element
    return len(c["layer_types"]) * (experts + (c["num_experts"] + 1) * hidden * BFLOAT16)


def test_flagship_in_int4() -> None:
    network, c = built("Qwen3.5-35B-A3B", 128), settings("Qwen3.5-35B-A3B")
    # Half a byte per weight, and two bytes of scale per 128 weights.
    element = 0.5 + 2 / 128
    head = c["vocab_size"] * c["hidden_size"] * element
    row = c["hidden_size"] * (1 + 2 / 128)
    found = decode_bytes(network, "cpu")
    assert found == mixer_bytes(c, element) + moe_bytes(c, element) + head + row
    assert round(found / 1e9, 3) == 1.687
    assert kv_bytes_per_token(network) == 20_480 == 10 * 2 * c["num_key_value_heads"] * c["head_dim"] * BFLOAT16


def test_flagship_in_bfloat16() -> None:
    """Without state, and with all rows of the embedding, these are the published model's 3.46 billion active parameters."""
    network, c = built("Qwen3.5-35B-A3B", None), settings("Qwen3.5-35B-A3B")
    table = c["vocab_size"] * c["hidden_size"] * BFLOAT16
    found = decode_bytes(network, "cpu")
    assert found == mixer_bytes(c, BFLOAT16) + moe_bytes(c, BFLOAT16) + table + c["hidden_size"] * BFLOAT16
    state = sum(buffer[0].nbytes for name, buffer in network.named_buffers() if name.endswith("_state"))
    assert round((found - 2 * state + table) / BFLOAT16 / 1e9, 2) == 3.46


@pytest.mark.parametrize("group_size", (None, 64))
def test_dense_model_whose_head_is_its_embedding(group_size: int | None) -> None:
    """The head reads the whole table once. If quantised, head and embedding are two tensors, and a step reads one row of
    the embedding."""
    network, c = built("Qwen3.5-0.8B", group_size), settings("Qwen3.5-0.8B")
    element = BFLOAT16 if group_size is None else 0.5 + 2 / 64
    row = 0 if group_size is None else c["hidden_size"] * (1 + 2 / 64)
    feed_forward = len(c["layer_types"]) * 3 * c["intermediate_size"] * c["hidden_size"] * element
    table = c["vocab_size"] * c["hidden_size"] * element
    assert decode_bytes(network, "cpu") == mixer_bytes(c, element) + feed_forward + table + row
    assert kv_bytes_per_token(network) == 6 * 2 * 2 * 256 * BFLOAT16


def test_one_token_moves_no_pending_updates() -> None:
    """On a GPU a slot has room for them: seven keys and values per layer, and a row of log decays and counts."""
    pytest.importorskip("triton")
    from ostinato.export.kernels.cuda import CudaKernels

    on_gpu, c = built("Qwen3.5-35B-A3B", 128, CudaKernels), settings("Qwen3.5-35B-A3B")
    assert decode_bytes(on_gpu, "cuda") == decode_bytes(built("Qwen3.5-35B-A3B", 128), "cuda")
    states, others = (
        sum(buffer[0].nbytes for name, buffer in on_gpu.named_buffers() if name.rpartition(".")[2] in names)
        for names in ({"recurrent_state"}, {"pending_keys", "pending_updates"})
    )
    layers = c["layer_types"].count("linear_attention")
    keys, values = 7 * c["linear_num_key_heads"] * 128 * BFLOAT16, 8 * c["linear_num_value_heads"] * 128 * FLOAT32
    assert others == layers * (keys + values) and round(others / states, 3) == 0.076
    forms = state_forms(on_gpu)
    assert {(form.kind, form.growth) for name, form in forms.items() if "pending" in name} == {
        (StateKind.RECURRENT, Growth.SLOTS)
    }
