# mypy: allow-untyped-defs
"""Products of experts with blocks of rows for everything that `rows_fixed_triton` does not take.

That is float32, other groups than of 128, weights in a floating dtype, and sizes that its tiles do not divide. Weights are
made numbers of the inputs' dtype in registers, rounded once as `dequantize_int4` does. Right for all, tuned for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_schedule_triton import BLOCK, RECORD, RECORD_PARTS, RECORD_ROWS, of_expert

# Weight rows of a program. Of gate and up it has half as many each.
TILE = tl.constexpr(128)
HALF = tl.constexpr(64)


@triton.jit
def gate_up_rows_early(
    inputs,
    schedule,
    gate_up,
    gate_up_scale,
    shared,
    shared_scale,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """hidden [places, WIDEST] = silu(gate) * up, in the dtype of inputs [R, SIZE]. Program (HALF columns, block).

    Args:
        SHARED_INNER: 0 without a shared expert.
        GROUP: elements that share a scale, 0 for weights in a floating dtype.
        WIDEST: the larger inner size.
    """
    start_next(EARLY)
    piece = tl.program_id(0)
    record = schedule + tl.program_id(1) * RECORD
    number = tl.arange(0, BLOCK)
    wait_for_previous(EARLY)
    expert = tl.load(record)
    inner = inner_of(expert, INNER, SHARED_INNER, EXPERTS)
    if (expert < 0) | (piece * HALF >= inner):
        return
    row = tl.load(record + RECORD_ROWS + number)
    weight, scale = weight_of(gate_up, gate_up_scale, shared, shared_scale, expert, 2 * INNER * SIZE, EXPERTS, GROUP)
    line = tl.arange(0, TILE)
    # Rows past the last one are the last one again.
    line = tl.minimum(piece * HALF + line % HALF, inner - 1) + line // HALF * inner
    total = multiply(inputs + row * SIZE, row >= 0, weight, scale, line, SIZE, GROUP)
    gates, ups = tl.split(tl.permute(tl.reshape(total, [2, HALF, BLOCK]), (1, 2, 0)))
    results = (gates * tl.sigmoid(gates) * ups).to(hidden.dtype.element_ty)
    column = piece * HALF + tl.arange(0, HALF)
    to = hidden + (tl.load(record + 1) + number)[None, :] * WIDEST + column[:, None]
    tl.store(to, results, mask=(row >= 0)[None, :] & (column < inner)[:, None])


@triton.jit
def down_rows_early(
    hidden,
    schedule,
    down,
    down_scale,
    shared,
    shared_scale,
    parts,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """parts [R (k (+ 1)), SIZE], outputs without their shares. Program (TILE of SIZE, block)."""
    start_next(EARLY)
    record = schedule + tl.program_id(1) * RECORD
    number = tl.arange(0, BLOCK)
    wait_for_previous(EARLY)
    expert = tl.load(record)
    if expert < 0:
        return
    part = tl.load(record + RECORD_PARTS + number)
    weight, scale = weight_of(down, down_scale, shared, shared_scale, expert, SIZE * INNER, EXPERTS, GROUP)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inputs = hidden + (tl.load(record + 1) + number) * WIDEST
    inner = inner_of(expert, INNER, SHARED_INNER, EXPERTS)
    total = multiply(inputs, part >= 0, weight, scale, tl.minimum(line, SIZE - 1), inner, GROUP)
    to = parts + (part.to(tl.int64) * SIZE)[None, :] + line[:, None]
    tl.store(to, total.to(parts.dtype.element_ty), mask=(part >= 0)[None, :] & (line < SIZE)[:, None])


@triton.jit
def inner_of(expert, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, EXPERTS: tl.constexpr):
    SAME: tl.constexpr = SHARED_INNER == 0 or SHARED_INNER == INNER
    return INNER if SAME else tl.where(expert == EXPERTS, SHARED_INNER, INNER)


@triton.jit
def weight_of(
    routed,
    routed_scale,
    shared,
    shared_scale,
    expert,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Where an expert's weights begin, COUNT of a routed one, and their scales."""
    weight = of_expert(routed, shared, expert, COUNT // (2 if GROUP > 0 else 1), EXPERTS)
    scale = of_expert(routed_scale, shared_scale, expert, COUNT // GROUP, EXPERTS) if GROUP > 0 else routed_scale
    return weight, scale


@triton.jit
def multiply(inputs, filled, weight, scale, line, columns, GROUP: tl.constexpr):
    """The products [TILE, BLOCK] of an expert's rows `line` [TILE] with the rows at `inputs` [BLOCK], float32.

    Of rows that are not `filled` nothing is read. `columns`: numbers per row, whole groups of them in int4.
    """
    total = tl.zeros([TILE, BLOCK], tl.float32)
    step = tl.arange(0, 32)
    rows = inputs[None, :] + step[:, None]
    if GROUP == 0:
        for start in range(0, columns, 32):
            inside = start + step < columns
            tile = tl.load(rows + start, mask=inside[:, None] & filled[None, :], other=0.0)
            left = tl.load(weight + line[:, None] * columns + (start + step)[None, :], mask=inside[None, :], other=0.0)
            total = tl.dot(left.to(tile.dtype), tile, total, input_precision="tf32x3")
    else:
        # A span of 64: the low nibbles of its 32 bytes are the first half, the high ones the second.
        for start in range(0, columns, 64):
            packed = tl.load(weight + line[:, None] * (columns // 2) + (start // 2 + step)[None, :])
            scales = scale + line * (columns // GROUP)
            for half in tl.static_range(2):
                tile = tl.load(rows + (start + half * 32), mask=filled[None, :], other=0.0)
                factor = tl.load(scales + (start + half * 32) // GROUP).to(tl.float32)
                left = ((packed >> (4 * half) & 15).to(tl.float32) - 8.0) * factor[:, None]
                total = tl.dot(left.to(tile.dtype), tile, total, input_precision="tf32x3")
    return total
