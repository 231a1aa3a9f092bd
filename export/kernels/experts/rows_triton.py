"""A mixture of experts for several rows as six Triton kernels that start early. They read only chosen experts' weights.

A call that never has more than FEW_ROWS rows takes the three kernels of a single token (`step_triton`).

1. The router's logits, in parts (`rows_route_triton`).
2. The choice of each row's experts, and the normed rows in the form that the experts take (`rows_route_triton`).
3. The schedule: blocks of up to eight rows of one expert (`rows_schedule_triton`).
4. The gate and up projections of these blocks, and SwiGLU (`rows_fixed_triton`, or `rows_general_triton`). Each block reads
   its expert's weights once.
5. The down projections, in the same way.
6. For each row, the sum of its experts' outputs times their shares, plus the residual stream (`rows_schedule_triton`).

Atomics only set bits of words, so every sum has the same order each time. A row's result is the same bits, whatever rows
stand beside it.

H200, 2026-11-23, the flagship's experts (256, of which a row takes 8, and a shared one; H is 2048 and I 512, int4): a layer
takes 42.2/64.5/125/142 us at 8/16/64/128 rows. Kernels 1 to 3 take 8 to 12 us of that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.launch import (
    are_many,
    at_most,
    launcher,
    processors,
    row_vector,
    shared_memory,
    starts_early,
)
from ostinato.export.kernels.linear import prefill_triton as linear_prefill
from ostinato.export.kernels.linear.rows_grouped_triton import PIECE
from ostinato.export.kernels.operands import FEW_ROWS, MAX_ROWS, ExpertWeights, Norm, Weight, unbiased

from . import prefill_triton, route_triton, step_triton
from . import rows_fixed_triton as fixed
from . import rows_general_triton as general
from . import rows_route_triton as routing
from . import rows_schedule_triton as scheduling
from .step_triton import check_weights, format_constants, optional_weight, weight_pointers

# A projection of the routed experts, and that of the shared expert.
Pair = tuple[Weight, Weight | None]

# Experts, and elements of a row, per program of the router, by the model's dtype.
# In bfloat16 a delta-net layer takes 71.1/108.1/159.1/226.9 us with (32, 512) at 8/16/32/64 rows, 72.6/108.3/161.0/226.8 with
# (64, 512), and 73.4/108.2/158.7/226.9 with (16, 512).
ROUTER = {torch.bfloat16: (32, 512), torch.float32: (16, 128)}
# Warps of a program of down in fixed point, each with a group of 128, or 2 where groups are no multiple of DOWN_WARPS. As
# many programs are launched as have room in DOWN_ROOM bytes of each multiprocessor's shared memory: the division of memory
# for kernels of rows (`delegate/graphs/nodes.py`). So they spread evenly, where one more would be alone in the end: with
# 1,536 inner activations 3 programs take 90 us, 2 take 72. A warp needs HELD_BYTES where it has one group of a row, whose
# inputs it holds, and LOADED_BYTES where it loads those of each turn.
DOWN_WARPS, DOWN_ROOM = 4, 164 * 1024
HELD_BYTES, LOADED_BYTES = 12800, 15104
# Columns per program of the last kernel.
SUM_COLUMNS = 1024


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
    """See `reference.sparse_moe`; 1 to MAX_ROWS rows in bfloat16 or float32; all tensors contiguous and aligned to 16 bytes.

    If x never has more than FEW_ROWS rows, the operations are those of `step_triton`, and those for prompts if it always has
    more than SOME_ROWS rows.

    Raises:
        ExportError: see `check_weights`; also for more than MAX_ROWS rows.
    """
    if at_most(x.shape[0], FEW_ROWS):
        return step_triton.sparse_moe(x, norm, gate, shared_gate, top_k, routed, shared, slots)
    if isinstance(x.shape[0], int) and x.shape[0] > MAX_ROWS:
        raise ExportError(f"a step's experts take up to {MAX_ROWS} rows, not {x.shape[0]}")
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    for weight, other in ((routed.gate_up, gate_up), (routed.down, down)):
        check_weights(weight, other, x.dtype, top_k)
    if are_many(x.shape[0]):
        return _as_prompt(x, norm(x).to(x.dtype), gate, shared_gate, top_k, routed, shared, slots)
    weights = (*unbiased(routed.gate_up), *unbiased(gate_up), *unbiased(routed.down), *unbiased(down))
    return _sparse_moe_rows(x, norm.weight, norm.eps, gate, shared_gate, top_k, *weights, slots)


def _as_prompt(
    x: Tensor,
    normed: Tensor,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    slots: Tensor | None,
) -> Tensor:
    """x + the experts of `normed`, by the kernels for prompts."""
    if slots is None:
        slots = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    weights, chosen = route_triton.route(F.linear(normed, gate), top_k, slots)
    out = x.float() + prefill_triton.experts(normed, weights, chosen, routed).float()
    if shared is not None and shared_gate is not None:
        first, second = linear_prefill.linear(normed, shared.gate_up).chunk(2, dim=1)
        product = linear_prefill.linear(F.silu(first) * second, shared.down)
        out += torch.sigmoid(F.linear(normed, shared_gate)).float() * product.float()
    return out.to(x.dtype)


@torch.library.triton_op("ostinato::sparse_moe_rows", mutates_args={})
def _sparse_moe_rows(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    gate_up_minimum: Tensor | None,
    gate_up_form: str,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_gate_up_minimum: Tensor | None,
    shared_gate_up_form: str,
    down: Tensor,
    down_scale: Tensor | None,
    down_minimum: Tensor | None,
    down_form: str,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    shared_down_minimum: Tensor | None,
    shared_down_form: str,
    slots: Tensor | None,
) -> Tensor:
    gate_ups = (
        Weight.of(gate_up, gate_up_scale, gate_up_minimum, None, gate_up_form),
        optional_weight(shared_gate_up, shared_gate_up_scale, shared_gate_up_minimum, shared_gate_up_form),
    )
    downs = (
        Weight.of(down, down_scale, down_minimum, None, down_form),
        optional_weight(shared_down, shared_down_scale, shared_down_minimum, shared_down_form),
    )
    in_fixed_point, grouped = takes_fixed_point(gate_ups, downs, x.dtype), takes_groups(gate_ups, downs, x.dtype)
    prepared, x_scale, x_sums, members, ranks, shares = _route(
        x, norm_weight, eps, gate, shared_gate, top_k, slots, in_fixed_point, grouped, grouped and _has_minima(gate_ups)
    )
    schedule, places = _schedule(members, ranks, top_k, shared_gate is not None)
    parts = torch.empty(shares.shape[0] * shares.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    if in_fixed_point:
        _multiply_fixed(prepared, x_scale, schedule, places, gate_ups, downs, parts)
    else:
        _multiply_general(prepared, x_sums, schedule, places, gate_ups, downs, parts, grouped)
    return _sum(parts, shares, slots, x)


def takes_fixed_point(gate_up: Pair, down: Pair, dtype: torch.dtype) -> bool:
    """Whether `rows_fixed_triton` takes these projections, with inputs in `dtype`."""
    (routed, shared), inner = down, down[0].columns
    alike = all(one.format == (other or one).format for one, other in (gate_up, down))
    int4 = all(isinstance(one.format, Int4) and one.group_size == 128 for one in (gate_up[0], routed))
    same = shared is None or shared.columns == inner
    return alike and int4 and same and dtype == torch.bfloat16 and (routed.rows | inner) % 256 == 0


def takes_groups(gate_up: Pair, down: Pair, dtype: torch.dtype) -> bool:
    """Whether `rows_grouped_triton` takes these projections, with inputs in `dtype`, if `rows_fixed_triton` does not."""
    integers = [one for one in (*gate_up, *down) if one is not None and one.format is not None]
    whole = all(one.columns % 64 == 0 for one in integers)
    return bool(integers) and whole and dtype == torch.bfloat16 and not takes_fixed_point(gate_up, down, dtype)


def _has_minima(weights: Pair) -> bool:
    return any(one is not None and one.minimum is not None for one in weights)


def _route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    slots: Tensor | None,
    in_fixed_point: bool,
    grouped: bool,
    with_sums: bool,
) -> tuple[Tensor, ...]:
    """Returns prepared, x_scale, x_sums, members, ranks and shares; see `rows_route_triton.choose_rows_early`."""
    (rows, size), experts = x.shape, gate.shape[0]
    tile, width = ROUTER[x.dtype]
    slices, words = _blocks(size, width), _blocks(rows, scheduling.WORD.value)
    logits, squares, members = _floats(x, slices, rows, experts), _floats(x, slices, rows), _integers(x, words, experts)
    launcher(routing.route_rows_early)[(slices, _blocks(experts, tile), words)](
        x,
        norm_weight,
        gate,
        logits,
        squares,
        members,
        rows,
        SIZE=size,
        EXPERTS=experts,
        TILE=tile,
        SLICE=width,
        EARLY=starts_early(),
        num_warps=4,
    )
    prepared = x_scale = x_sums = torch.empty_like(x)
    if with_sums:
        x_sums = _floats(x, rows, size // PIECE.value)
    if in_fixed_point:
        prepared = torch.empty(rows, 2, size, dtype=torch.int8, device=x.device)
        x_scale = _floats(x, rows, size // 128)
    ranks = torch.empty(rows, experts, dtype=torch.uint8, device=x.device)
    shares = _floats(x, rows, top_k + (shared_gate is not None))
    launcher(routing.choose_rows_early)[(rows, 2)](
        x,
        norm_weight,
        gate if shared_gate is None else shared_gate,
        logits,
        squares,
        squares if slots is None else slots,
        prepared,
        x_scale,
        x_sums,
        members,
        ranks,
        shares,
        rows,
        EPS=eps,
        SIZE=size,
        EXPERTS=experts,
        TOP_K=top_k,
        SHARED=shared_gate is not None,
        SLICES=slices,
        GROUPS=triton.next_power_of_2(_blocks(size, 128)),
        SLOTS=slots is not None,
        FIXED=in_fixed_point,
        GROUPED=grouped,
        SUMS=with_sums,
        EARLY=starts_early(),
        num_warps=4,
    )
    return prepared, x_scale, x_sums, members, ranks, shares


def _schedule(members: Tensor, ranks: Tensor, top_k: int, shared: bool) -> tuple[Tensor, int]:
    """The schedule [blocks, RECORD], and the number of places; see `rows_schedule_triton`."""
    rows, experts = ranks.shape
    block = scheduling.BLOCK.value
    # An upper bound: there are no more blocks than choices, and only the last block of an expert has fewer than BLOCK rows.
    blocks = torch.sym_min(rows * top_k, (rows * top_k + experts * (block - 1)) // block)
    places = rows * top_k
    if shared:
        blocks, places = blocks + _blocks(rows, block), places + rows
    schedule = _integers(ranks, blocks, scheduling.RECORD.value)
    launcher(scheduling.schedule_rows_early)[(blocks,)](
        members,
        ranks,
        schedule,
        rows,
        ROWS=row_vector(rows),
        EXPERTS=experts,
        TOP_K=top_k,
        WIDTH=max(32, triton.next_power_of_2(experts)),
        SHARED=shared,
        EARLY=starts_early(),
        num_warps=4,
    )
    return schedule, places


def _multiply_fixed(
    prepared: Tensor,
    x_scale: Tensor,
    schedule: Tensor,
    places: int,
    gate_up: Pair,
    down: Pair,
    parts: Tensor,
) -> None:
    """Writes parts [R (k (+ 1)), H]."""
    experts, size = down[0].values.shape[:2]
    inner, blocks, share = down[0].columns, schedule.shape[0], fixed.SHARE.value
    common = {"SIZE": size, "INNER": inner, "EXPERTS": experts, "EARLY": starts_early()}
    # Down projections read BLOCK places for each block, also where it has fewer rows.
    places = places + scheduling.BLOCK.value
    hidden = torch.empty(places, 2, inner, dtype=torch.int8, device=schedule.device)
    hidden_scale = _floats(schedule, places, inner // share)
    launcher(fixed.gate_up_fixed_rows_early)[(inner // share, blocks)](
        prepared, x_scale, schedule, *_scaled(gate_up), hidden, hidden_scale, num_warps=4, **common
    )
    warps = DOWN_WARPS if inner % (128 * DOWN_WARPS) == 0 else 2
    needed = HELD_BYTES if inner == 128 * warps else LOADED_BYTES
    # A program takes 1 KB besides.
    programs = min(DOWN_ROOM, shared_memory()) // (warps * needed + 1024)
    launcher(fixed.down_fixed_rows_early)[(programs * processors(),)](
        hidden, hidden_scale, schedule, *_scaled(down), parts, blocks, AT_ONCE=warps, num_warps=warps, **common
    )


def _scaled(weights: Pair) -> tuple[Tensor, ...]:
    """The `weight_pointers` without minima."""
    values, scale, _, shared, shared_scale, _ = weight_pointers(*weights)
    return values, scale, shared, shared_scale


def _multiply_general(
    prepared: Tensor,
    x_sums: Tensor,
    schedule: Tensor,
    places: int,
    gate_up: Pair,
    down: Pair,
    parts: Tensor,
    grouped: bool,
) -> None:
    """As `_multiply_fixed`, with the kernels of `rows_general_triton`."""
    experts, size = down[0].values.shape[:2]
    inner, shared_inner = (0 if one is None else one.columns for one in down)
    widest, blocks, piece = max(inner, shared_inner), schedule.shape[0], PIECE.value
    if grouped:
        widest = _blocks(widest, piece) * piece
    common = {"SIZE": size, "INNER": inner, "SHARED_INNER": shared_inner, "WIDEST": widest, "EXPERTS": experts}
    common |= {"GROUPED": grouped, "EARLY": starts_early(), "num_warps": 4}
    hidden = hidden_sums = torch.empty(places, widest, dtype=prepared.dtype, device=schedule.device)
    with_sums = grouped and _has_minima(down)
    if with_sums:
        hidden_sums = _floats(schedule, places, widest // piece)
    launcher(general.gate_up_rows_early)[(_blocks(widest, general.HALF.value), blocks)](
        prepared,
        x_sums,
        schedule,
        *weight_pointers(*gate_up),
        hidden,
        hidden_sums,
        SUMS=with_sums,
        **format_constants(*gate_up),
        **common,
    )
    launcher(general.down_rows_early)[(_blocks(size, general.TILE.value), blocks)](
        hidden, hidden_sums, schedule, *weight_pointers(*down), parts, **format_constants(*down), **common
    )


def _sum(parts: Tensor, shares: Tensor, slots: Tensor | None, x: Tensor) -> Tensor:
    rows, size = x.shape
    out = torch.empty_like(x)
    launcher(scheduling.sum_rows_early)[(_blocks(size, SUM_COLUMNS), rows)](
        parts,
        shares,
        shares if slots is None else slots,
        x,
        out,
        SIZE=size,
        PARTS=shares.shape[1],
        COLUMNS=SUM_COLUMNS,
        SLOTS=slots is not None,
        EARLY=starts_early(),
        num_warps=4,
    )
    return out


def _floats(like: Tensor, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=like.device)


def _integers(like: Tensor, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int32, device=like.device)


def _blocks(count: int, size: int) -> int:
    return (count + size - 1) // size
