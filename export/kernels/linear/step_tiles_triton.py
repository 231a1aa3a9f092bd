# mypy: allow-untyped-defs
"""The building blocks of a decode step's matrix-vector kernels: tiles of weights, their inputs, and the sum over lanes.

A *unit* is one element of a tile: a 32-bit word of eight four-bit weights (`step_int4_triton`), one of four eight-bit weights
(`step_int8_triton`) or, if GROUP is 0, one weight in a floating dtype. A tile has one dimension and holds UNITS units of one
row. A lane has LANE neighbouring units (16 bytes), or several such stretches. So a lane uses the same inputs for all rows of
its program. BITS, the bits of an integer weight, says which words they are; MINIMUM, whether groups have minima.

The tensors of a weight travel together, as `stored`: pointers to values, scales and minima. Only what GROUP and MINIMUM ask
for is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_int4_triton import (
    INTERPRETED,
    first_fours,
    load_constant_eights,
    load_constant_fours,
    load_eights,
    load_fours,
    multiply_int4,
)
from .step_int8_triton import multiply_int8


@triton.jit
def extended(tiles, tile):
    """The tuple with one more tile at its end. Triton does not take a starred expression."""
    return tiles + (tile,)  # noqa: RUF005


@triton.jit
def hold_loads():
    """Have all loads ahead of this place under way at once. The compiler moves each close to its use, so that a program waits
    for one after the other; past a fence it moves none.

    The fence is not one of `acq_rel`: behind that, ptxas of CUDA 13.0 to 13.3 and 13.5 waits for all loads under way, that of
    12.8 does not. The down projection of an 8B in bfloat16 with 4 rows then took 42.3 us, not 29.5 (one H200, 2026-11-30).
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise("fence.sc.cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = extended(tiles, tl.zeros([LANES], tl.float32))
    return tiles


@triton.jit
def tile_units(
    START: tl.constexpr,
    STEP: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr = 4,
):
    """Every STEP-th unit of the tile from START, and whether the unit is in the row (a constant if all units are)."""
    ROW: tl.constexpr = K * BITS // 32 if GROUP > 0 else K
    unit = START + tl.arange(0, UNITS // STEP) * STEP
    return unit, (unit < ROW) | (ROW % UNITS == 0)


@triton.jit
def unit_pointer(weight, GROUP: tl.constexpr):
    """A weight's pointer, converted to a pointer to its units."""
    return weight.to(tl.pointer_type(tl.uint32)) if GROUP > 0 else weight


@triton.jit
def load_tile(
    stored,
    first_row,
    START: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    APART: tl.constexpr = 0,
    BITS: tl.constexpr = 4,
    MINIMUM: tl.constexpr = False,
):
    """Load the units from START of ROWS rows: ROWS tiles [UNITS], and tuples of their lanes' scales and minima.

    Scales and minima are a tile [LANES] per row of integer weights; see `load_scales`. Rows past the last read the last row
    again. With APART the second half of the rows begins APART rows after the beginning of the first half.
    """
    ROW: tl.constexpr = K * BITS // 32 if GROUP > 0 else K
    unit, inside = tile_units(START, 1, K, GROUP, UNITS, BITS)
    units = unit_pointer(stored[0], GROUP) + first_row.to(tl.int64) * ROW
    tiles = ()
    for row in tl.static_range(ROWS):
        step = row_step(row, first_row, N, ROWS, APART)
        tiles = extended(tiles, tl.load(units + unit + step * ROW, mask=inside, other=0))
    scales = ()
    minima = ()
    if GROUP > 0:
        # One word in four: the first of each lane.
        lane_word, lane_inside = tile_units(START, 4, K, GROUP, UNITS, BITS)
        element = lane_element(lane_word, BITS)
        for row in tl.static_range(ROWS):
            step = row_step(row, first_row, N, ROWS, APART)
            scales = extended(scales, load_scales(stored[1], first_row, step, element, lane_inside, K, GROUP, BITS))
            if MINIMUM:
                numbers = load_scales(stored[2], first_row, step, element, lane_inside, K, GROUP, BITS)
                minima = extended(minima, numbers)
    return tiles, scales, minima


@triton.jit
def lane_element(word, BITS: tl.constexpr):
    """The first element of the lane whose first word is `word`; of four-bit weights, the first element of its span."""
    return word // 8 * 64 if BITS == 4 else word * 4


@triton.jit
def load_scales(scale, first_row, step, element, inside, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """The scales of the groups of `element`, `step` rows after `first_row`.

    A lane of four-bit weights in groups of 32 has elements of two groups, low nibbles of one and high nibbles of the next:
    their scales are one int32, which `of_pair` takes apart.
    """
    PAIRED: tl.constexpr = BITS == 4 and GROUP == 32
    WIDTH: tl.constexpr = 64 if PAIRED else GROUP
    numbers = scale.to(tl.pointer_type(tl.int32)) if PAIRED else scale
    numbers += first_row.to(tl.int64) * (K // WIDTH)
    return tl.load(numbers + (element // WIDTH + step * (K // WIDTH)), mask=inside, other=0)


@triton.jit
def row_step(ROW: tl.constexpr, first_row, N: tl.constexpr, ROWS: tl.constexpr, APART: tl.constexpr):
    """Rows from the first row to row ROW, or to the last row if ROW is past it. A constant if no row can be past the last."""
    if APART > 0:
        tl.static_assert(N % APART == 0 and APART % (ROWS // 2) == 0)
        return ROW % (ROWS // 2) + ROW // (ROWS // 2) * APART
    elif N % ROWS == 0:
        return ROW
    else:
        return tl.minimum(ROW, N - 1 - first_row)


@triton.jit
def load_input(
    vector,
    START: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr = 4,
):
    """Load the inputs that a tile's units multiply: float32 tiles [UNITS], one for each weight of a unit.

    Past the end of the row they are zeros.
    """
    unit, inside = tile_units(START, 1, K, GROUP, UNITS, BITS)
    return load_input_at(vector, unit, inside, GROUP, BITS)


@triton.jit
def load_input_at(vector, unit, inside, GROUP: tl.constexpr, BITS: tl.constexpr = 4):
    """`load_input` for these units of a row; zeros where not `inside`."""
    if GROUP > 0 and BITS == 8:
        x = load_fours(vector, unit, inside)
    elif GROUP > 0:
        x = load_eights(vector, first_fours(unit), inside)
    else:
        x = (tl.load(vector + unit, mask=inside, other=0.0).to(tl.float32),)
    return x


@triton.jit
def load_norm(
    norm,
    START: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr = 4,
):
    """Load the norm's weights for the tiles of `load_input`."""
    unit, inside = tile_units(START, 1, K, GROUP, UNITS, BITS)
    if GROUP > 0 and BITS == 8:
        weights = load_constant_fours(norm, unit, inside)
    elif GROUP > 0:
        weights = load_constant_eights(norm, first_fours(unit), inside)
    elif K % 4 == 0:
        weights = (load_constant_floats(norm, START, K, UNITS),)
    else:
        weights = (tl.load(norm + unit, mask=inside, other=0.0),)
    return weights


@triton.jit
def load_constant_floats(floats, START: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr):
    """UNITS elements from START of a constant float32 vector, K a multiple of 4; arbitrary past its end.

    The result can have any layout. A plain load would give a lane four neighbours. Where a lane needs eight, an exchange
    through shared memory would follow.
    """
    four, inside = tile_units(START // 4, 1, K // 4, 0, UNITS // 4)
    x0, x1, x2, x3 = load_constant_fours(floats, four, inside)
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [UNITS])


@triton.jit
def multiply_tile(
    sums,
    tile,
    x,
    factor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE: tl.constexpr,
    BITS: tl.constexpr = 4,
    MINIMUM: tl.constexpr = False,
):
    """Add a tile of `load_tile` times x of `load_input` times `factor` ([LANES] or 1) to the rows' sums, [LANES] each.

    With INTEGER integer weights are multiplied in fixed point, for inputs that had 8 bits (bfloat16); else in float32. SCALE
    is the dtype of scales and minima.
    """
    if GROUP > 0 and BITS == 8:
        added = multiply_int8(sums, tile, x, factor, ROWS, INTEGER)
    elif GROUP > 0:
        added = multiply_int4(sums, tile, x, factor, GROUP, ROWS, INTEGER, SCALE, MINIMUM)
    else:
        units = tile[0]
        added = ()
        for row in tl.static_range(ROWS):
            product = sum_lane(x[0] * units[row].to(tl.float32), LANE, sums[row].shape[0])
            added = extended(added, sums[row] + product * factor)
    return added


@triton.jit
def sum_lane(x, LANE: tl.constexpr, LANES: tl.constexpr):
    """[UNITS] -> [LANES]: each lane sums its LANE neighbouring units of every stretch of LANES * LANE units."""
    if x.shape[0] == LANES * LANE:
        return tl.sum(tl.reshape(x, [LANES, LANE]), axis=1)
    else:
        return tl.sum(tl.sum(tl.reshape(x, [x.shape[0] // (LANES * LANE), LANES, LANE]), axis=2), axis=0)


@triton.jit
def sum_rows(sums, squares, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The sums over all lanes of ROWS tiles [32 WARPS], and of `squares`, one tile for each input: two tensors [32].

    In the first, lane l has the total of tile `l * ROWS // 32`; in the second, that of `l * INPUTS // 32`. Each iteration
    halves the tiles that a lane has, so that n tiles take n shuffles and not 5 n. Then all warps' sums go through shared
    memory at once, with one barrier.
    """
    INPUTS: tl.constexpr = len(squares)
    tl.static_assert(ROWS <= 32)
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [WARPS, 32])
    rows = by_warp(sums, ROWS, WARPS)
    square = by_warp(squares, INPUTS, WARPS)
    for step in tl.static_range(5):
        rows = halved(rows, lane, 16 >> step, ROWS >> step)
        square = halved(square, lane, 16 >> step, INPUTS >> step)
    return sum_warps(rows[0], square[0], WARPS)


@triton.jit
def by_warp(tiles, COUNT: tl.constexpr, WARPS: tl.constexpr):
    reshaped = ()
    for i in tl.static_range(COUNT):
        reshaped = extended(reshaped, tl.reshape(tiles[i], [WARPS, 32]))
    return reshaped


@triton.jit
def halved(rows, lane, DISTANCE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles [WARPS, 32] -> COUNT / 2 tiles. Of every two tiles a lane keeps one, and the lane DISTANCE away the other.

    Each lane adds the other lane's values of the tile that it keeps. A single tile is kept by both lanes.
    """
    summed = ()
    if COUNT > 1:
        upper = (lane & DISTANCE) != 0
        for row in tl.static_range(COUNT // 2):
            kept = tl.where(upper, rows[row + COUNT // 2], rows[row])
            given = tl.where(upper, rows[row], rows[row + COUNT // 2])
            summed = extended(summed, kept + exchange(given, lane, DISTANCE))
    else:
        summed = extended(summed, rows[0] + exchange(rows[0], lane, DISTANCE))
    return summed


@triton.jit
def exchange(x, lane, DISTANCE: tl.constexpr):
    """x [WARPS, 32] from the lane DISTANCE away: a shuffle."""
    return tl.gather(x, lane ^ DISTANCE, axis=1)


@triton.jit
def sum_warps(x, y, WARPS: tl.constexpr):
    """The sums over the warps of x and of y, [WARPS, 32] each: two tensors [32].

    A split needs both parts in one thread, so all warps' sums get into the registers of that thread.
    """
    both = tl.permute(tl.join(x, y), (1, 2, 0))
    # A tile cannot change its type in a loop, so the code is written out for each number of warps.
    if WARPS == 1:
        summed = tl.reshape(both, [32, 2])
    elif WARPS == 2:
        first, second = tl.split(both)
        summed = first + second
    elif WARPS == 4:
        first, second = tl.split(tl.reshape(both, [32, 2, 2, 2]))
        first, second = tl.split(first + second)
        summed = first + second
    else:
        tl.static_assert(WARPS == 8)
        first, second = tl.split(tl.reshape(both, [32, 2, 4, 2]))
        first, second = tl.split(tl.reshape(first + second, [32, 2, 2, 2]))
        first, second = tl.split(first + second)
        summed = first + second
    return tl.split(summed)


@triton.jit
def lane_rows(first_row, N: tl.constexpr, ROWS: tl.constexpr, inputs=1, INPUTS: tl.constexpr = 1):
    """The row whose total each lane has after `sum_rows` of ROWS tiles for each of INPUTS inputs, one input after the other,
    and whether the lane is the first with this total, of one of the first `inputs` inputs: both [32]."""
    lane = tl.arange(0, 32)
    row = first_row + lane * (ROWS * INPUTS) // 32 % ROWS
    mine = (lane % (32 // (ROWS * INPUTS)) == 0) & (row < N)
    if INPUTS > 1:
        mine &= lane_input(INPUTS) < inputs
    return row, mine


@triton.jit
def lane_input(INPUTS: tl.constexpr):
    """The input whose total each lane has after `sum_rows`: [32], or 0 if there is one."""
    return tl.arange(0, 32) * INPUTS // 32 if INPUTS > 1 else 0
