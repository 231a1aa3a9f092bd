# mypy: allow-untyped-defs
"""Products of a decode step's kernels with all their inputs, and what stands around them: norms, heads, SwiGLU and bias.

Tiles of several inputs, and sums over them, are tuples: all those of the first input, then those of the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_tiles_triton import (
    exchange,
    extended,
    lane_rows,
    load_input,
    load_norm,
    load_tile,
    multiply_tile,
    sum_lane,
    sum_rows,
    tile_units,
    zeros,
)


@triton.jit
def norm_products(
    tile,
    norm,
    x_ptr,
    rows,
    norm_ptr,
    stored,
    first_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    BITS: tl.constexpr = 4,
    MINIMUM: tl.constexpr = False,
    APART: tl.constexpr = 0,
):
    """Each lane's sums over its units: of weight * norm * x for each row and input, and of x^2 for each input; tensors
    [32 WARPS].

    `tile` and `norm` are what the caller has loaded for the first tile.
    """
    ROW: tl.constexpr = K * BITS // 32 if GROUP > 0 else K
    SCALE: tl.constexpr = stored[1].dtype.element_ty
    sums = zeros(INPUTS * ROWS, 32 * WARPS)
    squares = zeros(INPUTS, 32 * WARPS)
    for start in tl.static_range(0, ROW, UNITS):
        x = load_inputs(x_ptr, rows, start, K, GROUP, INPUTS, UNITS, BITS)
        following = tile
        following_norm = norm
        if start + UNITS < ROW:
            after = start + UNITS
            following = load_tile(stored, first_row, after, N, K, GROUP, ROWS, UNITS, APART, BITS, MINIMUM)
            following_norm = load_norm(norm_ptr, after, K, GROUP, UNITS, BITS)
        added = ()
        added_squares = ()
        for i in tl.static_range(INPUTS):
            square, scaled = squares_and_normed(of_input(x, i, INPUTS), norm)
            added_squares = extended(added_squares, squares[i] + sum_lane(square, LANE, 32 * WARPS))
            added = added + multiply_tile(
                of_input(sums, i, INPUTS), tile, scaled, 1.0, GROUP, ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM
            )
        sums = added
        squares = added_squares
        tile = following
        norm = following_norm
    return sums, squares


@triton.jit
def load_inputs(
    x_ptr,
    rows,
    START: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr,
):
    """The tiles of `load_input` for one input after the other."""
    x = ()
    for i in tl.static_range(INPUTS):
        x = x + load_input(x_ptr + row_of_x(i, rows) * K, START, K, GROUP, UNITS, BITS)
    return x


@triton.jit
def row_of_x(INPUT: tl.constexpr, rows):
    """The row of x that an input is: inputs past the last row are the last row again."""
    return tl.minimum(INPUT, rows - 1) if INPUT > 0 else 0


@triton.jit
def of_input(tiles, INPUT: tl.constexpr, INPUTS: tl.constexpr):
    """The tiles of one input, of those for one input after the other."""
    COUNT: tl.constexpr = len(tiles) // INPUTS
    own = ()
    for i in tl.static_range(COUNT):
        own = extended(own, tiles[INPUT * COUNT + i])
    return own


@triton.jit
def squares_and_normed(x, norm):
    """Tiles x of `load_input` and norm of `load_norm` -> the sum of the squares of x, [UNITS], and the tiles x times norm."""
    square = x[0] * x[0]
    scaled = (x[0] * norm[0],)
    for i in tl.static_range(1, len(x)):
        square += x[i] * x[i]
        scaled = extended(scaled, x[i] * norm[i])
    return square, scaled


@triton.jit
def normed_totals(sums, squares, K: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The products of ROWS rows with each normed input, from the lanes' sums: [32], one per lane as in `lane_rows`."""
    totals, square = sum_rows(sums, squares, len(squares) * ROWS, WARPS)
    return totals * tl.rsqrt(square / K + EPS)


@triton.jit
def paired_rows(first_row, N: tl.constexpr, ROWS: tl.constexpr, inputs=1, INPUTS: tl.constexpr = 1):
    """`lane_rows` for ROWS gates and, in the second half of an input's lanes, their ups. Results are in the gates' lanes."""
    row, mine = lane_rows(first_row, N, 2 * ROWS, inputs, INPUTS)
    return row, mine & has_gate(INPUTS)


@triton.jit
def has_gate(INPUTS: tl.constexpr):
    return tl.arange(0, 32) % (32 // INPUTS) < 16 // INPUTS


@triton.jit
def swiglu(totals, INPUTS: tl.constexpr = 1):
    """silu(gate) * up, [32], for the lanes that have gates: see `paired_rows`."""
    lane = tl.arange(0, 32)
    ups = tl.reshape(exchange(totals[None, :], lane[None, :], 16 // INPUTS), [32])
    return totals * tl.sigmoid(totals) * ups


@triton.jit
def normed_heads(
    x,
    squares_ptr,
    START: tl.constexpr,
    EPS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The tiles x of `load_input`, each element times the factor of its own head."""
    unit, inside = tile_units(START, 1, K, GROUP, UNITS, BITS)
    normed = ()
    for i in tl.static_range(len(x)):
        if GROUP > 0 and BITS == 8:
            element = unit * 4 + i
        elif GROUP > 0:
            element = unit // 8 * 64 + unit % 8 * 4 + i % 2 * 32 + i // 2
        else:
            element = unit
        normed = extended(normed, x[i] * head_factor(squares_ptr, element, inside, EPS, K // HEADS, PARTS))
    return normed


@triton.jit
def head_factor(squares_ptr, element, inside, EPS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """1 / rms of the head in which each `element` lies; a head has SIZE elements."""
    square = tl.load(squares_ptr + element // SIZE * PARTS, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        square += tl.load(squares_ptr + element // SIZE * PARTS + part, mask=inside, other=0.0)
    return tl.rsqrt(square / SIZE + EPS)


@triton.jit
def load_bias(bias_ptr, row, mine, BIAS: tl.constexpr):
    """The bias of the rows, float32; 0 without BIAS."""
    return tl.load(bias_ptr + row, mask=mine, other=0.0).to(tl.float32) if BIAS else 0.0
