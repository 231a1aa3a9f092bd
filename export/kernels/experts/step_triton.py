"""A mixture of experts for one token, or for a few, as three Triton kernels that start early: router; gate and up; down.

The norm is one factor for the whole vector, so each program sums x^2 beside its products. No kernel of its own chooses the
experts. Each program of `experts_gate_up` finds its expert in the logits while its input is being loaded. Each program of
`experts_down` finds all chosen experts, and loads their weights while `experts_gate_up` still runs.

A program has one token. So an expert that several tokens chose is read for each of them, from L2 if at the same time. Of the
64 choices of eight tokens (8 of 256 experts each) 57 differ, and 102 of 128: up to FEW_ROWS tokens this costs less than the
kernels of `rows_triton` that bring together the tokens of an expert. A token's result is the same bits, whatever tokens stand
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.launch import is_one, launcher, pointers, starts_early
from ostinato.export.kernels.linear.limits import check_weight
from ostinato.export.kernels.linear.step_triton import bits_of, tile_constants, units_per_lane
from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight, unbiased

from .limits import check_routing
from .step_down_triton import experts_down_early
from .step_gate_up_triton import experts_gate_up_early
from .step_route_triton import route_logits_early


@dataclass(frozen=True)
class Config:
    """How much of a weight one program takes, and how it multiplies.

    Attributes:
        units: units of weights per program (see `linear.step_tiles_triton`), the padding of rows included.
        rows: rows per program, at most.
        warps: warps per program, at most.
        integer: whether inputs in bfloat16 are multiplied by integer weights in fixed point (see
            `linear.step_fixed_point_triton`). Float32 inputs never are.
    """

    units: int
    rows: int
    warps: int
    integer: bool = True

    def warps_of(self, weight: Weight, width: int) -> int:
        """Warps per program. They lie along a row of `width` units, with 16 bytes per lane."""
        return max(1, min(self.warps, width // (32 * units_per_lane(weight.values.dtype))))

    def rows_of(self, count: int, width: int) -> int:
        """Rows per program, a power of two that divides `count`, the number of rows. A row has `width` units with padding."""
        return max(1, min(self.rows, self.units // width, count & -count))


# At the flagship's shapes in int4 the router has 129 programs of two rows. Gate and up have 576 programs of 8 gate and 8 up
# rows; six programs fit on a multiprocessor (168 registers per thread). Down has 128 programs of 16 rows over nine experts.
# On an H200 each kernel is one wave. In a chain of layers, these three and the output projection ahead of them take 14.4 us
# per layer; 15.3 with 8 rows for the down projections, and 16.0 with 4.
# In bfloat16 the down projections take 5.5 us with 8 rows and 6.3 with 4.
ROUTER = Config(units=4096, rows=2, warps=1)
GATE_UP = {
    torch.uint8: Config(units=2048, rows=8, warps=2),
    torch.int8: Config(units=4096, rows=8, warps=4),
    torch.bfloat16: Config(units=8192, rows=4, warps=8),
    torch.float32: Config(units=8192, rows=4, warps=8),
}
DOWN = {
    torch.uint8: Config(units=8192, rows=16, warps=4),
    torch.int8: Config(units=8192, rows=16, warps=4),
    torch.bfloat16: Config(units=32768, rows=8, warps=4),
    torch.float32: Config(units=16384, rows=4, warps=4),
}
# Programs of gate and up, and of down, for which an H200 has room at once, with bfloat16 inputs and int4 weights in groups of
# 128: six and three on a multiprocessor. Several tokens have as many programs at most, so each takes several blocks. A
# delta-net layer of 4 and 8 tokens then takes 39.2 and 60.0 us; with as many programs of gate and up as one token has, and a
# program for each block of down, 41.5 and 64.6 (one H200, 2026-11-28).
GATE_UP_ROOM, DOWN_ROOM = 6 * 132, 3 * 132


def takes_turns(x: Tensor, weight: Weight) -> bool:
    """Whether programs take several blocks, as GATE_UP_ROOM and DOWN_ROOM say: these are for such weights and inputs."""
    known = x.dtype == torch.bfloat16 and isinstance(weight.format, Int4) and weight.group_size == 128
    return known and not is_one(x.shape[0])


def sections(count: int | torch.SymInt, size: int | torch.SymInt) -> Any:
    """How many sections of `size` make up `count`; the last one may be smaller. Both may be symbols."""
    return (count + size - 1) // size


def turns_for(count: int | torch.SymInt, blocks: int, room: int) -> Any:
    """Blocks that a program takes, if `count` projections of so many blocks have `room` for programs at once."""
    return sections(blocks, torch.sym_max(1, room // count))


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """See `reference.route_logits`; x [R, H] in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes."""
    return _route_logits(x, norm.weight, norm.eps, gate, shared_gate)


@torch.library.triton_op("ostinato::route_logits", mutates_args={})
def _route_logits(x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    experts, size = gate.shape
    count = experts + (shared_gate is not None)
    block = triton.next_power_of_2(size)
    rows, tokens = max(1, min(ROUTER.rows, ROUTER.units // block)), x.shape[0]
    logits = torch.empty((tokens, count), dtype=x.dtype, device=x.device)
    launcher(route_logits_early)[((count + rows - 1) // rows, 1, tokens)](
        x,
        norm_weight,
        gate,
        gate if shared_gate is None else shared_gate,
        logits,
        EPS=eps,
        SIZE=size,
        EXPERTS=experts,
        COUNT=count,
        ROWS=rows,
        BLOCK=block,
        SEVERAL=not is_one(tokens),
        EARLY=starts_early(),
        num_warps=ROUTER.warps * max(1, block // 2048),
    )
    return logits


def experts_gate_up(
    x: Tensor,
    norm: Norm,
    logits: Tensor,
    top_k: int,
    routed: Weight,
    shared: Weight | None,
    slots: Tensor | None = None,
) -> Tensor:
    """See `reference.experts_gate_up`; x [R, H] in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    Args:
        slots: [R] as in `RowIndex`; what the result has for padding is not defined. None: no row is padding.

    The kernel is a late one. The kernel of `experts_down` must come directly behind it (R3 to R5 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_weights`.
    """
    check_weights(routed, shared, x.dtype, top_k)
    return _experts_gate_up(x, norm.weight, norm.eps, logits, top_k, *unbiased(routed), *unbiased(shared), slots)


@torch.library.triton_op("ostinato::experts_gate_up", mutates_args={})
def _experts_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    form: str,
    shared_values: Tensor | None,
    shared_scale: Tensor | None,
    shared_minimum: Tensor | None,
    shared_form: str,
    slots: Tensor | None,
) -> Tensor:
    weight = Weight.of(values, scale, minimum, None, form)
    shared = optional_weight(shared_values, shared_scale, shared_minimum, shared_form)
    experts, inner, size = values.shape[0], weight.rows // 2, weight.columns
    shared_inner = 0 if shared is None else shared.rows // 2
    config, width = GATE_UP[values.dtype], triton.next_power_of_2(units_of(weight, size))
    warps, rows = config.warps_of(weight, width), config.rows_of(inner, width)
    constants = tile_constants(weight, x.dtype, warps, 1, config.integer)
    shared_rows, shared_constants = rows, constants
    if shared is not None:
        # The shared expert's programs have as many warps as the others, and not more weights for each of them than with the
        # number of warps that their own format has.
        config, width = GATE_UP[shared.values.dtype], triton.next_power_of_2(units_of(shared, size))
        shared_rows = config.rows_of(shared_inner, width * max(1, config.warps_of(shared, width) // warps))
        shared_constants = tile_constants(shared, x.dtype, warps, 1, config.integer)
    tokens = x.shape[0]
    hidden = torch.empty((tokens, top_k * inner + shared_inner), dtype=x.dtype, device=x.device)
    blocks, shared_blocks = inner // rows, shared_inner // shared_rows
    # The next block's weights are under way before a block is stored.
    turns = (
        turns_for(tokens * (top_k + (shared is not None)), blocks, GATE_UP_ROOM) if takes_turns(x, weight) else tokens
    )
    grid = top_k * sections(blocks, turns) + sections(shared_blocks, turns), 1, tokens
    launcher(experts_gate_up_early)[grid](
        x,
        norm_weight,
        logits,
        *weight_pointers(weight, shared),
        logits if slots is None else slots,
        hidden,
        turns,
        EPS=eps,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=shared_inner,
        EXPERTS=experts,
        COUNT=logits.shape[1],
        TOP_K=top_k,
        ROWS=rows,
        SHARED_ROWS=shared_rows,
        SHARED_UNITS=shared_constants["UNITS"],
        SHARED_LANE=shared_constants["LANE"],
        SEVERAL=not is_one(tokens),
        SLOTS=slots is not None,
        EARLY=starts_early(),
        **(constants | format_constants(weight, shared)),
    )
    return hidden


def experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    routed: Weight,
    shared: Weight | None,
    residual: Tensor,
    slots: Tensor | None = None,
) -> Tensor:
    """See `reference.experts_down`; residual [R, H] in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    Args:
        slots: [R] as in `RowIndex`; padding gets its residual. None: no row is padding.

    The kernel reads `logits` and `residual` before its wait. So, among kernels that start early, it must come directly behind
    the kernel of `experts_gate_up`. Both tensors must be written ahead of that kernel (R4 and R5 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_weights`.
    """
    check_weights(routed, shared, residual.dtype, top_k)
    return _experts_down(hidden, logits, top_k, *unbiased(routed), *unbiased(shared), residual, slots)


@torch.library.triton_op("ostinato::experts_down", mutates_args={})
def _experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    form: str,
    shared_values: Tensor | None,
    shared_scale: Tensor | None,
    shared_minimum: Tensor | None,
    shared_form: str,
    residual: Tensor,
    slots: Tensor | None,
) -> Tensor:
    weight = Weight.of(values, scale, minimum, None, form)
    shared = optional_weight(shared_values, shared_scale, shared_minimum, shared_form)
    experts, size, inner = values.shape[0], weight.rows, weight.columns
    # At least 8, so that all units of a lane lie in one row.
    width, shared_width = (
        max(8, triton.next_power_of_2(0 if one is None else units_of(one, one.columns))) for one in (weight, shared)
    )
    config, total = DOWN[values.dtype], triton.next_power_of_2(top_k) * width
    warps, rows = config.warps_of(weight, total), config.rows_of(size, total)
    constants = tile_constants(weight, residual.dtype, warps, 1, config.integer)
    shared_constants = tile_constants(shared or weight, residual.dtype, warps, 1, config.integer)
    out, tokens = torch.empty_like(residual), residual.shape[0]
    blocks, several = size // rows, takes_turns(residual, weight)
    turns = turns_for(tokens, blocks, DOWN_ROOM) if several else 1
    launcher(experts_down_early)[(sections(blocks, turns), 1, tokens)](
        hidden,
        logits,
        *weight_pointers(weight, shared),
        logits if slots is None else slots,
        residual,
        out,
        turns,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=0 if shared is None else shared.columns,
        EXPERTS=experts,
        COUNT=logits.shape[1],
        TOP_K=top_k,
        ROWS=rows,
        WIDTH=width,
        SHARED_UNITS=shared_constants["UNITS"],
        SHARED_LANE=shared_constants["LANE"],
        SHARED_WIDTH=shared_width,
        SEVERAL=not is_one(tokens),
        TURNS=several,
        SLOTS=slots is not None,
        EARLY=starts_early(),
        **(constants | format_constants(weight, shared)),
    )
    return out


def sparse_moe(
    x: Tensor,
    norm: Norm,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    slots: Tensor | None,
) -> Tensor:
    """See `reference.sparse_moe`; in three kernels."""
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    slots = None if is_one(x.shape[0]) else slots
    logits = route_logits(x, norm, gate, shared_gate)
    hidden = experts_gate_up(x, norm, logits, top_k, routed.gate_up, gate_up, slots)
    return experts_down(hidden, logits, top_k, routed.down, down, x, slots)


def optional_weight(values: Tensor | None, scale: Tensor | None, minimum: Tensor | None, form: str) -> Weight | None:
    """The weight that these arguments of an operator are, as `unbiased` returns them."""
    return None if values is None else Weight.of(values, scale, minimum, None, form)


def units_of(weight: Weight, columns: int) -> int:
    """Units of a row of `columns` elements; see `linear.step_tiles_triton`."""
    return columns if weight.format is None else columns * bits_of(weight) // 32


def weight_pointers(routed: Weight, shared: Weight | None) -> tuple[Tensor, ...]:
    """Values, scale and minimum of both weights, as a kernel takes them.

    Without a shared expert, the routed experts' tensors stand in both places: a kernel has code for both.
    """
    both = routed, shared or routed
    return tuple(one for weight in both for one in pointers(weight.values, weight.scale, weight.minimum))


def format_constants(routed: Weight, shared: Weight | None) -> dict[str, Any]:
    """Compile-time constants of a kernel that say what numbers are at the `weight_pointers`."""
    shared = shared or routed
    return {
        "GROUP": routed.group_size or 0,
        "BITS": bits_of(routed),
        "MINIMUM": routed.minimum is not None,
        "SHARED_GROUP": shared.group_size or 0,
        "SHARED_BITS": bits_of(shared),
        "SHARED_MINIMUM": shared.minimum is not None,
    }


def check_weights(routed: Weight, shared: Weight | None, dtype: torch.dtype, top_k: int) -> None:
    """Raises ExportError if the kernels cannot take one projection of the routed experts and of the shared one.

    dtype: the inputs' dtype.
    """
    check_routing(routed.values.shape[0], top_k)
    for weight in (routed, shared):
        if weight is not None:
            check_weight(weight, dtype)
            if weight.bias is not None:
                raise ExportError("the experts' kernels take weights without a bias")
