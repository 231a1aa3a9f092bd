"""A mixture of experts for one token as three Triton kernels that start early: router; gate and up; down.

The norm is one factor for the whole vector, so each program sums x^2 beside its products. No kernel chooses the experts: each
program of `experts_gate_up` finds its own in the logits while the input that it needs is being loaded, and each program of
`experts_down` finds them all and loads their weights while `experts_gate_up` still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.formats import SPAN
from ostinato.export.kernels.launch import launcher, starts_early
from ostinato.export.kernels.linear.step_tiles_triton import LANE
from ostinato.export.kernels.linear.step_triton import packed
from ostinato.export.kernels.operands import Norm, Weight

from .limits import check_experts
from .step_kernels_triton import experts_down_early, experts_gate_up_early
from .step_route_triton import route_logits_early


@dataclass(frozen=True)
class Config:
    """What one program does.

    Attributes:
        words: what it reads of its weights: 32-bit words, or elements of the router's weights, the padding of rows included.
        rows: the most rows among which it divides them.
        warps: the most warps that it has.
        integer: whether inputs in bfloat16 are multiplied in fixed point, as `linear.step_fixed_point_triton` says. Float32
            inputs never are.
    """

    words: int
    rows: int
    warps: int
    integer: bool = True

    def rows_of(self, columns: int) -> int:
        """Rows per program, a power of two, where a row has `columns` words or elements with its padding."""
        return max(1, min(self.rows, self.words // columns))

    def warps_of(self, columns: int) -> int:
        """Warps per program, all along a row of `columns` words, of which a lane takes four at a time."""
        return max(1, min(self.warps, columns // (32 * LANE.value)))


# At the flagship's shapes: 129 programs of two rows; 576 of 8 gate and 8 up rows, six of which fit on a multiprocessor (168
# registers per thread); 128 of 16 rows over nine experts. On an H200 each is one wave. In a chain of layers, these three and
# the output projection ahead of them take 14.4 us per layer; 15.3 with 8 rows for the down projections and 16.0 with 4.
ROUTER = Config(words=4096, rows=2, warps=1)
GATE_UP = Config(words=2048, rows=8, warps=2)
DOWN = Config(words=8192, rows=16, warps=4)


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """See `reference.route_logits`; x in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes."""
    return _route_logits(x, norm.weight, norm.eps, gate, shared_gate)


@torch.library.triton_op("ostinato::route_logits", mutates_args={})
def _route_logits(x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    experts, size = gate.shape
    count = experts + (shared_gate is not None)
    block = triton.next_power_of_2(size)
    rows = ROUTER.rows_of(block)
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

    Its kernel is a late one, and that of `experts_down` must be directly behind it (R3 to R5 in `delegate/graph_nodes.py`).

    Raises:
        ExportError: see `check_experts`; weights in a floating dtype; or a shared expert that does not match.
    """
    values, scale = packed(routed)
    size, group = x.shape[1], x.shape[1] // scale.shape[2]
    check_experts(size, routed.rows // 2, values.shape[0], top_k, group)
    shared_weight = (None, None) if shared is None else _checked_shared(shared, shared.rows // 2, size, group)
    return _experts_gate_up(x, norm.weight, norm.eps, logits, top_k, values, scale, *shared_weight)


@torch.library.triton_op("ostinato::experts_gate_up", mutates_args={})
def _experts_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
) -> Tensor:
    experts, inner, size = gate_up.shape[0], gate_up.shape[1] // 2, x.shape[1]
    shared_inner = 0 if shared_gate_up is None else shared_gate_up.shape[0] // 2
    columns = triton.next_power_of_2(size // 8)
    rows, warps = GATE_UP.rows_of(columns), GATE_UP.warps_of(columns)
    hidden = torch.empty((1, top_k * inner + shared_inner), dtype=x.dtype, device=x.device)
    launcher(experts_gate_up_early)[((top_k * inner + shared_inner) // rows,)](
        x,
        norm_weight,
        logits,
        gate_up,
        gate_up_scale,
        gate_up if shared_gate_up is None else shared_gate_up,
        gate_up_scale if shared_gate_up_scale is None else shared_gate_up_scale,
        hidden,
        EPS=eps,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=shared_inner,
        EXPERTS=experts,
        TOP_K=top_k,
        GROUP=size // gate_up_scale.shape[2],
        ROWS=rows,
        WARPS=warps,
        TILE=32 * LANE.value * warps,
        INTEGER=GATE_UP.integer and x.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=warps,
    )
    return hidden


def experts_down(
    hidden: Tensor, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None, residual: Tensor
) -> Tensor:
    """See `reference.experts_down`; residual in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    Its kernel reads `logits` and `residual` before its wait. So among kernels that start early it must be directly behind
    that of `experts_gate_up`, and both tensors must be older than that one (R4 and R5 in `delegate/graph_nodes.py`).

    Raises:
        ExportError: see `check_experts`; weights in a floating dtype; or a shared expert that does not match.
    """
    values, scale = packed(routed)
    size, group = routed.rows, routed.columns // scale.shape[2]
    check_experts(size, routed.columns, values.shape[0], top_k, group)
    shared_weight = (None, None) if shared is None else _checked_shared(shared, size, shared.columns, group)
    return _experts_down(hidden, logits, top_k, values, scale, *shared_weight, residual)


@torch.library.triton_op("ostinato::experts_down", mutates_args={})
def _experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    down: Tensor,
    down_scale: Tensor,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    residual: Tensor,
) -> Tensor:
    experts, size, inner = down.shape[0], down.shape[1], down.shape[2] * 2
    shared_inner = 0 if shared_down is None else shared_down.shape[1] * 2
    words = triton.next_power_of_2(inner // 8)
    columns = triton.next_power_of_2(top_k) * words
    rows, warps = DOWN.rows_of(columns), DOWN.warps_of(columns)
    out = torch.empty_like(residual)
    launcher(experts_down_early)[(size // rows,)](
        hidden,
        logits,
        down,
        down_scale,
        down if shared_down is None else shared_down,
        down_scale if shared_down_scale is None else shared_down_scale,
        residual,
        out,
        SIZE=size,
        INNER=inner,
        SHARED_INNER=shared_inner,
        EXPERTS=experts,
        TOP_K=top_k,
        GROUP=inner // down_scale.shape[2],
        ROWS=rows,
        WARPS=warps,
        TILE=32 * LANE.value * warps,
        WORDS=words,
        SHARED_WORDS=max(8, triton.next_power_of_2(shared_inner // 8)),
        INTEGER=DOWN.integer and residual.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=warps,
    )
    return out


def _checked_shared(shared: Weight, rows: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
    """The shared expert's values and scale; ExportError where its groups or its sizes do not fit the kernels."""
    values, scale = packed(shared)
    if rows % SPAN or columns % max(SPAN, group) or scale.shape[1] * group != columns:
        raise ExportError(
            f"the shared expert's int4 weights must have group size {group}, as the routed experts' have, and sizes that "
            f"are multiples of {SPAN} and of it; got {rows} rows of {columns} with {scale.shape[1]} groups"
        )
    return values, scale
