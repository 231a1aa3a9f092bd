"""What a decode step moves: bytes that are read, from the config's numbers alone, and buffers that are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export.methods import model_methods
from ostinato.export.models import ModelConfig, Qwen3_5, build_on_meta
from ostinato.export.mutation import written_buffers
from ostinato.export.trace import trace_method
from ostinato.export.traffic import decode_bytes, kv_bytes_per_token
from ostinato.export.weights import hollow

CONFIGS = Path(__file__).resolve().parents[1] / "assets" / "configs"
FLOAT32, BFLOAT16 = 4, 2


def built(name: str, group_size: int | None) -> Qwen3_5:
    return build_on_meta(ModelConfig.from_folder(CONFIGS / name), 64, torch.bfloat16, group_size=group_size)


def settings(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / name / "config.json").read_text())["text_config"])


def mixer_bytes(c: dict[str, Any], element: float) -> float:
    """Both kinds of layers before their feed-forward parts: all weights, norms, and the state, read and written.

    `element` is the size of an element of a quantised matrix.
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
    """Router, chosen experts, shared expert and its gate."""
    hidden, chosen = c["hidden_size"], c["num_experts_per_tok"] * c["moe_intermediate_size"]
    experts = 3 * (chosen + c["shared_expert_intermediate_size"]) * hidden * element
    return len(c["layer_types"]) * (experts + (c["num_experts"] + 1) * hidden * BFLOAT16)


def test_flagship_in_int4() -> None:
    network, c = built("Qwen3.5-35B-A3B", 128), settings("Qwen3.5-35B-A3B")
    # Half a byte, and two bytes of scale for 128.
    element = 0.5 + 2 / 128
    head = c["vocab_size"] * c["hidden_size"] * element
    row = c["hidden_size"] * (1 + 2 / 128)
    found = decode_bytes(network)
    assert found == mixer_bytes(c, element) + moe_bytes(c, element) + head + row
    assert round(found / 1e9, 3) == 1.687
    assert kv_bytes_per_token(network) == 20_480 == 10 * 2 * c["num_key_value_heads"] * c["head_dim"] * BFLOAT16


def test_flagship_in_bfloat16() -> None:
    """Without state, and with the embedding's other rows, these are the published model's 3.46 billion active parameters."""
    network, c = built("Qwen3.5-35B-A3B", None), settings("Qwen3.5-35B-A3B")
    table = c["vocab_size"] * c["hidden_size"] * BFLOAT16
    found = decode_bytes(network)
    assert found == mixer_bytes(c, BFLOAT16) + moe_bytes(c, BFLOAT16) + table + c["hidden_size"] * BFLOAT16
    state = sum(buffer.nbytes for name, buffer in network.named_buffers() if name.endswith("_state"))
    assert round((found - 2 * state + table) / BFLOAT16 / 1e9, 2) == 3.46


@pytest.mark.parametrize("group_size", (None, 64))
def test_dense_model_whose_head_is_its_embedding(group_size: int | None) -> None:
    """The head reads the whole table once. Quantised, head and embedding are two tensors, one of them read by the row."""
    network, c = built("Qwen3.5-0.8B", group_size), settings("Qwen3.5-0.8B")
    element = BFLOAT16 if group_size is None else 0.5 + 2 / 64
    row = 0 if group_size is None else c["hidden_size"] * (1 + 2 / 64)
    feed_forward = len(c["layer_types"]) * 3 * c["intermediate_size"] * c["hidden_size"] * element
    table = c["vocab_size"] * c["hidden_size"] * element
    assert decode_bytes(network) == mixer_bytes(c, element) + feed_forward + table + row
    assert kv_bytes_per_token(network) == 6 * 2 * 2 * 256 * BFLOAT16


# --- buffers that a graph writes


@torch.library.custom_op("ostinato_tests::accumulate", mutates_args={"total", "others"})
def accumulate(x: Tensor, total: Tensor, scale: float, others: list[Tensor]) -> Tensor:
    total.add_(x.sum(), alpha=scale)
    for other in others:
        other.add_(1)
    return x * 2


@accumulate.register_fake
def _(x: Tensor, total: Tensor, scale: float, others: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


class Tensors(nn.Module):
    """Buffers `a` and `b`, a tensor `c` that is neither parameter nor buffer, a parameter `w`, all [4, 6]."""

    a: Tensor
    b: Tensor

    def __init__(self, body: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(4, 6))
        self.register_buffer("b", torch.zeros(4, 6), persistent=False)
        self.c = torch.ones(4, 6)
        self.w = nn.Parameter(torch.ones(4, 6), requires_grad=False)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        self.body(self, x)
        return x + self.a + self.b + self.c + self.w


def assign(m: Any, x: Tensor) -> None:
    m.a[1:3] = x[1:3]


def put(m: Any, x: Tensor) -> None:
    m.a = m.a + x


def swap(m: Any, x: Tensor) -> None:
    kept = m.a + 0
    m.a.copy_(m.b)
    m.b.copy_(kept)


WRITES: dict[str, tuple[Callable[[Any, Tensor], object], set[str]]] = {
    "nothing": (lambda m, x: None, set()),
    "only what it computed": (lambda m, x: (x * 2).add_(m.a), set()),
    "in place": (lambda m, x: m.a.add_(x), {"a"}),
    "both": (swap, {"a", "b"}),
    "no buffer": (lambda m, x: m.c.add_(1), {"c"}),
    "an element": (assign, {"a"}),
    "a new value": (put, {"a"}),
    "a row of a view": (lambda m, x: m.a.view(2, 12).t()[3:].zero_(), {"a"}),
    "at positions": (lambda m, x: m.b.index_copy_(1, torch.tensor([2]), x[:, :1]), {"b"}),
    "where": (lambda m, x: m.b.masked_fill_(x > 0, 1.0), {"b"}),
    "one of some chunks": (lambda m, x: m.a.chunk(2)[1].add_(1), {"a"}),
    "one of some rows": (lambda m, x: m.a.unbind(0)[2].copy_(x[0]), {"a"}),
    "a piece of a piece": (lambda m, x: m.a.split([1, 3])[1].split([2, 4], dim=1)[0].mul_(2), {"a"}),
    "as what it is already": (lambda m, x: m.a.contiguous().to(torch.float32).reshape(24).add_(1), {"a"}),
    "a copy": (lambda m, x: m.a.clone().add_(1), set()),
    "a copy by reshape": (lambda m, x: m.a.t().reshape(24).add_(1), set()),
    "a copy of another dtype": (lambda m, x: m.a.to(torch.bfloat16).add_(1), set()),
    "out=": (lambda m, x: torch.mul(x, 2, out=m.b), {"b"}),
    "a list": (lambda m, x: torch._foreach_add_([m.a[1:], m.b.view(24)], 1.0), {"a", "b"}),
    "by an operator of ours": (lambda m, x: accumulate(x, m.a[0], 2.0, []), {"a"}),
    "by an operator of ours, a list": (lambda m, x: accumulate(x, x.sum(0), 2.0, [m.a, m.b]), {"a", "b"}),
    "numbers in the code": (lambda m, x: torch.tensor([1.0] * 6).add_(m.a[0]), set()),
    "an input's copy": (lambda m, x: x.t().reshape(24).add_(1), set()),
}


def traced(body: Callable[[Any, Tensor], object]) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Tensors(body), (torch.ones(4, 6),), strict=False)


@pytest.mark.parametrize("what", WRITES)
def test_written_buffers(what: str) -> None:
    body, expected = WRITES[what]
    assert written_buffers("step", traced(body)) == expected


@pytest.mark.parametrize(
    "body",
    (
        lambda m, x: x.add_(1),
        lambda m, x: x[1:].t().mul_(2),
        lambda m, x: x.chunk(2)[0].zero_(),
        lambda m, x: accumulate(x, x[0], 1.0, []),
    ),
)
def test_input_that_is_written_is_refused(body: Callable[[Any, Tensor], object]) -> None:
    with pytest.raises(ExportError, match=r"method 'step' writes its input 'x': write a copy of it \(`.clone\(\)`\)"):
        written_buffers("step", traced(body))


def test_parameter_that_is_written_is_refused() -> None:
    with pytest.raises(ExportError, match=r"method 'step' writes its parameter 'w': make it a buffer"):
        written_buffers("step", traced(lambda m, x: m.w[0].add_(1)))


def test_running_statistics() -> None:
    norm, example = nn.BatchNorm1d(6), (torch.ones(4, 6),)
    program = torch.export.export(norm, example, strict=False)
    assert written_buffers("step", program) == {"running_mean", "running_var", "num_batches_tracked"}
    program = torch.export.export(norm.eval(), example, strict=False)
    assert written_buffers("step", program) == set()


def test_state_of_a_model(capitals_checkpoint: Path) -> None:
    """What moves the model writes all of its state; what draws a token writes all of the sampling's."""
    config = replace(ModelConfig.from_folder(capitals_checkpoint), layer_types=("linear_attention", "full_attention"))
    network = build_on_meta(config, 64, torch.float32, group_size=32)
    hollow(network)
    state = {name for name, _ in network.named_buffers() if name.endswith(("_cache", "_state"))}
    assert len(state) == 4
    begun = {"sampling." + name for name in ("token", "position", "temperature", "top_k", "top_p", "seed")}
    moved = {"sampling.token", "sampling.position"}
    written = {"prefill": state, "decode": state, "sample": begun, "decode_sample": state | moved}
    methods = model_methods(network)
    assert methods.keys() == written.keys()
    for name, chain in methods.items():
        method = trace_method(name, chain)
        assert {link.link.prefix + own for link in method.links for own in link.graph.written} == written[name], name
