# mypy: allow-untyped-defs
"""What the matrix-vector kernels of a decode step consist of: tiles of packed words, their inputs, and the sum over lanes.

A tile of one dimension holds WORDS 32-bit words of one row, four neighbouring ones (16 bytes) per lane, so that a lane uses
the same inputs in all of a program's rows.

Words. The layout is that of `formats`. Read as 32-bit words, word `j` of a span's eight holds the elements `4 j` to `4 j + 3`
in its nibbles 0, 2, 4, 6, and the elements that are 32 after those in its nibbles 1, 3, 5, 7.

From a nibble to a number. A nibble masked out of its word and read as the bits of a float32 is the number q 2^(p - 149),
where p is the place of its lowest bit: subnormal numbers and those of the first exponent are evenly spaced, so this holds
up to bit 23. The input is multiplied by 2^(SHIFT - p) beforehand and the sum by 2^(149 - SHIFT) afterwards, all exact. So
a nibble costs an AND and a multiply-add. At the memory's full speed a multiprocessor receives 37 nibbles per clock and
can issue on 128 lanes, too few to extract and convert each nibble. With SHIFT = 80 inputs may be as large as 2^47, and
what is lost of them is below 2^-69.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_fixed_point_triton import fixed_point, multiply_words, offsets

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SHIFT = tl.constexpr(80)
# Words per lane.
LANE = tl.constexpr(4)
# The lowest bit of each nibble in its word or, from nibble 3 on, in the word shifted right by 8. Nibble 2 in the shifted word
# would cost a shift of its own.
PLACES = tl.constexpr((0, 4, 8, 4, 8, 12, 16, 20))


@triton.jit
def extended(tiles, tile):
    """A tuple with one more at its end; Triton does not take a starred expression."""
    return tiles + (tile,)  # noqa: RUF005


@triton.jit
def load_tile(
    weight,
    scale,
    first_row,
    START: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    APART: tl.constexpr = 0,
):
    """The words from START of ROWS rows: ROWS tiles [WORDS] uint32, and their scales, [LANES] bfloat16.

    In groups of 64 and more there is one tile of scales per row. In groups of 32 there are two: first the tiles for the low
    nibbles of all rows, then those for the high nibbles. Rows past the last are the last one again. With APART the second
    half of the rows begins APART rows after the first half, not directly after it.
    """
    word, inside = tile_words(START, 1, K, WORDS)
    lane_word, lane_inside = tile_words(START, LANE, K, WORDS)
    words = weight.to(tl.pointer_type(tl.uint32)) + first_row.to(tl.int64) * (K // 8)
    groups = scale + first_row.to(tl.int64) * (K // GROUP)
    word_tiles = ()
    scale_tiles = ()
    for row in tl.static_range(ROWS):
        step = row_step(row, first_row, N, ROWS, APART)
        word_tiles = extended(word_tiles, tl.load(words + word + step * (K // 8), mask=inside, other=0))
    for half in tl.static_range(2 if GROUP == 32 else 1):
        for row in tl.static_range(ROWS):
            step = row_step(row, first_row, N, ROWS, APART)
            group = lane_word // 8 * 64 // GROUP + half + step * (K // GROUP)
            scale_tiles = extended(scale_tiles, tl.load(groups + group, mask=lane_inside, other=0.0))
    return word_tiles, scale_tiles


@triton.jit
def row_step(ROW: tl.constexpr, first_row, N: tl.constexpr, ROWS: tl.constexpr, APART: tl.constexpr):
    """How many rows after the first one row ROW is: a constant, which loads fold in, if no row is past the last."""
    if APART > 0:
        tl.static_assert(N % APART == 0 and APART % (ROWS // 2) == 0)
        return ROW % (ROWS // 2) + ROW // (ROWS // 2) * APART
    elif N % ROWS == 0:
        return ROW
    else:
        return tl.minimum(ROW, N - 1 - first_row)


@triton.jit
def tile_words(START: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr):
    """Every STEP-th word of the tile from START, and whether it is in the row: a constant where all are."""
    word = START + tl.arange(0, WORDS // STEP) * STEP
    return word, (word < K // 8) | (K // 8 % WORDS == 0)


@triton.jit
def load_eights(vector, START: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr):
    """What the nibbles 0 to 7 of each word in a tile multiply, as float32 tiles [WORDS]; past the row's end zeros."""
    word, inside = tile_words(START, 1, K, WORDS)
    return load_eights_at(vector, first_fours(word), inside)


@triton.jit
def load_eights_at(vector, low, inside):
    """`load_eights` where the low nibbles multiply the fours `low`; zeros where not `inside`."""
    if vector.dtype.element_ty == tl.bfloat16:
        # Four at once in 64 bits.
        fours = vector.to(tl.pointer_type(tl.int64))
        low_bits = tl.load(fours + low, mask=inside, other=0)
        high_bits = tl.load(fours + low + 8, mask=inside, other=0)
        x0, x2 = two_floats(low_bits.to(tl.int32))
        x4, x6 = two_floats((low_bits >> 32).to(tl.int32))
        x1, x3 = two_floats(high_bits.to(tl.int32))
        x5, x7 = two_floats((high_bits >> 32).to(tl.int32))
    else:
        x0, x2, x4, x6 = load_fours(vector, low, inside)
        x1, x3, x5, x7 = load_fours(vector, low + 8, inside)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def first_fours(word):
    """Which four neighbours of the input a word's low nibbles multiply; its high ones multiply those 8 fours later."""
    return word // 8 * 16 + word % 8


@triton.jit
def load_fours(floats, four, inside):
    """Elements 4 i to 4 i + 3 of a float32 vector for i in `four`, as four tiles like it."""
    first = floats + four * 4
    return (
        tl.load(first, mask=inside, other=0.0),
        tl.load(first + 1, mask=inside, other=0.0),
        tl.load(first + 2, mask=inside, other=0.0),
        tl.load(first + 3, mask=inside, other=0.0),
    )


@triton.jit
def load_constant_fours(floats, four, inside):
    """`load_fours` 16 bytes at a time, of data aligned to 16 bytes that no kernel writes; arbitrary where not `inside`.

    The compiler joins only loads of one tile: four loads would each touch every line. If this were not pure, torch would
    assume that the kernel writes every argument. As `ld.global.nc` it would be moved down to its use, past the wait.
    """
    if INTERPRETED:
        w0, w1, w2, w3 = load_fours(floats, four, inside)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l",
            [(floats + tl.where(inside, four, 0) * 4).to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return w0, w1, w2, w3


@triton.jit
def two_floats(bits):
    """The two bfloat16 numbers in an int32 as float32, the lower half first: a bfloat16 is the upper half of its float32."""
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def load_norm(norm, START: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr):
    """The factors of what `load_eights` gives of x: 1 + the norm's weight."""
    word, inside = tile_words(START, 1, K, WORDS)
    low = first_fours(word)
    w0, w2, w4, w6 = load_constant_fours(norm, low, inside)
    w1, w3, w5, w7 = load_constant_fours(norm, low + 8, inside)
    weights = (w0, w1, w2, w3, w4, w5, w6, w7)
    factors = ()
    for i in tl.static_range(8):
        factors = extended(factors, 1.0 + weights[i])
    return factors


@triton.jit
def multiply_tile(sums, tile, x, factor, GROUP: tl.constexpr, ROWS: tl.constexpr, INTEGER: tl.constexpr):
    """The rows' sums, [LANES] each, with a tile of `load_tile` times x, eight tiles, times `factor`, [LANES] or 1.

    With INTEGER in fixed point, for inputs that had 8 bits, else in float32.
    """
    words, scales = tile
    if INTEGER:
        bytes, lane_scale = fixed_point(x)
        started = offsets(bytes)
        factor *= lane_scale
    else:
        nibbles, low, high = coefficients(x, GROUP)
        factor *= 2.0 ** (149 - SHIFT)
    added = ()
    for row in tl.static_range(ROWS):
        scale = scales[row].to(tl.float32) * factor
        high_scale = scales[(ROWS if GROUP == 32 else 0) + row].to(tl.float32) * factor
        if INTEGER:
            low_sum, high_sum = multiply_words(words[row], bytes, started)
            if GROUP == 32:
                product = low_sum.to(tl.float32) * scale + high_sum.to(tl.float32) * (high_scale * 2.0**-4)
            else:
                product = (low_sum * 16 + high_sum).to(tl.float32) * (scale * 2.0**-4)
        else:
            product = multiply_row(words[row], nibbles, low, high, scale, high_scale, GROUP)
        added = extended(added, sums[row] + product)
    return added


@triton.jit
def coefficients(x, GROUP: tl.constexpr):
    """What `multiply_row` multiplies by, eight tiles of x times powers of two, and the two tiles that it starts from.

    In groups of 64 and more nibble 7 is not masked out: the shifted word as it is holds nibbles 2 to 7, 24 bits. So the
    factor of nibble 7 is subtracted from those of the others. The start subtracts the 8 in each nibble's q + 8, word by
    word, so that no large numbers cancel; in groups of 32 there is one start for the low nibbles and one for the high
    ones.
    """
    last = x[7] * 2.0 ** (SHIFT - PLACES[7])
    nibbles = ()
    low = tl.zeros(last.shape, tl.float32)
    high = tl.zeros(last.shape, tl.float32)
    for i in tl.static_range(8):
        scaled = x[i] * 2.0 ** (SHIFT - PLACES[i])
        if i % 2 == 0:
            low += scaled * (-8.0 * 2.0 ** (PLACES[i] - 149))
        else:
            high += scaled * (-8.0 * 2.0 ** (PLACES[i] - 149))
        if GROUP > 32 and i == 2:
            scaled -= last * 2.0**-8
        elif GROUP > 32 and i > 2 and i < 7:
            scaled -= last
        nibbles = extended(nibbles, scaled)
    if GROUP > 32:
        low += high
    return nibbles, low, high


@triton.jit
def multiply_row(words, nibbles, low, high, scale, high_scale, GROUP: tl.constexpr):
    """Sums over each lane's words of weight times input, [LANES], times 2^(SHIFT - 149)."""
    # A nibble masked out of its word is a float32: see the top of the file.
    shifted = words >> 8
    if GROUP > 32:
        low += shifted.to(tl.float32, bitcast=True) * nibbles[7]
        for i in tl.static_range(3):
            low += masked(words, i) * nibbles[i]
        for i in tl.static_range(3, 7):
            low += masked(shifted, i) * nibbles[i]
        return sum_lane(low) * scale
    for i in tl.static_range(0, 8, 2):
        low += masked(words if i < 3 else shifted, i) * nibbles[i]
        high += masked(words if i + 1 < 3 else shifted, i + 1) * nibbles[i + 1]
    return sum_lane(low) * scale + sum_lane(high) * high_scale


@triton.jit
def masked(words, NIBBLE: tl.constexpr):
    return (words & (15 << PLACES[NIBBLE])).to(tl.float32, bitcast=True)


@triton.jit
def zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = extended(tiles, tl.zeros([LANES], tl.float32))
    return tiles


@triton.jit
def sum_lane(x):
    """[WORDS] -> [LANES]."""
    return tl.sum(tl.reshape(x, [x.shape[0] // LANE, LANE]), axis=1)


@triton.jit
def sum_eights(x, WARPS: tl.constexpr):
    """[ELEMENTS] -> [32 WARPS]: a lane sums eight neighbours, and eight more in every further 256 WARPS elements."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0] // (256 * WARPS), 32 * WARPS, 8]), axis=2), axis=0)


@triton.jit
def exchange(x, lane, DISTANCE: tl.constexpr):
    """x [WARPS, 32] from the lane DISTANCE away: a shuffle."""
    return tl.gather(x, lane ^ DISTANCE, axis=1)


@triton.jit
def sum_rows(sums, squares, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The sums over the lanes of ROWS tiles [32 WARPS], and of one more tile: two tensors [32].

    In the first, lane l has the total of row l ROWS // 32; in the second all lanes have the one total. Each step halves the
    rows that a lane has, so that n rows take n shuffles and not 5 n. Then all warps' sums go through shared memory at once,
    with one barrier.
    """
    tl.static_assert(ROWS <= 32)
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [WARPS, 32])
    rows = by_warp(sums, ROWS, WARPS)
    square = tl.reshape(squares, [WARPS, 32])
    for step in tl.static_range(5):
        rows = halved(rows, lane, 16 >> step, ROWS >> step)
        square += exchange(square, lane, 16 >> step)
    return sum_warps(rows[0], square, WARPS)


@triton.jit
def by_warp(tiles, COUNT: tl.constexpr, WARPS: tl.constexpr):
    reshaped = ()
    for i in tl.static_range(COUNT):
        reshaped = extended(reshaped, tl.reshape(tiles[i], [WARPS, 32]))
    return reshaped


@triton.jit
def halved(rows, lane, DISTANCE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles [WARPS, 32] -> half as many: of every two, a lane keeps one, summed with that of the lane DISTANCE away.

    A single tile is summed in the same way.
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
def sum_warps(x, y, WARPS: tl.constexpr):
    """Two [WARPS, 32] -> two [32]. A split needs both parts in one thread, so all warps' sums get into its registers."""
    both = tl.permute(tl.join(x, y), (1, 2, 0))
    # In a loop a tile cannot change its type, so each number of warps is written out.
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
