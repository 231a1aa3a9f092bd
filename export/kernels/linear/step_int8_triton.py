# mypy: allow-untyped-defs
"""Eight-bit weights in the tiles of `step_tiles_triton`: products of words that hold four neighbouring elements of a row.

From a byte to a number, in float32. With its sign bit flipped a byte is q + 128. Masked out of its word and read as the bits
of a float32 it is that number times a power of two, as nibbles are in `step_int4_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_fixed_point_triton import fixed_point, multiply_bytes
from .step_int4_triton import SHIFT, sum_four

# The place of each byte's lowest bit: in its word or, for the last byte, in the word shifted right by 8.
BYTE_PLACES = tl.constexpr((0, 8, 16, 16))


@triton.jit
def multiply_int8(sums, tile, x, factor, ROWS: tl.constexpr, INTEGER: tl.constexpr):
    """Add words times x (four tiles) times `factor` ([LANES] or 1) to the rows' sums, [LANES] each.

    With INTEGER the products are in fixed point, for inputs that had 8 bits (bfloat16); else they are in float32.
    """
    words, scales, _ = tile
    if INTEGER:
        pairs, lane_scale = fixed_point(x)
        factor *= lane_scale
    else:
        scaled, start = byte_coefficients(x)
        factor *= 2.0 ** (149 - SHIFT)
    added = ()
    for row in tl.static_range(ROWS):
        if INTEGER:
            product = multiply_bytes(words[row], pairs).to(tl.float32)
        else:
            product = multiply_byte_row(words[row], scaled, start)
        # Triton does not take a starred expression.
        added = added + (sums[row] + product * (scales[row].to(tl.float32) * factor),)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit
def byte_coefficients(x):
    """The factors of `multiply_byte_row`, four tiles of x times powers of two, and the tile from which its sums start.

    The start subtracts the 128s, word by word.
    """
    scaled = ()
    start = tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(4):
        one = x[i] * 2.0 ** (SHIFT - BYTE_PLACES[i])
        start += one * (-128.0 * 2.0 ** (BYTE_PLACES[i] - 149))
        scaled = scaled + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return scaled, start


@triton.jit
def multiply_byte_row(words, scaled, start):
    """Each lane's sum over its words of weight times input, too large by 2^(SHIFT - 149): [LANES]."""
    flipped = words ^ 0x80808080
    total = start
    for i in tl.static_range(4):
        byte = (flipped if i < 3 else flipped >> 8) & (255 << BYTE_PLACES[i])
        total += byte.to(tl.float32, bitcast=True) * scaled[i]
    return sum_four(total)
