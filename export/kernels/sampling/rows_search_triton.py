# mypy: allow-untyped-defs
"""The search for the sampled token among those that top-k, top-p and min-p keep; `rows_triton.py` says how it goes."""

from __future__ import annotations

import triton
import triton.language as tl

from .token_ranks_triton import (
    FIRST,
    LOWEST,
    NOTHING,
    OUTSIDE,
    PIECE,
    QUADS,
    best_of,
    gumbel_noise,
    key_of,
    key_of_token,
    least_key,
    number_of,
    read_quads,
    token_of,
    weights_of,
)

# Tokens that all programs of a row check for top-p together. If top-p keeps the share p of the weight, none of them is kept
# with a probability of (1 - p)^CHECKED.
CHECKED = tl.constexpr(8)
# Candidates for the lowest kept logit in a turn of top-k's search.
CANDIDATES = tl.constexpr(16)
# Turns at the start of a search that divide the range of logits evenly. Later turns divide the range of their bits. Most bit
# patterns belong to numbers near 0, and few lie between large logits, so turns by bits alone would take twice the number. But
# only turns by bits are sure to end.
EVEN_TURNS = tl.constexpr(3)


@triton.jit
def checked_keys(x_row, bests, least, VOCAB: tl.constexpr):
    """Keys of the best tokens with keys from `least` on, [CHECKED] int32, the best one first; OUTSIDE if there are no more.

    bests: the ranks of blocks' best tokens, [blocks, rounded up]. Other tokens are not looked at.
    """
    keys = tl.where(bests == NOTHING, OUTSIDE, key_of_token(x_row, bests, VOCAB))
    left = tl.where(keys >= least, bests, NOTHING)
    found = tl.full((CHECKED,), OUTSIDE, tl.int32)
    # Comparing all with all takes more registers than there are.
    for index in tl.static_range(CHECKED):
        first = (left == tl.max(left, 0)) & (left != NOTHING)
        found = tl.where(tl.arange(0, CHECKED) == index, tl.max(tl.where(first, keys, OUTSIDE), 0), found)
        left = tl.where(first, NOTHING, left)
    return found


@triton.jit
def masses_ahead(
    x_row,
    peaks,
    split,
    keys,
    peak,
    temperature,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weight of the tokens with keys above each of `keys` [CHECKED], of one of SPLITS programs' tokens: [CHECKED] float32."""
    each = tl.arange(0, CHECKED)
    lowest = tl.min(tl.where(keys == OUTSIDE, FIRST, keys), 0)
    masses = tl.zeros((CHECKED,), tl.float32)
    for begin in range(split * TILE, PIECES, SPLITS * TILE):
        quads = begin * QUADS + tl.arange(0, TILE * QUADS)
        pieces = quads // QUADS
        listed = tl.load(peaks + pieces, mask=pieces < PIECES, other=OUTSIDE) > lowest
        if tl.max(listed.to(tl.int32), 0) > 0:
            x, of_tokens = read_quads(x_row, quads, listed, VOCAB)
            weights = weights_of(x, of_tokens, OUTSIDE + 1, peak, temperature)
            parts = ()
            for index in tl.static_range(CHECKED):
                # One of the keys, for all threads.
                key = tl.sum(tl.where(each == index, keys, 0), 0)
                parts += (tl.sum(tl.where(of_tokens > key, weights, 0.0), 1),)  # type: ignore[assignment]
            masses += tl.sum(_stack(parts), 0)
    return masses


@triton.jit
def sample_kept(
    x_row,
    bests,
    tops,
    masses,
    peaks,
    chosen,
    keys,
    ahead,
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
    """The best of the tokens that a row keeps, as a rank.

    Args:
        bests: ranks of the blocks' best tokens, [BLOCKS, rounded up]. Not used if `few`.
        tops, masses, peaks: what `rank_rows_early` stores for the row.
        chosen: pointer to room for a list of pieces.
        keys, ahead: what `checked_keys` gives and what all programs' `masses_ahead` are together; only if top-p is on and not
            `few`.
        few: whether top-k is on.
    """
    PIECES: tl.constexpr = BLOCKS * (BLOCK // PIECE)
    GROUPS: tl.constexpr = (PIECES + PIECE - 1) // PIECE
    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
    of_blocks = tl.load(tops + blocks, mask=blocks < BLOCKS, other=OUTSIDE)
    highest = tl.max(of_blocks, 0)
    peak = number_of(highest)

    # All keys from `sure` on are kept, no key below `low` is. The most likely token is always kept, whatever rounding makes
    # of a tiny top_p.
    low = least_key(peak, temperature, min_p)
    sure = highest
    total = tl.full((), 0, tl.float32)
    count = tl.full((), 0, tl.int32)
    best = tl.full((), NOTHING, tl.int64)
    if few:
        bound = tl.where(top_k > BLOCKS, LOWEST, _kth_largest(of_blocks, top_k))
        count = _choose(chosen, peaks, bound, PIECES)
        if (count > TILE) & (top_k < PIECES):
            # The k-th largest of the pieces' largest logits is a closer bound. They are searched in pieces of their own.
            numbers = tl.arange(0, triton.next_power_of_2(GROUPS))
            tl.store(chosen + numbers, numbers, mask=numbers < GROUPS)
            tl.debug_barrier()
            bound = _lowest_of(peaks, chosen, GROUPS, bound, highest + 1, top_k, PIECES, TILE)
            count = _choose(chosen, peaks, bound, PIECES)
        bound = _lowest_of(x_row, chosen, count, bound, highest + 1, top_k, VOCAB, TILE)
        if top_p < 1:
            total = _mass(x_row, chosen, count, bound, peak, temperature, VOCAB, TILE)
        low = tl.maximum(low, bound)
    elif top_p < 1:
        weights = tl.load(masses + blocks, mask=blocks < BLOCKS, other=0.0)
        total = tl.sum(weights * weights_of(number_of(of_blocks), of_blocks, OUTSIDE + 1, peak, temperature), 0)
        keeps = (ahead < top_p * total) & (keys != OUTSIDE)
        sure = tl.minimum(sure, tl.min(tl.where(keeps, keys, FIRST), 0))
        low = tl.maximum(low, tl.max(tl.where(keeps | (keys == OUTSIDE), OUTSIDE, keys + 1), 0))
    if top_p >= 1:
        sure = low

    found = tl.full((), OUTSIDE, tl.int32)
    if few == 0:
        best = tl.max(bests, 0)
        found = key_of_token(x_row, best, VOCAB)
        # Often the best of the checked tokens is kept. Those ahead of it are not, and the next ones of their blocks may be
        # better than it.
        turns = tl.where((top_p >= 1) | (tl.max(keys, 0) >= sure), CHECKED, 0)
        while (found < low) & (turns > 0):
            block = token_of(best).to(tl.int32) // BLOCK
            quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            next_best = _best_of_quads(x_row, quads, quads >= 0, low, temperature, seed, position, VOCAB)
            bests = tl.where(blocks == block, next_best, bests)
            best = tl.max(bests, 0)
            found = key_of_token(x_row, best, VOCAB)
            turns -= 1
    if found < sure:
        if few == 0:
            count = _choose(chosen, peaks, low, PIECES)
        if found < low:
            best = _best(x_row, chosen, count, low, temperature, seed, position, VOCAB, TILE)
            found = key_of_token(x_row, best, VOCAB)
        while found < sure:
            low = found + 1
            if _mass(x_row, chosen, count, low, peak, temperature, VOCAB, TILE) < top_p * total:
                sure = found
            else:
                best = _best(x_row, chosen, count, low, temperature, seed, position, VOCAB, TILE)
                found = key_of_token(x_row, best, VOCAB)
    return best


@triton.jit
def _kth_largest(numbers, k):
    """The k-th largest of a few numbers; if there are fewer than k, the smallest one that is not OUTSIDE."""
    larger = tl.sum((numbers[None, :] > numbers[:, None]).to(tl.int32), 1)
    return tl.min(tl.where((larger < k) & (numbers > OUTSIDE), numbers, FIRST), 0)


@triton.jit
def _choose(chosen, peaks, low, PIECES: tl.constexpr):
    """Store in `chosen` the pieces whose largest key is `low` or more, in order, and return their number."""
    pieces = tl.arange(0, triton.next_power_of_2(PIECES))
    reaching = tl.load(peaks + pieces, mask=pieces < PIECES, other=OUTSIDE) >= low
    # Loaded again, because torch's analysis stops at loads. If the places in `chosen` came from `low` without a load between,
    # the logits that `low` was made of would be taken as written.
    reach = (tl.load(peaks + pieces, mask=reaching & (pieces < PIECES), other=OUTSIDE) > OUTSIDE).to(tl.int32)
    tl.store(chosen + tl.cumsum(reach, 0) - 1, pieces, mask=reach > 0)
    # Other threads will read `chosen`.
    tl.debug_barrier()
    return tl.sum(reach, 0)


@triton.jit
def _lowest_of(numbers, chosen, count, low, high, amount, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A key that only the `amount` largest of SIZE logits or keys reach, and those as large as the last of these; int32.

    At least `amount` of them reach `low`, fewer reach `high`. None outside the chosen pieces reaches `low`.
    """
    each = tl.arange(0, CANDIDATES)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    searching = high - low > 1
    turn = 0
    while searching:
        even = (turn < EVEN_TURNS) & (low > LOWEST)
        counts = _counts(numbers, chosen, count, low, high, even, SIZE, TILE)
        reached = tl.sum(((counts >= amount) & (each > 0)).to(tl.int32), 0)
        new_low = _candidate(low, high, reached, even)
        if reached < CANDIDATES - 1:
            high = tl.minimum(high, _candidate(low, high, reached + 1, even))
        low = new_low
        # Often the set of kept tokens is known before its lowest key is known to the last bit.
        searching = (high - low > 1) & (tl.sum(tl.where(each == reached, counts, 0), 0) > amount)
        turn += 1
    return low.to(tl.int32)


@triton.jit
def _candidate(low, high, index, even):
    """The key of a turn's candidate `index`. Candidates ascend from `low`, which is the first, to `high` or barely above."""
    inside = low + index * ((high - low + CANDIDATES - 1) // CANDIDATES)
    if even:
        first = number_of(low.to(tl.int32))
        step = number_of(high.to(tl.int32)) * (1.0 / CANDIDATES) - first * (1.0 / CANDIDATES)
        # Only one rounding, so that candidates ascend, and are the same wherever they are computed.
        number = tl.fma(step, index * 1.0, first)
        inside = tl.maximum(key_of(number).to(tl.int64), low + index)
    return tl.where(index == 0, low, inside)


@triton.jit
def _counts(numbers, chosen, count, low, high, even, SIZE: tl.constexpr, TILE: tl.constexpr):
    """How many logits or keys of the chosen pieces reach each candidate of a turn, [CANDIDATES] int32."""
    found = tl.zeros((CANDIDATES,), tl.int32)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        if numbers.dtype.element_ty == tl.int32:
            places = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
            keys = tl.load(numbers + places, mask=listed[:, None] & (places < SIZE), other=OUTSIDE)
        else:
            _, keys = read_quads(numbers, quads, listed, SIZE)
        parts = ()
        # Two counts of a tile fit one number. With one number for each, there are too few registers.
        for index in tl.static_range(0, CANDIDATES, 2):
            above = (keys >= _candidate(low, high, index, even).to(tl.int32)).to(tl.int32)
            above += (keys >= _candidate(low, high, index + 1, even).to(tl.int32)).to(tl.int32) << 16
            parts += (tl.sum(above, 1),)  # type: ignore[assignment]
        both = tl.sum(_stack(parts), 0)
        found += tl.join(both & 0xFFFF, both >> 16).reshape(CANDIDATES)
    return found


@triton.jit
def _mass(x_row, chosen, count, low, peak, temperature, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Weight of all tokens with keys from `low` on. Always added in the same order."""
    parts = tl.zeros((TILE * QUADS,), tl.float32)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        x, keys = read_quads(x_row, quads, listed, VOCAB)
        parts += tl.sum(weights_of(x, keys, low, peak, temperature), 1)
    return tl.sum(parts, 0)


@triton.jit
def _best(x_row, chosen, count, low, temperature, seed, position, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The best token with a key from `low` on, as a rank."""
    best = tl.full((), NOTHING, tl.int64)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        best = tl.maximum(best, _best_of_quads(x_row, quads, listed, low, temperature, seed, position, VOCAB))
    return best


@triton.jit
def _best_of_quads(x_row, quads, listed, low, temperature, seed, position, VOCAB: tl.constexpr):
    x, keys = read_quads(x_row, quads, listed, VOCAB)
    return best_of(tl.div_rn(x, temperature) + gumbel_noise(seed, position, quads), keys, quads, low)


@triton.jit
def _quads(chosen, begin, count, TILE: tl.constexpr):
    """(quads of TILE chosen pieces from index `begin` on, whether each exists), [TILE * QUADS] each. A quad: four tokens."""
    quad = tl.arange(0, TILE * QUADS)
    place = begin + quad // QUADS
    listed = place < count
    return tl.load(chosen + place, mask=listed, other=0) * QUADS + quad % QUADS, listed


@triton.jit
def _stack(parts):
    """A power of two of tensors [N] -> [N, their number], so that one sum over threads serves them all."""
    half: tl.constexpr = len(parts) // 2
    pairs = ()
    for index in tl.static_range(half):
        pairs += (tl.join(parts[index], parts[index + half]),)  # type: ignore[assignment]
    if half > 1:
        return _stack(pairs)
    else:
        return pairs[0].reshape(pairs[0].shape[0], pairs[0].numel // pairs[0].shape[0])  # type: ignore[misc]
