# mypy: allow-untyped-defs
"""Rows in bfloat16 times integer weights in groups of 32, 64 or 128: products in bfloat16 on tensor cores.

Weights without their scales are exact in bfloat16. They are unpacked in registers: a word of eight four-bit weights takes
eleven instructions, one of four eight-bit weights seven. A *piece* is 32 neighbouring elements of a row; no group is shorter.
The product of a group is multiplied by the group's scale in float32. So nothing is rounded but the input, to bfloat16, and
the output. The minima of all groups are multiplied by the groups' sums of inputs in one more product, ahead of the others.

A block has 128 elements: 16 words of four-bit weights, or 32 words. Four lanes share a row of a tensor core's operand; lane c
has elements 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16. Each lane should read two neighbouring words of a piece, 2c and
2c + 1, and unpack bytes 0 and 2 of a word together, and 1 and 3. So `order_rows_early` gives the inputs for these bytes the
places that lane c has.

A row's result depends on that row alone, and its sums always have the same order. So the result is the same bits, whatever
stands in the other rows, and in whichever column the row stands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_fixed_triton import GATE_ROWS, write_gates, write_outputs
from .rows_prepare_triton import prepared_blocks
from .rows_tiles_triton import BLOCK
from .scales_triton import of_pair

PIECE = tl.constexpr(32)
# Groups whose minima are multiplied at once.
MINIMA = tl.constexpr(32)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def order_rows_early(
    x_ptr,
    norm_ptr,
    squares_ptr,
    normed_ptr,
    sums_ptr,
    counters_ptr,
    inputs_ptr,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write rows x [R, K] to inputs [R, B * 128] bfloat16 in the order of `element_at`, zeros past K; BLOCKS blocks per
    program.

    Args:
        NORM: whether x is normed over K elements.
        HEADS: number of heads of a row, which are divided by their root mean squares; 0: x has no heads.
        PARTS: number of parts of a head's sum of squares.
        NORMED: whether normed [R, K] is written too: the normed rows in x's dtype and order.
        SUMS: whether sums [R, B * 4] float32 is written, the sums of the inputs of each piece.
        COUNTERS: number of counters that are set to zero for each COLUMNS rows.
        BLOCKS: with NORM all blocks of a row.
    """
    start_next(EARLY)
    WIDTH: tl.constexpr = (K + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCK)
    x = prepared_blocks(x_ptr, norm_ptr, squares_ptr, row, block, within, EPS, K, NORM, HEADS, PARTS, EARLY)
    rounded = x.to(tl.bfloat16)
    offsets = block[:, None] * BLOCK + within[None, :]
    tl.store(inputs_ptr + row * (WIDTH * BLOCK) + offsets, in_places(rounded), mask=(block < WIDTH)[:, None])
    if NORMED:
        tl.store(normed_ptr + row * K + offsets, rounded, mask=offsets < K)
    if SUMS:
        pieces = tl.reshape(rounded.to(tl.float32), [BLOCKS * (BLOCK // PIECE), PIECE])
        piece = tl.program_id(1) * (BLOCKS * (BLOCK // PIECE)) + tl.arange(0, BLOCKS * (BLOCK // PIECE))
        at = sums_ptr + row * (WIDTH * (BLOCK // PIECE)) + piece
        tl.store(at, tl.sum(pieces, 1), mask=piece < WIDTH * (BLOCK // PIECE))
    if COUNTERS > 0 and row % COLUMNS == 0 and tl.program_id(1) == 0:
        counter = tl.arange(0, triton.next_power_of_2(COUNTERS))
        zeros = tl.zeros([triton.next_power_of_2(COUNTERS)], tl.int32)
        tl.store(counters_ptr + row // COLUMNS * COUNTERS + counter, zeros, mask=counter < COUNTERS)


@triton.jit
def in_places(blocks):
    """Blocks [BLOCKS, 128] of a row, in the order of `element_at`."""
    # Dimensions: block, piece, lane, four of eight, pair, element of a pair.
    parts = tl.reshape(blocks, [blocks.shape[0], BLOCK // PIECE, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 4)), [blocks.shape[0], BLOCK])


@triton.jit
def element_at(place):
    """The element of a row that stands in each place of the inputs; an element stays in its piece. See `in_lanes`."""
    return place // PIECE * PIECE + place // 2 % 4 * 8 + place // 16 % 2 * 4 + place // 8 % 2 + place % 2 * 2


@triton.jit
def place_of(element):
    """The place of a row's element, the inverse of `element_at`."""
    return element // PIECE * PIECE + element // 8 % 4 * 2 + element // 4 % 2 * 16 + element % 2 * 8 + element // 2 % 2


@triton.jit
def grouped_rows_early(
    inputs_ptr,
    sums_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    residual_ptr,
    gates_ptr,
    normed_ptr,
    gated_ptr,
    counters_ptr,
    parts_ptr,
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
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N]: the product of rows with a weight, and the operations behind it, as `fixed_rows_early` does.

    K is a multiple of 64 and of the group size. The kernel is a late one (R3 in `delegate/graphs/nodes.py`): the next kernel
    starts after the loop. The products of a layer 4,096 and 14,336 wide in int4 then take 104 and 113 us with 8 and 32 rows,
    and 118 and 132 us if it starts after this kernel's wait (H100, 2026-11-26).
    """
    rows = tl.cast(rows, tl.int32)
    GATE_TILES: tl.constexpr = (GATES + GATE_ROWS - 1) // GATE_ROWS
    tile = tl.program_id(2) - GATE_TILES
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if GATES > 0 and tile < 0:
        wait_for_previous(EARLY)
        start_next(EARLY)
        if tl.program_id(1) == 0:
            write_gates(normed_ptr, gates_ptr, gated_ptr, rows, row, tl.program_id(2) * GATE_ROWS, GATES, K, COLUMNS)
    else:
        output = tile * ROWS + tl.arange(0, ROWS)
        stored = weight_ptr, scale_ptr, minimum_ptr
        sums, ups = multiply_groups(
            inputs_ptr, sums_ptr, stored, output, row, rows, N, K, GROUP, BITS, MINIMUM, SWIGLU, ROWS, COLUMNS,
            SPLITS, EARLY,
        )  # fmt: skip
        write_outputs(
            sums, ups, bias_ptr, residual_ptr, counters_ptr, parts_ptr, out_ptr, output, row, rows, tile, N, BIAS,
            RESIDUAL, SWIGLU, GATE_TILES, COLUMNS, SPLITS,
        )  # fmt: skip


@triton.jit
def multiply_groups(
    inputs_ptr,
    sums_ptr,
    stored,
    output,
    row,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products of outputs [ROWS] and rows [COLUMNS] over this program's part of K; with SWIGLU also those of outputs + N."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    AT_ONCE: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    SCALE: tl.constexpr = stored[1].dtype.element_ty
    begin = tl.program_id(1) * AT_ONCE
    end = tl.minimum(begin + AT_ONCE, BLOCKS)
    first = tl.minimum(begin, BLOCKS - 1)
    # Rows past the last read the last row again.
    at = output if N % ROWS == 0 else tl.minimum(output, N - 1)
    scales = load_block_scales(stored[1], at, first, K, GROUP)
    up_scales = scales
    if SWIGLU:
        up_scales = load_block_scales(stored[1], at + N, first, K, GROUP)
    wait_for_previous(EARLY)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = sums
    if MINIMUM:
        # Pieces of a row, and of this program's part.
        PIECES: tl.constexpr = BLOCKS * (BLOCK // PIECE)
        start, last = begin * (BLOCK // PIECE), tl.minimum(end * (BLOCK // PIECE), K // PIECE)
        sums = multiply_minima(sums, sums_ptr + row * PIECES, row < rows, stored[2], at, start, last, K)
        if SWIGLU:
            ups = multiply_minima(ups, sums_ptr + row * PIECES, row < rows, stored[2], at + N, start, last, K)
    # Words of a weight row.
    ROW: tl.constexpr = K * BITS // 32
    words = stored[0].to(tl.pointer_type(tl.uint32))
    weights_at = words + at.to(tl.int64)[:, None] * ROW + tl.arange(0, 16)[None, :]
    inputs_at = inputs_ptr + row[None, :] * (BLOCKS * BLOCK) + tl.arange(0, PIECE)[:, None]
    for block in range(begin, end):
        # The next block's scales are loaded while this block is multiplied.
        following = tl.minimum(block + 1, BLOCKS - 1)
        next_scales = load_block_scales(stored[1], at, following, K, GROUP)
        next_up_scales = next_scales
        if SWIGLU:
            next_up_scales = load_block_scales(stored[1], at + N, following, K, GROUP)
        inputs = load_pieces(inputs_at + block * BLOCK, row, rows, COLUMNS)
        weights = load_weights(weights_at, block, K, BITS, MINIMUM)
        sums = add_products(sums, weights, inputs, scales, GROUP, SCALE)
        if SWIGLU:
            weights = load_weights(weights_at + N * ROW, block, K, BITS, MINIMUM)
            ups = add_products(ups, weights, inputs, up_scales, GROUP, SCALE)
        scales, up_scales = next_scales, next_up_scales
    start_next(EARLY)
    return sums, ups


@triton.jit
def load_block_scales(scale, weight_row, block, K: tl.constexpr, GROUP: tl.constexpr):
    """The scales of a block's groups, [ROWS], in one integer: `of_group` takes them apart. Groups past K have zeros."""
    GROUPS: tl.constexpr = K // GROUP
    if GROUP == 128:
        bits = tl.load(scale + weight_row * GROUPS + block)
    elif GROUP == 64 and K % 128 == 0:
        bits = tl.load(scale.to(tl.pointer_type(tl.int32)) + weight_row * (GROUPS // 2) + block)
    elif GROUP == 64:
        halves = scale.to(tl.pointer_type(tl.uint16)) + weight_row * GROUPS + block * 2
        second = tl.load(halves + 1, mask=block * 2 + 1 < GROUPS, other=0)
        bits = (tl.load(halves).to(tl.uint32) | (second.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    elif K % 128 == 0:
        bits = tl.load(scale.to(tl.pointer_type(tl.int64)) + weight_row * (GROUPS // 4) + block)
    else:
        pairs = scale.to(tl.pointer_type(tl.uint32)) + weight_row * (GROUPS // 2) + block * 2
        second = tl.load(pairs + 1, mask=block * 2 + 1 < GROUPS // 2, other=0)
        bits = (tl.load(pairs).to(tl.uint64) | (second.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    return bits


@triton.jit
def of_group(bits, PLACE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """The scale, float32, of the group that begins PLACE elements after the beginning of a block."""
    if GROUP == 128:
        scale = bits.to(tl.float32)
    elif GROUP == 64:
        scale = of_pair(bits, PLACE == 64, SCALE)
    else:
        scale = of_pair((bits >> 32) if PLACE >= 64 else bits, PLACE % 64 == 32, SCALE)
    return scale


@triton.jit
def multiply_minima(sums, inputs_at, filled, minimum_ptr, weight_row, first, last, K: tl.constexpr):
    """sums [ROWS, COLUMNS] + the minima of the groups `first` to `last` of a row times the sums of their inputs.

    inputs_at: where each column's sums of pieces begin, [COLUMNS]; those of columns that are not `filled` are not read.
    """
    for start in range(first, last, MINIMA):
        group = start + tl.arange(0, MINIMA)
        minima = minimum_ptr + weight_row[:, None] * (K // PIECE) + group[None, :]
        minima = tl.load(minima, mask=(group < last)[None, :], other=0.0).to(tl.float32)
        inputs = inputs_at[None, :] + group[:, None]
        inputs = tl.load(inputs, mask=(group < last)[:, None] & filled[None, :], other=0.0)
        sums = tl.dot(minima, inputs, sums, input_precision="tf32x3")
    return sums


@triton.jit
def load_pieces(inputs_at, row, rows, COLUMNS: tl.constexpr):
    """The four pieces of a block of inputs, [32, COLUMNS] each."""
    # Masks for more than 16 columns would take registers. What they load belongs to columns that are not written.
    MASKED: tl.constexpr = COLUMNS <= 16
    pieces = ()
    for piece in tl.static_range(4):
        at = inputs_at + piece * PIECE
        loaded = tl.load(at, mask=(row < rows)[None, :], other=0.0) if MASKED else tl.load(at)
        pieces = pieces + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def load_weights(weights_at, block, K: tl.constexpr, BITS: tl.constexpr, MINIMUM: tl.constexpr):
    """The four pieces of a block of weights, [ROWS, 32] bfloat16 each, without scales."""
    if BITS == 4:
        # Words past the end of the row multiply inputs that are zeros.
        inside = None if K % 128 == 0 else (block * 16 + tl.arange(0, 16) < K // 8)[None, :]
        words = tl.load(weights_at + block * 16, mask=inside, other=None if K % 128 == 0 else 0)
        even_low, odd_low, even_high, odd_high = unpack_nibbles(words, MINIMUM)
        first, third = in_lanes(even_low, odd_low)
        second, fourth = in_lanes(even_high, odd_high)
    else:
        even, odd = unpack_bytes(tl.load(weights_at + block * 32))
        first, second = in_lanes(even, odd)
        inside = None if K % 128 == 0 else block * 128 + 64 < K
        rest = tl.load(weights_at + (block * 32 + 16), mask=inside, other=None if K % 128 == 0 else 0)
        even, odd = unpack_bytes(rest)
        third, fourth = in_lanes(even, odd)
    return first, second, third, fourth


@triton.jit
def in_lanes(even, odd):
    """Pairs of bfloat16 [ROWS, 16], those of the words' even bytes and of their odd bytes -> two pieces [ROWS, 32].

    The pieces' elements stand in the order of `element_at`. This moves no data.
    """
    of_even = tl.join(of_halves(even, False), of_halves(even, True))
    of_odd = tl.join(of_halves(odd, False), of_halves(odd, True))
    # Dimensions: row, piece, lane, word, byte of a pair, pair.
    parts = tl.reshape(tl.join(of_even, of_odd), [even.shape[0], 2, 4, 2, 2, 2])
    return tl.split(tl.reshape(tl.permute(parts, (0, 3, 5, 2, 4, 1)), [even.shape[0], PIECE, 2]))


@triton.jit
def of_halves(pairs, SECOND: tl.constexpr):
    """The lower or the upper bfloat16 of each 32 bits."""
    return ((pairs >> 16) if SECOND else pairs).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def add_products(sums, weights, inputs, scales, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """sums [ROWS, COLUMNS] + the products of a block's pieces, times the scales of their groups."""
    for start in tl.static_range(0, 4, GROUP // PIECE):
        product = tl.dot(weights[start], inputs[start])
        for piece in tl.static_range(start + 1, start + GROUP // PIECE):
            product = tl.dot(weights[piece], inputs[piece], product)
        sums += product * of_group(scales, start * PIECE, GROUP, SCALE)[:, None]
    return sums


@triton.jit
def unpack_nibbles(words, MINIMUM: tl.constexpr):
    """Words uint32 -> pairs of bfloat16, int32: low nibbles of even and of odd bytes, then high nibbles of both.

    A nibble in the low mantissa bits of the bfloat16 128 makes it 128 + nibble. With MINIMUM a nibble is q, else q + 8.
    """
    if INTERPRETED:
        offset: tl.constexpr = 0 if MINIMUM else 8
        even_low = pair_of((words & 15).to(tl.int32) - offset, (words >> 16 & 15).to(tl.int32) - offset)
        odd_low = pair_of((words >> 8 & 15).to(tl.int32) - offset, (words >> 24 & 15).to(tl.int32) - offset)
        even_high = pair_of((words >> 4 & 15).to(tl.int32) - offset, (words >> 20 & 15).to(tl.int32) - offset)
        odd_high = pair_of((words >> 12 & 15).to(tl.int32) - offset, (words >> 28 & 15).to(tl.int32) - offset)
    else:
        # -128 or -136, twice.
        OFFSET: tl.constexpr = "0xc300c300" if MINIMUM else "0xc308c308"
        even_low, odd_low, even_high, odd_high = tl.inline_asm_elementwise(
            """{
            .reg .b32 high, next, both, mask, magic, one, offset;
            mov.b32 mask, 0x000f000f;
            mov.b32 magic, 0x43004300;
            mov.b32 one, 0x3f803f80;
            mov.b32 offset, """
            + OFFSET
            + """;
            shr.u32 high, $4, 4;
            shr.u32 next, $4, 8;
            shr.u32 both, $4, 12;
            lop3.b32 $0, $4, mask, magic, 0xEA;
            lop3.b32 $1, next, mask, magic, 0xEA;
            lop3.b32 $2, high, mask, magic, 0xEA;
            lop3.b32 $3, both, mask, magic, 0xEA;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return even_low, odd_low, even_high, odd_high


@triton.jit
def unpack_bytes(words):
    """Words uint32 of signed bytes -> pairs of bfloat16, int32: the even bytes, then the odd bytes.

    The low seven bits of a byte in the mantissa of the bfloat16 128 make 128 + these bits. The byte's sign bit makes 128 or
    256 of the same constant, which is subtracted.
    """
    if INTERPRETED:
        signed = words.to(tl.int32, bitcast=True)
        even, odd = pair_of(signed << 24 >> 24, signed << 8 >> 24), pair_of(signed << 16 >> 24, signed >> 24)
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 next, first, second, low, sign, magic, minus;
            mov.b32 low, 0x007f007f;
            mov.b32 sign, 0x00800080;
            mov.b32 magic, 0x43004300;
            mov.b32 minus, 0xbf80bf80;
            shr.u32 next, $2, 8;
            lop3.b32 $0, $2, low, magic, 0xEA;
            lop3.b32 $1, next, low, magic, 0xEA;
            lop3.b32 first, $2, sign, magic, 0xEA;
            lop3.b32 second, next, sign, magic, 0xEA;
            fma.rn.bf16x2 $0, first, minus, $0;
            fma.rn.bf16x2 $1, second, minus, $1;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return even, odd


@triton.jit
def pair_of(first, second):
    """Two integers as a pair of bfloat16, for the interpreter."""
    lower = (first.to(tl.float32).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return lower | (second.to(tl.float32).to(tl.int32, bitcast=True) & -65536)
