# mypy: allow-untyped-defs
"""The most likely tokens of a row in order, by ranking alone, and sampling where top-k keeps only some of these.

A candidate's place is the number of candidates that are ahead of it. All pairs are compared at once, so no turn waits for
another one. The LISTED largest logits lie in the LISTED blocks with the largest ones, in the LISTED parts of these, and so on
down to tokens: a part that is left out has as many parts ahead of it, with a token each. With parts of a quarter there are
seven selections among up to 128; parts of an eighth take five among 256, and half as many instructions again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .token_ranks_triton import (
    FIRST,
    LOWEST,
    OUTSIDE,
    best_of,
    finite,
    gumbel_noise,
    key_of,
    least_key,
    number_of,
    weights_of,
)

# Number of tokens that are found.
LISTED = tl.constexpr(32)
# Parts of a part among which a selection chooses.
PARTS = tl.constexpr(4)
# Ranks of parts with a key are higher.
ABSENT = tl.constexpr(LOWEST.value << 32)


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
    keys = tl.load(tops + blocks, mask=blocks < BLOCKS, other=OUTSIDE)
    found = _first_of(_ranks_of(keys, blocks), SIZE)
    found = _largest_within(peaks, found, PIECES, BLOCKS * PIECES)
    found = _largest_within(x_row, found, PIECE, VOCAB)
    return found, _keys_at(x_row, found, found >= 0)


@triton.jit
def sample_listed(tokens, keys, temperature, top_k, top_p, min_p, seed, position):
    """Sample among the tokens that a row keeps, if these are listed.

    Args:
        tokens, keys: what `largest_tokens` gives.

    Returns:
        The best token as a rank, and whether all kept tokens are listed. If not, the rank means nothing.
    """
    places = tl.arange(0, LISTED)
    peak = number_of(tl.max(keys, 0))
    low = tl.max(tl.where(places == top_k - 1, keys, OUTSIDE), 0)
    # Tokens that are as likely as the last one stay, and behind the list there may be more of them.
    complete = tl.min(keys, 0) < low
    x = number_of(keys)
    if top_p < 1:
        weights = weights_of(x, keys, tl.maximum(low, OUTSIDE + 1), peak, temperature)
        ahead = tl.sum(tl.where(places[:, None] < places[None, :], weights[:, None], 0.0), 0)
        keeps = (keys >= low) & (ahead < top_p * tl.sum(weights, 0))
        low = tl.min(tl.where(keeps, keys, FIRST), 0)
    low = tl.maximum(tl.maximum(low, least_key(peak, temperature, min_p)), OUTSIDE + 1)
    quads = tokens // 4
    mine = (tokens % 4)[:, None] == tl.arange(0, 4)[None, :]
    scores = tl.div_rn(x, temperature)[:, None] + gumbel_noise(seed, position, quads)
    return best_of(scores, tl.where(mine, keys[:, None], OUTSIDE), quads, low), complete


@triton.jit
def _largest_within(numbers, found, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The LISTED largest of SIZE keys or logits, which stand in the parts that were found, of WIDTH each."""
    COUNT: tl.constexpr = WIDTH if WIDTH < PARTS else PARTS
    EACH: tl.constexpr = WIDTH // COUNT
    parts = (found[:, None] * COUNT + tl.arange(0, COUNT)[None, :]).reshape(LISTED * COUNT)
    places = parts[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Parts of nothing have negative numbers.
    keys = _keys_at(numbers, places, (parts >= 0)[:, None] & (places < SIZE))
    found = _first_of(_ranks_of(tl.max(keys, 1), parts), LISTED * COUNT)
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
def _ranks_of(keys, parts):
    """Numbers that order parts by their keys, and of equal keys the earlier part first; below ABSENT without a key."""
    # One more than the key, so that none is below the lowest integer.
    return ((keys + 1).to(tl.int64) << 32) - parts


@triton.jit
def _first_of(ranks, COUNT: tl.constexpr):
    """The parts with the LISTED highest of COUNT different ranks, [LISTED] int32 in order; -1 behind the last one."""
    LANES: tl.constexpr = 32 if COUNT > 32 else COUNT
    WARPS: tl.constexpr = 8 if COUNT > 8 else COUNT
    # By itself Triton would take the threads' order from the loads, and add up across threads for each part: 6,600
    # instructions in all, not 3,500. A gather begins a new order: the last axis goes to lanes, the one ahead of it to warps.
    ranks = tl.gather(ranks, tl.arange(0, COUNT), 0)
    own = ranks.reshape(COUNT // LANES, 1, 1, LANES)
    others = ranks.reshape(1, COUNT // WARPS, WARPS, 1)
    ahead = tl.sum(tl.sum((others > own).to(tl.int32), 1), 1).reshape(COUNT // WARPS, WARPS, 1)
    others = others.reshape(COUNT // WARPS, WARPS, 1)
    placed = tl.where(others < ABSENT, LISTED, ahead)
    parts = -others.to(tl.int32)
    places = tl.arange(0, LISTED)[None, None, :]
    return tl.max(tl.max(tl.where(placed == places, parts, -1), 0), 0)
