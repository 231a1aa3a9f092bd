# mypy: allow-untyped-defs
"""Up to STEP_ROWS rows in fixed point times integer weights of any group size: from memory directly into operands of `mma`.

A program has ROWS weight rows, and its warps divide K. A *turn* is a block of 128 elements of each row, for each warp; the
warps' blocks of a turn are neighbours. Weights and inputs of AHEAD turns are under way: in registers, as words, so that no
byte moves to another lane.

A turn has four spans of 32 elements. Four lanes load 32 bytes of a row, 8 each. The low nibbles of these bytes are a span and
the high ones are the next, or the bytes are a span. A row's inputs are stored as a warp loads them (`store_operands`).

A group's sum is an exact integer, the sums of the warps are added in one order, and no row sees another. So a row has the
same bits for every number of rows, and whatever stands beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_direct_store_triton import load_past, load_taps, offset_in_run, store_direct, stored_lines
from .rows_grouped_triton import load_block_scales, of_group
from .rows_prepare_triton import signed_bytes
from .rows_tiles_triton import BLOCK, ROUNDING_BITS
from .step_fixed_point_triton import ROUNDING

SPAN = tl.constexpr(32)
# Masks of the upper four bits of four bytes, and of their upper bit.
UPPER = tl.constexpr(-0x0F0F0F10)
SIGNS = tl.constexpr(-0x7F7F7F80)


@triton.jit
def direct_integers_rows_early(
    planes_ptr,
    factors_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    residual_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of rows in fixed point with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these. ROWS is 16: as few as
    tensor cores take on the left, and the load of their scales is so small that Triton gives each lane those that it needs. K
    is a multiple of 128.

    Args:
        planes, factors: see `store_operands`.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_direct`. 0: none is.
        AHEAD: turns whose weights are loaded before the wait, and later before those ahead of them are multiplied.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    TURNS: tl.constexpr = (K // BLOCK + WARPS - 1) // WARPS
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    # Words of a weight row.
    ROW: tl.constexpr = K * BITS // 32
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * OUTPUTS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, OUTPUTS)
    line = tl.arange(0, ROWS // 8)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    line = stored_lines(line, first, N, SWIGLU, ROWS)
    words = weight_ptr.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * ROW + line * ROW
    scaled = first.to(tl.int64) + stored_lines(tl.arange(0, ROWS)[None, :], first, N, SWIGLU, ROWS)
    tiles = ()
    for turn in tl.static_range(min(AHEAD, TURNS)):
        tile = load_turn(words, scale_ptr, minimum_ptr, scaled, turn, K, GROUP, BITS, MINIMUM, WARPS)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    sums = tl.zeros([WARPS, ROWS, 2 * COLUMNS], tl.float32)
    following = load_inputs(planes_ptr, factors_ptr, rows, 0, K, COLUMNS, WARPS)
    if TURNS <= AHEAD:
        for turn in tl.static_range(TURNS):
            columns = following
            if turn + 1 < TURNS:
                following = load_inputs(planes_ptr, factors_ptr, rows, turn + 1, K, COLUMNS, WARPS)
            sums = add_turn(sums, tiles[turn], columns, GROUP, BITS, MINIMUM, SCALE, COLUMNS, WARPS)
    else:
        inputs = (following,)
        for turn in tl.static_range(1, AHEAD):
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn, K, COLUMNS, WARPS)
            inputs = inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        # A loop, not a list of turns: in a list the compiler moves each load close to where its data are needed.
        for turn in tl.range(0, TURNS, num_stages=1):
            tile, columns = tiles[0], inputs[0]  # type: ignore[misc]
            loaded = load_turn(words, scale_ptr, minimum_ptr, scaled, turn + AHEAD, K, GROUP, BITS, MINIMUM, WARPS)
            tiles = tiles[1:] + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn + AHEAD, K, COLUMNS, WARPS)
            inputs = inputs[1:] + (loaded,)  # noqa: RUF005
            sums = add_turn(sums, tile, columns, GROUP, BITS, MINIMUM, SCALE, COLUMNS, WARPS)
    # Bytes of eight-bit weights are not 16 times a weight, as the factors are for.
    total = joined_planes(tl.sum(sums, 0), COLUMNS) * (1.0 if BITS == 4 else 16.0)
    store_direct(
        total, bias_ptr, residual_ptr, state_ptr, slots_ptr, out_ptr, taps, past, slot, offset, output, row, rows,
        N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


# --- loads


@triton.jit
def load_turn(
    words,
    scale_ptr,
    minimum_ptr,
    scaled,
    number,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load a turn of weights: tiles of words [4, 8, WARPS, ROWS / 8, 2] of 32 bytes of a row each, and the block's scales and
    minima [WARPS, ROWS].

    Behind the last block is the last block again, whose inputs are zeros. Behind the last turn nothing is loaded.

    Args:
        words: pointers [1, 8, 1, ROWS / 8, 1] to the rows' first words.
        scaled: the rows' numbers [1, ROWS].
        number: the turn.
    """
    block = tl.minimum(tl.arange(0, WARPS) + number * WARPS, K // BLOCK - 1)
    word = tl.arange(0, 4)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    at = words + block[None, None, :, None, None] * (BLOCK * BITS // 32) + word
    inside = number * WARPS < K // BLOCK
    tiles = ()
    for piece in tl.static_range(BITS // 2):
        tiles = tiles + (tl.load(at + piece * 8, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    scales = load_block_scales(scale_ptr, scaled, block[:, None], K, GROUP)
    minima = scales
    if MINIMUM:
        minima = load_block_scales(minimum_ptr, scaled, block[:, None], K, GROUP)
    return tiles, scales, minima


@triton.jit
def load_inputs(planes_ptr, factors_ptr, rows, number, K: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Load the inputs of a turn: two tiles of words [4, 8, WARPS, COLUMNS / 4, 4], upper bytes in the first COLUMNS columns,
    and the blocks' factors [WARPS, 2 COLUMNS]: zeros behind the last block and the last row."""
    block = tl.arange(0, WARPS) + number * WARPS
    known = block < K // BLOCK
    block = tl.minimum(block, K // BLOCK - 1)
    column = tl.arange(0, COLUMNS // 4)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    lane = tl.arange(0, 4)[:, None, None, None, None]
    at = planes_ptr.to(tl.pointer_type(tl.int32)) + block[None, None, :, None, None] * (2 * COLUMNS * BLOCK // 4)
    at += column // 8 * 256 + (column % 8 * 4 + lane) * 4 + tl.arange(0, 4)[None, None, None, None, :]
    inside = number * WARPS < K // BLOCK
    # Columns of rows behind the last have any bytes, and are multiplied by zeros.
    tiles = tl.load(at, mask=inside, other=0), tl.load(at + 128, mask=inside, other=0)
    row = tl.arange(0, 2 * COLUMNS)[None, :] % COLUMNS
    at = factors_ptr + block[:, None] * COLUMNS + row
    return tiles, tl.load(at, mask=(row < rows) & known[:, None], other=0.0)


@triton.jit
def store_operands(planes_ptr, factors_ptr, x, row, block, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store blocks [BLOCKS, 128] of a row in fixed point as `load_inputs` reads them: planes [K / 128, 2 COLUMNS * 128] and
    factors [K / 128, COLUMNS]."""
    upper, lower, scale = signed_bytes(x)
    store_column(planes_ptr, upper, block, row, K, COLUMNS)
    store_column(planes_ptr, lower, block, COLUMNS + row, K, COLUMNS)
    tl.store(factors_ptr + block * COLUMNS + row, scale / 16, mask=block < K // BLOCK)


@triton.jit
def store_column(planes_ptr, values, block, column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store one plane of a row, [BLOCKS, 128] int8.

    A warp loads the 512 bytes of two spans of eight columns at once, in their order: each lane has 8 bytes of both spans.
    """
    within = tl.arange(0, BLOCK)[None, :]
    eight = within // 8
    place = eight // 8 * 512 + eight % 4 * 16 + eight // 4 % 2 * 8 + within % 8
    at = planes_ptr + block[:, None] * (2 * COLUMNS * BLOCK) + (column // 8 * 1024 + column % 8 * 64)
    tl.store(at + place, values, mask=(block < K // BLOCK)[:, None])


# --- products


@triton.jit
def add_turn(
    sums,
    tile,
    inputs,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """sums [WARPS, ROWS, 2 COLUMNS] + the products of a turn's weights with bytes of the inputs, times scales and factors."""
    tiles, scales, minima = tile
    columns = ()
    for half in tl.static_range(2):
        both = tl.reshape(inputs[0][half], [4, 8, WARPS, COLUMNS // 4, 2, 2])
        columns = columns + tl.split(tl.permute(both, (0, 1, 2, 3, 5, 4)))  # type: ignore[assignment]
    weights = ()
    for piece in tl.static_range(BITS // 2):
        if BITS == 4:
            # Bytes that are 16 times a weight.
            weights = weights + (((tiles[piece] << 4) & UPPER) ^ SIGNS, (tiles[piece] & UPPER) ^ SIGNS)  # type: ignore[assignment]  # noqa: RUF005
        else:
            weights = weights + (tiles[piece],)  # type: ignore[assignment]  # noqa: RUF005
    products = tl.zeros(sums.shape, tl.float32)
    for start in tl.static_range(0, 4, GROUP // SPAN):
        integers = tl.full(sums.shape, ROUNDING_BITS, tl.int32)
        totals = integers
        for span in tl.static_range(start, start + GROUP // SPAN):
            right = tl.permute(operand(columns[span]), (0, 2, 1))
            integers = tl.dot(operand(weights[span]), right, integers, out_dtype=tl.int32)
            if MINIMUM:
                sixteens = tl.full([WARPS, sums.shape[1], SPAN], 16, tl.int8)
                totals = tl.dot(sixteens, right, totals, out_dtype=tl.int32)
        scale = of_group(scales, start * SPAN, GROUP, SCALE)
        products += (integers.to(tl.float32, bitcast=True) - ROUNDING) * scale[:, :, None]
        if MINIMUM:
            # The bytes are 16 times what is 8 less than a weight.
            minimum = of_group(minima, start * SPAN, GROUP, SCALE) + 8.0 * scale
            products += (totals.to(tl.float32, bitcast=True) - ROUNDING) * minimum[:, :, None]
    return sums + products * inputs[1][:, None, :]


@triton.jit
def operand(words):
    """Words [4, 8, WARPS, LINES / 8, 2] -> [WARPS, LINES, 32] int8, the left operand of a product; the right one must be
    transposed. Moves no data: a lane has eight neighbouring bytes of a line, as for `mma`."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    # Dimensions: lane, line of eight, warp, eight, word, and the byte of a word in two.
    return tl.reshape(tl.permute(tl.join(even, odd), (2, 3, 1, 0, 4, 5, 6)), [words.shape[2], words.shape[3] * 8, SPAN])


@triton.jit
def joined_planes(sums, COLUMNS: tl.constexpr):
    """[ROWS, 2 COLUMNS] -> upper * 256 + lower, [ROWS, COLUMNS]."""
    upper, lower = tl.split(tl.permute(tl.reshape(sums, [sums.shape[0], 2, COLUMNS]), (0, 2, 1)))
    return upper * 256.0 + lower
