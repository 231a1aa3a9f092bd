# mypy: allow-untyped-defs
"""Up to FEW_ROWS rows in bfloat16 times weights in bfloat16: from memory directly into operands of `mma`.

As `rows_direct_int4_triton`: a program has some weight rows, and its warps divide K. A *turn* is 64 bytes of each row, for
each warp. The weights of the first turns are loaded before the wait, and the others while the products are made. The sums of
the warps are added in one order, and no row sees another.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.operands import FEW_ROWS, STEP_ROWS

from .rows_direct_store_triton import (
    MAX_WARPS,
    TILE,
    load_factors,
    load_past,
    load_taps,
    multiply,
    offset_in_run,
    store_direct,
    stored_lines,
)
from .step_tiles_triton import hold_loads

# Elements of a turn, and turns of a block.
TURN = tl.constexpr(32)
BLOCK_TURNS = tl.constexpr(4)
# Turns that a warp loads ahead, and the most of them if these are all.
AHEAD, ALL_AHEAD = 8, 14
# The fewest outputs of a vocabulary, and the fewest whose programs may have four warps with more than 2,048 elements.
MANY_OUTPUTS, SOME_OUTPUTS = 32768, 4096


def float_warps(k: int) -> int:
    """Warps of a program with bfloat16 weights, but for what `FloatsConfig` says of others."""
    return MAX_WARPS if k > 1024 else MAX_WARPS // 2


@dataclass(frozen=True)
class FloatsConfig:
    """Configuration of a product with bfloat16 weights.

    A warp loads all its weights ahead of the wait, if they are few. Then the inputs of up to STEP_ROWS rows are under way at
    once, too: a layer of 0.8B with 4/8 rows takes 25.8/27.6 us, not 26.2/28.3. With 16 it would take 37.6, not 37.1. But
    where a residual is added, and no more than AHEAD turns, it takes 35.9, not 38.0; with attention 34.7, not 36.6 (one H200,
    2026-11-28).

    A vocabulary with 16 rows, in us, by weight rows, warps and turns ahead (one H200, 2026-11-29):

                           16, 4, 8   16, 8, 8   32, 4, 4   32, 4, 8   32, 8, 4   32, 8, 2
        248,320 x 1,024    163                   136        171
        248,320 x 2,048               387        278        284        323        354
        128,256 x 4,096               302        310        278        328        414

    With 8 rows 248,320 x 1,024 takes 130 us in the first way and 135 in the third; 128,256 x 4,096 takes 261, 278 and 283 in
    the second, fourth and fifth.

    With K of more than 2,048 four warps are faster than eight where there are programs enough: more of them have room at
    once, and one that ends leaves less idle. The products of an 8B, in us with 4, 8 and 16 rows (one H200, 2026-11-29):

                                          8 warps               4 warps
        qkv, 6,144 x 4,096                19.6   20.7   25.0    18.8   19.1   21.3
        o, 4,096 x 4,096                  13.1   14.3   16.2    12.9   13.4   14.6
        gate and up, 28,672 x 4,096       64.7   66.8   81.3    64.4   65.5   70.6
        down, 4,096 x 14,336              36.9   38.2   39.9    35.2   36.1   39.3
        all four in a chain              132.4  134.4  157.6   127.4  129.3  142.5

    But down has eight: 112 turns take 19 s to compile, 56 take 4. Down of 0.8B (K 3,584) has 64 programs for its 1,024
    outputs: it takes 6.8, 6.8 and 7.7 us with four warps, 5.6, 5.8 and 7.1 with eight.

    Attributes:
        rows: weight rows of a program.
        warps: warps, which divide K.
        ahead: turns whose weights a warp loads ahead.
        hold: whether the inputs of all turns are under way at once.
    """

    rows: int
    warps: int
    ahead: int
    hold: bool

    @classmethod
    def of(cls, k: int, columns: int, outputs: int, added: bool, divided: bool) -> FloatsConfig:
        """The configuration for K elements and `columns` rows.

        Args:
            added: whether a residual is added.
            divided: whether the product divides its rows' heads.
        """
        if columns == FEW_ROWS and outputs >= MANY_OUTPUTS:
            return cls(2 * TILE, MAX_WARPS // 2, AHEAD // 2 if k <= 2048 else AHEAD, False)
        wide = 2048 < k <= 8192 and SOME_OUTPUTS <= outputs < MANY_OUTPUTS
        warps = MAX_WARPS // 2 if wide and not divided else float_warps(k)
        turns = triton.cdiv(k // TURN.value, warps)
        most_held = ALL_AHEAD if columns == STEP_ROWS else AHEAD if added else 0
        return cls(TILE, warps, turns if turns <= ALL_AHEAD else AHEAD, turns <= most_held)


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

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these.

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
    line = tl.arange(0, ROWS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    line = stored_lines(line, first, N, SWIGLU, ROWS)
    of_weight = weight_ptr + first.to(tl.int64) * K + line * K
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
    factors = ()
    if HEADS > 0:
        factors = load_factors(squares_ptr, rows, EPS, K, HEADS, PARTS, COLUMNS, WARPS, TURNS // BLOCK_TURNS)
    column = tl.arange(0, COLUMNS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    # Of prepared rows, a warp loads a piece of memory at once, not a piece of each row.
    of_x = x_ptr + column * (TURN if PREPARED else K)
    APART: tl.constexpr = COLUMNS * TURN if PREPARED else TURN
    inputs = ()
    for turn in tl.static_range(TURNS if HOLD else 1):
        inputs = inputs + (load_turn(of_x, turn, K, WARPS, APART, column < rows),)  # type: ignore[assignment]  # noqa: RUF005
    if HOLD:
        hold_loads()
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    for turn in tl.static_range(TURNS):
        if not HOLD and turn + 1 < TURNS:
            inputs = inputs + (load_turn(of_x, turn + 1, K, WARPS, APART, column < rows),)  # type: ignore[assignment]  # noqa: RUF005
        weights = tiles[0]  # type: ignore[misc]
        tiles = tiles[1:]
        if turn + AHEAD < TURNS:
            tiles = tiles + (load_turn(of_weight, turn + AHEAD, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
        products = multiply(weights, inputs[turn], products)
        if HEADS > 0 and (turn + 1) // BLOCK_TURNS > turn // BLOCK_TURNS:
            sums += products * factors[turn // BLOCK_TURNS][:, None, :]
            products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    store_direct(
        tl.sum(sums if HEADS > 0 else products, 0), bias_ptr, residual_ptr, state_ptr, slots_ptr, out_ptr, taps, past, slot,
        offset, output, row, rows, N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


@triton.jit
def load_turn(
    lines, NUMBER: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, APART: tl.constexpr = TURN, filled=True
):
    """Load a turn of lines, pointers [8, 1, LINES / 8, 1] to their first elements: [8, WARPS, LINES / 8, TURN].

    A warp's turns are neighbours, and begin APART elements from each other. Zeros behind the last element, and where not
    `filled`.
    """
    TURNS: tl.constexpr = (K // TURN + WARPS - 1) // WARPS
    at = tl.arange(0, WARPS)[None, :, None, None] * TURNS + NUMBER
    inside = (at < K // TURN) | (K // TURN == TURNS * WARPS)
    return tl.load(lines + (at * APART + tl.arange(0, TURN)[None, None, None, :]), mask=inside & filled, other=0.0)
