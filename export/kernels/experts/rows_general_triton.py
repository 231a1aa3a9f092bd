# mypy: allow-untyped-defs
"""Products of experts with blocks of rows, for all experts that `rows_fixed_triton` does not take.

These are experts in float32, in other formats than int4 in groups of 128, with weights in a floating dtype, and with sizes
that the tiles there do not divide. With GROUPED, integers are multiplied as in `rows_grouped_triton`, by rows in bfloat16
that stand in its order. Otherwise weights are converted to the inputs' dtype in registers, rounded once as in
`Format.dequantize`: this is correct for all experts and tuned for none.

The tensors of a weight travel together, as `stored`: pointers to values, scales and minima. GROUP is 0 for weights in a
floating dtype; then scales are not read. BITS are those of an integer; MINIMUM says whether groups have minima. The shared
expert's format has constants of its own, whose names begin with SHARED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_grouped_triton import PIECE, place_of

from .rows_grouped_triton import multiply_floats, multiply_groups
from .rows_schedule_triton import BLOCK, RECORD, RECORD_PARTS, RECORD_ROWS, of_expert

# Weight rows per program. A program of gate and up has HALF gate rows and HALF up rows.
TILE = tl.constexpr(128)
HALF = tl.constexpr(64)


@triton.jit
def gate_up_rows_early(
    inputs,
    inputs_sums,
    schedule,
    gate_up,
    gate_up_scale,
    gate_up_minimum,
    shared,
    shared_scale,
    shared_minimum,
    hidden,
    hidden_sums,
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
    GROUPED: tl.constexpr,
    SUMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write hidden [places, WIDEST] = silu(gate) * up, in the dtype of inputs [R, SIZE]. Program (HALF columns, block).

    Args:
        inputs_sums: [R, SIZE / PIECE] float32, the sums of pieces; read only with GROUPED, where groups have minima.
        hidden_sums: with SUMS, [places, WIDEST / PIECE] float32, the sums of the pieces of hidden.
        SHARED_INNER: 0 without a shared expert.
        WIDEST: at least INNER and SHARED_INNER; with GROUPED a multiple of PIECE.
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
        inputs + row * SIZE, inputs_sums + row * (SIZE // PIECE), row >= 0, stored, shared_stored, expert, line, SIZE,
        SIZE, 2 * INNER, EXPERTS, GROUP, BITS, MINIMUM, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM, GROUPED,
    )  # fmt: skip
    gates, ups = tl.split(tl.permute(tl.reshape(total, [2, HALF, BLOCK]), (1, 2, 0)))
    results = (gates * tl.sigmoid(gates) * ups).to(hidden.dtype.element_ty)
    column = piece * HALF + tl.arange(0, HALF)
    place = tl.load(record + 1) + number
    to = hidden + place[None, :] * WIDEST + (place_of(column) if GROUPED else column)[:, None]
    tl.store(to, results, mask=(row >= 0)[None, :] & (column < inner)[:, None])
    if SUMS:
        pieces = tl.where((column < inner)[:, None], results.to(tl.float32), 0.0)
        sums = tl.sum(tl.reshape(pieces, [HALF // PIECE, PIECE, BLOCK]), 1)
        number_of_piece = piece * (HALF // PIECE) + tl.arange(0, HALF // PIECE)
        to = hidden_sums + place[None, :] * (WIDEST // PIECE) + number_of_piece[:, None]
        tl.store(to, sums, mask=(row >= 0)[None, :] & (number_of_piece * PIECE < inner)[:, None])


@triton.jit
def down_rows_early(
    hidden,
    hidden_sums,
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
    GROUPED: tl.constexpr,
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
    place = tl.load(record + 1) + number
    stored = down, down_scale, down_minimum
    shared_stored = shared, shared_scale, shared_minimum
    total = multiply_expert(
        hidden + place * WIDEST, hidden_sums + place * (WIDEST // PIECE), part >= 0, stored, shared_stored, expert,
        tl.minimum(line, SIZE - 1), INNER, SHARED_INNER, SIZE, EXPERTS, GROUP, BITS, MINIMUM, SHARED_GROUP, SHARED_BITS,
        SHARED_MINIMUM, GROUPED,
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
    inputs_sums,
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
    GROUPED: tl.constexpr,
):
    """`multiply` by the weight rows `line` of an expert. A routed expert has LINES rows of COLUMNS elements.

    Experts of one format have one code. It takes two lengths of rows, but with GROUPED a length is a constant.
    """
    SAME: tl.constexpr = GROUP == SHARED_GROUP and BITS == SHARED_BITS and MINIMUM == SHARED_MINIMUM
    ONE: tl.constexpr = not GROUPED or SHARED_COLUMNS == 0 or SHARED_COLUMNS == COLUMNS
    if SAME and ONE and stored[0].dtype == shared[0].dtype and stored[1].dtype == shared[1].dtype:
        weight, scale, minimum = stored_of(stored, shared, expert, LINES * COLUMNS, EXPERTS, GROUP, BITS, MINIMUM)
        columns = inner_of(expert, COLUMNS, SHARED_COLUMNS, EXPERTS)
        one = weight, scale, minimum
        total = multiply(inputs, inputs_sums, filled, one, line, columns, COLUMNS, GROUP, BITS, MINIMUM, GROUPED)
    elif expert == EXPERTS:
        total = multiply(
            inputs, inputs_sums, filled, shared, line, SHARED_COLUMNS, SHARED_COLUMNS, SHARED_GROUP, SHARED_BITS,
            SHARED_MINIMUM, GROUPED,
        )  # fmt: skip
    else:
        routed = stored_of(stored, stored, expert, LINES * COLUMNS, EXPERTS, GROUP, BITS, MINIMUM)
        total = multiply(inputs, inputs_sums, filled, routed, line, COLUMNS, COLUMNS, GROUP, BITS, MINIMUM, GROUPED)
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
    inputs,
    inputs_sums,
    filled,
    stored,
    line,
    columns,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Products of an expert's weight rows `line` [TILE] with the input rows at `inputs` [BLOCK]: [TILE, BLOCK] float32.

    Input rows that are not `filled` are not read. `columns`: elements per row, a multiple of 64 for four-bit weights, of 32
    for eight-bit weights; with GROUPED it is COLUMNS.
    """
    total = tl.zeros([TILE, BLOCK], tl.float32)
    step = tl.arange(0, 32)
    rows = inputs[None, :] + step[:, None]
    if GROUPED and GROUP == 0:
        total = multiply_floats(total, inputs, filled, stored[0], line, COLUMNS)
    elif GROUPED:
        total = multiply_groups(total, inputs, inputs_sums, filled, stored, line, COLUMNS, GROUP, BITS, MINIMUM)
    elif GROUP == 0:
        for start in range(0, columns, 32):
            inside = start + step < columns
            tile = tl.load(rows + start, mask=inside[:, None] & filled[None, :], other=0.0)
            left = tl.load(
                stored[0] + line[:, None] * columns + (start + step)[None, :], mask=inside[None, :], other=0.0
            )
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
