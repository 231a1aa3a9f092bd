# mypy: allow-untyped-defs
"""The search for the sampled token among those that top-k, top-p and min-p keep; `rows_triton.py` says how it goes."""

from __future__ import annotations

import triton
import triton.language as tl

from .sample_triton import (
    CANDIDATES,
    EVEN_TURNS,
    LARGEST,
    LOWEST,
    NOTHING,
    OUTSIDE,
    _candidate,
    _gumbel_noise,
    _key,
    _number,
    _stack,
)

# Logits of a piece, of which the largest one is stored. They are 128 bytes, as much as a warp reads from memory at once.
PIECE = tl.constexpr(32)
QUADS = tl.constexpr(PIECE.value // 4)
FIRST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def sample_kept(
    x_row,
    best,
    masses,
    peaks,
    chosen,
    few,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best of the tokens that a row keeps, encoded as in `best_of`. best: the best of all tokens, unless top-k is on."""
    EACH: tl.constexpr = BLOCK // PIECE
    pieces = tl.arange(0, triton.next_power_of_2(BLOCKS) * EACH)
    largest = tl.load(peaks + pieces, mask=pieces < BLOCKS * EACH, other=OUTSIDE)
    of_blocks = tl.max(largest.reshape(triton.next_power_of_2(BLOCKS), EACH), 1)
    highest = tl.max(of_blocks, 0)
    peak = _number(highest)
    # If min_p is 0, its logarithm keeps all tokens.
    least = _key(tl.maximum(peak + temperature * tl.log(min_p), -LARGEST))

    # From here on, no key below `low` is looked at.
    low = least
    fresh = few
    if few:
        low = tl.where(top_k > BLOCKS, LOWEST, _kth_largest(of_blocks, top_k))
    else:
        # Not in a called function: torch's analysis would take the logits as written, because `chosen` depends on this load.
        found = _key(_finite(tl.load(x_row + token_of(best))))
        fresh = found < least
        low = tl.where(fresh, least, found + 1)
    count = _choose(chosen, pieces, largest, low)

    total = tl.full((), 0, tl.float32)
    if few:
        low = _lowest_of(x_row, chosen, count, low, highest + 1, top_k, VOCAB, TILE)
        if top_p < 1:
            total = _mass(x_row, chosen, count, low, peak, temperature, VOCAB, TILE)
    elif top_p < 1:
        blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
        weights = tl.load(masses + blocks, mask=blocks < BLOCKS, other=0.0)
        total = tl.sum(weights * weights_of(_number(of_blocks), of_blocks, OUTSIDE + 1, peak, temperature), 0)
    if fresh:
        low = tl.maximum(low, least)
        best = _best(x_row, chosen, count, low, temperature, seed, position, VOCAB, TILE)

    searching = top_p < 1
    while searching:
        low = _key(_finite(tl.load(x_row + token_of(best)))) + 1
        ahead = _mass(x_row, chosen, count, low, peak, temperature, VOCAB, TILE)
        # No token is more likely than the most likely one, so the search ends there, whatever rounding makes of a tiny top_p.
        searching = (ahead >= top_p * total) & (low <= highest)
        if searching:
            best = _best(x_row, chosen, count, low, temperature, seed, position, VOCAB, TILE)
    return best


@triton.jit
def _kth_largest(numbers, k):
    """The k-th largest of a few numbers; if there are fewer than k, the smallest one that is not OUTSIDE."""
    larger = tl.sum((numbers[None, :] > numbers[:, None]).to(tl.int32), 1)
    return tl.min(tl.where((larger < k) & (numbers > OUTSIDE), numbers, FIRST), 0)


@triton.jit
def _choose(chosen, pieces, largest, low):
    """Store in `chosen` the pieces whose largest key is `low` or more, in order, and return their number."""
    reach = (largest >= low).to(tl.int32)
    tl.store(chosen + tl.cumsum(reach, 0) - 1, pieces, mask=reach > 0)
    # Other threads will read `chosen`.
    tl.debug_barrier()
    return tl.sum(reach, 0)


@triton.jit
def _lowest_of(x_row, chosen, count, low, high, amount, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """A key that only the `amount` most likely tokens reach, and tokens as likely as the last of these; int32.

    At least `amount` tokens reach `low`, fewer reach `high`. No token outside the chosen pieces reaches `low`.
    """
    each = tl.arange(0, CANDIDATES)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    searching = high - low > 1
    turn = 0
    while searching:
        even = (turn < EVEN_TURNS) & (low > LOWEST)
        counts = _counts(x_row, chosen, count, low, high, even, VOCAB, TILE)
        reached = tl.sum(((counts >= amount) & (each > 0)).to(tl.int32), 0)
        new_low = _candidate(low, low, high, reached, even)
        if reached < CANDIDATES - 1:
            high = tl.minimum(high, _candidate(low, low, high, reached + 1, even))
        low = new_low
        # Often the set of kept tokens is known before its lowest key is known to the last bit.
        searching = (high - low > 1) & (tl.sum(tl.where(each == reached, counts, 0), 0) > amount)
        turn += 1
    return low.to(tl.int32)


@triton.jit
def _counts(x_row, chosen, count, low, high, even, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Number of tokens that reach each candidate of a turn, [CANDIDATES] int32."""
    found = tl.zeros((CANDIDATES,), tl.int32)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        _, keys = read_quads(x_row, quads, listed, VOCAB)
        parts = ()
        for index in tl.static_range(CANDIDATES):
            above = keys >= _candidate(low, low, high, index, even).to(tl.int32)
            parts += (tl.sum(above.to(tl.int32), 1),)  # type: ignore[assignment]
        found += tl.sum(_stack(parts), 0)
    return found


@triton.jit
def _mass(x_row, chosen, count, low, peak, temperature, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Weight of all tokens with keys from `low` on, where a logit of `peak` weighs 1. Always added in the same order."""
    parts = tl.zeros((TILE * QUADS,), tl.float32)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        x, keys = read_quads(x_row, quads, listed, VOCAB)
        parts += tl.sum(weights_of(x, keys, low, peak, temperature), 1)
    return tl.sum(parts, 0)


@triton.jit
def _best(x_row, chosen, count, low, temperature, seed, position, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The best token with a key from `low` on, encoded as in `best_of`."""
    best = tl.full((), NOTHING, tl.int64)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        x, keys = read_quads(x_row, quads, listed, VOCAB)
        scores = tl.div_rn(x, temperature) + _gumbel_noise(seed, position, quads)
        best = tl.maximum(best, best_of(scores, keys, quads, low))
    return best


@triton.jit
def _quads(chosen, begin, count, TILE: tl.constexpr):
    """(quads of TILE chosen pieces from index `begin` on, whether each exists), [TILE * QUADS] each. A quad: four tokens."""
    quad = tl.arange(0, TILE * QUADS)
    place = begin + quad // QUADS
    listed = place < count
    return tl.load(chosen + place, mask=listed, other=0) * QUADS + quad % QUADS, listed


@triton.jit
def read_quads(x_row, quads, listed, VOCAB: tl.constexpr):
    """(finite logits of quads of tokens, their keys), [quads, 4] each. The key of a token that does not exist is OUTSIDE."""
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    present = listed[:, None] & (tokens < VOCAB)
    x = tl.load(x_row + tokens, mask=present, other=0.0)
    x = _finite(x)
    return x, tl.where(present, _key(x), OUTSIDE)


@triton.jit
def _finite(x):
    return tl.where(x != x, -LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))


@triton.jit
def weights_of(x, keys, low, peak, temperature):
    """Weight of each token: its probability relative to that of a logit of `peak`; 0 for keys below `low`."""
    return tl.where(keys >= low, tl.exp(tl.div_rn(x - peak, temperature)), 0.0)


@triton.jit
def best_of(scores, keys, quads, low):
    """A number that encodes the best token with a key from `low` on.

    Of two tokens, the one with the higher score has the larger number; of equal scores, the earlier token has it.
    """
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    ranks = (_key(scores).to(tl.int64) << 32) + (FIRST - tokens)
    return tl.max(tl.max(tl.where(keys >= low, ranks, NOTHING), 1), 0)


@triton.jit
def token_of(best):
    return FIRST - (best & FIRST)
