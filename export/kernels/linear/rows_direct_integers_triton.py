# mypy: allow-untyped-defs
"""Up to STEP_ROWS rows in fixed point times integer weights of any group size: from memory directly into operands of `mma`.

A program has ROWS weight rows, and its warps divide K. A *turn* is one block of 128 elements of each row, or two neighbouring
ones, for each warp; what the warps have of a turn are neighbours. Weights and inputs of AHEAD turns are under way: in
registers, as words, so that no byte moves to another lane. The scales of two blocks in groups of 32 are one load: L1 looks up
a line for each row, whatever is loaded of it, and scales are as many rows as weights.

A block has four spans of 32 elements. Four lanes load 32 bytes of a row, 8 each. The low nibbles of these bytes are a span
and the high ones are the next, or the bytes are a span. A row's inputs are stored as a warp loads them (`store_operands`).

A group's sum is an exact integer, the sums of the warps are added in one order, and no row sees another. So a row has the
same bits whatever stands beside it.
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
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of rows in fixed point with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these. ROWS is 16: as few as
    tensor cores take on the left, and the load of their scales is so small that Triton gives each lane those that it needs. K
    is a multiple of BLOCKS blocks.

    Args:
        planes, factors: see `store_operands`.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_direct`. 0: none is.
        BLOCKS: blocks of a turn for each warp, 1, or in groups of 32 also 2.
        AHEAD: turns whose weights are loaded before the wait, and later before those ahead of them are multiplied.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    TURNS: tl.constexpr = (K // (BLOCKS * BLOCK) + WARPS - 1) // WARPS
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
        tile = load_turn(words, scale_ptr, minimum_ptr, scaled, turn, K, GROUP, BITS, MINIMUM, WARPS, BLOCKS)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    sums = tl.zeros([WARPS, ROWS, 2 * COLUMNS], tl.float32)
    if TURNS <= AHEAD:
        following = load_inputs(planes_ptr, factors_ptr, rows, 0, K, COLUMNS, WARPS, BLOCKS)
        for turn in tl.static_range(TURNS):
            columns = following
            if turn + 1 < TURNS:
                following = load_inputs(planes_ptr, factors_ptr, rows, turn + 1, K, COLUMNS, WARPS, BLOCKS)
            sums = add_turn(sums, tiles[turn], columns, GROUP, BITS, MINIMUM, SCALE, COLUMNS)
    else:
        inputs = ()
        for turn in tl.static_range(AHEAD):
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn, K, COLUMNS, WARPS, BLOCKS)
            inputs = inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        # A loop, not a list of turns: in a list the compiler moves each load close to where its data are needed.
        for turn in tl.range(0, TURNS, num_stages=1):
            tile = load_turn(
                words, scale_ptr, minimum_ptr, scaled, turn + AHEAD, K, GROUP, BITS, MINIMUM, WARPS, BLOCKS
            )
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn + AHEAD, K, COLUMNS, WARPS, BLOCKS)
            tiles, inputs = tiles + (tile,), inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            sums = add_turn(sums, tiles[0], inputs[0], GROUP, BITS, MINIMUM, SCALE, COLUMNS)  # type: ignore[misc]
            tiles, inputs = tiles[1:], inputs[1:]
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
    BLOCKS: tl.constexpr,
):
    """Load a turn of weights: for each block of a warp, tiles of words [4, 8, WARPS, ROWS / 8, 2] of 32 bytes of a row each;
    and the scales and minima of `load_scales`.

    Behind the last blocks are the last ones again, whose inputs are zeros. Behind the last turn nothing is loaded.

    Args:
        words: pointers [1, 8, 1, ROWS / 8, 1] to the rows' first words.
        scaled: the rows' numbers [1, ROWS].
        number: the turn.
    """
    own = tl.minimum(tl.arange(0, WARPS) + number * WARPS, K // (BLOCKS * BLOCK) - 1)
    word = tl.arange(0, 4)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    at = words + own[None, None, :, None, None] * (BLOCKS * BLOCK * BITS // 32) + word
    inside = number * WARPS < K // (BLOCKS * BLOCK)
    tiles = ()
    for piece in tl.static_range(BLOCKS * BITS // 2):
        tiles = tiles + (tl.load(at + piece * 8, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    scales = load_scales(scale_ptr, scaled, own[:, None], K, GROUP, BLOCKS)
    minima = scales
    if MINIMUM:
        minima = load_scales(minimum_ptr, scaled, own[:, None], K, GROUP, BLOCKS)
    return tiles, scales, minima


@triton.jit
def load_scales(scale_ptr, scaled, own, K: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """The scales of a turn as `of_group` takes them: a tensor [WARPS, ROWS] for each block of a warp.

    own: which of K's BLOCKS blocks are a warp's, [WARPS, 1].
    """
    if BLOCKS == 1:
        scales = (load_block_scales(scale_ptr, scaled, own, K, GROUP),)
    else:
        # Eight rows at a time: such a load is small enough for Triton to give each lane what it needs.
        above, below = tl.split(tl.permute(tl.reshape(scaled, [2, 8]), (1, 0)))
        first, second = load_two(scale_ptr, above, own, K)
        first_below, second_below = load_two(scale_ptr, below, own, K)
        scales = one_below_other(first, first_below), one_below_other(second, second_below)  # type: ignore[assignment]
    return scales


@triton.jit
def load_two(scale_ptr, scaled, own, K: tl.constexpr):
    """The scales of two blocks in groups of 32, for rows [8]: two tensors [WARPS, 8] of integers."""
    at = scale_ptr.to(tl.pointer_type(tl.int64)) + scaled[None, :, None] * (K // BLOCK) + own[:, :, None] * 2
    return tl.split(tl.load(at + tl.arange(0, 2)[None, None, :]))


@triton.jit
def one_below_other(above, below):
    """[WARPS, 8] and [WARPS, 8] -> [WARPS, 16]."""
    return tl.reshape(tl.permute(tl.join(above, below), (0, 2, 1)), [above.shape[0], 16])


@triton.jit
def load_inputs(
    planes_ptr,
    factors_ptr,
    rows,
    number,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Load the inputs of a turn: for each block of a warp two tiles of words [4, 8, WARPS, COLUMNS / 4, 4], upper bytes in
    the first COLUMNS columns; and the blocks' factors [WARPS, 2 COLUMNS]: zeros behind the last block and the last row."""
    own = tl.arange(0, WARPS) + number * WARPS
    known = own < K // (BLOCKS * BLOCK)
    own = tl.minimum(own, K // (BLOCKS * BLOCK) - 1)
    column = tl.arange(0, COLUMNS // 4)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    lane = tl.arange(0, 4)[:, None, None, None, None]
    inside = number * WARPS < K // (BLOCKS * BLOCK)
    row = tl.arange(0, 2 * COLUMNS)[None, :] % COLUMNS
    tiles = ()
    factors = ()
    for block in tl.static_range(BLOCKS):
        at = own[None, None, :, None, None] * BLOCKS + block
        at = planes_ptr.to(tl.pointer_type(tl.int32)) + at * (2 * COLUMNS * BLOCK // 4)
        at += column // 8 * 256 + (column % 8 * 4 + lane) * 4 + tl.arange(0, 4)[None, None, None, None, :]
        # Columns of rows behind the last have any bytes, and are multiplied by zeros.
        halves = tl.load(at, mask=inside, other=0), tl.load(at + 128, mask=inside, other=0)
        tiles = tiles + halves  # type: ignore[assignment]
        at = factors_ptr + (own[:, None] * BLOCKS + block) * COLUMNS + row
        factor = tl.load(at, mask=(row < rows) & known[:, None], other=0.0)
        factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles, factors


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
):
    """sums [WARPS, ROWS, 2 COLUMNS] + the products of a turn's weights with bytes of the inputs, times scales and factors."""
    tiles, scales, minima = tile
    columns, factors = inputs
    PIECES: tl.constexpr = BITS // 2
    for block in tl.static_range(len(scales)):
        weights = ()
        for piece in tl.static_range(PIECES):
            weights = weights + spans_of(tiles[block * PIECES + piece], BITS)
        halves = columns[2 * block], columns[2 * block + 1]
        products = block_products(weights, halves, scales[block], minima[block], GROUP, MINIMUM, SCALE, COLUMNS)
        sums += products * factors[block][:, None, :]
    return sums


@triton.jit
def spans_of(words, BITS: tl.constexpr):
    """The spans of which `words` are 32 bytes: two of four bits, as bytes that are 16 times a weight, or one of eight."""
    return (((words << 4) & UPPER) ^ SIGNS, (words & UPPER) ^ SIGNS) if BITS == 4 else (words,)


@triton.jit
def block_products(
    weights,
    halves,
    scales,
    minima,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The products of a block's four spans with bytes of the inputs, times scales: [WARPS, ROWS, 2 COLUMNS]."""
    WARPS: tl.constexpr = scales.shape[0]
    ROWS: tl.constexpr = scales.shape[1]
    columns = ()
    for half in tl.static_range(2):
        both = tl.reshape(halves[half], [4, 8, WARPS, COLUMNS // 4, 2, 2])
        columns = columns + tl.split(tl.permute(both, (0, 1, 2, 3, 5, 4)))  # type: ignore[assignment]
    products = tl.zeros([WARPS, ROWS, 2 * COLUMNS], tl.float32)
    for start in tl.static_range(0, 4, GROUP // SPAN):
        integers = tl.full(products.shape, ROUNDING_BITS, tl.int32)
        totals = integers
        for span in tl.static_range(start, start + GROUP // SPAN):
            right = tl.permute(operand(columns[span]), (0, 2, 1))
            integers = tl.dot(operand(weights[span]), right, integers, out_dtype=tl.int32)
            if MINIMUM:
                sixteens = tl.full([WARPS, ROWS, SPAN], 16, tl.int8)
                totals = tl.dot(sixteens, right, totals, out_dtype=tl.int32)
        scale = of_group(scales, start * SPAN, GROUP, SCALE)
        products += (integers.to(tl.float32, bitcast=True) - ROUNDING) * scale[:, :, None]
        if MINIMUM:
            # The bytes are 16 times what is 8 less than a weight.
            minimum = of_group(minima, start * SPAN, GROUP, SCALE) + 8.0 * scale
            products += (totals.to(tl.float32, bitcast=True) - ROUNDING) * minimum[:, :, None]
    return products


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
