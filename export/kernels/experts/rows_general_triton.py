# mypy: allow-untyped-defs
"""Products of experts with blocks of rows, for all experts that `rows_fixed_triton` does not take.

These are experts in float32, in groups of other sizes than 128, with weights in a floating dtype, and with sizes that the
tiles there do not divide. Weights are converted to the inputs' dtype in registers, rounded once as in `dequantize_int4`. The
kernels are correct for all of these and tuned for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_schedule_triton import BLOCK, RECORD, RECORD_PARTS, RECORD_ROWS, of_expert

# Weight rows per program. A program of gate and up has HALF gate rows and HALF up rows.
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
    """Write hidden [places, WIDEST] = silu(gate) * up, in the dtype of inputs [R, SIZE]. Program (HALF columns, block).

    Args:
        SHARED_INNER: 0 without a shared expert.
        GROUP: elements that share a scale, 0 for weights in a floating dtype.
        WIDEST: the larger one of INNER and SHARED_INNER.
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
    # Rows past the last read the last row again.
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
    """Write parts [R (k (+ 1)), SIZE]: outputs, not yet times their shares. Program (TILE columns, block)."""
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
    """Pointers to an expert's weights and to their scales. COUNT: number of weights of a routed expert."""
    weight = of_expert(routed, shared, expert, COUNT // (2 if GROUP > 0 else 1), EXPERTS)
    scale = of_expert(routed_scale, shared_scale, expert, COUNT // GROUP, EXPERTS) if GROUP > 0 else routed_scale
    return weight, scale


@triton.jit
def multiply(inputs, filled, weight, scale, line, columns, GROUP: tl.constexpr):
    """Products of an expert's weight rows `line` [TILE] with the input rows at `inputs` [BLOCK]: [TILE, BLOCK] float32.

    Input rows that are not `filled` are not read. `columns`: elements per row, a multiple of GROUP in int4.
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
        # A span has 64 elements in 32 bytes: the low nibbles are its first half, the high nibbles its second.
        for start in range(0, columns, 64):
            packed = tl.load(weight + line[:, None] * (columns // 2) + (start // 2 + step)[None, :])
            scales = scale + line * (columns // GROUP)
            for half in tl.static_range(2):
                tile = tl.load(rows + (start + half * 32), mask=filled[None, :], other=0.0)
                factor = tl.load(scales + (start + half * 32) // GROUP).to(tl.float32)
                left = ((packed >> (4 * half) & 15).to(tl.float32) - 8.0) * factor[:, None]
                total = tl.dot(left.to(tile.dtype), tile, total, input_precision="tf32x3")
    return total
