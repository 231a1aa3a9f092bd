# mypy: allow-untyped-defs
"""The down projections of `step_triton`, composed like the gate and up projections (`step_gate_up_triton`).

The same row of all chosen experts counts as one long row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.step_tiles_triton import (
    extended,
    hold_loads,
    lane_element,
    lane_rows,
    load_input_at,
    load_scales,
    multiply_tile,
    sum_rows,
    unit_pointer,
    zeros,
)

from .step_route_triton import expert_of, largest_keys, load_keys, softmax_of, token_of


@triton.jit
def experts_down_early(
    hidden,
    logits,
    down,
    down_scale,
    down_minimum,
    shared,
    shared_scale,
    shared_minimum,
    slots,
    residual,
    out,
    turns,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    SHARED_BITS: tl.constexpr,
    SHARED_MINIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_UNITS: tl.constexpr,
    SHARED_LANE: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    WARPS: tl.constexpr,
    INTEGER: tl.constexpr,
    SEVERAL: tl.constexpr,
    TURNS: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, SIZE] = residual + the weighted sum over the experts. Program (blocks, token): `turns` blocks of ROWS
    elements, one without TURNS. Padding gets its residual.

    A program loads the rows of all experts together, those of its next block while a block is added up. Before its wait the
    kernel reads the logits and the residual stream, which other kernels of the step wrote. So `experts_gate_up_early`, a late
    kernel, must come directly ahead of it (R4 and R5 in `delegate/graphs/nodes.py`). WIDTH and SHARED_WIDTH: units of a tile
    that a row of a routed expert takes, and of the shared expert.
    """
    ROW: tl.constexpr = INNER * BITS // 32 if GROUP > 0 else INNER
    SHARED_ROW: tl.constexpr = SHARED_INNER * SHARED_BITS // 32 if SHARED_GROUP > 0 else SHARED_INNER
    SCALE: tl.constexpr = down_scale.dtype.element_ty
    SHARED_SCALE: tl.constexpr = shared_scale.dtype.element_ty
    start_next(EARLY)
    begin = tl.program_id(0) * turns if TURNS else tl.program_id(0)
    last = tl.minimum(begin + turns, SIZE // ROWS) - 1 if TURNS else begin
    token = token_of(SEVERAL)
    residual += token * SIZE
    out += token * SIZE
    if SLOTS and tl.load(slots + token) < 0:
        wait_for_previous(EARLY)
        for block in tl.range(begin, last + 1, num_stages=1):
            row, mine = lane_rows(block * ROWS, SIZE, ROWS)
            tl.store(out + row, tl.load(residual + row), mask=mine)
        return
    hidden += token * (TOP_K * INNER + SHARED_INNER)
    logits += token * COUNT
    stored = down, down_scale, down_minimum
    shared_stored = shared, shared_scale, shared_minimum
    first_row = begin * ROWS
    shared_tiles = load_shared_tiles(
        shared_stored, first_row, SHARED_INNER, SHARED_GROUP, ROWS, SHARED_UNITS, SHARED_WIDTH, SHARED_BITS, SHARED_MINIMUM,
    )  # fmt: skip
    keys = load_keys(logits, EXPERTS, ".cg")
    if SHARED_INNER > 0:
        shared_logit = tl.load(logits + EXPERTS, cache_modifier=".cg").to(tl.float32)
    total = tl.load(residual + lane_rows(first_row, SIZE, ROWS)[0], cache_modifier=".cg")
    keys = largest_keys(keys, TOP_K)
    tiles = load_tiles(stored, keys, first_row, TOP_K, SIZE, INNER, GROUP, ROWS, UNITS, WIDTH, BITS, MINIMUM)
    shares = softmax_of(keys)
    shared_share = tl.sigmoid(shared_logit) if SHARED_INNER > 0 else 0.0
    wait_for_previous(EARLY)
    inputs = ()
    for start in tl.static_range(0, TOP_K * WIDTH, UNITS):
        choice, unit = choice_units(start, 1, UNITS, WIDTH)
        inside = (choice < TOP_K) & (unit < ROW)
        # If the compiler sees a plain range, it loads 16 bytes at a time, otherwise 8.
        position = start + tl.arange(0, UNITS) if ROW == WIDTH else choice * ROW + unit
        x = load_input_at(hidden, position, inside, GROUP, BITS)
        inputs = inputs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    shared_inputs = ()
    if SHARED_INNER > 0:
        for start in tl.static_range(0, ROWS * SHARED_WIDTH, SHARED_UNITS):
            _, unit = choice_units(start, 1, SHARED_UNITS, SHARED_WIDTH)
            shared_x = load_input_at(hidden + TOP_K * INNER, unit, unit < SHARED_ROW, SHARED_GROUP, SHARED_BITS)
            shared_inputs = shared_inputs + (shared_x,)  # type: ignore[assignment]  # noqa: RUF005
    if GROUP > 0 and not TURNS:
        # Without this the compiler loads the routed experts' inputs once the shared expert's are there.
        hold_loads()
    if TURNS:
        for block in tl.range(begin, last, num_stages=1):
            following_row = (block + 1) * ROWS
            following_total = tl.load(residual + lane_rows(following_row, SIZE, ROWS)[0])
            following_shared = load_shared_tiles(
                shared_stored, following_row, SHARED_INNER, SHARED_GROUP, ROWS, SHARED_UNITS, SHARED_WIDTH, SHARED_BITS,
                SHARED_MINIMUM,
            )  # fmt: skip
            following = load_tiles(
                stored, keys, following_row, TOP_K, SIZE, INNER, GROUP, ROWS, UNITS, WIDTH, BITS, MINIMUM
            )
            store_block(
                out, block * ROWS, total, shared_tiles, shared_inputs, shared_share, tiles, inputs, shares, SIZE, GROUP,
                BITS, MINIMUM, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM, ROWS, UNITS, LANE, WIDTH, SHARED_UNITS,
                SHARED_LANE, SHARED_WIDTH, WARPS, INTEGER, SCALE, SHARED_SCALE,
            )  # fmt: skip
            total = following_total
            shared_tiles = following_shared
            tiles = following
    store_block(
        out, last * ROWS, total, shared_tiles, shared_inputs, shared_share, tiles, inputs, shares, SIZE, GROUP, BITS,
        MINIMUM, SHARED_GROUP, SHARED_BITS, SHARED_MINIMUM, ROWS, UNITS, LANE, WIDTH, SHARED_UNITS, SHARED_LANE,
        SHARED_WIDTH, WARPS, INTEGER, SCALE, SHARED_SCALE,
    )  # fmt: skip


@triton.jit
def store_block(
    out,
    first_row,
    total,
    shared_tiles,
    shared_inputs,
    shared_share,
    tiles,
    inputs,
    shares,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    SHARED_BITS: tl.constexpr,
    SHARED_MINIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    LANE: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_UNITS: tl.constexpr,
    SHARED_LANE: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    WARPS: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE: tl.constexpr,
    SHARED_SCALE: tl.constexpr,
):
    """Store ROWS elements: `total` of the residual stream, and what the experts' tiles add."""
    row, mine = lane_rows(first_row, SIZE, ROWS)
    sums = zeros(ROWS, 32 * WARPS)
    for i in tl.static_range(len(shared_tiles)):
        alone = (tl.zeros([32 * WARPS], tl.float32),)
        product = multiply_tile(
            alone, shared_tiles[i], shared_inputs[i], shared_share, SHARED_GROUP, 1, SHARED_LANE, INTEGER, SHARED_SCALE,
            SHARED_BITS, SHARED_MINIMUM,
        )  # fmt: skip
        sums = add_to_rows(sums, product[0], i * SHARED_UNITS, ROWS, SHARED_UNITS, SHARED_WIDTH, SHARED_LANE)
    for i in tl.static_range(len(tiles)):
        choice, _ = choice_units(i * UNITS, LANE, UNITS, WIDTH)
        share = of_choice(shares, choice, i * UNITS, UNITS, WIDTH)
        sums = multiply_tile(sums, tiles[i], inputs[i], share, GROUP, ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM)
    totals, _ = sum_rows(sums, zeros(1, 32 * WARPS), ROWS, WARPS)
    tl.store(out + row, (total.to(tl.float32) + totals).to(out.dtype.element_ty), mask=mine)


@triton.jit
def load_tiles(
    stored,
    keys,
    first_row,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Load a block's rows of the chosen experts: a tuple of `load_chosen`'s results."""
    tiles = ()
    for start in tl.static_range(0, TOP_K * WIDTH, UNITS):
        tile = load_chosen(stored, keys, first_row, start, SIZE, INNER, GROUP, ROWS, UNITS, WIDTH, BITS, MINIMUM)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def load_shared_tiles(
    stored,
    first_row,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Load a block's rows of the shared expert, if there is one: a tuple of `load_shared`'s results."""
    tiles = ()
    if INNER > 0:
        for start in tl.static_range(0, ROWS * WIDTH, UNITS):
            tile = load_shared(stored, first_row, start, INNER, GROUP, ROWS, UNITS, WIDTH, BITS, MINIMUM)
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def choice_units(START: tl.constexpr, STEP: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr):
    """For every STEP-th unit of the tile from START: which stretch of WIDTH units has it, and its index in the stretch."""
    unit = START + tl.arange(0, UNITS // STEP) * STEP
    return unit // WIDTH, unit % WIDTH


@triton.jit
def of_choice(values, choice, START: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr):
    """For each element of `choice`, in the tile from START: the value of the tuple `values` that it selects.

    Past the tuple's end it selects the last value.
    """
    FIRST: tl.constexpr = START // WIDTH
    LAST: tl.constexpr = min(len(values), (START + UNITS + WIDTH - 1) // WIDTH)
    picked = tl.broadcast_to(values[LAST - 1], choice.shape)
    for i in tl.static_range(FIRST, LAST - 1):
        picked = tl.where(choice == i, values[i], picked)
    return picked


@triton.jit
def load_chosen(
    stored,
    keys,
    first_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """`load_tile` for ROWS rows of the experts with these `keys`, one expert after the other."""
    ROW: tl.constexpr = INNER * BITS // 32 if GROUP > 0 else INNER
    choice, unit = choice_units(START, 1, UNITS, WIDTH)
    expert = expert_of(of_choice(keys, choice, START, UNITS, WIDTH)).to(tl.int64) * SIZE + first_row
    units = unit_pointer(stored[0], GROUP) + (expert * ROW + unit)
    inside = (choice < len(keys)) & (unit < ROW)
    tiles = ()
    for row in tl.static_range(ROWS):
        tiles = extended(tiles, tl.load(units + row * ROW, mask=inside, other=0))
    scale_tiles = ()
    minimum_tiles = ()
    if GROUP > 0:
        choice, word = choice_units(START, 4, UNITS, WIDTH)
        element = lane_element(word, BITS)
        expert = expert_of(of_choice(keys, choice, START, UNITS, WIDTH)).to(tl.int64) * SIZE + first_row
        inside = (choice < len(keys)) & (word < ROW)
        for row in tl.static_range(ROWS):
            loaded = load_scales(stored[1], expert, row, element, inside, INNER, GROUP, BITS)
            scale_tiles = extended(scale_tiles, loaded)
            if MINIMUM:
                numbers = load_scales(stored[2], expert, row, element, inside, INNER, GROUP, BITS)
                minimum_tiles = extended(minimum_tiles, numbers)
    return tiles, scale_tiles, minimum_tiles


@triton.jit
def load_shared(
    stored,
    first_row,
    START: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """`load_tile` for ROWS rows of the shared expert as one long row: one after the other, each padded to WIDTH units."""
    ROW: tl.constexpr = INNER * BITS // 32 if GROUP > 0 else INNER
    row, unit = choice_units(START, 1, UNITS, WIDTH)
    inside = (row < ROWS) & (unit < ROW)
    units = unit_pointer(stored[0], GROUP) + first_row.to(tl.int64) * ROW
    tile = tl.load(units + (row * ROW + unit), mask=inside, other=0)
    scale_tiles = ()
    minimum_tiles = ()
    if GROUP > 0:
        row, word = choice_units(START, 4, UNITS, WIDTH)
        element = lane_element(word, BITS)
        inside = (row < ROWS) & (word < ROW)
        loaded = load_scales(stored[1], first_row, row, element, inside, INNER, GROUP, BITS)
        scale_tiles = extended(scale_tiles, loaded)
        if MINIMUM:
            numbers = load_scales(stored[2], first_row, row, element, inside, INNER, GROUP, BITS)
            minimum_tiles = extended(minimum_tiles, numbers)
    return (tile,), scale_tiles, minimum_tiles


@triton.jit
def add_to_rows(
    sums,
    product,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANE: tl.constexpr,
):
    """Add the products of a tile of `load_shared` to the lanes' sums, each product to the sum of its row."""
    row, _ = choice_units(START, LANE, UNITS, WIDTH)
    added = ()
    for i in tl.static_range(ROWS):
        if i * WIDTH >= START + UNITS or (i + 1) * WIDTH <= START:
            added = extended(added, sums[i])
        else:
            added = extended(added, sums[i] + tl.where(row == i, product, 0.0))
    return added
