# mypy: allow-untyped-defs
"""The most likely tokens of a row in order, by ranking alone.

A candidate's place is the number of candidates that are ahead of it. All pairs are compared at once, so no turn waits for
another one. The LISTED largest logits lie in the LISTED blocks with the largest ones, in the LISTED parts of these, and so on
down to tokens: a part that is left out has as many parts ahead of it, with a token each. With parts of a quarter there are
seven selections among up to 128; parts of an eighth take five among 256, and half as many instructions again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .token_ranks_triton import OUTSIDE, finite, key_of

# Number of tokens that are found.
LISTED = tl.constexpr(32)
# Parts of a part among which a selection chooses.
PARTS = tl.constexpr(4)


@triton.jit
def largest_tokens(
    x_row, tops, peaks, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr
):
    """The tokens with the LISTED largest logits, [LISTED] int32 in order, and their keys; -1 and OUTSIDE behind the last one.

    Args:
        tops: keys of the largest logit of each block, [BLOCKS] int32.
        peaks: keys of the largest logit of each piece, [BLOCKS * BLOCK / PIECE] int32.
    """
    PIECES: tl.constexpr = BLOCK // PIECE
    SIZE: tl.constexpr = triton.next_power_of_2(BLOCKS)
    blocks = tl.arange(0, SIZE)
    found = _first_of(tl.load(tops + blocks, mask=blocks < BLOCKS, other=OUTSIDE), blocks, SIZE)
    found = _largest_within(peaks, found, PIECES, BLOCKS * PIECES)
    found = _largest_within(x_row, found, PIECE, VOCAB)
    return found, _keys_at(x_row, found, found >= 0)


@triton.jit
def _largest_within(numbers, found, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The LISTED largest of SIZE keys or logits, which stand in the parts that were found, of WIDTH each."""
    COUNT: tl.constexpr = WIDTH if WIDTH < PARTS else PARTS
    EACH: tl.constexpr = WIDTH // COUNT
    parts = (found[:, None] * COUNT + tl.arange(0, COUNT)[None, :]).reshape(LISTED * COUNT)
    places = parts[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Parts of nothing have negative numbers.
    keys = _keys_at(numbers, places, (parts >= 0)[:, None] & (places < SIZE))
    found = _first_of(tl.max(keys, 1), parts, LISTED * COUNT)
    if EACH > 1:
        return _largest_within(numbers, found, EACH, SIZE)
    else:
        return found


@triton.jit
def _keys_at(numbers, places, present):
    """Keys at these places of keys or logits."""
    if numbers.dtype.element_ty == tl.int32:
        return tl.load(numbers + places, mask=present, other=OUTSIDE)
    else:
        x = tl.load(numbers + places, mask=present, other=0.0)
        return tl.where(present, key_of(finite(x)), OUTSIDE)


@triton.jit
def _first_of(keys, parts, COUNT: tl.constexpr):
    """The LISTED of COUNT different parts with the largest keys, [LISTED] in order; of equal keys the earlier part is first.
    -1 stands for a key of OUTSIDE, and behind the last one."""
    LANES: tl.constexpr = 32 if COUNT > 32 else COUNT
    WARPS: tl.constexpr = 8 if COUNT > 8 else COUNT
    # By itself Triton would take the threads' order from the loads, and add up across threads for each part: 6,600
    # instructions in all, not 4,000. A gather begins a new order: the last axis goes to lanes, the one ahead of it to warps.
    keys = tl.gather(keys, tl.arange(0, COUNT), 0)
    # One more than the key, so that no number is too low.
    ranks = ((keys + 1).to(tl.int64) << 32) - parts
    own = ranks.reshape(COUNT // LANES, 1, 1, LANES)
    others = ranks.reshape(1, COUNT // WARPS, WARPS, 1)
    ahead = tl.sum(tl.sum((others > own).to(tl.int32), 1), 1).reshape(COUNT)
    placed = tl.where(keys == OUTSIDE, LISTED, ahead).reshape(COUNT // WARPS, WARPS, 1)
    places = tl.arange(0, LISTED)[None, None, :]
    return tl.max(tl.max(tl.where(placed == places, parts.reshape(COUNT // WARPS, WARPS, 1), -1), 0), 0)
