"""A mixture of experts for one token as three Triton kernels that start early: router, gate and up, down. See `step_moe`.

The norm is one factor for the whole vector, so each program sums x^2 beside its products. No kernel chooses the experts:
each program of `experts_gate_up` finds its own in the logits, while the input that it needs is on its way, and each of
`experts_down` finds them all and fetches their weights, while `experts_gate_up` still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...delegate.errors import ExportError
from .experts_triton import check_shapes
from .launch import launcher, starts_early
from .step_experts_triton import experts_down_early, experts_gate_up_early
from .step_linear_math_triton import LANE
from .step_route_triton import route_logits_early


@dataclass(frozen=True)
class Config:
    """Attributes:
    words: what a program reads of its weights: 32-bit words, or elements of the router's weights, padded rows counted.
    rows: the most rows among which it divides them.
    warps: of 32 threads, at most.
    integer: whether inputs in bfloat16 are multiplied in fixed point: `step_linear_integer_triton`. Float32 ones are not.
    """

    words: int
    rows: int
    warps: int
    integer: bool = True

    def rows_of(self, columns: int) -> int:
        """Rows a program, a power of two, where a row has `columns` words or elements with its padding."""
        return max(1, min(self.rows, self.words // columns))

    def warps_of(self, columns: int) -> int:
        """Warps a program, all along a row of `columns` words, of which a lane takes four at a time."""
        return max(1, min(self.warps, columns // (32 * LANE.value)))


# At the flagship's shapes: 129 programs of two rows; 576 of 8 gate and 8 up rows, six of which fit a multiprocessor (168
# registers a thread); 128 of 16 rows over nine experts. For an H200 each is one wave. In a chain with the output projection
# ahead of them a layer's share of the four takes 14.4 us, 15.3 with 8 rows for the down projections and 16.0 with 4.
ROUTER = Config(words=4096, rows=2, warps=1)
GATE_UP = Config(words=2048, rows=8, warps=2)
DOWN = Config(words=8192, rows=16, warps=4)


@torch.library.triton_op("ostinato::route_logits", mutates_args={})
def route_logits(h: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """See `step_moe.route_logits`. All contiguous, addresses multiples of 16 bytes; h in bfloat16 or float32."""
    experts, size = gate.shape
    count = experts + (shared_gate is not None)
    block = triton.next_power_of_2(size)
    rows = ROUTER.rows_of(block)
    logits = torch.empty((1, count), dtype=h.dtype, device=h.device)
    launcher(route_logits_early)[((count + rows - 1) // rows,)](
        h,
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


@torch.library.triton_op("ostinato::experts_gate_up", mutates_args={})
def experts_gate_up(
    h: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
) -> Tensor:
    """See `step_moe.experts_gate_up`. All contiguous, addresses multiples of 16 bytes; h in bfloat16 or float32.

    It starts the kernel behind it late, which is to be `experts_down`'s: see there.

    Raises:
        ExportError: sizes that the kernels do not take.
    """
    experts, inner, size = gate_up.shape[0], gate_up.shape[1] // 2, h.shape[1]
    shared_inner = 0 if shared_gate_up is None else shared_gate_up.shape[0] // 2
    group = size // gate_up_scale.shape[2]
    check_shapes(size, inner, experts, top_k, group)
    check_shared(shared_inner, size, group, shared_gate_up_scale)
    columns = triton.next_power_of_2(size // 8)
    rows, warps = GATE_UP.rows_of(columns), GATE_UP.warps_of(columns)
    hidden = torch.empty((1, top_k * inner + shared_inner), dtype=h.dtype, device=h.device)
    launcher(experts_gate_up_early)[((top_k * inner + shared_inner) // rows,)](
        h,
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
        GROUP=group,
        ROWS=rows,
        WARPS=warps,
        TILE=32 * LANE.value * warps,
        INTEGER=GATE_UP.integer and h.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=warps,
    )
    return hidden


@torch.library.triton_op("ostinato::experts_down", mutates_args={})
def experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    down: Tensor,
    down_scale: Tensor,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    residual: Tensor,
) -> Tensor:
    """See `step_moe.experts_down`. All contiguous, addresses multiples of 16 bytes; residual in bfloat16 or float32.

    Among kernels that start early it must come directly behind `experts_gate_up`, and `logits` and `residual` be older than
    that one: it reads them before its wait.

    Raises:
        ExportError: sizes that the kernels do not take.
    """
    experts, size, inner = down.shape[0], down.shape[1], down.shape[2] * 2
    shared_inner = 0 if shared_down is None else shared_down.shape[1] * 2
    group = inner // down_scale.shape[2]
    check_shapes(size, inner, experts, top_k, group)
    check_shared(size, shared_inner, group, shared_down_scale)
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
        GROUP=group,
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


def check_shared(rows: int, columns: int, group: int, scale: Tensor | None) -> None:
    """Raises ExportError where the shared expert's weight is not like the others', or has sizes that do not divide."""
    if scale is None:
        return
    if rows % 64 or columns % max(64, group) or scale.shape[1] * group != columns:
        raise ExportError(
            f"the shared expert's int4 weights must have group size {group}, as the routed experts' have, and sizes that "
            f"are multiples of 64 and of it; got {rows} rows of {columns} with {scale.shape[1]} groups"
        )
