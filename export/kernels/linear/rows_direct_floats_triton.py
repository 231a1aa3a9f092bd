# mypy: allow-untyped-defs
"""Up to FEW_ROWS rows in bfloat16 times weights in bfloat16: from memory directly into operands of `mma`.

As `rows_direct_int4_triton`: a program has some weight rows, and its warps divide K. A *turn* is 64 bytes of each row, for
each warp. The weights of the first turns are loaded before the wait, and the others while the products are made. Few turns
are a list (`direct_floats_rows_early`), more are a loop (`direct_long_floats_rows_early`). The sums of the warps are added in
one order, and no row sees another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_direct_store_triton import (
    load_factors,
    load_past,
    load_residual,
    load_taps,
    multiply,
    offset_in_run,
    store_direct,
    stored_lines,
)
from .rows_tiles_triton import sum_of_warps
from .step_tiles_triton import hold_loads

# Elements of a turn, and turns of a block.
TURN = tl.constexpr(32)
BLOCK_TURNS = tl.constexpr(4)


@triton.jit
def direct_floats_rows_early(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PREPARED: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    HOLD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of x [R, K] with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these. Its turns are a list.

    Args:
        PREPARED: whether x is [K / TURN, COLUMNS, TURN], with anything in the columns behind the last row.
        HEADS: number of heads of a row, which are divided by their root mean squares; 0: x has no heads. See `load_factors`.
        PARTS: number of parts of a head's sum of squares.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_direct`. 0: none is.
        AHEAD: turns whose weights are loaded before the wait, and later before those ahead of them are multiplied.
        HOLD: whether the inputs of all turns are under way at once.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    TURNS: tl.constexpr = (K // TURN + WARPS - 1) // WARPS
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * OUTPUTS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, OUTPUTS)
    of_weight = lines_of(weight_ptr, first, N, K, SWIGLU, ROWS)
    tiles = ()
    for turn in tl.static_range(min(AHEAD, TURNS)):
        tiles = tiles + (load_turn(of_weight, turn, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    column = tl.arange(0, COLUMNS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    # Of prepared rows, a warp loads a piece of memory at once, not a piece of each row.
    of_x = x_ptr + column * (TURN if PREPARED else K)
    APART: tl.constexpr = COLUMNS * TURN if PREPARED else TURN
    inputs = ()
    for turn in tl.static_range(TURNS if HOLD else 1):
        inputs = inputs + (load_turn(of_x, turn, K, WARPS, APART, column < rows),)  # type: ignore[assignment]  # noqa: RUF005
    residual = load_residual(residual_ptr, output, row, rows, N) if RESIDUAL else 0.0
    if HOLD:
        hold_loads()
    factors = ()
    if HEADS > 0:
        factors = load_factors(squares_ptr, rows, EPS, K, HEADS, PARTS, COLUMNS, WARPS, TURNS // BLOCK_TURNS)
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    # Two in turn, since a product waits for the one before it in the same sum.
    products, others = sums, sums
    for turn in tl.static_range(TURNS):
        if not HOLD and turn + 1 < TURNS:
            inputs = inputs + (load_turn(of_x, turn + 1, K, WARPS, APART, column < rows),)  # type: ignore[assignment]  # noqa: RUF005
            if CHANNELS > 0:
                # Loaded all at once, they would take the registers of one of four programs of a multiprocessor.
                hold_loads()
        weights = tiles[0]  # type: ignore[misc]
        tiles = tiles[1:]
        if turn + AHEAD < TURNS:
            tiles = tiles + (load_turn(of_weight, turn + AHEAD, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
        products, others = others, multiply(weights, inputs[turn], products)
        if HEADS > 0 and (turn + 1) // BLOCK_TURNS > turn // BLOCK_TURNS:
            sums += (products + others) * factors[turn // BLOCK_TURNS][:, None, :]
            products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
            others = products
    store_direct(
        sum_of_warps(sums if HEADS > 0 else products + others), residual, bias_ptr, state_ptr, slots_ptr, out_ptr, taps,
        past, slot, offset, output, row, rows, N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


@triton.jit
def direct_long_floats_rows_early(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PREPARED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    INPUTS: tl.constexpr,
    FENCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As `direct_floats_rows_early`, without heads. The turns are a loop: a list of 112 takes 19 s to compile.

    Args:
        AHEAD, INPUTS: turns whose weights and inputs are under way. The weights of AHEAD turns are loaded before the wait.
        FENCE: turns whose loads stand ahead of one fence, which divides AHEAD.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    TURNS: tl.constexpr = (K // TURN + WARPS - 1) // WARPS
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * OUTPUTS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, OUTPUTS)
    of_weight = lines_of(weight_ptr, first, N, K, SWIGLU, ROWS)
    tiles = ()
    for turn in tl.static_range(AHEAD):
        tiles = tiles + (load_turn(of_weight, turn, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    column = tl.arange(0, COLUMNS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    of_x = x_ptr + column * (TURN if PREPARED else K)
    APART: tl.constexpr = COLUMNS * TURN if PREPARED else TURN
    inputs = ()
    for turn in tl.static_range(INPUTS):
        inputs = inputs + (load_turn(of_x, turn, K, WARPS, APART, column < rows),)  # type: ignore[assignment]  # noqa: RUF005
    residual = load_residual(residual_ptr, output, row, rows, N) if RESIDUAL else 0.0
    hold_loads()
    products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    others = products
    LOOPED: tl.constexpr = (TURNS - AHEAD) // AHEAD * AHEAD
    for start in tl.range(0, LOOPED, AHEAD, num_stages=1):
        for turn in tl.static_range(AHEAD):
            loaded = load_turn(of_x, start + turn + INPUTS, K, WARPS, APART, column < rows)
            tile = load_turn(of_weight, start + turn + AHEAD, K, WARPS)
            inputs, tiles = inputs + (loaded,), tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
            if (turn + 1) % FENCE == 0:
                hold_loads()
            products, others = others, multiply(tiles[0], inputs[0], products)  # type: ignore[misc]
            inputs, tiles = inputs[1:], tiles[1:]
    for turn in tl.static_range(LOOPED, TURNS):
        if turn + INPUTS < TURNS:
            loaded = load_turn(of_x, turn + INPUTS, K, WARPS, APART, column < rows)
            inputs = inputs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        if turn + AHEAD < TURNS:
            tiles = tiles + (load_turn(of_weight, turn + AHEAD, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
        if turn + INPUTS < TURNS and (turn + 1) % FENCE == 0:
            hold_loads()
        products, others = others, multiply(tiles[0], inputs[0], products)  # type: ignore[misc]
        inputs, tiles = inputs[1:], tiles[1:]
    store_direct(
        sum_of_warps(products + others), residual, bias_ptr, state_ptr, slots_ptr, out_ptr, taps, past, slot, offset,
        output, row, rows, N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


@triton.jit
def lines_of(weight_ptr, first, N: tl.constexpr, K: tl.constexpr, SWIGLU: tl.constexpr, ROWS: tl.constexpr):
    """Pointers [8, 1, ROWS / 8, 1] to the first elements of a program's weight rows."""
    line = tl.arange(0, ROWS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    return weight_ptr + first.to(tl.int64) * K + stored_lines(line, first, N, SWIGLU, ROWS) * K


@triton.jit
def load_turn(lines, number, K: tl.constexpr, WARPS: tl.constexpr, APART: tl.constexpr = TURN, filled=True):
    """Load a turn of lines, pointers [8, 1, LINES / 8, 1] to their first elements: [8, WARPS, LINES / 8, TURN].

    A warp's turns are neighbours, and begin APART elements from each other. Zeros behind the last element, and where not
    `filled`.
    """
    TURNS: tl.constexpr = (K // TURN + WARPS - 1) // WARPS
    at = tl.arange(0, WARPS)[None, :, None, None] * TURNS + number
    inside = (at < K // TURN) | (K // TURN == TURNS * WARPS)
    return tl.load(lines + (at * APART + tl.arange(0, TURN)[None, None, None, :]), mask=inside & filled, other=0.0)
