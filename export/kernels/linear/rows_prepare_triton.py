# mypy: allow-untyped-defs
"""Rows in fixed point, as `rows_fixed_triton` multiplies them: normed, and in the order in which weights are unpacked.

A block has 128 elements. They stand in the order of the weights that multiply them: [2 nibbles][64 bytes]. A block has one
scale, a power of two that brings its largest element to between 2^14 and 2^15. Each element is rounded to an integer, which
is 256 times a signed byte plus another signed byte. A row is stored as a plane of upper bytes and a plane of lower bytes. The
error is at most 2^-15 of the block's largest element, and zero for a bfloat16 within a factor of 2^7 of that element. Stored
scales are divided by 16, since unpacked weights are 16 times too large (`rows_tiles_triton.unpack_bytes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_tiles_triton import BLOCK, nibble_order
from .step_fixed_point_triton import ROUNDING


@triton.jit
def prepare_rows_early(
    x_ptr,
    norm_ptr,
    squares_ptr,
    normed_ptr,
    counters_ptr,
    planes_ptr,
    factors_ptr,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNTERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Convert rows x [R, K] to planes [R, 2, K] int8 and factors [R, K / 128] float32, the blocks' scales; a row per program.

    Args:
        NORM: whether x is normed over K elements.
        HEADS: number of heads of a row, which are divided by their root mean squares; 0: x has no heads.
        PARTS: number of parts of a head's sum of squares.
        NORMED: whether normed [R, K] is written: the normed or divided rows in x's dtype and order.
        COUNTERS: number of counters that are set to zero for each COLUMNS rows.
    """
    start_next(EARLY)
    BLOCKS: tl.constexpr = K // BLOCK
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))
    order = nibble_order(tl.arange(0, BLOCK))
    x = prepared_blocks(x_ptr, norm_ptr, squares_ptr, row, block, order, EPS, K, NORM, HEADS, PARTS, EARLY)
    store_planes(planes_ptr, factors_ptr, x, row, block, K)
    if NORMED:
        element = block[:, None] * BLOCK + order[None, :]
        tl.store(normed_ptr + row * K + element, x.to(normed_ptr.dtype.element_ty), mask=element < K)
    if COUNTERS > 0 and row % COLUMNS == 0:
        counter = tl.arange(0, triton.next_power_of_2(COUNTERS))
        zeros = tl.zeros([triton.next_power_of_2(COUNTERS)], tl.int32)
        tl.store(counters_ptr + row // COLUMNS * COUNTERS + counter, zeros, mask=counter < COUNTERS)


@triton.jit
def prepared_blocks(
    x_ptr,
    norm_ptr,
    squares_ptr,
    row,
    block,
    order,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Wait, then load blocks [BLOCKS] of a row and norm or divide them: [BLOCKS, 128] float32, zeros behind the last.

    Args:
        block: with NORM all blocks of the row.
        order: the elements of a block [128], in the order of the result.
    """
    element = block[:, None] * BLOCK + order[None, :]
    inside = element < K
    if NORM:
        factor = tl.load(norm_ptr + element, mask=inside, other=0.0)
    wait_for_previous(EARLY)
    x = tl.load(x_ptr + row * K + element, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(tl.sum(x * x, 1), 0) / K
        x = x * factor * tl.rsqrt(mean + EPS)
    if HEADS > 0:
        x = x * head_factors(squares_ptr + row * (HEADS * PARTS), block, element, inside, EPS, K // HEADS, PARTS)
    return x


@triton.jit
def store_planes(planes_ptr, factors_ptr, x, row, block, K: tl.constexpr):
    """Store blocks [BLOCKS, 128] of a row in fixed point, in their order: planes [R, 2, K] and factors [R, K / 128]."""
    upper, lower, scale = signed_bytes(x)
    inside = (block < K // BLOCK)[:, None]
    planes = planes_ptr + row * (2 * K) + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(planes, upper, mask=inside)
    tl.store(planes + K, lower, mask=inside)
    tl.store(factors_ptr + row * (K // BLOCK) + block, scale / 16, mask=block < K // BLOCK)


@triton.jit
def signed_bytes(x):
    """x [BLOCKS, 128] float32 -> (upper bytes, lower bytes [BLOCKS, 128] int8, the blocks' scales [BLOCKS])."""
    # Without the sign, bits compare as the numbers do, and NaN is above infinity.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = tl.maximum(bits, 27 << 23).to(tl.float32, bitcast=True)
    # A little more than the largest, so that no upper byte is above 127.
    exponent = (largest * (1.0 + 2.0**-7)).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (((127 + 14) << 23) - exponent + (127 << 23)).to(tl.float32, bitcast=True)
    # Infinity and NaN must show in the product.
    scale = (exponent - (14 << 23)).to(tl.float32, bitcast=True) + (largest - largest)
    integer = (x * inverse[:, None] + ROUNDING).to(tl.int32, bitcast=True)
    return ((integer + 128) >> 8).to(tl.int8), integer.to(tl.int8), scale


@triton.jit
def head_factors(
    squares,
    block,
    element,
    inside,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """1 / rms of each element's head of SIZE elements: [BLOCKS, 128], or [BLOCKS, 1] if each block lies in one head."""
    if SIZE % 128 == 0:
        AT_ONCE: tl.constexpr = triton.next_power_of_2(PARTS)
        part = tl.arange(0, AT_ONCE)[None, :]
        head = block[:, None] * BLOCK // SIZE
        known = (part < PARTS) & (tl.max(inside.to(tl.int32), 1, keep_dims=True) > 0)
        square = tl.sum(tl.load(squares + head * PARTS + part, mask=known, other=0.0), 1, keep_dims=True)
    else:
        square = tl.zeros([block.shape[0], BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            square += tl.load(squares + element // SIZE * PARTS + part, mask=inside, other=0.0)
    return tl.rsqrt(square / SIZE + EPS)
