"""Configurations of the direct products whose weights are in bfloat16, or integers that are not int4 in groups of 128."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ostinato.export.kernels.operands import FOUR_ROWS, STEP_ROWS, Weight

from .rows_direct_floats_triton import TURN
from .rows_direct_store_triton import MAX_WARPS
from .rows_tiles_triton import BLOCK
from .step_triton import bits_of

# Turns that are under way in a loop: of most products, and of those with few programs. The most that are all under way.
AHEAD, FAR_AHEAD, ALL_AHEAD = 4, 8, 14
# Fewer programs than an H200 has multiprocessors; as many as have room twice on each; those of a vocabulary.
FEW_PROGRAMS, SOME_PROGRAMS, MANY_PROGRAMS = 132, 264, 2048
# A warp of a product with other integers may have all its blocks under way if they are few and all programs have room.
MOST_BLOCKS, H100_REGISTERS = 8, 132 * 65536
# The most programs that have a fence in each turn: as many as have room at once.
FENCED_PROGRAMS = 4 * 132


def float_warps(k: int) -> int:
    """Warps of a program with bfloat16 weights, if its rows' heads are divided or programs are few."""
    return MAX_WARPS if k > 1024 else MAX_WARPS // 2


@dataclass(frozen=True)
class FloatsConfig:
    """Configuration of a product with bfloat16 weights.

    A warp loads all its weights ahead of the wait, if they are few. Then the inputs of up to STEP_ROWS rows are under way at
    once, too: a layer of 0.8B with 4/8 rows takes 25.8/27.6 us, not 26.2/28.3. With 16 it would take 37.6, not 37.1. But
    where a residual is added, and no more than FAR_AHEAD turns, it takes 35.9, not 38.0; with attention 34.7, not 36.6 (one
    H200, 2026-11-28).

    Longer products are a loop. The compiler moves loads behind the products that they should run beside; a fence in some of
    the turns holds them. Microseconds with 4, 8 and 16 rows by warps, turns of weights ahead, turns of inputs ahead (with 16
    rows 4) and turns to a fence; and before, as a list of turns without fences (one H200, 2026-11-30):

                                          list                  4, 4, 4, 4            4, 8, 8, 2            8, 4, 4, 4
        8B: qkv, 6,144 x 4,096            18.2   19.1   21.3    18.5   18.9   19.5    20.5   20.8   22.9    21.1   21.4   25.1
        gate and up, 28,672 x 4,096       63.5   65.5   71.6    60.8   61.4   65.7    62.0   62.9   69.5    64.2   65.1   89.2
        o, 4,096 x 4,096                  12.5   13.3   14.7    13.0   13.1   14.1    12.4   12.6   14.2    12.8   13.1   17.2
        down, 4,096 x 14,336              37.0   38.2   40.2    34.3   34.6   37.1    32.8   33.4   37.0    32.9   33.1   41.8
        4B: o, 2,560 x 4,096              11.1   12.4   15.1    12.0   12.2   13.3    11.1   11.4   13.0    11.2   11.6   16.9
        down, 2,560 x 9,728               20.1   20.9   23.8    21.6   21.8   24.6    18.9   19.3   22.9    18.8   19.3   28.7
        14B: down, 5,120 x 17,408         57.9   61.8   70.0    47.4   47.9   51.3    56.2   57.7   68.9    53.6   55.8   65.8
        1.7B: down, 2,048 x 6,144         10.4   11.5   12.9    12.8   13.2   14.4    11.0   11.3   12.9    10.5   10.6   12.3
        vocabulary, 128,256 x 4,096      256.9  261.1  276.4   242.1  246.2  259.0   244.4  248.3          241.0  244.4  316.8
        vocabulary, 151,936 x 2,560      217.4  221.7  209.9   183.4  187.5  205.1   183.2  187.4          196.3  198.2  322.1

    With four turns ahead a multiprocessor has room for four programs of up to 8 rows (119 registers) and for three of 16
    (159), with eight for two (212 and 201): these are for products with few programs. Where there are fewer programs than
    multiprocessors, eight warps share one.

    Attributes:
        warps: warps, which divide K.
        ahead: turns whose weights a warp loads ahead.
        inputs: turns whose inputs a warp loads ahead.
        fence: turns whose loads stand ahead of one fence, in a loop; 0: the turns are a list.
    """

    warps: int
    ahead: int
    inputs: int
    fence: int

    @classmethod
    def of(cls, k: int, columns: int, programs: int, added: bool, divided: bool) -> FloatsConfig:
        """The configuration for K elements and `columns` rows.

        Args:
            added: whether a residual is added.
            divided: whether the product divides its rows' heads.
        """
        warps = float_warps(k) if divided or programs < FEW_PROGRAMS else MAX_WARPS // 2
        turns = triton.cdiv(k // TURN.value, warps)
        if turns <= (AHEAD if programs >= MANY_PROGRAMS else ALL_AHEAD):
            held = turns <= (ALL_AHEAD if columns == STEP_ROWS else FAR_AHEAD if added else 0)
            return cls(warps, turns, turns if held else 1, 0)
        if divided:
            return cls(warps, FAR_AHEAD, 1, 0)
        if FEW_PROGRAMS <= programs <= SOME_PROGRAMS:
            return cls(warps, FAR_AHEAD, FAR_AHEAD if columns == STEP_ROWS else AHEAD, 2)
        return cls(warps, AHEAD, AHEAD, AHEAD)


@dataclass(frozen=True)
class IntegersConfig:
    """Configuration of a product with integer weights: how many warps divide K, how many blocks each has of a turn, how many
    turns are under way, and whether a fence in each turn holds loads ahead of products.

    Microseconds of gate and up, 28,672 x 4,096 with SwiGLU, and of down, 4,096 x 14,336, among a layer's kernels in groups of
    32, with scales loaded in each turn (of one block or two, as was faster) | by stretches (one H200, 2026-11-28):

                  gate and up, up to 4 rows   up to 8        down, up to 4   up to 8
        int4      27.0 | 21.3                 27.6 | 29.1    16.1 | 13.5     16.8 | 15.8
        int8      39.2 | 36.2                 40.2 | 39.5    19.4 | 19.9     23.2 | 21.4

    A layer with attention, its qkv and o with all blocks under way (where these have room) | by stretches with a fence (one
    H200, 2026-11-30):

                  up to 4 rows     up to 8
        int4      52.7 | 53.7      65.2 | 64.2
        int8      77.4 | 76.6      85.8 | 84.2

    Gate and up have so many programs that they do without: a fence takes registers, and then 25.8 and 29.8 us in int4, not
    23.2 and 29.0.

    The same layer with down without | with a fence (one H200, 2026-11-30):

                  up to 4 rows     up to 8
        int4      52.6 | 49.6      62.7 | 66.8
        int8      75.3 | 77.4      83.3 | 85.3

    The same choices are the best with minima, 59.4/71.1 us: with 4 rows qkv and o by stretches 61.9, down without a fence
    61.8, with 8 rows down with one 75.2, with one block in each turn 64.0/71.2. With planes joined by two instructions
    57.4/69.7, and so with two turns of gate and up ahead 59.2/81.7 (one H200, 2026-12-01).
    """

    warps: int
    blocks: int
    ahead: int
    fence: bool = False

    @classmethod
    def of(cls, weight: Weight, columns: int, programs: int) -> IntegersConfig:
        blocks, bits = weight.columns // BLOCK.value, bits_of(weight)
        two = blocks % 2 == 0 and weight.group_size == 32
        warps = MAX_WARPS // 2
        turns = triton.cdiv(blocks, warps)
        long = turns > MOST_BLOCKS
        warps = MAX_WARPS if long else warps
        # The products of few columns with four bits take few registers.
        light = columns == FOUR_ROWS and bits == 4
        # A lane's registers with all blocks under way: words and scales.
        registers = 60 + turns * (2 * bits + 4)
        if (light or not two) and not long and programs * 32 * warps * registers <= H100_REGISTERS:
            return cls(warps, 1, turns)
        if two:
            return cls(warps, 2, 1, fence=light if long else programs <= FENCED_PROGRAMS)
        if columns == FOUR_ROWS:
            return cls(warps, 1, 3 if long else 2)
        # Two turns of rows with minima take 164 registers, one takes 96.
        return cls(warps, 1, 2 if bits == 8 or long else 1)
