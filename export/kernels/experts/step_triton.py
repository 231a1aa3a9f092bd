"""A mixture of experts for one token as three Triton kernels that start early: router; gate and up; down.

The norm is one factor for the whole vector, so each program sums x^2 beside its products. No kernel of its own chooses the
experts. Each program of `experts_gate_up` finds its expert in the logits while its input is being loaded. Each program of
`experts_down` finds all chosen experts, and loads their weights while `experts_gate_up` still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import SPAN, Int4
from ostinato.export.kernels.launch import launcher, pointers, starts_early
from ostinato.export.kernels.linear.limits import check_weight
from ostinato.export.kernels.linear.step_triton import tile_constants, units_per_lane
from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight

from .limits import check_experts
from .step_kernels_triton import experts_down_early, experts_gate_up_early
from .step_route_triton import route_logits_early


@dataclass(frozen=True)
class Config:
    """How much of a weight one program takes, and how it multiplies.

    Attributes:
        units: units of weights per program (see `linear.step_tiles_triton`), the padding of rows included.
        rows: rows per program, at most.
        warps: warps per program, at most.
        integer: whether inputs in bfloat16 are multiplied by int4 weights in fixed point (see
            `linear.step_fixed_point_triton`). Float32 inputs never are.
    """

    units: int
    rows: int
    warps: int
    integer: bool = True

    def rows_of(self, count: int, width: int) -> int:
        """Rows per program, a power of two that divides `count`, the number of rows. A row has `width` units with padding."""
        return max(1, min(self.rows, self.units // width, count & -count))

    def constants(self, weight: Weight, dtype: torch.dtype, width: int) -> dict[str, Any]:
        """Compile-time constants of a kernel. Its warps lie along a row of `width` units, with 16 bytes per lane.

        dtype: the inputs' dtype.
        """
        warps = max(1, min(self.warps, width // (32 * units_per_lane(weight.values.dtype))))
        return {"EARLY": starts_early(), **tile_constants(weight, dtype, warps, 1, self.integer)}


# At the flagship's shapes in int4 the router has 129 programs of two rows. Gate and up have 576 programs of 8 gate and 8 up
# rows; six programs fit on a multiprocessor (168 registers per thread). Down has 128 programs of 16 rows over nine experts.
# On an H200 each kernel is one wave. In a chain of layers, these three and the output projection ahead of them take 14.4 us
# per layer; 15.3 with 8 rows for the down projections, and 16.0 with 4.
# In bfloat16 the down projections take 5.5 us with 8 rows and 6.3 with 4.
ROUTER = Config(units=4096, rows=2, warps=1)
GATE_UP = {
    torch.uint8: Config(units=2048, rows=8, warps=2),
    torch.bfloat16: Config(units=8192, rows=4, warps=8),
    torch.float32: Config(units=8192, rows=4, warps=8),
}
DOWN = {
    torch.uint8: Config(units=8192, rows=16, warps=4),
    torch.bfloat16: Config(units=32768, rows=8, warps=4),
    torch.float32: Config(units=16384, rows=4, warps=4),
}


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """See `reference.route_logits`; x in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes."""
    return _route_logits(x, norm.weight, norm.eps, gate, shared_gate)


@torch.library.triton_op("ostinato::route_logits", mutates_args={})
def _route_logits(x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    experts, size = gate.shape
    count = experts + (shared_gate is not None)
    block = triton.next_power_of_2(size)
    rows = max(1, min(ROUTER.rows, ROUTER.units // block))
    logits = torch.empty((1, count), dtype=x.dtype, device=x.device)
    launcher(route_logits_early)[((count + rows - 1) // rows,)](
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
        EARLY=starts_early(),
        num_warps=ROUTER.warps * max(1, block // 2048),
    )
    return logits


def experts_gate_up(x: Tensor, norm: Norm, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None) -> Tensor:
    """See `reference.experts_gate_up`; x in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    The kernel is a late one. The kernel of `experts_down` must come directly behind it (R3 to R5 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_experts` and `check_weight`; also for a shared expert that does not match.
    """
    inner = 0 if shared is None else shared.rows // 2
    check_weights(routed, shared, x.dtype, (x.shape[1], routed.rows // 2, inner), top_k)
    return _experts_gate_up(x, norm.weight, norm.eps, logits, top_k, *weight_tensors(routed, shared))


@torch.library.triton_op("ostinato::experts_gate_up", mutates_args={})
def _experts_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
) -> Tensor:
    weight = Weight.of(gate_up, gate_up_scale, None, None, Int4.name)
    experts, inner, size = gate_up.shape[0], weight.rows // 2, weight.columns
    shared_inner = 0 if shared_gate_up is None else shared_gate_up.shape[0] // 2
    config = GATE_UP[gate_up.dtype]
    width = triton.next_power_of_2(gate_up.shape[2] // (1 if gate_up_scale is None else 4))
    rows = config.rows_of(inner | shared_inner, width)
    hidden = torch.empty((1, top_k * inner + shared_inner), dtype=x.dtype, device=x.device)
    launcher(experts_gate_up_early)[((top_k * inner + shared_inner) // rows,)](
        x,
        norm_weight,
        logits,
        *weight_pointers(gate_up, gate_up_scale, shared_gate_up, shared_gate_up_scale),
        hidden,
        EPS=eps,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=shared_inner,
        EXPERTS=experts,
        TOP_K=top_k,
        ROWS=rows,
        **config.constants(weight, x.dtype, width),
    )
    return hidden


def experts_down(
    hidden: Tensor, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None, residual: Tensor
) -> Tensor:
    """See `reference.experts_down`; residual in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    The kernel reads `logits` and `residual` before its wait. So, among kernels that start early, it must come directly behind
    the kernel of `experts_gate_up`. Both tensors must be written ahead of that kernel (R4 and R5 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_experts` and `check_weight`; also for a shared expert that does not match.
    """
    inner = 0 if shared is None else shared.columns
    check_weights(routed, shared, residual.dtype, (routed.rows, routed.columns, inner), top_k)
    return _experts_down(hidden, logits, top_k, *weight_tensors(routed, shared), residual)


@torch.library.triton_op("ostinato::experts_down", mutates_args={})
def _experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    down: Tensor,
    down_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    residual: Tensor,
) -> Tensor:
    weight = Weight.of(down, down_scale, None, None, Int4.name)
    experts, size, inner = down.shape[0], weight.rows, weight.columns
    per_unit = 1 if down_scale is None else 8
    shared_inner = (
        0 if shared_down is None else Weight.of(shared_down, shared_down_scale, None, None, Int4.name).columns
    )
    config = DOWN[down.dtype]
    # At least 8, so that all units of a lane lie in one row.
    width, shared_width = (max(8, triton.next_power_of_2(count // per_unit)) for count in (inner, shared_inner))
    total = triton.next_power_of_2(top_k) * width
    rows = config.rows_of(size, total)
    out = torch.empty_like(residual)
    launcher(experts_down_early)[(size // rows,)](
        hidden,
        logits,
        *weight_pointers(down, down_scale, shared_down, shared_down_scale),
        residual,
        out,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=shared_inner,
        EXPERTS=experts,
        TOP_K=top_k,
        ROWS=rows,
        WIDTH=width,
        SHARED_WIDTH=shared_width,
        **config.constants(weight, residual.dtype, total),
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
    """See `reference.sparse_moe`; for one row, in three kernels."""
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    logits = route_logits(x, norm, gate, shared_gate)
    hidden = experts_gate_up(x, norm, logits, top_k, routed.gate_up, gate_up)
    return experts_down(hidden, logits, top_k, routed.down, down, x)


def weight_tensors(routed: Weight, shared: Weight | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Values and scales of both weights, as an operator of torch takes them."""
    return (
        (routed.values, routed.scale, None, None)
        if shared is None
        else (routed.values, routed.scale, shared.values, shared.scale)
    )


def weight_pointers(
    values: Tensor, scale: Tensor | None, shared: Tensor | None, shared_scale: Tensor | None
) -> tuple[Tensor, ...]:
    """Values and scales of both weights, as a kernel takes them.

    Without a shared expert, the routed experts' tensors stand in both places. A kernel has code for both, with equal types.
    """
    routed = pointers(values, scale)
    return *routed, *(routed if shared is None else pointers(shared, shared_scale))


def check_weights(
    routed: Weight, shared: Weight | None, dtype: torch.dtype, sizes: tuple[int, int, int], top_k: int
) -> None:
    """Raises ExportError if the kernels cannot take these weights. `sizes`: H, the routed and the shared inner size."""
    size, inner, shared_inner = sizes
    check_experts(size, inner, routed.values.shape[0], top_k, routed.format)
    for weight in (routed, shared):
        if weight is not None:
            check_weight(weight, dtype)
            if weight.bias is not None:
                raise ExportError("the experts' kernels take weights without a bias")
    if shared is None:
        return
    group = routed.group_size
    if shared.group_size != group or (group is not None and shared_inner % max(SPAN, group)):
        raise ExportError(
            f"the shared expert's weights must be in the routed experts' format, which is "
            f"{_format(routed)}, and its inner size a multiple of {SPAN} and of the group size in int4; got "
            f"{_format(shared)} and {shared_inner}"
        )


def _format(weight: Weight) -> str:
    return str(weight.values.dtype) if weight.group_size is None else f"int4 in groups of {weight.group_size}"
