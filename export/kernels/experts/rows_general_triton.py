# mypy: allow-untyped-defs
"""Products of experts with blocks of rows, for all experts that `rows_fixed_triton` does not take.

These are experts in float32, in other formats than int4 in groups of 128, with weights in a floating dtype, and with sizes
that the tiles there do not divide. Weights are converted to the inputs' dtype in registers, rounded once as in
`Format.dequantize`. The kernels are correct for all of these and tuned for none.

The tensors of a weight travel together, as `stored`: pointers to values, scales and minima. GROUP is 0 for weights in a
floating dtype; then scales are not read. BITS are those of an integer; MINIMUM says whether groups have minima. The shared
expert's format has constants of its own, whose names begin with SHARED.
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
    gate_up_minimum,
    shared,
    shared_scale,
    shared_minimum,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    SHARED_BITS: tl.constexpr,
    SHARED_MINIMUM: tl.constexpr,
    WIDEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write hidden [places, WIDEST] = silu(gate) * up, in the dtype of inputs [R, SIZE]. Program (HALF columns, block).

    Args:
        SHARED_INNER: 0 without a shared expert.
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
    line = tl.arange(0, TILE)
    # Rows past the last read the last row again.
    line = tl.minimum(piece * HALF + line % HALF, inner - 1) + line // HALF * inner
    stored = gate_up, gate_up_scale, gate_up_minimum
    shared_stored = shared, shared_scale, shared_minimum
    total = multiply_expert(
        inputs + row * SIZE, row >= 0, stored, shared_stored, expert, line, SIZE, SIZE, 2 * INNER, EXPERTS, GROUP, BITS,
        MINIMUM, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM,
    )  # fmt: skip
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
    down_minimum,
    shared,
    shared_scale,
    shared_minimum,
    parts,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    SHARED_BITS: tl.constexpr,
    SHARED_MINIMUM: tl.constexpr,
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
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inputs = hidden + (tl.load(record + 1) + number) * WIDEST
    stored = down, down_scale, down_minimum
    shared_stored = shared, shared_scale, shared_minimum
    total = multiply_expert(
        inputs, part >= 0, stored, shared_stored, expert, tl.minimum(line, SIZE - 1), INNER, SHARED_INNER, SIZE, EXPERTS,
        GROUP, BITS, MINIMUM, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM,
    )  # fmt: skip
    to = parts + (part.to(tl.int64) * SIZE)[None, :] + line[:, None]
    tl.store(to, total.to(parts.dtype.element_ty), mask=(part >= 0)[None, :] & (line < SIZE)[:, None])


@triton.jit
def inner_of(expert, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, EXPERTS: tl.constexpr):
    SAME: tl.constexpr = SHARED_INNER == 0 or SHARED_INNER == INNER
    return INNER if SAME else tl.where(expert == EXPERTS, SHARED_INNER, INNER)


@triton.jit
def multiply_expert(
    inputs,
    filled,
    stored,
    shared,
    expert,
    line,
    COLUMNS: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    SHARED_BITS: tl.constexpr,
    SHARED_MINIMUM: tl.constexpr,
):
    """`multiply` by the weight rows `line` of an expert. A routed expert has LINES rows of COLUMNS elements."""
    SAME: tl.constexpr = GROUP == SHARED_GROUP and BITS == SHARED_BITS and MINIMUM == SHARED_MINIMUM
    if SAME and stored[0].dtype == shared[0].dtype and stored[1].dtype == shared[1].dtype:
        weight, scale, minimum = stored_of(stored, shared, expert, LINES * COLUMNS, EXPERTS, GROUP, BITS, MINIMUM)
        columns = inner_of(expert, COLUMNS, SHARED_COLUMNS, EXPERTS)
        total = multiply(inputs, filled, (weight, scale, minimum), line, columns, GROUP, BITS, MINIMUM)
    elif expert == EXPERTS:
        total = multiply(inputs, filled, shared, line, SHARED_COLUMNS, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM)
    else:
        routed = stored_of(stored, stored, expert, LINES * COLUMNS, EXPERTS, GROUP, BITS, MINIMUM)
        total = multiply(inputs, filled, routed, line, COLUMNS, GROUP, BITS, MINIMUM)
    return total


@triton.jit
def stored_of(
    stored,
    shared,
    expert,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Pointers to an expert's values, scales and minima. COUNT: number of weights of a routed expert."""
    values = of_expert(stored[0], shared[0], expert, COUNT * BITS // 8 if GROUP > 0 else COUNT, EXPERTS)
    scale = of_expert(stored[1], shared[1], expert, COUNT // GROUP, EXPERTS) if GROUP > 0 else stored[1]
    minimum = of_expert(stored[2], shared[2], expert, COUNT // GROUP, EXPERTS) if MINIMUM else stored[2]
    return values, scale, minimum


@triton.jit
def multiply(
    inputs, filled, stored, line, columns, GROUP: tl.constexpr, BITS: tl.constexpr, MINIMUM: tl.constexpr
):
    """Products of an expert's weight rows `line` [TILE] with the input rows at `inputs` [BLOCK]: [TILE, BLOCK] float32.

    Input rows that are not `filled` are not read. `columns`: elements per row, a multiple of 64 for four-bit weights, of 32
    for eight-bit weights.
    """
    total = tl.zeros([TILE, BLOCK], tl.float32)
    step = tl.arange(0, 32)
    rows = inputs[None, :] + step[:, None]
    if GROUP == 0:
        for start in range(0, columns, 32):
            inside = start + step < columns
            tile = tl.load(rows + start, mask=inside[:, None] & filled[None, :], other=0.0)
            left = tl.load(stored[0] + line[:, None] * columns + (start + step)[None, :], mask=inside[None, :], other=0.0)
            total = tl.dot(left.to(tile.dtype), tile, total, input_precision="tf32x3")
    else:
        # A span of four-bit weights has 64 elements in 32 bytes: the low nibbles are its first half, the high nibbles its
        # second.
        PARTS: tl.constexpr = 8 // BITS
        for start in range(0, columns, 32 * PARTS):
            packed = tl.load(stored[0] + line[:, None] * (columns // PARTS) + (start // PARTS + step)[None, :])
            scales = stored[1] + line * (columns // GROUP)
            for half in tl.static_range(PARTS):
                tile = tl.load(rows + (start + half * 32), mask=filled[None, :], other=0.0)
                factor = tl.load(scales + (start + half * 32) // GROUP).to(tl.float32)
                if BITS == 8:
                    number = packed.to(tl.float32)
                elif MINIMUM:
                    number = (packed >> (4 * half) & 15).to(tl.float32)
                else:
                    number = (packed >> (4 * half) & 15).to(tl.float32) - 8.0
                left = number * factor[:, None]
                if MINIMUM:
                    minima = stored[2] + line * (columns // GROUP)
                    left += tl.load(minima + (start + half * 32) // GROUP).to(tl.float32)[:, None]
                total = tl.dot(left.to(tile.dtype), tile, total, input_precision="tf32x3")
    return total
