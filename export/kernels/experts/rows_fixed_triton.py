# mypy: allow-untyped-defs
"""Products of int4 experts in groups of 128 with blocks of rows in fixed point, by tensor cores, which multiply bytes.

Inputs that share a scale are integers of two signed bytes, up to 127 * 256 + 127. They are stored as a plane of upper bytes
and a plane of lower bytes. A row's two planes are two neighbouring columns of a product, so that a thread holds both. Weights
are the left operand, unpacked in registers with three instructions for eight weights; their sums over a group are exact
integers. The error of an input is at most 2^-16 of the largest input that shares its scale. A scale is for 128 elements of a
normed row, or for the 64 inner activations of one program.

Times on an H200, 2026-11-23, for 256 experts, 8 per row, H 2048 and I 512, in us at 8/16/32/64/128/256 rows. At that time
down had the form of gate and up. In its present form it takes 13.8/19.5/28.7/38.3/45.7 us at 8/16/32/64/128 rows.

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

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_tiles_triton import (
    ROUNDING_BITS,
    WARPS,
    joined,
    load_blocks,
    operand,
    operand_offsets,
    sum_of_warps,
    unpack_bytes,
)
from ostinato.export.kernels.linear.scales_triton import of_pair
from ostinato.export.kernels.linear.step_fixed_point_triton import ROUNDING, larger

from .rows_schedule_triton import BLOCK, RECORD, RECORD_PARTS, RECORD_ROWS, of_expert

# The largest integer of two signed bytes.
LARGEST = tl.constexpr(127.0 * 256.0 + 127.0)
# Inner activations of one program of gate and up, which share a scale; and the weight rows of this program.
SHARE = tl.constexpr(64)
TILE = tl.constexpr(128)
# Stages of the gate and up projections' loop (`num_stages`). With 2 stages they take 54.2/71.1/83.4 us at 32/64/128 rows,
# with 3 stages 54.5/69.9/78.9.
STAGES = tl.constexpr(3)
# Weight rows per program of down, and per product in it.
DOWN_TILE = tl.constexpr(128)
DOWN_ROWS = tl.constexpr(32)


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
    inputs = planes + (row_of_column * 2 + column % 2)[None, :] * SIZE + byte[:, None]
    inputs_scale = planes_scale + row * (SIZE // 128)
    filled = (row_of_column >= 0)[None, :]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    start = tl.full([TILE, 2 * BLOCK], ROUNDING_BITS, tl.int32)
    for pair in tl.range(0, SIZE // 256, num_stages=STAGES):
        factors = tl.load(scale + pair)
        for half in tl.static_range(2):
            group = pair * 2 + half
            factor = tl.load(inputs_scale + group, mask=row >= 0, other=0.0)
            low, high = unpack_bytes(tl.load(weight + group * 64))
            sums = tl.dot(low, tl.load(inputs + group * 128, mask=filled, other=0), start, out_dtype=tl.int32)
            other = tl.load(inputs + (group * 128 + 64), mask=filled, other=0)
            sums = tl.dot(high, other, sums, out_dtype=tl.int32)
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
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write parts [R (k (+ 1)), SIZE]: outputs, not yet times their shares. Program (DOWN_TILE columns, block).

    A program's warps divide INNER. The kernel reads the schedule before its wait (R4 in `delegate/graphs/nodes.py`).

    A program reads BLOCK places, also where its block has fewer rows. The places behind the block's last one belong to the
    next block, or were never written. Their products are not stored.

    Args:
        hidden: as `gate_up_fixed_rows_early` writes it, with room for BLOCK more places.
        SIZE: a multiple of DOWN_TILE.
        INNER: a multiple of 128.
    """
    GROUPS: tl.constexpr = INNER // 128
    TURNS: tl.constexpr = (GROUPS + WARPS - 1) // WARPS
    start_next(EARLY)
    record = schedule + tl.program_id(1) * RECORD
    number = tl.arange(0, BLOCK)
    group = tl.arange(0, WARPS)
    column, group_of_column, byte_of_column = operand_offsets(2 * BLOCK)
    row, group_of_row, byte_of_row = operand_offsets(DOWN_ROWS)
    expert = tl.load(record, cache_modifier=".cg")
    if expert < 0:
        wait_for_previous(EARLY)
        return
    line = tl.program_id(0) * DOWN_TILE
    weight = of_expert(down, shared, expert, SIZE * INNER // 2, EXPERTS) + line * (INNER // 2)
    weight = weight + (row * (INNER // 2) + group_of_row * 64 + byte_of_row)
    line = line + tl.arange(0, DOWN_ROWS)
    scale = of_expert(down_scale, shared_scale, expert, SIZE * INNER // 128, EXPERTS)
    scale = scale + (line[None, :] * GROUPS + group[:, None])
    place = tl.load(record + 1, cache_modifier=".cg")
    part = tl.load(record + RECORD_PARTS + number, cache_modifier=".cg")
    wait_for_previous(EARLY)
    inputs = hidden + ((place * 2 + column) * INNER + group_of_column * 128 + byte_of_column)
    inputs_scale = hidden_scale + ((place + number)[None, :] * (INNER // SHARE) + group[:, None] * 2)
    columns = ()
    for turn in tl.static_range(TURNS):
        first = turn * WARPS
        low = operand(load_blocks(inputs + first * 128, group_of_column, first, GROUPS))
        high = operand(load_blocks(inputs + (first * 128 + 64), group_of_column, first, GROUPS))
        low_scale = load_blocks(inputs_scale + first * 2, group[:, None], first, GROUPS)[:, None, :]
        high_scale = load_blocks(inputs_scale + (first * 2 + 1), group[:, None], first, GROUPS)[:, None, :]
        low = tl.permute(low, (0, 2, 1))
        high = tl.permute(high, (0, 2, 1))
        columns = columns + ((low, high, low_scale, high_scale),)  # type: ignore[assignment]  # noqa: RUF005
    start = tl.full([WARPS, DOWN_ROWS, 2 * BLOCK], ROUNDING_BITS, tl.int32)
    for rows in tl.static_range(0, DOWN_TILE, DOWN_ROWS):
        products = ()
        for turn in tl.static_range(TURNS):
            first = turn * WARPS
            words = load_blocks(weight + (rows * (INNER // 2) + first * 64), group_of_row, first, GROUPS)
            factor = load_blocks(scale + (rows * GROUPS + first), group[:, None], first, GROUPS)
            low, high = unpack_bytes(words)
            low_column, high_column, low_scale, high_scale = columns[turn]  # type: ignore[var-annotated]
            sums = joined(tl.dot(operand(low), low_column, start, out_dtype=tl.int32)) * low_scale
            sums += joined(tl.dot(operand(high), high_column, start, out_dtype=tl.int32)) * high_scale
            products = products + (sums * factor.to(tl.float32)[:, :, None],)  # type: ignore[assignment]  # noqa: RUF005
        total = products[0]  # type: ignore[misc]
        for turn in tl.static_range(1, TURNS):
            total += products[turn]
        to = parts + (part.to(tl.int64) * SIZE)[None, :] + (line + rows)[:, None]
        tl.store(to, sum_of_warps(total).to(parts.dtype.element_ty), mask=(part >= 0)[None, :])


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
