# mypy: allow-untyped-defs
"""Up to STEP_ROWS rows in fixed point times integer weights of any group size: from memory directly into operands of `mma`.

A program has ROWS weight rows, and its warps divide K. A *turn* is one block of 128 elements of each row, or two neighbouring
ones, for each warp. Weights and inputs of AHEAD turns are under way: in registers, as words, so that no byte moves to another
lane. Of one block, what the warps have of a turn are neighbours. Of two, in groups of 32, a warp's turns are: a *stretch* of
K, whose scales are loaded ahead of the loop. L1 looks up a line for each row of a load, whatever is loaded of it: 64 bytes of
scales at once take 2 look-ups per block, not 8.

A block has four spans of 32 elements. Four lanes load 32 bytes of a row, 8 each. The low nibbles of these bytes are a span
and the high ones are the next, or the bytes are a span. A row's inputs are stored as a warp loads them (`store_operands`).

Minima are multiplied ahead of the turns (`rows_direct_minima_triton`).

A group's sum is an exact integer, the sums of the warps are added in one order, and no row sees another. So a row has the
same bits whatever stands beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_direct_minima_triton import load_minima, minima_products, store_sums
from .rows_direct_store_triton import (
    load_past,
    load_residual,
    load_taps,
    offset_in_run,
    store_direct,
    stored_lines,
)
from .rows_grouped_triton import load_block_scales, of_group
from .rows_prepare_triton import signed_bytes
from .rows_tiles_triton import BLOCK, INTERPRETED, ROUNDING_BITS, UNPACK, joined, joined_shortly, sum_of_warps
from .step_tiles_triton import hold_loads

SPAN = tl.constexpr(32)
# Masks of the lower and the upper four bits of four bytes, and of their upper bit.
LOWER = tl.constexpr(0x0F0F0F0F)
UPPER = tl.constexpr(-0x0F0F0F10)
SIGNS = tl.constexpr(-0x7F7F7F80)
# Eight nibbles -> four low ones and four high ones, as bytes. As in UNPACK, the input is not read after a result is written.
DIVIDE = tl.constexpr(
    "{ .reg .b32 shifted; shr.u32 shifted, $2, 4; and.b32 $0, $2, 0x0F0F0F0F; and.b32 $1, shifted, 0x0F0F0F0F; }"
)


@triton.jit
def direct_integers_rows_early(
    planes_ptr,
    factors_ptr,
    sums_ptr,
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
    FENCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of rows in fixed point with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these. ROWS is 16: as few as
    tensor cores take on the left, and the load of their scales is so small that Triton gives each lane those that it needs. K
    is a multiple of BLOCKS blocks.

    Args:
        planes, factors, sums: see `store_operands`. Without MINIMUM there are no sums.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_direct`. 0: none is.
        BLOCKS: blocks of a turn for each warp: 1, or, in groups of 32, 2.
        AHEAD: turns whose weights are loaded before the wait, and later before those ahead of them are multiplied.
        FENCE: whether a fence in each turn of a loop holds loads ahead of the products.
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
    scales = load_stretches(scale_ptr, scaled, K, WARPS, TURNS) if BLOCKS == 2 else ()
    tiles = ()
    for turn in tl.static_range(min(AHEAD, TURNS)):
        tile = load_turn(words, scale_ptr, scaled, turn, K, GROUP, BITS, WARPS, BLOCKS)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    minima = load_minima(minimum_ptr + first.to(tl.int64) * (K // GROUP), line, K, WARPS) if MINIMUM else ()
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    residual = load_residual(residual_ptr, output, row, rows, N) if RESIDUAL else 0.0
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    if MINIMUM:
        sums = minima_products(minima, sums_ptr, rows, K, ROWS, COLUMNS, WARPS)
    if TURNS <= AHEAD:
        following = load_inputs(planes_ptr, factors_ptr, rows, 0, K, COLUMNS, WARPS, BLOCKS)
        for turn in tl.static_range(TURNS):
            columns = following
            if turn + 1 < TURNS:
                following = load_inputs(planes_ptr, factors_ptr, rows, turn + 1, K, COLUMNS, WARPS, BLOCKS)
            scaled_tile = with_scales(tiles[turn], scales, turn)
            sums = add_turn(sums, scaled_tile, columns, GROUP, BITS, MINIMUM, SCALE, COLUMNS, EARLY)
    else:
        inputs = ()
        for turn in tl.static_range(AHEAD):
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn, K, COLUMNS, WARPS, BLOCKS)
            inputs = inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        # A loop, not a list of turns: in a list the compiler moves each load close to where its data are needed.
        for turn in tl.range(0, TURNS, num_stages=1):
            tile = load_turn(words, scale_ptr, scaled, turn + AHEAD, K, GROUP, BITS, WARPS, BLOCKS)
            loaded = load_inputs(planes_ptr, factors_ptr, rows, turn + AHEAD, K, COLUMNS, WARPS, BLOCKS)
            tiles, inputs = tiles + (tile,), inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            if FENCE:
                hold_loads()
            first_tile = with_scales(tiles[0], scales, turn)  # type: ignore[misc]
            sums = add_turn(sums, first_tile, inputs[0], GROUP, BITS, MINIMUM, SCALE, COLUMNS, EARLY)  # type: ignore[misc]
            tiles, inputs = tiles[1:], inputs[1:]
    # Bytes of eight-bit weights, and of those with minima, are not 16 times a weight, as the factors are for.
    total = sum_of_warps(sums) * (1.0 if BITS == 4 and not MINIMUM else 16.0)
    store_direct(
        total, residual, bias_ptr, state_ptr, slots_ptr, out_ptr, taps, past, slot, offset, output, row, rows,
        N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


# --- loads


@triton.jit
def load_turn(
    words,
    scale_ptr,
    scaled,
    number,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Load a turn of weights: for each block of a warp, tiles of words [4, 8, WARPS, ROWS / 8, 2] of 32 bytes of a row each;
    and, of one block, its scales as `of_group` takes them. Those of two blocks are in `load_stretches`.

    Behind the last blocks are the last ones again, whose inputs are zeros. Behind the last turn nothing is loaded.

    Args:
        words: pointers [1, 8, 1, ROWS / 8, 1] to the rows' first words.
        scaled: the rows' numbers [1, ROWS].
        number: the turn.
    """
    own = tl.minimum(own_of_turn(tl.arange(0, WARPS), number, K, WARPS, BLOCKS), K // (BLOCKS * BLOCK) - 1)
    word = tl.arange(0, 4)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    at = words + own[None, None, :, None, None] * (BLOCKS * BLOCK * BITS // 32) + word
    inside = number * WARPS < K // (BLOCKS * BLOCK)
    tiles = ()
    for piece in tl.static_range(BLOCKS * BITS // 2):
        tiles = tiles + (tl.load(at + piece * 8, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    scales = ()
    if BLOCKS == 1:
        scales = (load_block_scales(scale_ptr, scaled, own[:, None], K, GROUP),)  # type: ignore[assignment]
    return tiles, scales


@triton.jit
def own_of_turn(warp, number, K: tl.constexpr, WARPS: tl.constexpr, BLOCKS: tl.constexpr):
    """Numbers of what the warps have in a turn, counted in BLOCKS blocks. Of two blocks, a warp's turns are neighbours."""
    return warp + number * WARPS if BLOCKS == 1 else warp * ((K // (BLOCKS * BLOCK) + WARPS - 1) // WARPS) + number


@triton.jit
def load_stretches(scale_ptr, scaled, K: tl.constexpr, WARPS: tl.constexpr, TURNS: tl.constexpr):
    """Load the scales of all turns of two blocks in groups of 32, as integers of a block's four.

    Four lanes load 64 neighbouring bytes of a row: four turns. Returns tensors [8 WARPS, 4], one for every four turns, eight
    rows, and block of a turn, in this order. Their lines are the rows of each warp, and their columns are turns.
    """
    # Eight rows at a time: such a load is small enough for Triton to give each lane what it needs.
    eights = tl.split(tl.permute(tl.reshape(scaled, [2, 8]), (1, 0)))
    warp = tl.arange(0, WARPS)[None, None, :, None]
    stretches = ()
    for start in tl.static_range(0, TURNS, 4):
        turn = start + tl.arange(0, 4)[:, None, None, None]
        own = tl.minimum(own_of_turn(warp, turn, K, WARPS, 2), K // (2 * BLOCK) - 1)
        at = scale_ptr.to(tl.pointer_type(tl.int64)) + own * 2 + tl.arange(0, 2)[None, None, None, :]
        for half in tl.static_range(2):
            loaded = tl.load(at + eights[half][None, :, None, None] * (K // BLOCK))
            lines = tl.reshape(tl.permute(loaded, (2, 1, 0, 3)), [8 * WARPS, 4, 2])
            stretches = stretches + tl.split(lines)  # type: ignore[assignment]
    return stretches


@triton.jit
def with_scales(tile, stretches, number):
    """A turn of weights with its scales: those of `load_stretches`, or those that it has if there are none."""
    return tile if len(stretches) == 0 else (tile[0], scales_of_turn(stretches, number))


@triton.jit
def scales_of_turn(stretches, number):
    """A turn's scales, from those of `load_stretches`, as `of_group` takes them: [WARPS, 16] for each of two blocks."""
    LINES: tl.constexpr = stretches[0].shape[0]
    column = tl.zeros([LINES, 1], tl.int32) + number % 4
    pieces = ()
    for i in tl.static_range(4):
        # A shuffle: a lane gets it from one of its four.
        piece = tl.gather(stretches[i], column, 1)
        for four in tl.static_range(1, len(stretches) // 4):
            piece = tl.where(number // 4 == four, tl.gather(stretches[4 * four + i], column, 1), piece)
        pieces = pieces + (tl.reshape(piece, [LINES // 8, 8]),)  # type: ignore[assignment]  # noqa: RUF005
    return one_below_other(pieces[0], pieces[2]), one_below_other(pieces[1], pieces[3])  # type: ignore[misc]


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
    """Load the inputs of a turn: for each block of a warp two tiles of words [4, 8, WARPS, COLUMNS / 4, 4], a row's planes in
    neighbouring columns; and the blocks' factors [WARPS, COLUMNS]: zeros behind the last block and the last row."""
    own = own_of_turn(tl.arange(0, WARPS), number, K, WARPS, BLOCKS)
    known = own < K // (BLOCKS * BLOCK)
    own = tl.minimum(own, K // (BLOCKS * BLOCK) - 1)
    column = tl.arange(0, COLUMNS // 4)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    lane = tl.arange(0, 4)[:, None, None, None, None]
    inside = number * WARPS < K // (BLOCKS * BLOCK)
    row = tl.arange(0, COLUMNS)[None, :]
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
def store_operands(
    planes_ptr,
    factors_ptr,
    sums_ptr,
    x,
    row,
    block,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Store blocks [BLOCKS, 128] of a row in fixed point as `load_inputs` reads them: planes [K / 128, 2 COLUMNS * 128] and
    factors [K / 128, COLUMNS]. With SUMS also sums; see `store_sums`.

    A warp loads at once the 512 bytes that eight columns have for 64 elements of a block. With SPANS a lane's 16 bytes are 8
    of each of two spans, else neighbours.
    """
    upper, lower, scale = signed_bytes(x)
    store_column(planes_ptr, upper, block, 2 * row, K, COLUMNS, SPANS)
    store_column(planes_ptr, lower, block, 2 * row + 1, K, COLUMNS, SPANS)
    tl.store(factors_ptr + block * COLUMNS + row, scale / 16, mask=block < K // BLOCK)
    if SUMS:
        store_sums(sums_ptr, upper, lower, scale / 16, row, block, K)


@triton.jit
def store_column(planes_ptr, values, block, column, K: tl.constexpr, COLUMNS: tl.constexpr, SPANS: tl.constexpr):
    """Store one plane of a row, [BLOCKS, 128] int8."""
    within = tl.arange(0, BLOCK)[None, :]
    byte = within % 64
    if SPANS:
        byte = within // 8 % 4 * 16 + within // 32 % 2 * 8 + within % 8
    place = within // 64 * 512 + byte
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
    EARLY: tl.constexpr,
):
    """sums [WARPS, ROWS, COLUMNS] + the products of a turn's weights with bytes of the inputs, times scales and factors."""
    tiles, scales = tile
    columns, factors = inputs
    PIECES: tl.constexpr = BITS // 2
    for block in tl.static_range(len(scales)):
        weights = ()
        for piece in tl.static_range(PIECES):
            weights = weights + spans_of(tiles[block * PIECES + piece], GROUP, BITS, MINIMUM, EARLY)
        halves = columns[2 * block], columns[2 * block + 1]
        products = block_products(weights, halves, scales[block], GROUP, BITS, SCALE, COLUMNS)
        sums += products * factors[block][:, None, :]
    return sums


@triton.jit
def spans_of(words, GROUP: tl.constexpr, BITS: tl.constexpr, MINIMUM: tl.constexpr, EARLY: tl.constexpr):
    """The spans of which `words` are 32 bytes: two of four bits, as bytes that are a weight with MINIMUM, else 16 times a
    weight, or one of eight."""
    if BITS == 8:
        return (words,)
    elif (EARLY or GROUP == SPAN) and not INTERPRETED:
        # Of an AND with a constant the compiler makes operations of bytes, and of an AND and a XOR two instructions. So a
        # layer of an 8B with 4/8 rows takes 58.8/69.7 us in int4_min and 49.5/61.3 in int4 g32; with these instructions
        # 51.5/64.8 and 48.8/59.7, and in int4 g64 52.2/62.3, not 53.3/63.0 (one H200, 2026-12-01). On an 8.9, 8 rows in
        # groups of 64 would spill 48 bytes.
        CODE: tl.constexpr = DIVIDE if MINIMUM else UNPACK
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [words], (tl.int32, tl.int32), is_pure=True, pack=1)
    elif MINIMUM:
        return words & LOWER, (words >> 4) & LOWER
    else:
        return ((words << 4) & UPPER) ^ SIGNS, (words & UPPER) ^ SIGNS


@triton.jit
def block_products(
    weights,
    halves,
    scales,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The products of a block's four spans with the inputs, times scales: [WARPS, ROWS, COLUMNS]."""
    WARPS: tl.constexpr = scales.shape[0]
    ROWS: tl.constexpr = scales.shape[1]
    columns = ()
    for half in tl.static_range(2):
        both = tl.reshape(halves[half], [4, 8, WARPS, COLUMNS // 4, 2, 2])
        columns = columns + tl.split(tl.permute(both, (0, 1, 2, 3, 5, 4)))  # type: ignore[assignment]
    products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, 4, GROUP // SPAN):
        integers = tl.full([WARPS, ROWS, 2 * COLUMNS], ROUNDING_BITS, tl.int32)
        for span in tl.static_range(start, start + GROUP // SPAN):
            right = tl.permute(operand(columns[span]), (0, 2, 1))
            integers = tl.dot(operand(weights[span]), right, integers, out_dtype=tl.int32)
        scale = of_group(scales, start * SPAN, GROUP, SCALE)
        products += (joined_shortly(integers) if BITS == 4 else joined(integers)) * scale[:, :, None]
    return products


@triton.jit
def operand(words):
    """Words [4, 8, WARPS, LINES / 8, 2] -> [WARPS, LINES, 32] int8, the left operand of a product; the right one must be
    transposed. Moves no data: a lane has eight neighbouring bytes of a line, as for `mma`."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    # Dimensions: lane, line of eight, warp, eight, word, and the byte of a word in two.
    return tl.reshape(tl.permute(tl.join(even, odd), (2, 3, 1, 0, 4, 5, 6)), [words.shape[2], words.shape[3] * 8, SPAN])
