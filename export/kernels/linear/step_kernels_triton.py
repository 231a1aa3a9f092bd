# mypy: allow-untyped-defs
"""The kernels of `step_triton`; what they are composed of is in `step_tiles_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .step_tiles_triton import (
    LANE,
    extended,
    load_eights,
    load_norm,
    load_tile,
    multiply_tile,
    sum_eights,
    sum_lane,
    sum_rows,
    tile_words,
    zeros,
)


@triton.jit
def norm_linear_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    WORDS: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_linear`; ROWS rows per program."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    tile = load_tile(weight_ptr, scale_ptr, first_row, 0, N, K, GROUP, ROWS, WORDS)
    norm = load_norm(norm_ptr, 0, K, WORDS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, norm_ptr, weight_ptr, scale_ptr, first_row, N, K, GROUP, ROWS, WORDS, INTEGER
    )
    totals, square = sum_rows(sums, squares, ROWS, WARPS)
    totals *= tl.rsqrt(square / K + EPS)
    row, mine = lane_rows(first_row, N, ROWS)
    tl.store(out_ptr + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def norm_linear_conv_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    gates_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    mixed_ptr,
    gated_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    WORDS: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_linear_conv`; the programs after those for the N rows compute GATE_ROWS of the gates' rows each."""
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    start_next(EARLY)
    program = tl.program_id(0)
    if program >= BLOCKS:
        first_row = (program - BLOCKS) * GATE_ROWS
        gate_rows(x_ptr, norm_ptr, gates_ptr, gated_ptr, first_row, EPS, K, GATES, GATE_ROWS, WARPS, 8 * WORDS, EARLY)
    else:
        first_row = program * ROWS
        row, mine = lane_rows(first_row, N, ROWS)
        convolved = mine & (row < CHANNELS)
        taps = ()
        inputs = ()
        for tap in tl.static_range(TAPS):
            taps = extended(taps, tl.load(conv_ptr + row * TAPS + tap, mask=convolved, other=0.0))
        for tap in tl.static_range(TAPS - 1):
            inputs = extended(inputs, tl.load(state_ptr + tap * CHANNELS + row, mask=convolved, other=0.0))
        tile = load_tile(weight_ptr, scale_ptr, first_row, 0, N, K, GROUP, ROWS, WORDS)
        norm = load_norm(norm_ptr, 0, K, WORDS)
        wait_for_previous(EARLY)
        fresh = tl.load(positions_ptr) == 0
        sums, squares = norm_products(
            tile, norm, x_ptr, norm_ptr, weight_ptr, scale_ptr, first_row, N, K, GROUP, ROWS, WORDS, INTEGER
        )
        totals, square = sum_rows(sums, squares, ROWS, WARPS)
        totals *= tl.rsqrt(square / K + EPS)
        newest = totals.to(mixed_ptr.dtype.element_ty)
        mixed = newest.to(tl.float32) * taps[TAPS - 1].to(tl.float32)
        for tap in tl.static_range(TAPS - 1):
            past = tl.where(fresh, 0.0, inputs[tap].to(tl.float32))
            mixed += past * taps[tap].to(tl.float32)
            if tap > 0:
                moved = past.to(state_ptr.dtype.element_ty)
                tl.store(state_ptr + (tap - 1) * CHANNELS + row, moved, mask=convolved)
        tl.store(state_ptr + (TAPS - 2) * CHANNELS + row, newest, mask=convolved)
        mixed = tl.where(row < CHANNELS, mixed * tl.sigmoid(mixed), newest.to(tl.float32))
        tl.store(mixed_ptr + row, mixed.to(mixed_ptr.dtype.element_ty), mask=mine)


@triton.jit
def gate_rows(
    x_ptr,
    norm_ptr,
    gates_ptr,
    gated_ptr,
    first_row,
    EPS: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS products of the normed x with rows in a floating dtype, ELEMENTS at a time; the first are loaded before x."""
    rows = load_floats(gates_ptr, first_row, 0, K, GATES, ROWS, ELEMENTS)
    element = tl.arange(0, ELEMENTS)
    norm = tl.load(norm_ptr + element, mask=element < K, other=0.0)
    wait_for_previous(EARLY)
    sums = zeros(ROWS, 32 * WARPS)
    squares = tl.zeros([32 * WARPS], tl.float32)
    for start in tl.static_range(0, K, ELEMENTS):
        if start > 0:
            element = start + tl.arange(0, ELEMENTS)
            rows = load_floats(gates_ptr, first_row, start, K, GATES, ROWS, ELEMENTS)
            norm = tl.load(norm_ptr + element, mask=element < K, other=0.0)
        x = tl.load(x_ptr + element, mask=element < K, other=0.0).to(tl.float32)
        squares += sum_eights(x * x, WARPS)
        x *= 1.0 + norm
        added = ()
        for row in tl.static_range(ROWS):
            added = extended(added, sums[row] + sum_eights(x * rows[row].to(tl.float32), WARPS))
        sums = added
    totals, square = sum_rows(sums, squares, ROWS, WARPS)
    row, mine = lane_rows(first_row, GATES, ROWS)
    tl.store(gated_ptr + row, totals * tl.rsqrt(square / K + EPS), mask=mine)


@triton.jit
def load_floats(
    matrix,
    first_row,
    START: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """ELEMENTS from START of ROWS rows of a matrix [N, K]; rows past the last are the last one again."""
    element = START + tl.arange(0, ELEMENTS)
    tiles = ()
    for row in tl.static_range(ROWS):
        here = matrix + tl.minimum(first_row + row, N - 1) * K
        tiles = extended(tiles, tl.load(here + element, mask=element < K, other=0.0))
    return tiles


@triton.jit
def linear_add_early(
    x_ptr,
    weight_ptr,
    scale_ptr,
    residual_ptr,
    squares_ptr,
    out_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    WORDS: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`linear_add`; ROWS rows per program. HEADS is 0 where there are no squares."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, N, ROWS)
    tile = load_tile(weight_ptr, scale_ptr, first_row, 0, N, K, GROUP, ROWS, WORDS)
    wait_for_previous(EARLY)
    residual = tl.load(residual_ptr + row, mask=mine, other=0.0).to(tl.float32)
    sums = zeros(ROWS, WORDS // LANE)
    for start in tl.static_range(0, K // 8, WORDS):
        # If a span of 64 elements, and so all inputs of a lane, lies in one head, they have one factor, else one each.
        lane_factor = 1.0
        if HEADS > 0 and K // HEADS % 64 == 0:
            lane_word, lane_inside = tile_words(start, LANE, K, WORDS)
            lane_factor = head_factor(squares_ptr, lane_word * 8, lane_inside, EPS, K // HEADS, PARTS)
        x = load_eights(x_ptr, start, K, WORDS)
        following = tile
        if start + WORDS < K // 8:
            following = load_tile(weight_ptr, scale_ptr, first_row, start + WORDS, N, K, GROUP, ROWS, WORDS)
        scaled = ()
        for i in tl.static_range(8):
            factor = 1.0
            if HEADS > 0 and K // HEADS % 64 != 0:
                word, inside = tile_words(start, 1, K, WORDS)
                element = word // 8 * 64 + word % 8 * 4 + i % 2 * 32 + i // 2
                factor *= head_factor(squares_ptr, element, inside, EPS, K // HEADS, PARTS)
            scaled = extended(scaled, x[i] * factor)
        sums = multiply_tile(sums, tile, scaled, lane_factor, GROUP, ROWS, INTEGER)
        tile = following
    totals, _ = sum_rows(sums, tl.zeros([WORDS // LANE], tl.float32), ROWS, WARPS)
    totals = residual + totals
    tl.store(out_ptr + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def head_factor(squares_ptr, element, inside, EPS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """1 / rms of the head of SIZE elements that each of `element` is in."""
    square = tl.load(squares_ptr + element // SIZE * PARTS, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        square += tl.load(squares_ptr + element // SIZE * PARTS + part, mask=inside, other=0.0)
    return tl.rsqrt(square / SIZE + EPS)


@triton.jit
def norm_products(
    tile,
    norm,
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    first_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """The lanes' sums for each row, and of the squares of x; the first tile's weights are already loaded."""
    sums = zeros(ROWS, WORDS // LANE)
    squares = tl.zeros([WORDS // LANE], tl.float32)
    for start in tl.static_range(0, K // 8, WORDS):
        x = load_eights(x_ptr, start, K, WORDS)
        following = tile
        following_norm = norm
        if start + WORDS < K // 8:
            following = load_tile(weight_ptr, scale_ptr, first_row, start + WORDS, N, K, GROUP, ROWS, WORDS)
            following_norm = load_norm(norm_ptr, start + WORDS, K, WORDS)
        square = x[0] * x[0]
        scaled = (x[0] * norm[0],)
        for i in tl.static_range(1, 8):
            square += x[i] * x[i]
            scaled = extended(scaled, x[i] * norm[i])
        squares += sum_lane(square)
        sums = multiply_tile(sums, tile, scaled, 1.0, GROUP, ROWS, INTEGER)
        tile = following
        norm = following_norm
    return sums, squares


@triton.jit
def lane_rows(first_row, N: tl.constexpr, ROWS: tl.constexpr):
    """The rows whose totals the lanes have after `sum_rows`, and whether a lane is the first with its row: both [32]."""
    lane = tl.arange(0, 32)
    row = first_row + lane * ROWS // 32
    return row, (lane % (32 // ROWS) == 0) & (row < N)
