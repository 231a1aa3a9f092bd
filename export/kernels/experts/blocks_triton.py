# mypy: allow-untyped-defs
"""The expert of a block of rows, for prompts and for steps of several rows. Blocks are in the order of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from .step_route_triton import add_pairs


@triton.jit
def expert_of_block(count, block, BLOCK: tl.constexpr, BOTH: tl.constexpr):
    """The expert of a block (-1 for an unused block), the block's index among that expert's blocks, and its first place.

    An expert's places follow those of lower experts. A block has BLOCK places, or what is left of its expert's.

    Args:
        count: number of rows of each expert; its length is a power of two.
        BOTH: an integer type; half of its bits must hold the number of all places.
    """
    HALF: tl.constexpr = BOTH.primitive_bitwidth // 2
    expert = tl.arange(0, count.shape[0])
    # The number of an expert's blocks and that of its places, in one integer: one sum over experts serves both.
    both = (((count + BLOCK - 1) // BLOCK).to(BOTH) << HALF) + count
    before = tl.cumsum(both, 0) - both
    hit = (before >> HALF <= block) & (block < (before + both) >> HALF)
    mine, ahead = tl.reduce((tl.where(hit, expert + 1, 0).to(BOTH), tl.where(hit, before, 0)), 0, add_pairs)
    index = block - (ahead >> HALF).to(tl.int32)
    place = (ahead & ((1 << HALF) - 1)).to(tl.int32) + index * BLOCK
    return mine.to(tl.int32) - 1, index, place
