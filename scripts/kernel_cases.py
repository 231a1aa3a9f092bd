"""The operations of a decode step as cases to measure: arguments at a model's shapes, bytes that must move, calls a token.

What each operation computes, and its arguments in order, is said by its reference in export/kernels. The embedding's row
and the rotary angles, which no kernel here computes, are not among the cases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ostinato.export.kernels.sample import workspace_size
from ostinato.export.models.config import ModelConfig

KERNELS = "ostinato.export.kernels"
# The step that the convolution and the delta rule are measured at: any but 0, where the state counts as zeros.
POSITION = 7
# Of squares, a head: how many is for `delta_step` to choose, `linear_add` takes any, and they count in no bytes.
PARTIAL_SUMS = 16

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """What the arguments' sizes depend on; `group`: elements that share a scale, `slots`: positions of the KV caches."""

    config: ModelConfig
    group: int
    slots: int

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)


@dataclass(frozen=True)
class Draw:
    """Random tensors on one device, with torch's own seed. On "meta" they have shapes and no values."""

    shapes: Shapes
    device: str

    def normal(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """In the model's dtype unless said otherwise."""
        return (torch.randn(size, device=self.device) * scale).to(dtype or self.shapes.dtype)

    def wide(self, *size: int, scale: float = 1.0) -> Tensor:
        return self.normal(*size, dtype=torch.float32, scale=scale)

    def whole(self, value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self.device)

    def number(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float32, device=self.device)

    def packed(self, *size: int) -> Tensor:
        """Four-bit weights [..., N, K]."""
        return torch.randint(256, (*size[:-1], size[-1] // 2), dtype=torch.uint8, device=self.device)

    def scales(self, *size: int) -> Tensor:
        """Those of weights [..., N, K] whose products with a normal input are about normal."""
        spread = 1 / (4.6 * size[-1] ** 0.5)
        return self.normal(*size[:-1], size[-1] // self.shapes.group, dtype=torch.bfloat16, scale=spread)

    def distinct(self, count: int) -> Tensor:
        """[1, count], no two alike in bfloat16 up to 512, so that the largest are the same ones in every precision."""
        order = torch.randperm(count, device=self.device) - count // 2
        return (order / 32)[None].to(self.shapes.dtype)


# Arguments that kernels of the same step have just written: in the step they are in L2, and so they are here.
_NORMED, _MIXED, _ROUTED = ("x", "h", "residual"), ("mixed", "gates", "squares", "qkv"), ("logits", "hidden")
HANDED_ON = frozenset((*_NORMED, *_MIXED, *_ROUTED, "cos", "sin", "positions", "position"))


@dataclass(frozen=True)
class Case:
    """One operation at one of its shapes.

    Attributes:
        name: unique, the function's name and what tells it from others.
        shape: the sizes that its cost comes from, for people.
        module, function: where in export/kernels it is; its kernel is in the file with `_triton` behind.
        arguments: draws one set of arguments, by name and in order.
        written: bytes of what it returns.
        calls: how often a token needs it; 0 for what is measured beside.
        depth: positions before it, where that matters.
        moves: how often the bytes of an argument cross the memory's bus, if not once: a state that is read and written
            2, experts of which few are used less than 1, scratch 0.
        mutates: arguments that are written.
        comparable: turns results into what kernel and reference have in common.
    """

    name: str
    shape: str
    module: str
    function: str
    arguments: Callable[[Draw], Arguments]
    written: int
    calls: int
    depth: int | None = None
    moves: Mapping[str, float] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    comparable: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple

    @property
    def kernel(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{KERNELS}.{self.module}_triton"), self.function)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{KERNELS}.{self.module}"), self.function)

    def bytes_moved(self, shapes: Shapes) -> int:
        """Bytes that one call reads and writes at least."""
        return self.written + self._weighted(shapes, lambda moves: moves)

    def bytes_read(self, shapes: Shapes) -> int:
        """Bytes of its arguments that one call touches, each once: what it takes of a cache."""
        return self._weighted(shapes, lambda moves: min(moves, 1.0))

    def _weighted(self, shapes: Shapes, weight: Callable[[float], float]) -> int:
        arguments = self.arguments(Draw(shapes, "meta")).items()
        sizes = {name: value.nbytes for name, value in arguments if isinstance(value, Tensor)}
        return round(sum(size * weight(self.moves.get(name, 1.0)) for name, size in sizes.items()))


def decode_cases(shapes: Shapes, depths: tuple[int, ...]) -> list[Case]:
    """Every operation of a decode step, in the order of the step. Those that the model has no layer for are left out."""
    config = shapes.config
    linear = config.layer_types.count("linear_attention")
    full = config.layer_types.count("full_attention")
    cases = [*_delta_net(shapes, linear), *_attention(shapes, full, depths)]
    cases += _moe(shapes) if config.is_moe else _dense(shapes)
    cases += [_norm_linear(shapes, "lm_head", config.vocab_size, 1, torch.float32), *_sampling(shapes)]
    return [case for case in cases if case.calls or case.function == "sample"]


def comparison_cases(shapes: Shapes) -> list[Case]:
    """The matrix-vector product without anything folded into it, at the shape of the delta-net's output projection."""
    n, k = shapes.config.hidden_size, shapes.config.value_dim

    def arguments(draw: Draw) -> Arguments:
        return {"x": draw.normal(1, k), "weight": draw.packed(n, k), "scale": draw.scales(n, k)}

    return [
        Case("int4_matvec/out_proj", _product(n, k), "int4", "int4_linear", arguments, n * shapes.dtype.itemsize, 0)
    ]


def _delta_net(shapes: Shapes, layers: int) -> list[Case]:
    config = shapes.config
    heads, value_dim = config.linear_num_value_heads, config.value_dim
    key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    size, rows, channels = config.hidden_size, config.conv_dim + value_dim, config.conv_dim

    def projection(draw: Draw) -> Arguments:
        return {
            **_normed(draw, size),
            "weight": draw.packed(rows, size),
            "scale": draw.scales(rows, size),
            "extra": draw.normal(2 * heads, size, scale=size**-0.5),
            "conv_weight": draw.normal(channels, 1, config.linear_conv_kernel_dim, scale=0.6),
            "conv_state": draw.normal(config.linear_conv_kernel_dim - 1, channels),
            "positions": draw.whole(POSITION),
        }

    def step(draw: Draw) -> Arguments:
        return {
            "mixed": draw.normal(1, rows),
            "gates": draw.wide(1, 2 * heads),
            "a_log": draw.wide(heads) - 1,
            "dt_bias": draw.wide(heads),
            "state": draw.wide(heads, key_size, value_size),
            "positions": draw.whole(POSITION),
            "norm_weight": 1 + draw.wide(value_size, scale=0.3),
            "key_heads": config.linear_num_key_heads,
        }

    return [
        Case(
            "norm_linear_conv",
            f"{_product(rows, size)}, conv {channels:,}",
            "step_linear",
            "norm_linear_conv",
            projection,
            rows * shapes.dtype.itemsize + 2 * heads * 4,
            layers,
            moves={"conv_state": 2},
            mutates=("conv_state",),
        ),
        Case(
            "delta_step",
            f"{heads} heads of {key_size} x {value_size}",
            "step_delta",
            "delta_step",
            step,
            value_dim * shapes.dtype.itemsize,
            layers,
            moves={"state": 2},
            mutates=("state",),
            comparable=lambda results: (results[0], results[1].sum(1)),
        ),
        _linear_add(shapes, "delta_net", size, value_dim, layers, heads),
    ]


def _attention(shapes: Shapes, layers: int, depths: tuple[int, ...]) -> list[Case]:
    config = shapes.config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = 2 * (heads + kv_heads) * head_dim

    def step(depth: int) -> Case:
        def arguments(draw: Draw) -> Arguments:
            angles = draw.wide(1, config.rotary_dim)
            return {
                "qkv": draw.normal(1, rows),
                "q_norm": draw.wide(head_dim, scale=0.4),
                "k_norm": draw.wide(head_dim, scale=0.4),
                "eps": config.rms_norm_eps,
                "cos": angles.cos(),
                "sin": angles.sin(),
                "k_cache": draw.normal(kv_heads, shapes.slots, head_dim),
                "v_cache": draw.normal(kv_heads, shapes.slots, head_dim),
                "positions": draw.whole(depth),
                "heads": heads,
            }

        used = (depth + 1) / shapes.slots
        return Case(
            f"attend_step@{depth}",
            f"{heads} heads, {kv_heads} for keys, of {head_dim}",
            "step_attention",
            "attend_step",
            arguments,
            heads * head_dim * shapes.dtype.itemsize,
            layers,
            depth,
            # The positions before it are read, its own is written.
            moves={"k_cache": used, "v_cache": used},
            mutates=("k_cache", "v_cache"),
        )

    return [
        _norm_linear(shapes, "qkv", rows, layers),
        *map(step, depths),
        _linear_add(shapes, "attention", config.hidden_size, heads * head_dim, layers),
    ]


def _moe(shapes: Shapes) -> list[Case]:
    config = shapes.config
    size, experts, top_k = config.hidden_size, config.num_experts, config.num_experts_per_tok
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    layers = config.num_hidden_layers
    used = top_k / experts

    def route(draw: Draw) -> Arguments:
        return {
            **_normed(draw, size),
            "gate": draw.normal(experts, size, scale=size**-0.5),
            "shared_gate": draw.normal(1, size, scale=size**-0.5),
        }

    def gate_up(draw: Draw) -> Arguments:
        return {
            **_normed(draw, size),
            "logits": draw.distinct(experts + 1),
            "top_k": top_k,
            "gate_up": draw.packed(experts, 2 * inner, size),
            "gate_up_scale": draw.scales(experts, 2 * inner, size),
            "shared_gate_up": draw.packed(2 * shared, size),
            "shared_gate_up_scale": draw.scales(2 * shared, size),
        }

    def down(draw: Draw) -> Arguments:
        return {
            "hidden": draw.normal(1, top_k * inner + shared),
            "logits": draw.distinct(experts + 1),
            "top_k": top_k,
            "down": draw.packed(experts, size, inner),
            "down_scale": draw.scales(experts, size, inner),
            "shared_down": draw.packed(size, shared),
            "shared_down_scale": draw.scales(size, shared),
            "residual": draw.normal(1, size),
        }

    routed = f"{top_k} of {experts}"
    return [
        Case(
            "route_logits",
            _product(experts + 1, size),
            "step_moe",
            "route_logits",
            route,
            (experts + 1) * shapes.dtype.itemsize,
            layers,
        ),
        Case(
            "experts_gate_up",
            f"{routed} of {_product(2 * inner, size)} + {_product(2 * shared, size)}",
            "step_moe",
            "experts_gate_up",
            gate_up,
            (top_k * inner + shared) * shapes.dtype.itemsize,
            layers,
            moves={"gate_up": used, "gate_up_scale": used},
        ),
        Case(
            "experts_down",
            f"{routed} of {_product(size, inner)} + {_product(size, shared)}",
            "step_moe",
            "experts_down",
            down,
            size * shapes.dtype.itemsize,
            layers,
            moves={"down": used, "down_scale": used},
        ),
    ]


def _dense(shapes: Shapes) -> list[Case]:
    """The SwiGLU between the two is the compiler's."""
    config = shapes.config
    size, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return [_norm_linear(shapes, "gate_up", 2 * inner, layers), _linear_add(shapes, "down", size, inner, layers)]


def _sampling(shapes: Shapes) -> list[Case]:
    """Greedy counts towards a token; sampling proper is measured beside it."""
    vocabulary = shapes.config.vocab_size

    def case(name: str, temperature: float, top_k: int, top_p: float, calls: int) -> Case:
        def arguments(draw: Draw) -> Arguments:
            return {
                "logits": draw.wide(1, vocabulary, scale=3.0),
                "position": draw.whole(POSITION),
                "temperature": draw.number(temperature),
                "top_k": draw.whole(top_k),
                "top_p": draw.number(top_p),
                "seed": draw.whole(0),
                "workspace": torch.zeros(workspace_size(), dtype=torch.int64, device=draw.device),
            }

        moves = {"workspace": 0.0}
        return Case(f"sample/{name}", f"{vocabulary:,} logits", "sample", "sample", arguments, 8, calls, moves=moves)

    return [case("greedy", 0.0, 0, 1.0, 1), case("top_p", 0.8, 40, 0.95, 0)]


def _norm_linear(shapes: Shapes, name: str, n: int, calls: int, out_dtype: torch.dtype | None = None) -> Case:
    k, dtype = shapes.config.hidden_size, out_dtype or shapes.dtype

    def arguments(draw: Draw) -> Arguments:
        return {
            **_normed(draw, k),
            "weight": draw.packed(n, k),
            "scale": draw.scales(n, k),
            "out_dtype": dtype,
        }

    written = n * dtype.itemsize
    return Case(f"norm_linear/{name}", _product(n, k), "step_linear", "norm_linear", arguments, written, calls)


def _linear_add(shapes: Shapes, name: str, n: int, k: int, calls: int, heads: int | None = None) -> Case:
    """With `heads`, each of their runs of inputs is divided by its rms."""

    def arguments(draw: Draw) -> Arguments:
        return {
            "x": draw.normal(1, k),
            "weight": draw.packed(n, k),
            "scale": draw.scales(n, k),
            "residual": draw.normal(1, n),
            "squares": _squares(draw, heads, k // heads) if heads else None,
            "eps": shapes.config.rms_norm_eps,
        }

    written = n * shapes.dtype.itemsize
    moves = {"squares": 0.0}
    shape = _product(n, k)
    return Case(f"linear_add/{name}", shape, "step_linear", "linear_add", arguments, written, calls, moves=moves)


def _squares(draw: Draw, heads: int, size: int) -> Tensor:
    """Partial sums over heads of `size` numbers that are about normal."""
    return draw.wide(heads, PARTIAL_SUMS).square() * (size / PARTIAL_SUMS)


def _normed(draw: Draw, size: int) -> Arguments:
    """An input and the norm before the product."""
    eps = draw.shapes.config.rms_norm_eps
    return {"x": draw.normal(1, size), "norm_weight": draw.wide(size, scale=0.4), "eps": eps}


def _product(n: int, k: int) -> str:
    return f"{n:,} x {k:,}"
