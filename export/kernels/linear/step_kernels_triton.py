# mypy: allow-untyped-defs
"""The kernels of `step_triton`, composed of the functions in `step_products_triton` and `step_tiles_triton`.

GROUP is 0 for weights in a floating dtype; then `scale_ptr` is not read. `minimum_ptr` is not read unless MINIMUM is true,
`bias_ptr` not unless BIAS is true.

x has `rows` rows, at most INPUTS. A program multiplies its weights by all of them: it has the sums of its weight rows for the
first input, then those for the next (`lane_rows`, `lane_input`). A row's sums are the same bits for every INPUTS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .step_fixed_point_triton import of_neighbours
from .step_products_triton import (
    has_gate,
    head_factor,
    load_bias,
    load_inputs,
    norm_products,
    normed_heads,
    normed_totals,
    of_input,
    paired_rows,
    row_of_x,
    swiglu,
)
from .step_tiles_triton import (
    extended,
    lane_input,
    lane_rows,
    load_norm,
    load_tile,
    multiply_tile,
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
    rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_linear`, ROWS weight rows per program."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, N, ROWS, rows, INPUTS)
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
    norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
    bias = load_bias(bias_ptr, row, mine, BIAS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, rows, norm_ptr, stored, first_row, N, K, GROUP, ROWS, INPUTS, WARPS, UNITS, LANE, INTEGER, BITS,
        MINIMUM,
    )  # fmt: skip
    totals = normed_totals(sums, squares, K, EPS, ROWS, WARPS) + bias
    tl.store(out_ptr + lane_input(INPUTS) * N + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def norm_swiglu_early(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`norm_swiglu` with N outputs, ROWS per program. An output has a gate row, and the up row N rows after the gate row."""
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = paired_rows(first_row, N, ROWS, rows, INPUTS)
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, 2 * N, K, GROUP, 2 * ROWS, UNITS, N, BITS, MINIMUM)
    norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
    bias = load_bias(bias_ptr, tl.where(has_gate(INPUTS), row, row - ROWS + N), row < 2 * N, BIAS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, rows, norm_ptr, stored, first_row, 2 * N, K, GROUP, 2 * ROWS, INPUTS, WARPS, UNITS, LANE, INTEGER,
        BITS, MINIMUM, N,
    )  # fmt: skip
    totals = swiglu(normed_totals(sums, squares, K, EPS, 2 * ROWS, WARPS) + bias, INPUTS)
    tl.store(out_ptr + lane_input(INPUTS) * N + row, totals.to(out_ptr.dtype.element_ty), mask=mine)


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
    rows,
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
    INPUTS: tl.constexpr,
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
            gated_ptr, x_ptr, rows, norm_ptr, gates_ptr, (program - BLOCKS) * GATE_ROWS, EPS, GATES, K, GATE_ROWS, INPUTS,
            WARPS, GATE_UNITS, GATE_LANE, EARLY,
        )  # fmt: skip
    else:
        first_row = program * ROWS
        row, mine = lane_rows(first_row, N, ROWS, rows, INPUTS)
        own = lane_input(INPUTS)
        convolved = mine & (row < CHANNELS)
        if INPUTS > 1:
            slot = tl.load(slots_ptr + own, mask=own < rows, other=-2)
            position = tl.load(positions_ptr + own, mask=own < rows, other=0)
        else:
            slot = tl.load(slots_ptr)
            position = tl.load(positions_ptr)
        offset, last = place_in_run(slots_ptr, slot, rows, INPUTS)
        taps = ()
        stored_inputs = ()
        for tap in tl.static_range(TAPS):
            taps = extended(taps, tl.load(conv_ptr + row * TAPS + tap, mask=convolved, other=0.0))
        stored = weight_ptr, scale_ptr, minimum_ptr
        tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
        norm = load_norm(norm_ptr, 0, K, GROUP, UNITS, BITS)
        bias = load_bias(bias_ptr, row, mine, BIAS)
        # The state is loaded after the weights, which need not wait for the slot.
        cells = state_ptr + (tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS) + row)
        for tap in tl.static_range(TAPS - 1):
            here = convolved if INPUTS == 1 else convolved & (offset + tap < TAPS - 1)
            stored_inputs = extended(stored_inputs, tl.load(cells + (tap + offset) * CHANNELS, mask=here, other=0.0))
        wait_for_previous(EARLY)
        sums, squares = norm_products(
            tile, norm, x_ptr, rows, norm_ptr, stored, first_row, N, K, GROUP, ROWS, INPUTS, WARPS, UNITS, LANE, INTEGER,
            BITS, MINIMUM,
        )  # fmt: skip
        totals = normed_totals(sums, squares, K, EPS, ROWS, WARPS) + bias
        newest = totals.to(mixed_ptr.dtype.element_ty)
        mixed = newest.to(tl.float32) * taps[TAPS - 1].to(tl.float32)
        kept = convolved & (slot >= 0) & last
        for tap in tl.static_range(TAPS - 1):
            past = tl.where(position > offset, stored_inputs[tap].to(tl.float32), 0.0)
            if TAPS - 1 - tap < INPUTS:
                past = tl.where(
                    offset + tap < TAPS - 1, past, of_earlier(newest, TAPS - 1 - tap, INPUTS).to(tl.float32)
                )
            mixed += past * taps[tap].to(tl.float32)
            if tap > 0:
                moved = past.to(state_ptr.dtype.element_ty)
                tl.store(cells + (tap - 1) * CHANNELS, moved, mask=kept)
        tl.store(cells + (TAPS - 2) * CHANNELS, newest, mask=kept)
        mixed = tl.where(row < CHANNELS, mixed * tl.sigmoid(mixed), newest.to(tl.float32))
        tl.store(mixed_ptr + own * N + row, mixed.to(mixed_ptr.dtype.element_ty), mask=mine)


@triton.jit
def place_in_run(slots_ptr, slot, rows, INPUTS: tl.constexpr):
    """How many rows of its run stand before a lane's input, and whether it is the last of its run: 0 and True for one."""
    offset = 0
    last = True
    if INPUTS > 1:
        mine = lane_input(INPUTS)
        offset = tl.zeros([32], tl.int32)
        for other in tl.static_range(INPUTS):
            same = tl.load(slots_ptr + other, mask=other < rows, other=-2) == slot
            offset += (same & (other < mine)).to(tl.int32)
            last = last & ~(same & (other > mine))
    return offset, last


@triton.jit
def of_earlier(x, DISTANCE: tl.constexpr, INPUTS: tl.constexpr):
    """x [32] of the same row for the input DISTANCE before a lane's; arbitrary if there is none."""
    lane = tl.maximum(tl.arange(0, 32) - DISTANCE * (32 // INPUTS), 0)
    return tl.reshape(tl.gather(x[None, :], lane[None, :], 1), [32])


@triton.jit
def store_gates(
    gated_ptr,
    x_ptr,
    rows,
    norm_ptr,
    gates_ptr,
    first_row,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write ROWS products of the normed x with rows of `gates`, in a floating dtype.

    Not a part of the kernel, where the same names would have two types.
    """
    row, mine = lane_rows(first_row, N, ROWS, rows, INPUTS)
    stored = gates_ptr, gates_ptr, gates_ptr
    tile = load_tile(stored, first_row, 0, N, K, 0, ROWS, UNITS)
    norm = load_norm(norm_ptr, 0, K, 0, UNITS)
    wait_for_previous(EARLY)
    sums, squares = norm_products(
        tile, norm, x_ptr, rows, norm_ptr, stored, first_row, N, K, 0, ROWS, INPUTS, WARPS, UNITS, LANE, False
    )
    tl.store(gated_ptr + lane_input(INPUTS) * N + row, normed_totals(sums, squares, K, EPS, ROWS, WARPS), mask=mine)


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
    rows,
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
    INPUTS: tl.constexpr,
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
    row, mine = lane_rows(first_row, N, ROWS, rows, INPUTS)
    at = lane_input(INPUTS) * N + row
    stored = weight_ptr, scale_ptr, minimum_ptr
    tile = load_tile(stored, first_row, 0, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
    bias = load_bias(bias_ptr, row, mine, BIAS)
    wait_for_previous(EARLY)
    residual = tl.load(residual_ptr + at, mask=mine, other=0.0).to(tl.float32)
    sums = zeros(INPUTS * ROWS, 32 * WARPS)
    for start in tl.static_range(0, ROW, UNITS):
        x = load_inputs(x_ptr, rows, start, K, GROUP, INPUTS, UNITS, BITS)
        following = tile
        if start + UNITS < ROW:
            following = load_tile(stored, first_row, start + UNITS, N, K, GROUP, ROWS, UNITS, 0, BITS, MINIMUM)
        added = ()
        for i in tl.static_range(INPUTS):
            squares = squares_ptr if HEADS == 0 else squares_ptr + row_of_x(i, rows) * (HEADS * PARTS)
            one = of_input(x, i, INPUTS)
            lane_factor = 1.0
            if HEADS > 0 and K // HEADS % SPAN == 0:
                unit, inside = tile_units(start, LANE, K, GROUP, UNITS, BITS)
                element = unit * (32 // BITS) if GROUP > 0 else unit
                lane_factor = head_factor(squares, element, inside, EPS, K // HEADS, PARTS)
                if GROUP == 0:
                    # A lane may have several stretches of neighbouring units, and so several factors.
                    one = (one[0] * of_neighbours(lane_factor, LANE),)
                    lane_factor = 1.0
            elif HEADS > 0:
                one = normed_heads(one, squares, start, EPS, K, GROUP, BITS, HEADS, PARTS, UNITS)
            added = added + multiply_tile(
                of_input(sums, i, INPUTS), tile, one, lane_factor, GROUP, ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM
            )
        sums = added
        tile = following
    totals, _ = sum_rows(sums, zeros(INPUTS, 32 * WARPS), INPUTS * ROWS, WARPS)
    totals += residual + bias
    tl.store(out_ptr + at, totals.to(out_ptr.dtype.element_ty), mask=mine)
