# mypy: allow-untyped-defs
"""Sampling for several rows, in two kernels that start early. No program waits for another one.

1. `rank_rows_early` reads all logits once. For each block it stores the best token, as if every token were kept. For each
   piece of PIECE logits it stores the largest logit.
2. `sample_rows_early`, one program per row, takes the best of the blocks' tokens. That is the sampled token if no token is
   left out, and often if some are. Top-p keeps a token if the more likely tokens together weigh little enough. This can be
   checked for one token, without knowing where top-p ends. If the token is not kept, the best of the more likely tokens is
   checked next. So the more tokens top-p keeps, the sooner one is found. Each turn halves the remaining tokens, on average.

   Top-k keeps few tokens, so for such a row the first kernel computes no noise. The second kernel searches for the lowest
   kept logit, CANDIDATES candidates at a time. The k-th largest of the blocks' largest logits is a lower bound of that logit.

   All these searches read only pieces whose largest logit reaches the logit in question. A model's logits have few such
   pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.delegate.sampling import SamplingTensors
from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import is_one, launcher, starts_early
from ostinato.export.kernels.operands import LastTokens

from . import sample_triton
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

# Logits per program of the first kernel, and per warp. 8/16/64 greedy rows of 248,320 logits take 6.7/10.8/40.9 us; with 128
# per warp 8.0/13.5/51.1, with 4,096 per program and 256 per warp 7.1/12.1/46.6 (H200, 2026-11-23).
BLOCK = 2048
WARP = 256
# Logits of a piece, of which the largest one is stored. They are 128 bytes, as much as a warp reads from memory at once.
PIECE = tl.constexpr(32)
QUADS = tl.constexpr(PIECE.value // 4)
# Pieces that the second kernel reads in a turn, and its warps: 8 logits per thread. With 32 warps, a thread's 64 registers
# are too few.
TILE = 128
SAMPLE_WARPS = 16
# Slots that are compared at a time.
SLOTS = tl.constexpr(256)
FIRST = tl.constexpr(0x7FFFFFFF)


def sample_next(
    logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors, workspace: Tensor
) -> Tensor:
    """See `reference.sample_next`; all tensors contiguous. One row goes to `sample_triton.sample_next`.

    Positions, slots and params are read before the kernel ahead has ended, so no marked kernel may write them (rule R2 in
    `delegate/graphs/nodes.py`). A row of padding gives token 0; its logits and params are not read. The workspace is not used
    for several rows.
    """
    if is_one(logits.shape[0]):
        return sample_triton.sample_next(logits, positions, slots, last, params, workspace)
    return _sample_rows(logits, positions, slots, last.token, last.position, list(params))


# `parameters` are the fields of `SamplingTensors`, in order. Only the kernels take them one by one.
@torch.library.triton_op("ostinato::sample_rows", mutates_args={"token", "position"})
def _sample_rows(
    logits: Tensor, positions: Tensor, slots: Tensor, token: Tensor, position: Tensor, parameters: list[Tensor]
) -> Tensor:
    rows, vocab = logits.shape
    block = min(BLOCK, max(WARP, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block)
    pieces = blocks * (block // PIECE.value)

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=logits.device)

    bests, masses = empty(rows, blocks, dtype=torch.int64), empty(rows, blocks, dtype=torch.float32)
    peaks, chosen = empty(rows, pieces, dtype=torch.int32), empty(rows, pieces, dtype=torch.int32)
    out = empty(rows, dtype=torch.int64)
    common = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": block, "EARLY": starts_early()}
    launcher(rank_rows_early)[(blocks, rows)](
        logits, positions, slots, *parameters, bests, masses, peaks, **common, num_warps=block // WARP
    )
    launcher(sample_rows_early)[(rows,)](
        logits,
        positions,
        slots,
        *parameters,
        bests,
        masses,
        peaks,
        chosen,
        token,
        position,
        out,
        rows,
        TILE=min(TILE, triton.next_power_of_2(pieces)),
        **common,
        num_warps=SAMPLE_WARPS,
    )
    return out


@triton.jit
def rank_rows_early(
    logits,
    positions,
    slots,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    min_p_ptr,
    bests,
    masses,
    peaks,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (b, r) reads BLOCK logits of row r from b * BLOCK on, and stores what `sample_rows_early` needs for the row:

    - bests [R, BLOCKS] int64, if top-k is off: the block's best token, see `_best_of`.
    - peaks [R, BLOCKS * BLOCK / PIECE] int32, if tokens may be left out: the key of each piece's largest logit.
    - masses [R, BLOCKS] float32, if top-p is on and top-k is off: the weight of the block's tokens together, where the most
      likely one of these weighs 1.
    """
    start_next(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    own = tl.maximum(slot, 0)
    temperature = tl.load(temperature_ptr + own)
    top_p = tl.load(top_p_ptr + own)
    few, filtered = _filters(temperature, tl.load(top_k_ptr + own), top_p, tl.load(min_p_ptr + own), VOCAB)
    scored = (slot >= 0) & (few == 0)
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    noise = tl.zeros((BLOCK // 4, 4), tl.float32)
    # The noise needs no logits, so it is computed while the kernel ahead still runs.
    if scored & (temperature > 0):
        noise = _gumbel_noise(tl.load(seed_ptr + own), tl.load(positions + row) + 1, quads)
    wait_for_previous(EARLY)
    if slot >= 0:
        x, keys = _read(_row(logits, row, VOCAB), quads, quads * 4 < VOCAB, VOCAB)
        if scored:
            scores = x
            if temperature > 0:
                scores = tl.div_rn(x, temperature) + noise
            tl.store(bests + row * BLOCKS + block, _best_of(scores, keys, quads, OUTSIDE + 1))
        if filtered:
            largest = tl.max(tl.max(keys, 1).reshape(BLOCK // PIECE, QUADS), 1)
            pieces = block * (BLOCK // PIECE) + tl.arange(0, BLOCK // PIECE)
            tl.store(_row(peaks, row, BLOCKS * (BLOCK // PIECE)) + pieces, largest)
            if scored & (top_p < 1):
                weights = _weights(x, keys, OUTSIDE + 1, _number(tl.max(largest, 0)), temperature)
                tl.store(masses + row * BLOCKS + block, tl.sum(tl.sum(weights, 1), 0))


@triton.jit
def sample_rows_early(
    logits,
    positions,
    slots,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    min_p_ptr,
    bests,
    masses,
    peaks,
    chosen,
    token,
    position_ptr,
    out,
    rows,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program r samples for row r. chosen: [R, BLOCKS * BLOCK / PIECE] int32, lists of the pieces that programs read."""
    start_next(EARLY)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    own = tl.maximum(slot, 0)
    temperature = tl.load(temperature_ptr + own)
    top_k = tl.load(top_k_ptr + own)
    top_p = tl.load(top_p_ptr + own)
    min_p = tl.load(min_p_ptr + own)
    seed = tl.load(seed_ptr + own)
    position = tl.load(positions + row) + 1
    few, filtered = _filters(temperature, top_k, top_p, min_p, VOCAB)
    keeps = (slot >= 0) & _is_last(slots, slot, row, rows)
    wait_for_previous(EARLY)
    sampled = tl.full((), 0, tl.int64)
    if slot >= 0:
        best = tl.full((), NOTHING, tl.int64)
        blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
        if few == 0:
            best = tl.max(tl.load(bests + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=NOTHING), 0)
        if filtered:
            pieces = row.to(tl.int64) * (BLOCKS * (BLOCK // PIECE))
            x_row = _row(logits, row, VOCAB)
            best = _sample_kept(
                x_row,
                best,
                masses + row * BLOCKS,
                peaks + pieces,
                chosen + pieces,
                few,
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                position,
                VOCAB,
                BLOCKS,
                BLOCK,
                TILE,
            )
        sampled = _token_of(best)
    tl.store(out + row, sampled)
    tl.store(token + own, sampled, mask=keeps)
    tl.store(position_ptr + own, position, mask=keeps)


@triton.jit
def _filters(temperature, top_k, top_p, min_p, VOCAB: tl.constexpr):
    """(whether top-k may leave out tokens of a row, whether any parameter may)."""
    few = (temperature > 0) & (top_k > 0) & (top_k < VOCAB)
    return few, few | ((temperature > 0) & ((top_p < 1) | (min_p > 0)))


@triton.jit
def _is_last(slots, slot, row, rows):
    """Whether no later row belongs to this slot."""
    later = tl.full((), 0, tl.int32)
    for begin in range(0, rows, SLOTS):
        others = begin + tl.arange(0, SLOTS)
        theirs = tl.load(slots + others, mask=others < rows, other=-1)
        later += tl.sum(((theirs == slot) & (others > row)).to(tl.int32), 0)
    return later == 0


@triton.jit
def _sample_kept(
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
    """The best of the tokens that a row keeps, encoded as in `_best_of`. best: the best of all tokens, unless top-k is on."""
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
        found = _key(_finite(tl.load(x_row + _token_of(best))))
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
        total = tl.sum(weights * _weights(_number(of_blocks), of_blocks, OUTSIDE + 1, peak, temperature), 0)
    if fresh:
        low = tl.maximum(low, least)
        best = _best(x_row, chosen, count, low, temperature, seed, position, VOCAB, TILE)

    searching = top_p < 1
    while searching:
        low = _key(_finite(tl.load(x_row + _token_of(best)))) + 1
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
        _, keys = _read(x_row, quads, listed, VOCAB)
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
        x, keys = _read(x_row, quads, listed, VOCAB)
        parts += tl.sum(_weights(x, keys, low, peak, temperature), 1)
    return tl.sum(parts, 0)


@triton.jit
def _best(x_row, chosen, count, low, temperature, seed, position, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The best token with a key from `low` on, encoded as in `_best_of`."""
    best = tl.full((), NOTHING, tl.int64)
    for begin in range(0, count, TILE):
        quads, listed = _quads(chosen, begin, count, TILE)
        x, keys = _read(x_row, quads, listed, VOCAB)
        scores = tl.div_rn(x, temperature) + _gumbel_noise(seed, position, quads)
        best = tl.maximum(best, _best_of(scores, keys, quads, low))
    return best


@triton.jit
def _quads(chosen, begin, count, TILE: tl.constexpr):
    """(quads of TILE chosen pieces from index `begin` on, whether each exists), [TILE * QUADS] each. A quad: four tokens."""
    quad = tl.arange(0, TILE * QUADS)
    place = begin + quad // QUADS
    listed = place < count
    return tl.load(chosen + place, mask=listed, other=0) * QUADS + quad % QUADS, listed


@triton.jit
def _read(x_row, quads, listed, VOCAB: tl.constexpr):
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
def _weights(x, keys, low, peak, temperature):
    """Weight of each token: its probability relative to that of a logit of `peak`; 0 for keys below `low`."""
    return tl.where(keys >= low, tl.exp(tl.div_rn(x - peak, temperature)), 0.0)


@triton.jit
def _best_of(scores, keys, quads, low):
    """A number that encodes the best token with a key from `low` on.

    Of two tokens, the one with the higher score has the larger number; of equal scores, the earlier token has it.
    """
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    ranks = (_key(scores).to(tl.int64) << 32) + (FIRST - tokens)
    return tl.max(tl.max(tl.where(keys >= low, ranks, NOTHING), 1), 0)


@triton.jit
def _token_of(best):
    return FIRST - (best & FIRST)


@triton.jit
def _row(pointer, row, SIZE: tl.constexpr):
    return pointer + row.to(tl.int64) * SIZE
