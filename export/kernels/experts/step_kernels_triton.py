# mypy: allow-untyped-defs
"""The kernels of `step_triton` over the experts, composed of the functions in `linear.step_tiles_triton`.

A tile is UNITS units of a row, 16 bytes per lane. In `experts_down_early` the same row of all chosen experts counts as one
long row. GROUP is 0 for weights in a floating dtype; then scales are not read. The shared expert's format and tiles have
constants of their own, whose names begin with SHARED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.step_kernels_triton import (
    normed_totals,
    paired_rows,
    squares_and_normed,
    swiglu,
)
from ostinato.export.kernels.linear.step_tiles_triton import (
    extended,
    lane_element,
    lane_rows,
    load_input,
    load_input_at,
    load_norm,
    load_scales,
    load_tile,
    multiply_tile,
    sum_lane,
    sum_rows,
    unit_pointer,
    zeros,
)

from .step_route_triton import expert_of, largest_key, largest_keys, load_keys, softmax_of, token_of


@triton.jit
def experts_gate_up_early(
    h,
    norm_weight,
    logits,
    gate_up,
    gate_up_scale,
    gate_up_minimum,
    shared,
    shared_scale,
    shared_minimum,
    slots,
    hidden,
    turns,
    EPS: tl.constexpr,
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
    SHARED_ROWS: tl.constexpr,
    SHARED_UNITS: tl.constexpr,
    SHARED_LANE: tl.constexpr,
    WARPS: tl.constexpr,
    INTEGER: tl.constexpr,
    SEVERAL: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write hidden = silu(gate) * up of a token. Program (blocks, token): `turns` blocks of ROWS rows of a routed expert, or
    of SHARED_ROWS rows of the shared one. Nothing is written for padding. A token has COUNT logits, the routed experts'
    first.

    The shared expert's programs come first. Then come the routed experts' programs, the smallest logit first: an expert with
    a smaller logit takes longer to find, so its programs start earlier. This kernel is a late one (R3 in
    `delegate/graphs/nodes.py`), and `experts_down_early` relies on this: programs of padding wait, too.
    """
    BLOCKS: tl.constexpr = INNER // ROWS
    SHARED_BLOCKS: tl.constexpr = SHARED_INNER // SHARED_ROWS
    SCALE: tl.constexpr = gate_up_scale.dtype.element_ty
    SHARED_SCALE: tl.constexpr = shared_scale.dtype.element_ty
    SAME: tl.constexpr = GROUP == SHARED_GROUP and BITS == SHARED_BITS and UNITS == SHARED_UNITS
    stored = gate_up, gate_up_scale, gate_up_minimum
    shared_stored = shared, shared_scale, shared_minimum
    token = token_of(SEVERAL)
    if SLOTS and tl.load(slots + token) < 0:
        wait_for_previous(EARLY)
        start_next(EARLY)
        return
    h += token * SIZE
    logits += token * COUNT
    hidden += token * (TOP_K * INNER + SHARED_INNER)
    norms = load_norms(norm_weight, SIZE, GROUP, UNITS, BITS)
    program = tl.program_id(0)
    turns = turns if SEVERAL else 1
    sections = (BLOCKS + turns - 1) // turns
    shared_sections = (SHARED_BLOCKS + turns - 1) // turns
    if program < shared_sections:
        shared_begin = program * turns
        shared_end = tl.minimum(shared_begin + turns, SHARED_BLOCKS)
        shared_norms = norms if SAME else load_norms(norm_weight, SIZE, SHARED_GROUP, SHARED_UNITS, SHARED_BITS)
        shared_tiles = load_pairs(
            shared_stored, shared_begin * SHARED_ROWS, SHARED_INNER, SIZE, SHARED_GROUP, SHARED_ROWS, SHARED_UNITS,
            SHARED_BITS, SHARED_MINIMUM,
        )  # fmt: skip
        wait_for_previous(EARLY)
        start_next(EARLY)
        shared_x = load_inputs(h, SIZE, SHARED_GROUP, SHARED_UNITS, SHARED_BITS)
        store_blocks(
            hidden + TOP_K * INNER, shared_stored, tl.zeros([], tl.int32), shared_begin, shared_end, shared_x, shared_norms,
            shared_tiles, EPS, SHARED_INNER, SIZE, SHARED_GROUP, SHARED_ROWS, SHARED_UNITS, WARPS, SHARED_LANE, INTEGER,
            SHARED_SCALE, SHARED_BITS, SHARED_MINIMUM, SEVERAL,
        )  # fmt: skip
    else:
        choice = TOP_K - 1 - (program - shared_sections) // sections
        begin = (program - shared_sections) % sections * turns
        end = tl.minimum(begin + turns, BLOCKS) if SEVERAL else begin + 1
        wait_for_previous(EARLY)
        start_next(EARLY)
        keys = load_keys(logits, EXPERTS, "")
        x = load_inputs(h, SIZE, GROUP, UNITS, BITS)
        first_row = expert_of(largest_key(keys, choice)) * (2 * INNER)
        # Loads and products stand in one block, so the compiler knows that the weights take longest, and waits for them last.
        tiles = load_pairs(stored, first_row + begin * ROWS, INNER, SIZE, GROUP, ROWS, UNITS, BITS, MINIMUM)
        store_blocks(
            hidden + choice * INNER, stored, first_row, begin, end, x, norms, tiles, EPS, INNER, SIZE, GROUP, ROWS, UNITS,
            WARPS, LANE, INTEGER, SCALE, BITS, MINIMUM, SEVERAL,
        )  # fmt: skip


@triton.jit
def store_blocks(
    hidden,
    stored,
    first_row,
    begin,
    end,
    x,
    norms,
    tiles,
    EPS: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WARPS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Store the blocks from `begin` to `end` of an expert whose first row is `first_row`. `tiles` are the first block's
    weights. Without SEVERAL there is one block.

    The next block's weights are under way while the last sums of a block are added and stored.
    """
    last = begin
    if SEVERAL:
        last = end - 1
        for block in tl.range(begin, last, num_stages=1):
            following = load_pairs(
                stored, first_row + (block + 1) * ROWS, INNER, SIZE, GROUP, ROWS, UNITS, BITS, MINIMUM
            )
            store_swiglu(
                hidden + block * ROWS,
                x,
                norms,
                tiles,
                EPS,
                SIZE,
                GROUP,
                ROWS,
                WARPS,
                LANE,
                INTEGER,
                SCALE,
                BITS,
                MINIMUM,
            )
            tiles = following
    to = hidden + last * ROWS
    store_swiglu(to, x, norms, tiles, EPS, SIZE, GROUP, ROWS, WARPS, LANE, INTEGER, SCALE, BITS, MINIMUM)


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
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, SIZE] = residual + the weighted sum over the experts, ROWS elements of a token per program. Program
    (elements, token). Padding gets its residual.

    A program loads the rows of all experts together. Before its wait the kernel reads the logits and the residual stream,
    which other kernels of the step wrote. So `experts_gate_up_early`, a late kernel, must come directly ahead of it (R4 and
    R5 in `delegate/graphs/nodes.py`). WIDTH and SHARED_WIDTH: units of a tile that a row of a routed expert takes, and of the
    shared expert.
    """
    ROW: tl.constexpr = INNER * BITS // 32 if GROUP > 0 else INNER
    SHARED_ROW: tl.constexpr = SHARED_INNER * SHARED_BITS // 32 if SHARED_GROUP > 0 else SHARED_INNER
    SCALE: tl.constexpr = down_scale.dtype.element_ty
    SHARED_SCALE: tl.constexpr = shared_scale.dtype.element_ty
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, SIZE, ROWS)
    token = token_of(SEVERAL)
    residual += token * SIZE
    out += token * SIZE
    if SLOTS and tl.load(slots + token) < 0:
        wait_for_previous(EARLY)
        tl.store(out + row, tl.load(residual + row), mask=mine)
        return
    hidden += token * (TOP_K * INNER + SHARED_INNER)
    logits += token * COUNT
    shared_tiles = ()
    if SHARED_INNER > 0:
        shared_stored = shared, shared_scale, shared_minimum
        for start in tl.static_range(0, ROWS * SHARED_WIDTH, SHARED_UNITS):
            tile = load_shared(
                shared_stored, first_row, start, SHARED_INNER, SHARED_GROUP, ROWS, SHARED_UNITS, SHARED_WIDTH,
                SHARED_BITS, SHARED_MINIMUM,
            )  # fmt: skip
            shared_tiles = shared_tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    keys = load_keys(logits, EXPERTS, ".cg")
    if SHARED_INNER > 0:
        shared_logit = tl.load(logits + EXPERTS, cache_modifier=".cg").to(tl.float32)
    total = tl.load(residual + row, cache_modifier=".cg")
    keys = largest_keys(keys, TOP_K)
    stored = down, down_scale, down_minimum
    tiles = ()
    for start in tl.static_range(0, TOP_K * WIDTH, UNITS):
        tile = load_chosen(stored, keys, first_row, start, SIZE, INNER, GROUP, ROWS, UNITS, WIDTH, BITS, MINIMUM)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    shares = softmax_of(keys)
    if SHARED_INNER > 0:
        shared_share = tl.sigmoid(shared_logit)
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
    totals, _ = sum_rows(sums, tl.zeros([32 * WARPS], tl.float32), ROWS, WARPS)
    tl.store(out + row, (total.to(tl.float32) + totals).to(out.dtype.element_ty), mask=mine)


@triton.jit
def load_pairs(
    stored,
    first,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Load ROWS whole gate rows from `first` on, and the up rows INNER rows after them: a tuple of `load_tile`'s results."""
    tiles = ()
    for start in tl.static_range(0, SIZE * BITS // 32 if GROUP > 0 else SIZE, UNITS):
        tile = load_tile(stored, first, start, 2 * INNER, SIZE, GROUP, 2 * ROWS, UNITS, INNER, BITS, MINIMUM)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def load_norms(norm, SIZE: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr):
    """Load the norm's weights for a whole row: a tuple of `load_norm`'s results, one per tile."""
    # Not `extended`: Triton flattens a tuple that is added to an empty one.
    norms = ()
    for start in tl.static_range(0, SIZE * BITS // 32 if GROUP > 0 else SIZE, UNITS):
        norms = norms + (load_norm(norm, start, SIZE, GROUP, UNITS, BITS),)  # type: ignore[assignment]  # noqa: RUF005
    return norms


@triton.jit
def load_inputs(h, SIZE: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr):
    """Load the inputs of a whole row: a tuple of `load_input`'s results, one per tile."""
    x = ()
    for start in tl.static_range(0, SIZE * BITS // 32 if GROUP > 0 else SIZE, UNITS):
        x = x + (load_input(h, start, SIZE, GROUP, UNITS, BITS),)  # type: ignore[assignment]  # noqa: RUF005
    return x


@triton.jit
def store_swiglu(
    hidden,
    x,
    norms,
    tiles,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    LANE: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Stores silu(gate) * up [ROWS], from the results of `load_inputs`, `load_norm` and `load_pairs`."""
    sums = zeros(2 * ROWS, 32 * WARPS)
    squares = tl.zeros([32 * WARPS], tl.float32)
    for i in tl.static_range(len(x)):
        square, normed = squares_and_normed(x[i], norms[i])
        squares += sum_lane(square, LANE, 32 * WARPS)
        sums = multiply_tile(sums, tiles[i], normed, 1.0, GROUP, 2 * ROWS, LANE, INTEGER, SCALE, BITS, MINIMUM)
    totals = swiglu(normed_totals(sums, squares, SIZE, EPS, 2 * ROWS, WARPS))
    row, mine = paired_rows(0, ROWS, ROWS)
    tl.store(hidden + row, totals.to(hidden.dtype.element_ty), mask=mine)


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
