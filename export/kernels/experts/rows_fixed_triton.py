# mypy: allow-untyped-defs
"""Products of int4 experts in groups of 128 with blocks of rows in fixed point, by tensor cores, which multiply bytes.

Inputs that share a scale are integers of two signed bytes, up to 127 * 256 + 127. They are stored as a plane of upper bytes
and a plane of lower bytes. A row's two planes are two neighbouring columns of a product, so that a thread holds both. Weights
are the left operand, unpacked in registers with three instructions for eight weights; their sums over a group are exact
integers. The error of an input is at most 2^-16 of the largest input that shares its scale. A scale is for 128 elements of a
normed row, or for the 64 inner activations of one program.

Times on an H200, 2026-11-23, for 256 experts, 8 per row, H 2048 and I 512, in us at 8/16/32/64/128/256 rows. At that time
down had the form of gate and up. In its present form it takes 24.5/32.5/38.6 us at 32/64/128 rows (H200, 2026-12-01).

| | blocks of | gate and up | down |
| --- | --- | --- | --- |
| fixed point | 8 | 20.4/35.4/53.1/69.2/81.9/99.4 | 16.2/24.2/37.3/49.3/59.3/82.7 |
| fixed point | 16 | 29.2/44.6/65.0/82.3/92.3/96.6 | 18.3/28.2/43.9/57.2/67.2/73.1 |
| bfloat16 | 16 | 31.8/43.0/65.6/83.2/94.8/101.5 | 18.2/26.4/39.5/51.3/59.9/64.8 |

Reading the weights' bytes takes 15.3/25.8/42.6/56.3/64.6/65.4 us for gate and up, and half of that for down.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import fetch, start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_tiles_triton import ROUNDING_BITS, joined, sum_of_warps, unpack_bytes
from ostinato.export.kernels.linear.scales_triton import of_pair
from ostinato.export.kernels.linear.step_fixed_point_triton import ROUNDING, larger

from .rows_schedule_triton import BLOCK, RECORD, RECORD_PARTS, RECORD_ROWS, RECORD_USED, of_expert

# The largest integer of two signed bytes.
LARGEST = tl.constexpr(127.0 * 256.0 + 127.0)
# Inner activations of one program of gate and up, which share a scale; and the weight rows of this program.
SHARE = tl.constexpr(64)
TILE = tl.constexpr(128)
# Stages of the gate and up projections' loop (`num_stages`). With 2 stages they take 54.2/71.1/83.4 us at 32/64/128 rows,
# with 3 stages 54.5/69.9/78.9.
STAGES = tl.constexpr(3)
# Weight rows of a piece of down; stages of the loop over pieces; weight rows that a program asks for before its wait.
DOWN_ROWS = tl.constexpr(64)
DOWN_STAGES = tl.constexpr(3)
DOWN_AHEAD = tl.constexpr(128)


@triton.jit
def gate_up_fixed_rows_early(
    planes,
    planes_scale,
    schedule,
    gate_up,
    gate_up_scale,
    shared,
    shared_scale,
    hidden,
    hidden_scale,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write silu(gate) * up in fixed point: hidden and hidden_scale. Program (SHARE columns, block).

    A program's columns share a scale. They are the columns that the low nibbles of one group of down weights multiply, or the
    high nibbles; `hidden` has them in this order. The kernel is a late one (R3 in `delegate/graphs/nodes.py`): it lets the
    next kernel start after its own wait.

    Args:
        planes: [R, 2, SIZE] int8, in the order of `rows_tiles_triton.nibble_order`.
        planes_scale: [R, SIZE / 128] float32, the scales of `planes`.
        hidden: [places, 2, INNER] int8.
        hidden_scale: [places, INNER / SHARE] float32.
        SIZE: a multiple of 256.
        INNER: a multiple of 128.
    """
    SCALE: tl.constexpr = gate_up_scale.dtype.element_ty
    piece = tl.program_id(0)
    record = schedule + tl.program_id(1) * RECORD
    number = tl.arange(0, BLOCK)
    column = tl.arange(0, 2 * BLOCK)
    wait_for_previous(EARLY)
    start_next(EARLY)
    expert = tl.load(record)
    place = tl.load(record + 1)
    row = tl.load(record + RECORD_ROWS + number)
    row_of_column = tl.load(record + RECORD_ROWS + column // 2)
    if expert < 0:
        return
    line = tl.arange(0, TILE)
    inner = line % SHARE
    line = piece // 2 * 128 + piece % 2 * 32 + inner // 32 * 64 + inner % 32 + line // SHARE * INNER
    byte = tl.arange(0, 64)
    weight = of_expert(gate_up, shared, expert, INNER * SIZE, EXPERTS) + line[:, None] * (SIZE // 2) + byte[None, :]
    scale = of_expert(gate_up_scale, shared_scale, expert, INNER * SIZE // 64, EXPERTS) + line * (SIZE // 128)
    scale = scale.to(tl.pointer_type(tl.int32))
    # A block with fewer rows reads the first row in place of those that it lacks. Nothing of their products is stored.
    inputs = planes + (tl.maximum(row_of_column, 0) * 2 + column % 2)[None, :] * SIZE + byte[:, None]
    inputs_scale = planes_scale + tl.maximum(row, 0) * (SIZE // 128)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    start = tl.full([TILE, 2 * BLOCK], ROUNDING_BITS, tl.int32)
    for pair in tl.range(0, SIZE // 256, num_stages=STAGES):
        factors = tl.load(scale + pair)
        for half in tl.static_range(2):
            group = pair * 2 + half
            factor = tl.load(inputs_scale + group)
            low, high = unpack_bytes(tl.load(weight + group * 64))
            sums = tl.dot(low, tl.load(inputs + group * 128), start, out_dtype=tl.int32)
            sums = tl.dot(high, tl.load(inputs + (group * 128 + 64)), sums, out_dtype=tl.int32)
            total += joined(sums) * (of_pair(factors, half, SCALE)[:, None] * factor[None, :])
    gates, ups = tl.split(tl.permute(tl.reshape(total, [2, SHARE, BLOCK]), (1, 2, 0)))
    to = hidden + (place + number)[None, :] * (2 * INNER) + (piece * SHARE + tl.arange(0, SHARE))[:, None]
    scales = hidden_scale + (place + number) * (INNER // SHARE) + piece
    results = gates * tl.sigmoid(gates) * ups
    store_planes(to, scales, results, 0, (row >= 0)[None, :], row >= 0, INNER)


@triton.jit
def down_fixed_rows_early(
    hidden,
    hidden_scale,
    schedule,
    down,
    down_scale,
    shared,
    shared_scale,
    parts,
    blocks,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write parts [R (k (+ 1)), SIZE]: outputs, not yet times their shares.

    A piece is DOWN_ROWS weight rows of a block's expert. The pieces of all used blocks stand in a line, and each program
    takes an equal stretch of it. A turn is AT_ONCE groups of a piece, one for each warp: a batch of products, which are then
    added up. The next turn's weights are under way while a turn is multiplied. Before its wait a program asks for its first
    weights: they come to the L2 cache while the last programs of `gate_up_fixed_rows_early` run. The kernel reads the
    schedule before its wait (R4 in `delegate/graphs/nodes.py`).

    A program reads BLOCK places, also where a block has fewer rows. The places behind the block's last one belong to the
    next block, or were never written. Their products are not stored.

    Args:
        hidden: as `gate_up_fixed_rows_early` writes it, with room for BLOCK more places.
        blocks: blocks of the schedule, unused ones too.
        SIZE: a multiple of DOWN_ROWS.
        INNER: a multiple of 128 AT_ONCE.
        AT_ONCE: the number of warps.
    """
    GROUPS: tl.constexpr = INNER // 128
    TURNS: tl.constexpr = GROUPS // AT_ONCE
    PIECES: tl.constexpr = SIZE // DOWN_ROWS
    start_next(EARLY)
    number = tl.arange(0, BLOCK)
    column = tl.arange(0, 2 * BLOCK)
    line = tl.arange(0, DOWN_ROWS)
    group = tl.arange(0, AT_ONCE)
    byte = tl.arange(0, AT_ONCE * 64)
    pieces = tl.load(schedule + (blocks - 1) * RECORD + RECORD_USED, cache_modifier=".cg") * PIECES
    begin = pieces * tl.program_id(0) // tl.num_programs(0)
    end = pieces * (tl.program_id(0) + 1) // tl.num_programs(0)
    if EARLY and begin < end:
        expert = tl.load(schedule + begin // PIECES * RECORD, cache_modifier=".cg")
        near = tl.minimum(begin % PIECES * DOWN_ROWS + tl.arange(0, DOWN_AHEAD), SIZE - 1) * (INNER // 2)
        near = of_expert(down, shared, expert, SIZE * INNER // 2, EXPERTS) + near
        for byte_of_line in tl.static_range(0, INNER // 2, 128):
            fetch(near + byte_of_line)
    wait_for_previous(EARLY)
    for block in tl.range(begin // PIECES, (end - 1) // PIECES + 1):
        record = schedule + block * RECORD
        expert = tl.load(record, cache_modifier=".cg")
        place = tl.load(record + 1, cache_modifier=".cg")
        part = tl.load(record + RECORD_PARTS + number, cache_modifier=".cg")
        weight = of_expert(down, shared, expert, SIZE * INNER // 2, EXPERTS)
        weight = weight + (line[:, None] * (INNER // 2) + byte[None, :])
        scale = of_expert(down_scale, shared_scale, expert, SIZE * INNER // 128, EXPERTS)
        scale = scale + (line[:, None] * GROUPS + group[None, :])
        inputs = hidden + (place * 2 + column) * INNER
        inputs_scale = hidden_scale + (place + number) * (INNER // SHARE)
        if TURNS == 1:
            held = load_columns(inputs, inputs_scale, group)
        total = tl.zeros([DOWN_ROWS, BLOCK], tl.float32)
        first = tl.maximum(begin - block * PIECES, 0) * TURNS
        last = tl.minimum(end - block * PIECES, PIECES) * TURNS
        for turn in tl.range(first, last, num_stages=DOWN_STAGES):
            row = turn // TURNS * DOWN_ROWS
            ahead = turn % TURNS * AT_ONCE
            packed = tl.load(weight + (row * (INNER // 2) + ahead * 64))
            factors = tl.load(scale + (row * GROUPS + ahead))
            if TURNS == 1:
                low_column, high_column, of_low, of_high = held
            else:
                low_column, high_column, of_low, of_high = load_columns(inputs, inputs_scale, ahead + group)
            low, high = unpack_bytes(tl.permute(tl.reshape(packed, [DOWN_ROWS, AT_ONCE, 64]), (1, 0, 2)))
            start = tl.full([AT_ONCE, DOWN_ROWS, 2 * BLOCK], ROUNDING_BITS, tl.int32)
            sums = joined(tl.dot(low, low_column, start, out_dtype=tl.int32)) * of_low
            sums += joined(tl.dot(high, high_column, start, out_dtype=tl.int32)) * of_high
            sums *= tl.trans(factors).to(tl.float32)[:, :, None]
            total = tl.where(ahead == 0, 0.0, total) + sum_of_warps(sums)
            to = parts + (part * SIZE)[None, :] + (line + row)[:, None]
            done = (part >= 0) & (turn % TURNS == TURNS - 1)
            tl.store(to, total.to(parts.dtype.element_ty), mask=done[None, :])


@triton.jit
def load_columns(inputs, inputs_scale, group):
    """Load the inputs of groups [G]: those that low nibbles multiply and those that high ones do, [G, 64, 2 BLOCK] each, then
    the scales of both, [G, 1, BLOCK] each."""
    at = inputs[None, None, :] + (group[:, None] * 128 + tl.arange(0, 64)[None, :])[:, :, None]
    scale = inputs_scale[None, :] + group[:, None] * 2
    return tl.load(at), tl.load(at + 64), tl.load(scale)[:, None, :], tl.load(scale + 1)[:, None, :]


@triton.jit
def store_planes(to, scale, values, AXIS: tl.constexpr, here, where, DISTANCE: tl.constexpr):
    """Stores values as two planes of bytes, and one scale for all values along AXIS.

    Args:
        to: pointers to the upper bytes; the lower bytes stand DISTANCE behind them.
        scale: pointers to the scales.
        here: mask of the values to store.
        where: mask of the scales to store.
    """
    largest = tl.reduce(tl.abs(values), AXIS, larger)
    # The lower bound avoids a division by 0 in a row of zeros; numbers below it lose digits.
    factor = LARGEST / tl.maximum(largest, 2.0**-100)
    integer = (values * tl.expand_dims(factor, AXIS) + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS
    upper = (integer + 128) >> 8
    tl.store(to, upper.to(tl.int8), mask=here)
    tl.store(to + DISTANCE, (integer - upper * 256).to(tl.int8), mask=here)
    # Divided by 16, since unpacked weights are 16 times too large (`unpack_bytes`). If a value is NaN or infinite, so is the
    # scale: it shows in the product.
    tl.store(scale, largest * (1.0 / (16.0 * LARGEST)), mask=where)
