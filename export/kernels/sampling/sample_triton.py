# mypy: allow-untyped-defs
"""Sampling in one kernel whose programs keep the logits in registers and exchange data only as often as the params need it.

For greedy sampling, and sampling from all tokens, each program stores its best token, and the last program to arrive takes
the best of these. No program waits. Min-p needs the largest of all logits, so all programs wait for each other once. Top-k
and top-p search for the lowest kept logit, CANDIDATES candidates at a time. In each turn, a program counts and weighs its
tokens that reach each candidate, and waits for all other programs. Then it adds up the numbers of all programs, all in the
same order, and so all find the same narrower range. Programs that wait for each other must all be on the GPU at once, so
there are no more programs than multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.compile.gpu import gpu_properties
from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, starts_early
from ostinato.export.kernels.operands import LastTokens

from . import reference
from .token_ranks_triton import LARGEST, LOWEST, NOTHING, OUTSIDE, gumbel_noise, key_of, number_of

# The fewest logits per program, and logits per warp: a vocabulary of 248,320 takes 122 programs of 16 warps, with one load of
# 16 bytes per thread. With 8 warps a thread needs 194 registers, not 102.
BLOCK = 2048
WARP = 128
MAX_WARPS = 32
# Turns at the start of a search that divide the range of logits evenly. Later turns divide the range of their bits. Most bit
# patterns belong to numbers near 0, and few lie between large logits, so turns by bits alone would take twice the number. But
# only turns by bits are sure to end.
EVEN_TURNS = tl.constexpr(3)

HEADER = tl.constexpr(reference.HEADER)
CANDIDATES = tl.constexpr(reference.CANDIDATES)


def sample_next(
    logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors, workspace: Tensor
) -> Tensor:
    """See `reference.sample_next`; all tensors contiguous.

    Positions, slots and params are read before the kernel ahead has ended, so no marked kernel may write them (rule R2 in
    `delegate/graphs/nodes.py`).
    """
    return _sample_next(logits, positions, slots, last.token, last.position, list(params), workspace)


# `parameters` are the fields of `SamplingTensors`, in order. Only the kernel takes them one by one.
@torch.library.triton_op("ostinato::sample_next", mutates_args={"token", "position", "workspace"})
def _sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    token: Tensor,
    position: Tensor,
    parameters: list[Tensor],
    workspace: Tensor,
) -> Tensor:
    out = torch.empty((1,), dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    block = block_size(vocab, processors())
    programs = triton.cdiv(vocab, block)
    launcher(sample_early)[(programs,)](
        logits,
        positions,
        slots,
        token,
        position,
        *parameters,
        workspace,
        out,
        VOCAB=vocab,
        PROGRAMS=programs,
        BLOCK=block,
        EARLY=starts_early(),
        num_warps=min(block // WARP, MAX_WARPS),
    )
    return out


def processors() -> int:
    """Number of programs that are certain to run at once: 1 in the interpreter, which runs them one after another."""
    gpu = gpu_properties()
    return 1 if gpu is None else min(gpu.processors, reference.PROGRAMS)


def block_size(vocab: int, programs: int) -> int:
    """Logits per program, a power of two: BLOCK, or more where BLOCK would need more than `programs` programs."""
    block = min(BLOCK, max(WARP, triton.next_power_of_2(vocab)))
    while triton.cdiv(vocab, block) > programs:
        block *= 2
    return block


@triton.jit
def sample_early(
    logits,
    positions,
    slots,
    token,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    min_p_ptr,
    workspace,
    out,
    VOCAB: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program p takes BLOCK logits from p * BLOCK on. Workspace: the number of arrivals, then two areas, see `_row`."""
    start_next(EARLY)
    program = tl.program_id(0)
    quads = program * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    slot = tl.load(slots).to(tl.int32)
    own = tl.maximum(slot, 0)
    temperature = tl.load(temperature_ptr + own)
    top_k = tl.load(top_k_ptr + own)
    top_p = tl.load(top_p_ptr + own)
    min_p = tl.load(min_p_ptr + own)
    position = tl.load(positions) + 1
    seed = tl.load(seed_ptr + own)
    noise = tl.zeros((BLOCK // 4, 4), tl.float32)
    # The noise needs no logits, so it is computed while the kernel ahead still runs.
    if temperature > 0:
        noise = gumbel_noise(seed, position, quads)
    wait_for_previous(EARLY)
    present = tokens < VOCAB
    x = tl.load(logits + tokens, mask=present, other=0.0)
    x = tl.where(x != x, -LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
    keys = tl.where(present, key_of(x), OUTSIDE)

    lowest = tl.full((), LOWEST, tl.int64)
    turn = 0
    scores = x
    if temperature > 0:
        scores = tl.div_rn(x, temperature) + noise
        few = (top_k > 0) & (top_k < VOCAB)
        if few | (top_p < 1) | (min_p > 0):
            highest, low = _exchange_peaks(keys, top_k, workspace, program, PROGRAMS)
            turn += 1
            # If min_p is 0, its logarithm keeps all tokens.
            least = number_of(highest.to(tl.int32)) + temperature * tl.log(min_p)
            least = key_of(tl.maximum(least, -LARGEST))
            if few:
                lowest, turn = _search(
                    keys, x, lowest, low, highest + 1, top_k, turn, workspace, program, PROGRAMS, False
                )
            if top_p < 1:
                peak = number_of(highest.to(tl.int32))
                mass = tl.where(present, tl.exp(tl.div_rn(x - peak, temperature)), 0.0)
                # All tokens below `bottom` together weigh less than (1 - top_p) / e of the most likely one.
                bottom = peak - temperature * (tl.log(VOCAB / (1 - top_p)) + 1)
                low = tl.maximum(lowest, key_of(tl.maximum(bottom, -LARGEST)).to(tl.int64))
                lowest, turn = _search(
                    keys, mass, lowest, low, highest + 1, top_p, turn, workspace, program, PROGRAMS, True
                )
            lowest = tl.maximum(lowest, least.to(tl.int64))

    # One number per token. It orders by score; of equal scores, the first token has the largest number.
    ranks = (key_of(scores).to(tl.int64) << 32) + (0x7FFFFFFF - tokens)
    best = tl.max(tl.max(tl.where(keys >= lowest.to(tl.int32), ranks, NOTHING), 1), 0)
    row = _row(workspace, turn, PROGRAMS)
    tl.store(row + program, best)
    if _arrive(workspace) == (turn + 1) * PROGRAMS - 1:
        sampled = 0x7FFFFFFF - (tl.max(_one_of_each(row, NOTHING, PROGRAMS), 0) & 0x7FFFFFFF)
        tl.store(out, sampled)
        tl.store(token + own, sampled, mask=slot >= 0)
        tl.store(position_ptr + own, position, mask=slot >= 0)
        # All programs have arrived for the last time. The next launch starts from 0 again.
        tl.store(workspace, 0)


@triton.jit
def _row(workspace, turn, PROGRAMS: tl.constexpr):
    """The area where programs write in this turn, CANDIDATES numbers each. The other area is read until all have arrived."""
    return workspace + HEADER + (turn % 2) * (PROGRAMS * CANDIDATES)


@triton.jit
def _arrive(workspace):
    """Announce that this program's stores are done, and return the number of earlier arrivals."""
    tl.debug_barrier()
    return tl.atomic_add(workspace, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _meet(workspace, turn, PROGRAMS: tl.constexpr):
    """Wait until all programs have stored their numbers of this turn."""
    _arrive(workspace)
    while tl.atomic_add(workspace, 0, sem="acquire", scope="gpu") < (turn + 1) * PROGRAMS:
        pass
    tl.debug_barrier()


@triton.jit
def _one_of_each(row, other, PROGRAMS: tl.constexpr):
    """The number that each program has stored at its place in `row`, [PROGRAMS, rounded up to a power of two]."""
    programs = tl.arange(0, triton.next_power_of_2(PROGRAMS))
    # Read past the first-level cache, which may hold the numbers of two turns ago.
    return tl.load(row + programs, mask=programs < PROGRAMS, other=other, cache_modifier=".cg")


@triton.jit
def _exchange_peaks(keys, top_k, workspace, program, PROGRAMS: tl.constexpr):
    """(the highest key, a key that at least `top_k` keys reach). The peak of every program reaches the lowest peak."""
    row = _row(workspace, 0, PROGRAMS)
    tl.store(row + program, tl.max(tl.max(keys, 1), 0).to(tl.int64))
    _meet(workspace, 0, PROGRAMS)
    highest = tl.max(_one_of_each(row, OUTSIDE, PROGRAMS), 0)
    shared = tl.min(_one_of_each(row, -OUTSIDE, PROGRAMS), 0)
    return highest, tl.where(top_k > PROGRAMS, LOWEST, shared)


@triton.jit
def _search(
    keys, weights, bottom, low, high, amount, turn, workspace, program, PROGRAMS: tl.constexpr, BY_MASS: tl.constexpr
):
    """(the largest key that enough tokens reach, or a lower one that the same tokens reach; the next turn).

    Enough are `amount` tokens or, if BY_MASS, tokens with the share `amount` of the weight of all keys from `bottom` on.
    Enough tokens reach `low`, too few reach `high`.
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
        # Candidates ascend, and a sum of fewer terms in the same order is not larger. So candidates that enough tokens reach
        # come first.
        reached = tl.sum((enough & (each > 0)).to(tl.int32), 0)
        new_low = _candidate(low, low, high, reached, even)
        if reached > 0:
            count_low = tl.sum(tl.where(each == reached, counts, 0), 0)
        if reached < CANDIDATES - 1:
            count_high = tl.sum(tl.where(each == reached + 1, counts, 0), 0)
            high = tl.minimum(high, _candidate(low, low, high, reached + 1, even))
        low = new_low
        # Often the set of kept tokens is known before its lowest key is known to the last bit.
        unsettled = count_low - count_high > 1 if BY_MASS else count_low > amount
        searching = (high - low > 1) & unsettled
        turn += 1
        passes += 1
    return low, turn


@triton.jit
def _candidate(bottom, low, high, index, even):
    """The key of a turn's candidate `index`: `bottom` for 0, the others ascend from `low` to `high` or barely above."""
    inside = low + index * ((high - low + CANDIDATES - 1) // CANDIDATES)
    if even:
        first = number_of(low.to(tl.int32))
        step = number_of(high.to(tl.int32)) * (1.0 / CANDIDATES) - first * (1.0 / CANDIDATES)
        # Only one rounding, so that candidates ascend, and are the same wherever they are computed.
        number = tl.fma(step, index * 1.0, first)
        inside = tl.maximum(key_of(number).to(tl.int64), low + index)
    return tl.where(index == 0, bottom, inside)


@triton.jit
def _totals(
    keys, weights, bottom, low, high, even, turn, workspace, program, PROGRAMS: tl.constexpr, BY_MASS: tl.constexpr
):
    """(number of keys of all programs that reach each candidate, the weight of these keys: 0 unless BY_MASS)."""
    counts = ()
    masses = ()
    for index in tl.static_range(CANDIDATES):
        above = keys >= _candidate(bottom, low, high, index, even).to(tl.int32)
        counts += (tl.sum(above.to(tl.int32), 1),)  # type: ignore[assignment]
        if BY_MASS:
            masses += (tl.sum(tl.where(above, weights, 0.0), 1),)  # type: ignore[assignment]
    each = tl.arange(0, CANDIDATES)
    numbers = tl.sum(_stack(counts), 0).to(tl.int64) << 32
    if BY_MASS:
        numbers += tl.sum(_stack(masses), 0).to(tl.int32, bitcast=True)
    row = _row(workspace, turn, PROGRAMS)
    tl.store(row + program * CANDIDATES + each, numbers)
    _meet(workspace, turn, PROGRAMS)
    programs = tl.arange(0, triton.next_power_of_2(PROGRAMS))[:, None]
    numbers = tl.load(
        row + programs * CANDIDATES + each[None, :], mask=programs < PROGRAMS, other=0, cache_modifier=".cg"
    )
    mass = (numbers & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum((numbers >> 32).to(tl.int32), 0), tl.sum(mass, 0)


@triton.jit
def _stack(parts):
    """CANDIDATES tensors [N] -> [N, CANDIDATES], so that one sum over threads serves them all."""
    half: tl.constexpr = len(parts) // 2
    pairs = ()
    for index in tl.static_range(half):
        pairs += (tl.join(parts[index], parts[index + half]),)  # type: ignore[assignment]
    if half > 1:
        return _stack(pairs)
    else:
        return pairs[0].reshape(pairs[0].shape[0], CANDIDATES)  # type: ignore[misc]
