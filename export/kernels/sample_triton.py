# mypy: allow-untyped-defs
"""Sampling in one kernel whose programs keep the logits in registers and meet only as often as the options ask.

Greedy, and drawing from all tokens: each program leaves its best token, and the last one to arrive takes the best of these;
no program waits. Top-k and top-p look for the lowest logit that is kept, `sample.CANDIDATES` candidates at a time: each one
counts and sums what it has above each, all wait for all, and each adds up all programs' numbers in the same order and so
comes to the same narrower range. Programs that wait for each other must all be on the GPU at once, so there are no more of
them than multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import sample as reference
from .early_triton import start_next, wait_for_previous
from .launch import launcher, starts_early

# Logits a program, at least, and a warp: 122 programs of 16 warps for a vocabulary of 248,320, with one load of 16 bytes a
# thread. With 8 warps a thread needs 194 registers in place of 102.
BLOCK = 2048
WARP = 128
MAX_WARPS = 32
# Turns of a search that divide the range of logits evenly, before those that divide the range of their bits. Few bits lie
# between large logits and most of all around 0, so alone these would take twice as many turns; but they come to an end.
EVEN_TURNS = tl.constexpr(3)

HEADER = tl.constexpr(reference.HEADER)
CANDIDATES = tl.constexpr(reference.CANDIDATES)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# The key of -LARGEST; no number has OUTSIDE.
LOWEST = tl.constexpr(-0x7F800000)
OUTSIDE = tl.constexpr(-0x80000000)
NOTHING = tl.constexpr(-0x8000000000000000)


@torch.library.triton_op("ostinato::sample", mutates_args={"workspace"})
def sample(
    logits: Tensor,
    position: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    workspace: Tensor,
) -> Tensor:
    """`sample.sample` for a GPU."""
    out = torch.empty((1, 1), dtype=torch.int64, device=logits.device)
    _launch(logits, position, out, temperature, top_k, top_p, seed, workspace, out, False)
    return out


@torch.library.triton_op("ostinato::sample_next", mutates_args={"position", "token", "workspace"})
def sample_next(
    logits: Tensor,
    position: Tensor,
    token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    workspace: Tensor,
) -> Tensor:
    """`sample.sample_next` for a GPU."""
    out = torch.empty((1, 1), dtype=torch.int64, device=logits.device)
    _launch(logits, position, token, temperature, top_k, top_p, seed, workspace, out, True)
    return out


def _launch(
    logits: Tensor,
    position: Tensor,
    token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    workspace: Tensor,
    out: Tensor,
    following: bool,
) -> None:
    vocab = logits.shape[1]
    block = block_size(vocab, processors())
    programs = triton.cdiv(vocab, block)
    launcher(sample_early)[(programs,)](
        logits,
        position,
        token,
        temperature,
        top_k,
        top_p,
        seed,
        workspace,
        out,
        VOCAB=vocab,
        PROGRAMS=programs,
        BLOCK=block,
        NEXT=following,
        EARLY=starts_early(),
        num_warps=min(block // WARP, MAX_WARPS),
    )


def processors() -> int:
    """Programs that surely run at once. The interpreter runs one after the other."""
    if not torch.cuda.is_available():
        return 1
    return min(torch.cuda.get_device_properties().multi_processor_count, reference.PROGRAMS)


def block_size(vocab: int, programs: int) -> int:
    """Logits a program, a power of two: BLOCK, or more where that would be more than `programs` programs."""
    block = min(BLOCK, max(WARP, triton.next_power_of_2(vocab)))
    while triton.cdiv(vocab, block) > programs:
        block *= 2
    return block


@triton.jit
def sample_early(
    logits,
    position,
    token,
    temperature,
    top_k,
    top_p,
    seed,
    workspace,
    out,
    VOCAB: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program p: logits p * BLOCK on. Workspace: programs that arrived, then twice a row of CANDIDATES a program."""
    start_next(EARLY)
    program = tl.program_id(0)
    quads = program * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    heat = tl.load(temperature)
    most = tl.load(top_k)
    share = tl.load(top_p)
    place = tl.load(position)
    key = tl.load(seed)
    if NEXT:
        place += 1
    noise = tl.zeros((BLOCK // 4, 4), tl.float32)
    # The noise needs no logits, so it is made while the kernel ahead still runs.
    if heat > 0:
        noise = _gumbel_noise(key, place, quads)
    wait_for_previous(EARLY)
    present = tokens < VOCAB
    x = tl.load(logits + tokens, mask=present, other=0.0)
    x = tl.where(x != x, -LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
    keys = tl.where(present, _key(x), OUTSIDE)

    lowest = tl.full((), LOWEST, tl.int64)
    turn = 0
    scores = x
    if heat > 0:
        scores = tl.div_rn(x, heat) + noise
        few = (most > 0) & (most < VOCAB)
        if few | (share < 1):
            highest, low = _exchange_peaks(keys, most, workspace, program, PROGRAMS)
            turn += 1
            if few:
                lowest, turn = _search(
                    keys, x, lowest, low, highest + 1, most, turn, workspace, program, PROGRAMS, False
                )
            if share < 1:
                peak = _number(highest.to(tl.int32))
                mass = tl.where(present, tl.exp(tl.div_rn(x - peak, heat)), 0.0)
                # All tokens below `bottom` together weigh less than (1 - share) / e of the most likely one.
                bottom = peak - heat * (tl.log(VOCAB / (1 - share)) + 1)
                low = tl.maximum(lowest, _key(tl.maximum(bottom, -LARGEST)).to(tl.int64))
                lowest, turn = _search(
                    keys, mass, lowest, low, highest + 1, share, turn, workspace, program, PROGRAMS, True
                )

    # One number orders by score, and among equals the first token first.
    ranks = (_key(scores).to(tl.int64) << 32) + (0x7FFFFFFF - tokens)
    best = tl.max(tl.max(tl.where(keys >= lowest.to(tl.int32), ranks, NOTHING), 1), 0)
    row = _row(workspace, turn, PROGRAMS)
    tl.store(row + program, best)
    if _arrive(workspace) == (turn + 1) * PROGRAMS - 1:
        drawn = 0x7FFFFFFF - (tl.max(_one_of_each(row, NOTHING, PROGRAMS), 0) & 0x7FFFFFFF)
        tl.store(out, drawn)
        if NEXT:
            tl.store(token, drawn)
            tl.store(position, place)
        # All have arrived for the last time: the next launch starts from 0 again.
        tl.store(workspace, 0)


@triton.jit
def _key(x):
    """An int32 that orders as x does; both zeros have the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel_noise(key, place, quads):
    """`sample.gumbel_noise` of four tokens a quad: [quads, 4]."""
    zeros = quads * 0
    low = zeros + (place & 0xFFFFFFFF).to(tl.int32)
    high = zeros + (place >> 32).to(tl.int32)
    word0, word1, word2, word3 = tl.philox(key, quads, zeros, low, high)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3)).reshape(quads.shape[0], 4)
    # -log(1 - u), without loss where u is small, which is where draws are decided; the GPU's log of a number close to 1
    # has few right digits. Below 1/2 by the series of 2 atanh(s), right to 2^-26.
    words = words.to(tl.int32, bitcast=True)
    upper = words < 0
    half = (words ^ (words >> 31)).to(tl.float32)
    u = (half + 0.5) * 2.3283064365386963e-10
    s = u / (2.0 - u)
    t = s * s
    series = 1.0 / 13
    for n in tl.static_range(5, -1, -1):
        series = series * t + 1.0 / (2 * n + 1)
    exponential = tl.where(upper, -tl.log(u), 2.0 * s * series)
    return -tl.log(exponential)


@triton.jit
def _row(workspace, turn, PROGRAMS: tl.constexpr):
    """Where programs write at this turn. The row before is being read until all have arrived at this turn."""
    return workspace + HEADER + (turn % 2) * (PROGRAMS * CANDIDATES)


@triton.jit
def _arrive(workspace):
    """Say that this program's stores are done, and give the number of arrivals before."""
    tl.debug_barrier()
    return tl.atomic_add(workspace, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _meet(workspace, turn, PROGRAMS: tl.constexpr):
    """Wait until all programs have stored what they tell at this turn."""
    _arrive(workspace)
    while tl.atomic_add(workspace, 0, sem="acquire", scope="gpu") < (turn + 1) * PROGRAMS:
        pass
    tl.debug_barrier()


@triton.jit
def _one_of_each(row, other, PROGRAMS: tl.constexpr):
    """The number that each program stored at its place in the row, [power of two]."""
    programs = tl.arange(0, triton.next_power_of_2(PROGRAMS))
    # Past the first-level cache, which may hold what was there two turns ago.
    return tl.load(row + programs, mask=programs < PROGRAMS, other=other, cache_modifier=".cg")


@triton.jit
def _exchange_peaks(keys, most, workspace, program, PROGRAMS: tl.constexpr):
    """The highest key, and one that at least `most` keys reach; every program has a key from the lowest of peaks on."""
    row = _row(workspace, 0, PROGRAMS)
    tl.store(row + program, tl.max(tl.max(keys, 1), 0).to(tl.int64))
    _meet(workspace, 0, PROGRAMS)
    highest = tl.max(_one_of_each(row, OUTSIDE, PROGRAMS), 0)
    shared = tl.min(_one_of_each(row, -OUTSIDE, PROGRAMS), 0)
    return highest, tl.where(most > PROGRAMS, LOWEST, shared)


@triton.jit
def _search(
    keys, weights, bottom, low, high, amount, turn, workspace, program, PROGRAMS: tl.constexpr, BY_MASS: tl.constexpr
):
    """The largest key such that enough tokens have it or more, and the next turn.

    Enough are `amount` tokens, or by mass, `amount` of the weights of keys from `bottom` on. `low` is enough, `high` is not.
    """
    each = tl.arange(0, CANDIDATES)
    searching = high - low > 1
    count_low = tl.full((), 0x7FFFFFFF, tl.int32)
    count_high = tl.full((), 0, tl.int32)
    passes = 0
    while searching:
        even = (passes < EVEN_TURNS) & (low > LOWEST)
        counts, masses = _totals(keys, weights, bottom, low, high, even, turn, workspace, program, PROGRAMS, BY_MASS)
        total = tl.sum(tl.where(each == 0, masses, 0.0), 0)
        enough = masses >= amount * total if BY_MASS else counts >= amount
        # Candidates ascend and sums of fewer terms in the same order are not larger, so these are the first ones.
        reached = tl.sum((enough & (each > 0)).to(tl.int32), 0)
        new_low = _candidate(low, low, high, reached, even)
        if reached > 0:
            count_low = tl.sum(tl.where(each == reached, counts, 0), 0)
        if reached < CANDIDATES - 1:
            count_high = tl.sum(tl.where(each == reached + 1, counts, 0), 0)
            high = tl.minimum(high, _candidate(low, low, high, reached + 1, even))
        low = new_low
        # Often the set is settled before its lowest key is known to the last bit.
        unsettled = count_low - count_high > 1 if BY_MASS else count_low > amount
        searching = (high - low > 1) & unsettled
        turn += 1
        passes += 1
    return low, turn


@triton.jit
def _candidate(bottom, low, high, index, even):
    """The key that a turn asks about, for an index from 0: `bottom`, then ascending from `low` to `high`, hardly beyond."""
    inside = low + index * ((high - low + CANDIDATES - 1) // CANDIDATES)
    if even:
        first = _number(low.to(tl.int32))
        step = _number(high.to(tl.int32)) * (1.0 / CANDIDATES) - first * (1.0 / CANDIDATES)
        # One rounding, so that it ascends and comes out the same wherever it is asked for.
        number = tl.fma(step, index * 1.0, first)
        inside = tl.maximum(_key(number).to(tl.int64), low + index)
    return tl.where(index == 0, bottom, inside)


@triton.jit
def _totals(
    keys, weights, bottom, low, high, even, turn, workspace, program, PROGRAMS: tl.constexpr, BY_MASS: tl.constexpr
):
    """For each candidate, how many keys of all programs reach it and their weight (0 unless by mass)."""
    counts = ()
    masses = ()
    for index in tl.static_range(CANDIDATES):
        above = keys >= _candidate(bottom, low, high, index, even).to(tl.int32)
        counts += (tl.sum(above.to(tl.int32), 1),)  # type: ignore[assignment]
        if BY_MASS:
            masses += (tl.sum(tl.where(above, weights, 0.0), 1),)  # type: ignore[assignment]
    each = tl.arange(0, CANDIDATES)
    told = tl.sum(_stack(counts), 0).to(tl.int64) << 32
    if BY_MASS:
        told += tl.sum(_stack(masses), 0).to(tl.int32, bitcast=True)
    row = _row(workspace, turn, PROGRAMS)
    tl.store(row + program * CANDIDATES + each, told)
    _meet(workspace, turn, PROGRAMS)
    programs = tl.arange(0, triton.next_power_of_2(PROGRAMS))[:, None]
    told = tl.load(row + programs * CANDIDATES + each[None, :], mask=programs < PROGRAMS, other=0, cache_modifier=".cg")
    mass = (told & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum((told >> 32).to(tl.int32), 0), tl.sum(mass, 0)


@triton.jit
def _stack(parts):
    """CANDIDATES tensors [N] -> [N, CANDIDATES], so that they are summed over threads together."""
    half: tl.constexpr = len(parts) // 2
    pairs = ()
    for index in tl.static_range(half):
        pairs += (tl.join(parts[index], parts[index + half]),)  # type: ignore[assignment]
    if half > 1:
        return _stack(pairs)
    else:
        return pairs[0].reshape(pairs[0].shape[0], CANDIDATES)  # type: ignore[misc]
