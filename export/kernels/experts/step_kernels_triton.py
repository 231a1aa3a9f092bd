# mypy: allow-untyped-defs
"""The kernels of `step_triton` over the experts, composed of the parts in `linear.step_tiles_triton`.

A tile is TILE 32-bit words of a row, 16 bytes per lane; in `experts_down_early` a row continues from one expert to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.step_kernels_triton import lane_rows
from ostinato.export.kernels.linear.step_tiles_triton import (
    LANE,
    exchange,
    extended,
    first_fours,
    load_eights,
    load_eights_at,
    load_norm,
    load_tile,
    multiply_tile,
    sum_lane,
    sum_rows,
    zeros,
)

from .step_route_triton import expert_of, largest_key, largest_keys, load_keys, softmax_of


@triton.jit
def experts_gate_up_early(
    h,
    norm_weight,
    logits,
    gate_up,
    gate_up_scale,
    shared,
    shared_scale,
    hidden,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """hidden = silu(gate) * up, ROWS rows of one expert per program: the shared expert's programs, then the routed ones'.

    The smaller an expert's weight, the longer it takes to find, so the earlier its programs start. This kernel is a late one
    (R3 in `delegate/graph_nodes.py`): `experts_down_early` relies on that.
    """
    BLOCKS: tl.constexpr = INNER // ROWS
    SHARED_BLOCKS: tl.constexpr = SHARED_INNER // ROWS
    # Not `extended`: Triton flattens a tuple that is added to an empty one.
    norms = ()
    for start in tl.static_range(0, SIZE // 8, TILE):
        norms = norms + (load_norm(norm_weight, start, SIZE, TILE),)  # type: ignore[assignment]  # noqa: RUF005
    program = tl.program_id(0)
    if program < SHARED_BLOCKS:
        first = program * ROWS
        tiles = load_pairs(shared, shared_scale, first, SHARED_INNER, SIZE, GROUP, ROWS, TILE)
        wait_for_previous(EARLY)
        start_next(EARLY)
        x = load_inputs(h, SIZE, TILE)
        store_swiglu(hidden + TOP_K * INNER + first, x, norms, tiles, EPS, SIZE, GROUP, ROWS, WARPS, INTEGER)
    else:
        slot = TOP_K - 1 - (program - SHARED_BLOCKS) // BLOCKS
        first = (program - SHARED_BLOCKS) % BLOCKS * ROWS
        wait_for_previous(EARLY)
        start_next(EARLY)
        keys = load_keys(logits, EXPERTS, "")
        x = load_inputs(h, SIZE, TILE)
        first_row = expert_of(largest_key(keys, slot)) * (2 * INNER) + first
        # In one block with the products: so the compiler knows that the weights take longest and waits for them last.
        tiles = load_pairs(gate_up, gate_up_scale, first_row, INNER, SIZE, GROUP, ROWS, TILE)
        store_swiglu(hidden + slot * INNER + first, x, norms, tiles, EPS, SIZE, GROUP, ROWS, WARPS, INTEGER)


@triton.jit
def experts_down_early(
    hidden,
    logits,
    down,
    down_scale,
    shared,
    shared_scale,
    residual,
    out,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED_WORDS: tl.constexpr,
    INTEGER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [SIZE] = residual + the weighted sum over the experts, ROWS elements per program; all experts' rows load together.

    Before its wait it reads the logits and the residual stream, which kernels of the step wrote: `experts_gate_up_early`, a
    late kernel, must be directly ahead of it (R4 and R5 in `delegate/graph_nodes.py`). WORDS and SHARED_WORDS: words of a
    tile that an expert's row takes.
    """
    start_next(EARLY)
    first_row = tl.program_id(0) * ROWS
    row, mine = lane_rows(first_row, SIZE, ROWS)
    shared_tiles = ()
    if SHARED_INNER > 0:
        for start in tl.static_range(0, ROWS * SHARED_WORDS, TILE):
            tile = load_shared(shared, shared_scale, first_row, start, SHARED_INNER, GROUP, ROWS, TILE, SHARED_WORDS)
            shared_tiles = shared_tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    keys = load_keys(logits, EXPERTS, ".cg")
    if SHARED_INNER > 0:
        shared_logit = tl.load(logits + EXPERTS, cache_modifier=".cg").to(tl.float32)
    total = tl.load(residual + row, cache_modifier=".cg")
    keys = largest_keys(keys, TOP_K)
    tiles = ()
    for start in tl.static_range(0, TOP_K * WORDS, TILE):
        tile = load_chosen(down, down_scale, keys, first_row, start, SIZE, INNER, GROUP, ROWS, TILE, WORDS)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    shares = softmax_of(keys)
    if SHARED_INNER > 0:
        shared_share = tl.sigmoid(shared_logit)
    wait_for_previous(EARLY)
    inputs = ()
    for start in tl.static_range(0, TOP_K * WORDS, TILE):
        slot, word = slot_words(start, 1, TILE, WORDS)
        inside = (slot < TOP_K) & (word < INNER // 8)
        # Where the compiler sees a plain range, loads are of 16 bytes, otherwise of 8.
        position = start + tl.arange(0, TILE) if INNER == 8 * WORDS else slot * (INNER // 8) + word
        x = load_eights_at(hidden, first_fours(position), inside)
        inputs = inputs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    shared_inputs = ()
    if SHARED_INNER > 0:
        for start in tl.static_range(0, ROWS * SHARED_WORDS, TILE):
            _, word = slot_words(start, 1, TILE, SHARED_WORDS)
            x = load_eights_at(hidden + TOP_K * INNER, first_fours(word), word < SHARED_INNER // 8)
            shared_inputs = shared_inputs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    sums = zeros(ROWS, TILE // LANE)
    for i in tl.static_range(len(shared_tiles)):
        alone = (tl.zeros([TILE // LANE], tl.float32),)
        product = multiply_tile(alone, shared_tiles[i], shared_inputs[i], shared_share, GROUP, 1, INTEGER)
        sums = add_to_rows(sums, product[0], i * TILE, ROWS, TILE, SHARED_WORDS)
    for i in tl.static_range(len(tiles)):
        slot, _ = slot_words(i * TILE, LANE, TILE, WORDS)
        share = of_slot(shares, slot, i * TILE, TILE, WORDS)
        sums = multiply_tile(sums, tiles[i], inputs[i], share, GROUP, ROWS, INTEGER)
    totals, _ = sum_rows(sums, tl.zeros([TILE // LANE], tl.float32), ROWS, WARPS)
    tl.store(out + row, (total.to(tl.float32) + totals).to(out.dtype.element_ty), mask=mine)


@triton.jit
def load_pairs(
    words,
    scales,
    first,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """ROWS gate rows from `first` on and the up rows INNER rows after them, all of each: a tuple of `load_tile`'s results."""
    tiles = ()
    for start in tl.static_range(0, SIZE // 8, TILE):
        tile = load_tile(words, scales, first, start, 2 * INNER, SIZE, GROUP, 2 * ROWS, TILE, INNER)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def load_inputs(h, SIZE: tl.constexpr, TILE: tl.constexpr):
    """`load_eights` for each tile of a row."""
    x = ()
    for start in tl.static_range(0, SIZE // 8, TILE):
        x = x + (load_eights(h, start, SIZE, TILE),)  # type: ignore[assignment]  # noqa: RUF005
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
    INTEGER: tl.constexpr,
):
    """Stores silu(gate) * up [ROWS], from the results of `load_inputs`, `load_norm` and `load_pairs`."""
    sums = zeros(2 * ROWS, 32 * WARPS)
    squares = tl.zeros([32 * WARPS], tl.float32)
    for i in tl.static_range(len(x)):
        square = x[i][0] * x[i][0]
        normed = (x[i][0] * norms[i][0],)
        for j in tl.static_range(1, 8):
            square += x[i][j] * x[i][j]
            normed = extended(normed, x[i][j] * norms[i][j])
        squares += sum_lane(square)
        sums = multiply_tile(sums, tiles[i], normed, 1.0, GROUP, 2 * ROWS, INTEGER)
    totals, square = sum_rows(sums, squares, 2 * ROWS, WARPS)
    totals *= tl.rsqrt(square / SIZE + EPS)
    # Lanes 0 to 15 have the gates, lanes 16 to 31 the ups.
    lane = tl.arange(0, 32)
    ups = tl.reshape(exchange(totals[None, :], lane[None, :], 16), [32])
    row, mine = lane_rows(0, ROWS, 2 * ROWS)
    tl.store(hidden + row, (totals * tl.sigmoid(totals) * ups).to(hidden.dtype.element_ty), mask=mine)


@triton.jit
def slot_words(START: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr):
    """Every STEP-th word of the tile from START, in runs of WORDS words: which run, and which word of it."""
    word = START + tl.arange(0, TILE // STEP) * STEP
    return word // WORDS, word % WORDS


@triton.jit
def of_slot(values, slot, START: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr):
    """The number of a tuple that each element of `slot`, in the tile from START, selects; past the tuple's end its last."""
    FIRST: tl.constexpr = START // WORDS
    LAST: tl.constexpr = min(len(values), (START + TILE + WORDS - 1) // WORDS)
    picked = tl.broadcast_to(values[LAST - 1], slot.shape)
    for i in tl.static_range(FIRST, LAST - 1):
        picked = tl.where(slot == i, values[i], picked)
    return picked


@triton.jit
def load_chosen(
    words,
    scales,
    keys,
    first_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """`load_tile` of ROWS rows of the experts with `keys`, one expert after another."""
    slot, word = slot_words(START, 1, TILE, WORDS)
    expert = expert_of(of_slot(keys, slot, START, TILE, WORDS)).to(tl.int64) * SIZE + first_row
    words = words.to(tl.pointer_type(tl.uint32)) + (expert * (INNER // 8) + word)
    inside = (slot < len(keys)) & (word < INNER // 8)
    word_tiles = ()
    for row in tl.static_range(ROWS):
        word_tiles = extended(word_tiles, tl.load(words + row * (INNER // 8), mask=inside, other=0))
    slot, word = slot_words(START, LANE, TILE, WORDS)
    expert = expert_of(of_slot(keys, slot, START, TILE, WORDS)).to(tl.int64) * SIZE + first_row
    scales += expert * (INNER // GROUP) + word // 8 * 64 // GROUP
    inside = (slot < len(keys)) & (word < INNER // 8)
    scale_tiles = ()
    for half in tl.static_range(2 if GROUP == 32 else 1):
        for row in tl.static_range(ROWS):
            here = scales + (row * (INNER // GROUP) + half)
            scale_tiles = extended(scale_tiles, tl.load(here, mask=inside, other=0.0))
    return word_tiles, scale_tiles


@triton.jit
def load_shared(
    words,
    scales,
    first_row,
    START: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """ROWS rows of the shared expert, one after another as if they were one row: `load_tile` of that."""
    row, word = slot_words(START, 1, TILE, WORDS)
    inside = (row < ROWS) & (word < INNER // 8)
    words = words.to(tl.pointer_type(tl.uint32)) + first_row.to(tl.int64) * (INNER // 8)
    word_tile = tl.load(words + (row * (INNER // 8) + word), mask=inside, other=0)
    row, word = slot_words(START, LANE, TILE, WORDS)
    inside = (row < ROWS) & (word < INNER // 8)
    scales += first_row.to(tl.int64) * (INNER // GROUP) + row * (INNER // GROUP) + word // 8 * 64 // GROUP
    scale_tiles = (tl.load(scales, mask=inside, other=0.0),)
    if GROUP == 32:
        scale_tiles = extended(scale_tiles, tl.load(scales + 1, mask=inside, other=0.0))
    return (word_tile,), scale_tiles


@triton.jit
def add_to_rows(sums, product, START: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr):
    """The lanes' sums per row, with the products of a tile of `load_shared` added, each to the sum of its row."""
    row, _ = slot_words(START, LANE, TILE, WORDS)
    added = ()
    for i in tl.static_range(ROWS):
        if i * WORDS >= START + TILE or (i + 1) * WORDS <= START:
            added = extended(added, sums[i])
        else:
            added = extended(added, sums[i] + tl.where(row == i, product, 0.0))
    return added
