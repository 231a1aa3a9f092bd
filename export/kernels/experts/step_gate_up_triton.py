# mypy: allow-untyped-defs
"""The gate and up projections of `step_triton`, composed of the functions in `linear.step_tiles_triton`.

A tile is UNITS units of a row, 16 bytes per lane. GROUP is 0 for weights in a floating dtype; then scales are not read. The
shared expert's format and tiles have constants of their own, whose names begin with SHARED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.step_products_triton import (
    normed_totals,
    paired_rows,
    squares_and_normed,
    swiglu,
)
from ostinato.export.kernels.linear.step_tiles_triton import (
    hold_loads,
    load_input,
    load_norm,
    load_tile,
    multiply_tile,
    sum_lane,
    zeros,
)

from .step_route_triton import expert_of, largest_key, load_keys, token_of


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
        tiles = load_pairs(stored, first_row + begin * ROWS, INNER, SIZE, GROUP, ROWS, UNITS, BITS, MINIMUM)
        if GROUP > 0:
            # Not for floats, which it makes slower: see "What was tried" in ../README.md.
            hold_loads()
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
            of_block = hidden + block * ROWS
            store_swiglu(
                of_block, x, norms, tiles, EPS, SIZE, GROUP, ROWS, WARPS, LANE, INTEGER, SCALE, BITS, MINIMUM
            )  # fmt: skip
            tiles = following
    to = hidden + last * ROWS
    store_swiglu(to, x, norms, tiles, EPS, SIZE, GROUP, ROWS, WARPS, LANE, INTEGER, SCALE, BITS, MINIMUM)


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
    totals = swiglu(normed_totals(sums, (squares,), SIZE, EPS, 2 * ROWS, WARPS))
    row, mine = paired_rows(0, ROWS, ROWS)
    tl.store(hidden + row, totals.to(hidden.dtype.element_ty), mask=mine)
