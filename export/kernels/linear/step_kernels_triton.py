# mypy: allow-untyped-defs
"""The kernels of `step_triton`, composed of the functions in `step_tiles_triton`.

GROUP is 0 for weights in a floating dtype; then `scale_ptr` is not read. `minimum_ptr` is not read unless MINIMUM is true,
`bias_ptr` not unless BIAS is true.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

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
def norm_linear_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_linear`, ROWS weight rows per program."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, N, ROWS)
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
    norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
    bias = load_bias(bias_ptr, row, mine, BIAS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, norm_ptr, stored, first_row, N, K, GROUP, ROWS, WARPS, UNITS, LANE, INTEGER, BITS, MINIMUM
    )
    totals = normed_totals(sums, squares, K, EPS, ROWS, WARPS) + bias
    tl.store(out_ptr + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def norm_swiglu_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_swiglu` with N outputs, ROWS per program. An output has a gate row, and the up row N rows after the gate row."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = paired_rows(first_row, N, ROWS)
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, 2 * N, K, GROUP, 2 * ROWS, UNITS, N, BITS, MINIMUM)
    norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
    bias = load_bias(bias_ptr, tl.where(tl.arange(0, 32) < 16, row, row - ROWS + N), row < 2 * N, BIAS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile,
        norm,
        x_ptr,
        norm_ptr,
        stored,
        first_row,
        2 * N,
        K,
        GROUP,
        2 * ROWS,
        WARPS,
        UNITS,
        LANE,
        INTEGER,
        BITS,
        MINIMUM,
        N,
    )
    totals = swiglu(normed_totals(sums, squares, K, EPS, 2 * ROWS, WARPS) + bias)
    tl.store(out_ptr + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def norm_linear_conv_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    gates_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    mixed_ptr,
    gated_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    GATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    GATE_UNITS: tl.constexpr,
    GATE_LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_linear_conv`. The first programs take ROWS of the N weight rows each, the others GATE_ROWS rows of `gates`."""
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    start_next(EARLY)
    program = tl.program_id(0)
    if program >= BLOCKS:
        store_gates(
            gated_ptr,
            x_ptr,
            norm_ptr,
            gates_ptr,
            (program - BLOCKS) * GATE_ROWS,
            EPS,
            GATES,
            K,
            GATE_ROWS,
            WARPS,
            GATE_UNITS,
            GATE_LANE,
            EARLY,
        )
    else:
        first_row = program * ROWS
        row, mine = lane_rows(first_row, N, ROWS)
        convolved = mine & (row < CHANNELS)
        slot = tl.load(slots_ptr)
        fresh = tl.load(positions_ptr) == 0
        taps = ()
        inputs = ()
        for tap in tl.static_range(TAPS):
            taps = extended(taps, tl.load(conv_ptr + row * TAPS + tap, mask=convolved, other=0.0))
        stored = weight_ptr, scale_ptr, minimum_ptr
        tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
        norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
        bias = load_bias(bias_ptr, row, mine, BIAS)
        # The state is loaded after the weights, which need not wait for the slot.
        state_ptr += tl.maximum(slot, 0) * (TAPS - 1) * CHANNELS
        for tap in tl.static_range(TAPS - 1):
            inputs = extended(inputs, tl.load(state_ptr + tap * CHANNELS + row, mask=convolved, other=0.0))
        wait_for_previous(EARLY)
        sums, squares = norm_products(
            tile,
            norm,
            x_ptr,
            norm_ptr,
            stored,
            first_row,
            N,
            K,
            GROUP,
            ROWS,
            WARPS,
            UNITS,
            LANE,
            INTEGER,
            BITS,
            MINIMUM,
        )
        totals = normed_totals(sums, squares, K, EPS, ROWS, WARPS) + bias
        newest = totals.to(mixed_ptr.dtype.element_ty)
        mixed = newest.to(tl.float32) * taps[TAPS - 1].to(tl.float32)
        kept = convolved & (slot >= 0)
        for tap in tl.static_range(TAPS - 1):
            past = tl.where(fresh, 0.0, inputs[tap].to(tl.float32))
            mixed += past * taps[tap].to(tl.float32)
            if tap > 0:
                moved = past.to(state_ptr.dtype.element_ty)
                tl.store(state_ptr + (tap - 1) * CHANNELS + row, moved, mask=kept)
        tl.store(state_ptr + (TAPS - 2) * CHANNELS + row, newest, mask=kept)
        mixed = tl.where(row < CHANNELS, mixed * tl.sigmoid(mixed), newest.to(tl.float32))
        tl.store(mixed_ptr + row, mixed.to(mixed_ptr.dtype.element_ty), mask=mine)


@triton.jit
def store_gates(
    gated_ptr,
    x_ptr,
    norm_ptr,
    gates_ptr,
    first_row,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write ROWS products of the normed x with rows of `gates`, in a floating dtype.

    Not a part of the kernel, where the same names would have two types.
    """
    row, mine = lane_rows(first_row, N, ROWS)
    stored = gates_ptr, gates_ptr, gates_ptr
    tile = load_tile(stored, first_row, 0, N, K, 0, ROWS, UNITS)
    norm = load_norm(norm_ptr, 0, K, 0, UNITS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, norm_ptr, stored, first_row, N, K, 0, ROWS, WARPS, UNITS, LANE, False
    )
    tl.store(gated_ptr + row, normed_totals(sums, squares, K, EPS, ROWS, WARPS), mask=mine)


@triton.jit
def linear_add_early(
    x_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    residual_ptr,
    squares_ptr,
    out_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`linear_add`, ROWS weight rows per program. HEADS is 0 if there are no squares."""
    ROW: tl.constexpr = K * BITS // 32 if GROUP > 0 else K
    # A lane's units lie within SPAN elements. If these are all in one head, the units have one factor.
    SPAN: tl.constexpr = (64 if BITS == 4 else 16) if GROUP > 0 else LANE
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, N, ROWS)
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
    bias = load_bias(bias_ptr, row, mine, BIAS)
    wait_for_previous(EARLY)
    residual = tl.load(residual_ptr + row, mask=mine, other=0.0).to(tl.float32)
    sums = zeros(ROWS, 32 * WARPS)
    for start in tl.static_range(0, ROW, UNITS):
        x = load_input(x_ptr, start, K, GROUP, UNITS, BITS)
        following = tile
        if start + UNITS < ROW:
            following = load_tile(stored, first_row, start + UNITS, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
        lane_factor = 1.0
        if HEADS > 0 and K // HEADS % SPAN == 0:
            unit, inside = tile_units(start, LANE, K, GROUP, UNITS, BITS)
            element = unit * (32 // BITS) if GROUP > 0 else unit
            lane_factor = head_factor(squares_ptr, element, inside, EPS, K // HEADS, PARTS)
            if GROUP == 0:
                # A lane may have several stretches of neighbouring units, and so several factors.
                x = (x[0] * of_neighbours(lane_factor, LANE),)
                lane_factor = 1.0
        elif HEADS > 0:
            x = normed_heads(x, squares_ptr, start, EPS, K, GROUP, BITS, HEADS, PARTS, UNITS)
        sums = multiply_tile(sums, tile, x, lane_factor, GROUP, ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM)
        tile = following
    totals, _ = sum_rows(sums, tl.zeros([32 * WARPS], tl.float32), ROWS, WARPS)
    totals += residual + bias
    tl.store(out_ptr + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def of_neighbours(x, LANE: tl.constexpr):
    """[UNITS / LANE] -> [UNITS]: each value repeated for LANE neighbours."""
    wide = tl.broadcast_to(tl.expand_dims(x, 1), [x.shape[0], LANE])
    return tl.reshape(wide, [x.shape[0] * LANE])


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


@triton.jit
def norm_products(
    tile,
    norm,
    x_ptr,
    norm_ptr,
    stored,
    first_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    BITS: tl.constexpr = 4,
    MINIMUM: tl.constexpr = False,
    APART: tl.constexpr = 0,
):
    """Each lane's sums over its units: of weight * norm * x for each row, and of x^2; tensors [32 WARPS].

    `tile` and `norm` are what the caller has loaded for the first tile.
    """
    ROW: tl.constexpr = K * BITS // 32 if GROUP > 0 else K
    SCALE: tl.constexpr = stored[1].dtype.element_ty
    sums = zeros(ROWS, 32 * WARPS)
    squares = tl.zeros([32 * WARPS], tl.float32)
    for start in tl.static_range(0, ROW, UNITS):
        x = load_input(x_ptr, start, K, GROUP, UNITS, BITS)
        following = tile
        following_norm = norm
        if start + UNITS < ROW:
            after = start + UNITS
            following = load_tile(stored, first_row, after, N, K, GROUP, ROWS, UNITS, APART, BITS, MINIMUM)
            following_norm = load_norm(norm_ptr, after, K, GROUP, UNITS, BITS)
        square, scaled = squares_and_normed(x, norm)
        squares += sum_lane(square, LANE, 32 * WARPS)
        sums = multiply_tile(sums, tile, scaled, 1.0, GROUP, ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM)
        tile = following
        norm = following_norm
    return sums, squares


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
    """The rows' products with the normed x, from the lanes' sums: [32], one row per lane as in `lane_rows`."""
    totals, square = sum_rows(sums, squares, ROWS, WARPS)
    return totals * tl.rsqrt(square / K + EPS)


@triton.jit
def paired_rows(first_row, N: tl.constexpr, ROWS: tl.constexpr):
    """`lane_rows` for ROWS gates in lanes 0 to 15 and their ups in lanes 16 to 31. Only lanes 0 to 15 have results."""
    row, mine = lane_rows(first_row, N, 2 * ROWS)
    return row, mine & (tl.arange(0, 32) < 16)


@triton.jit
def swiglu(totals):
    """silu(gate) * up, [32], for the lanes that have gates: see `paired_rows`."""
    lane = tl.arange(0, 32)
    ups = tl.reshape(exchange(totals[None, :], lane[None, :], 16), [32])
    return totals * tl.sigmoid(totals) * ups
