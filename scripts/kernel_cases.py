"""The operations of a step as cases to measure: arguments at a model's shapes, bytes that must move, calls per step.

A step has one row, or several rows of different sessions. The references in export/kernels say what each operation computes,
and list its arguments in order. The embedding and the rotary angles are no cases, because no kernel here computes them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_arguments import Arguments, RandomTensors, Shapes
from kernel_case import CONV_ROWS, Case
from kernel_sampling_cases import sampling_cases

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.experts.limits import check_experts
from ostinato.export.kernels.operands import (
    PENDING_MOVES,
    PENDING_UPDATES,
    STATE_MOVES,
    Convolution,
    Decay,
    ExpertWeights,
    Heads,
    KVCache,
    RecurrentState,
)
from ostinato.export.layers.build import PAGE_SIZE
from ostinato.export.models.qwen3_5 import Qwen3_5Config

# Position at which the convolution and the delta rule are measured: any except 0, where the state counts as zeros.
POSITION = 7
# `moves` of operations that read only positions and slots of a `RowIndex`.
UNROTATED = {"index.cos": 0.0, "index.sin": 0.0}


def decode_cases(shapes: Shapes, depths: tuple[int, ...], rows: int = 1) -> list[Case]:
    """All operations of a step, in the order of the step. Operations that the model has no layer for are left out."""
    config = shapes.config
    linear = config.layer_types.count("linear_attention")
    full = config.layer_types.count("full_attention")
    cases = _delta_net(config, shapes, rows, linear) if isinstance(config, Qwen3_5Config) else []
    cases += _attention(shapes, rows, full, depths)
    if isinstance(config, Qwen3_5Config) and config.is_moe:
        cases += _moe(config, shapes) if rows == 1 else [_moe_rows(config, shapes, rows)]
    else:
        cases += _dense(shapes, rows)
    cases += [_norm_linear(shapes, rows, "lm_head", config.vocab_size, 1, torch.float32), *sampling_cases(shapes, rows)]
    compared = {"sample_next", "logprobs", *[CONV_ROWS] * (rows > 1 and linear > 0)}
    return [replace(case, rows=rows) for case in cases if case.calls or case.function in compared]


def layer_cases(shapes: Shapes, depth: int, rows: int = 1) -> dict[str, list[Case]]:
    """The operations of one layer of each kind that the model has, in their order: "linear_attention" and
    "full_attention"."""
    config = shapes.config
    kinds = {"full_attention": _attention(shapes, rows, 1, (depth,))}
    if isinstance(config, Qwen3_5Config):
        kinds["linear_attention"] = _delta_net(config, shapes, rows, 1)
    if isinstance(config, Qwen3_5Config) and config.is_moe:
        others = _moe(config, shapes) if rows == 1 else [_moe_rows(config, shapes, rows)]
    else:
        others = _dense(shapes, rows)
    return {
        kind: [replace(case, rows=rows) for case in (*cases, *others) if case.calls]
        for kind, cases in sorted(kinds.items(), reverse=True)
        if kind in config.layer_types
    }


def prompt_case(shapes: Shapes, rows: int) -> Case:
    """A prompt's product of an attention layer, whose kernel dequantises a weight of integers."""
    n, k = _qkv_outputs(shapes), shapes.config.hidden_size

    def arguments(random: RandomTensors) -> Arguments:
        return {"x": random.normal(rows, k), "weight": random.weight(n, k, bias=shapes.config.attention.qkv_bias)}

    written = rows * n * shapes.dtype.itemsize
    return Case("linear/qkv", _product(n, k), "linear", arguments, written, 0, ("x",), rows=rows)


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """Expected number of experts that `rows` rows choose, if each chooses `top_k` and all experts are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def _delta_net(config: Qwen3_5Config, shapes: Shapes, rows: int, layers: int) -> list[Case]:
    heads, value_dim = config.linear_num_value_heads, config.delta_net.values
    key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    size, channels = config.hidden_size, config.delta_net.channels
    outputs, itemsize = channels + value_dim, shapes.dtype.itemsize
    pending = PENDING_UPDATES
    moves = {"state.stored": STATE_MOVES, "state.keys": PENDING_MOVES, "state.updates": PENDING_MOVES}
    if rows == 1:
        moves = {"state.stored": 2, "state.keys": 0, "state.updates": 0}

    def convolution(random: RandomTensors) -> Convolution:
        width = config.linear_conv_kernel_dim
        return Convolution(random.normal(channels, 1, width, scale=0.6), random.normal(rows, width - 1, channels))

    def projection(random: RandomTensors) -> Arguments:
        return {
            "x": random.normal(rows, size),
            "norm": random.norm(size),
            "weight": random.weight(outputs, size),
            "gates": random.normal(2 * heads, size, scale=size**-0.5),
            "conv": convolution(random),
            "index": random.index(POSITION, rows),
        }

    def convolved(random: RandomTensors) -> Arguments:
        return {
            "product": random.normal(rows, outputs),
            "conv": convolution(random),
            "index": random.index(POSITION, rows),
        }

    def step(random: RandomTensors) -> Arguments:
        return {
            "mixed": random.normal(rows, outputs),
            "gates": random.wide(rows, 2 * heads),
            "decay": Decay(random.wide(heads) - 1, random.wide(heads)),
            "state": RecurrentState(
                random.wide(rows, heads, key_size, value_size),
                random.normal(rows, config.linear_num_key_heads, pending, key_size),
                random.zeros(rows, heads, pending + 1, value_size),
            ),
            "index": random.index(POSITION, rows),
            "norm_weight": 1 + random.wide(value_size, scale=0.3),
            "key_heads": config.linear_num_key_heads,
        }

    return [
        Case(
            "norm_linear_conv",
            f"{_product(outputs, size)}, conv {channels:,}",
            "norm_linear_conv",
            projection,
            rows * (outputs * itemsize + 2 * heads * 4),
            layers,
            ("x", "index"),
            moves={"conv.state": 2, **UNROTATED},
            writes=("conv.state",),
            rounded=(1,) if rows > 1 else (),
        ),
        Case(
            CONV_ROWS,
            f"{channels:,} of {outputs:,}",
            CONV_ROWS,
            convolved,
            rows * outputs * itemsize,
            0,
            ("product", "index"),
            moves={"conv.state": 2, **UNROTATED},
            writes=("conv.state",),
        ),
        Case(
            "delta_step",
            f"{heads} heads of {key_size} x {value_size}",
            "delta_step",
            step,
            rows * value_dim * itemsize,
            layers,
            ("mixed", "gates", "index"),
            moves={**moves, **UNROTATED},
            writes=("state.stored",),
            comparable=lambda results: (results[0], results[1].sum(1)),
        ),
        _linear_add(shapes, rows, "delta_net", size, value_dim, layers, heads),
    ]


def _attention(shapes: Shapes, rows: int, layers: int, depths: tuple[int, ...]) -> list[Case]:
    sizes = shapes.config.attention
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    outputs = _qkv_outputs(shapes)
    pages = -(-shapes.positions // PAGE_SIZE)

    def step(depth: int) -> Case:
        def arguments(random: RandomTensors) -> Arguments:
            keys, values = (random.normal(rows * pages, kv_heads, PAGE_SIZE, head_dim) for _ in range(2))
            q_norm, k_norm = (random.norm(head_dim) if sizes.qk_norm else None for _ in range(2))
            return {
                "qkv": random.normal(rows, outputs),
                "heads": Heads(heads, q_norm, k_norm, sizes.gated),
                "index": random.index(depth, rows),
                "cache": KVCache(keys, values, random.order(pages, rows)),
            }

        used = (depth + 1) / (pages * PAGE_SIZE)
        return Case(
            f"attend_step@{depth}",
            f"{heads} heads, {kv_heads} for keys, of {head_dim}",
            "attend_step",
            arguments,
            rows * heads * head_dim * shapes.dtype.itemsize,
            layers,
            ("qkv", "index"),
            depth,
            # The positions before it are read, its own is written.
            moves={"cache.keys": used, "cache.values": used, "cache.table": used},
            writes=("cache.keys", "cache.values"),
        )

    return [
        _norm_linear(shapes, rows, "qkv", outputs, layers, bias=sizes.qkv_bias),
        *map(step, depths),
        _linear_add(shapes, rows, "attention", sizes.hidden, heads * head_dim, layers, bias=sizes.out_bias),
    ]


def _qkv_outputs(shapes: Shapes) -> int:
    sizes = shapes.config.attention
    return sum(Heads(sizes.heads, gated=sizes.gated).split(sizes.kv_heads, sizes.head_dim))


def _moe(config: Qwen3_5Config, shapes: Shapes) -> list[Case]:
    size, experts, top_k = config.hidden_size, config.num_experts, config.num_experts_per_tok
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    layers = config.num_hidden_layers
    used = top_k / experts

    def route(random: RandomTensors) -> Arguments:
        return {
            "x": random.normal(1, size),
            "norm": random.norm(size),
            "gate": random.normal(experts, size, scale=size**-0.5),
            "shared_gate": random.normal(1, size, scale=size**-0.5),
        }

    def gate_up(random: RandomTensors) -> Arguments:
        return {
            "x": random.normal(1, size),
            "norm": random.norm(size),
            "logits": random.distinct(experts + 1),
            "top_k": top_k,
            "routed": random.weight(experts, 2 * inner, size),
            "shared": random.weight(2 * shared, size),
        }

    def down(random: RandomTensors) -> Arguments:
        return {
            "hidden": random.normal(1, top_k * inner + shared),
            "logits": random.distinct(experts + 1),
            "top_k": top_k,
            "routed": random.weight(experts, size, inner),
            "shared": random.weight(size, shared),
            "residual": random.normal(1, size),
        }

    routed = f"{top_k} of {experts}"
    moves, missing = _shares("routed", shapes, used), _missing_experts(config, shapes)
    return [
        Case(
            "route_logits",
            _product(experts + 1, size),
            "route_logits",
            route,
            (experts + 1) * shapes.dtype.itemsize,
            layers,
            ("x",),
        ),
        Case(
            "experts_gate_up",
            f"{routed} of {_product(2 * inner, size)} + {_product(2 * shared, size)}",
            "experts_gate_up",
            gate_up,
            (top_k * inner + shared) * shapes.dtype.itemsize,
            layers,
            ("x", "logits"),
            moves=moves,
            missing=missing,
        ),
        Case(
            "experts_down",
            f"{routed} of {_product(size, inner)} + {_product(size, shared)}",
            "experts_down",
            down,
            size * shapes.dtype.itemsize,
            layers,
            ("hidden", "logits", "residual"),
            moves=moves,
            missing=missing,
        ),
    ]


def _moe_rows(config: Qwen3_5Config, shapes: Shapes, rows: int) -> Case:
    """The case for all of a layer's experts at once. Only routed experts that some row is expected to choose count."""
    size, experts, top_k = config.hidden_size, config.num_experts, config.num_experts_per_tok
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    distinct = distinct_experts(experts, top_k, rows)

    def arguments(random: RandomTensors) -> Arguments:
        norm, gate = random.norm(size), random.normal(experts, size, scale=2 * size**-0.5)
        return {
            "x": random.clear_choices(rows, norm, gate, top_k),
            "norm": norm,
            "gate": gate,
            "shared_gate": random.normal(1, size, scale=size**-0.5),
            "top_k": top_k,
            "routed": ExpertWeights(random.weight(experts, 2 * inner, size), random.weight(experts, size, inner)),
            "shared": ExpertWeights(random.weight(2 * shared, size), random.weight(size, shared)),
            "slots": random.slots(rows),
        }

    return Case(
        "sparse_moe",
        f"{distinct:.0f} of {experts} of {_product(inner, size)} + {_product(shared, size)}, three products each",
        "sparse_moe",
        arguments,
        rows * size * shapes.dtype.itemsize,
        config.num_hidden_layers,
        ("x", "slots"),
        moves={
            name: share
            for product in ("gate_up", "down")
            for name, share in _shares(f"routed.{product}", shapes, distinct / experts).items()
        },
        missing=_missing_experts(config, shapes),
    )


def _shares(weight: str, shapes: Shapes, share: float) -> dict[str, float]:
    """`moves` of a weight of which this share is read."""
    form = shapes.form
    parts = {"values": True, "scale": form is not None, "minimum": form is not None and form.has_minimum}
    return {f"{weight}.{part}": share for part, stored in parts.items() if stored}


def _missing_experts(config: Qwen3_5Config, shapes: Shapes) -> str | None:
    sizes = config.moe
    try:
        check_experts(sizes.hidden, sizes.inner, sizes.experts, sizes.top_k, shapes.form)
    except ExportError as error:
        return str(error)
    return None


def _dense(shapes: Shapes, rows: int) -> list[Case]:
    config = shapes.config
    size, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers

    def gate_up(random: RandomTensors) -> Arguments:
        return {"x": random.normal(rows, size), "norm": random.norm(size), "weight": random.weight(2 * inner, size)}

    shape, written = _product(2 * inner, size), rows * inner * shapes.dtype.itemsize
    return [
        Case("norm_swiglu", shape, "norm_swiglu", gate_up, written, layers, ("x",)),
        _linear_add(shapes, rows, "down", size, inner, layers),
    ]


def _norm_linear(
    shapes: Shapes,
    rows: int,
    name: str,
    n: int,
    calls: int,
    out_dtype: torch.dtype | None = None,
    bias: bool = False,
) -> Case:
    k, dtype = shapes.config.hidden_size, out_dtype or shapes.dtype

    def arguments(random: RandomTensors) -> Arguments:
        weight = random.weight(n, k, bias=bias)
        return {"x": random.normal(rows, k), "norm": random.norm(k), "weight": weight, "out_dtype": dtype}

    written = rows * n * dtype.itemsize
    # Kernels in fixed point do not round their inputs to the model's dtype.
    form = shapes.form
    fixed = isinstance(form, Int4) and form.group_size == 128 and k % 256 == 0
    return Case(
        f"norm_linear/{name}",
        _product(n, k),
        "norm_linear",
        arguments,
        written,
        calls,
        ("x",),
        rounded=(0,) if rows > 1 and not fixed else (),
    )


def _linear_add(
    shapes: Shapes, rows: int, name: str, n: int, k: int, calls: int, heads: int | None = None, bias: bool = False
) -> Case:
    """A case of `linear_add`. With `heads`, the inputs of each head are divided by their rms."""

    def arguments(random: RandomTensors) -> Arguments:
        return {
            "x": random.normal(rows, k),
            "weight": random.weight(n, k, bias=bias),
            "residual": random.normal(rows, n),
            "squares": random.squares(rows * heads, k // heads) if heads else None,
        }

    written = rows * n * shapes.dtype.itemsize
    activations, moves = ("x", "residual", "squares"), {"squares.sums": 0.0}
    return Case(f"linear_add/{name}", _product(n, k), "linear_add", arguments, written, calls, activations, moves=moves)


def _product(n: int, k: int) -> str:
    return f"{n:,} x {k:,}"
