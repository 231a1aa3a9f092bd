# mypy: allow-untyped-defs
"""Sampling in two kernels that start early. No program waits for another one.

1. `rank_rows_early` reads all logits once. For each block it stores the best token, as if every token were kept. For each
   piece of PIECE logits it stores the largest logit.
2. `sample_rows_early` takes the best of the blocks' tokens. That is the sampled token if no token is left out, and often if
   some are. Top-p keeps a token if the more likely tokens together weigh little enough. This can be checked for one token,
   without knowing where top-p ends. Reading a row's logits again takes one program too long, so SPLITS programs share it, and
   they check the CHECKED best tokens at once. The last of them to finish has the sums of all. Of the tokens that are kept, it
   takes the best one. If none is, it goes on by itself: the best of the tokens that are more likely than all checked ones is
   checked next, and so on. The more tokens top-p keeps, the sooner one is found. Each turn halves the remaining tokens, on
   average.

   Top-k keeps few tokens, so for such a row the first kernel computes no noise. If they are fewer than LISTED, one program of
   the second kernel finds them in order (`largest_triton.py`). Else it searches for the lowest kept logit, CANDIDATES
   candidates at a time. The k-th largest of the blocks' largest logits is a lower bound of that logit.

   The searches of one program read only pieces whose largest logit reaches the logit in question. A model's logits have few
   such pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import is_one, launcher, row_class, starts_early
from ostinato.export.kernels.operands import FEW_ROWS, MAX_ROWS, LastTokens, LogitsProcessing

from .largest_triton import LISTED, largest_tokens, sample_listed
from .processing_triton import BIASES, biases_of, change_quads, mode_of
from .rows_search_triton import CHECKED, checked_keys, masses_ahead, sample_kept
from .token_ranks_triton import (
    NOTHING,
    OUTSIDE,
    PIECE,
    best_of,
    gumbel_noise,
    least_key,
    number_of,
    read_quads,
    store_peaks,
    token_of,
    weights_of,
)

# Logits per program of the first kernel, and per warp. 8/16/64 greedy rows of 248,320 logits take 6.7/10.8/40.9 us; with 128
# per warp 8.0/13.5/51.1, with 4,096 per program and 256 per warp 7.1/12.1/46.6 (H200, 2026-11-23).
BLOCK = 2048
WARP = 256
# A single row has one load of 16 bytes per thread.
WARP_OF_ONE = 128
# Pieces that the second kernel reads in a turn, and its warps: 8 logits per thread. With 32 warps, a thread's 64 registers
# are too few.
TILE = 128
SAMPLE_WARPS = 16
# Programs that check a row's tokens together, by the class of the number of rows. For rows that need no check, all but the
# first of them end at once. A single row has one program for each TILE pieces.
SPLITS = {FEW_ROWS: 16, MAX_ROWS: 4}
# Slots that are compared at a time.
SLOTS = tl.constexpr(256)


def sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    last: LastTokens,
    params: SamplingTensors,
    processing: LogitsProcessing,
    late: bool = False,
) -> Tensor:
    """See `reference.sample_next`; all tensors contiguous.

    Positions, slots, params and `processing` without its counts are read before the kernel ahead has ended, so no marked
    kernel may write them (rule R2 in `delegate/graphs/nodes.py`). A row of padding gives token 0; its logits and params are
    not read.
    """
    given = processing.given._asdict()
    counts = given.pop("output_counts")
    others = [processing.processed, *given.values()]
    return _sample_rows(logits, positions, slots, last.token, last.position, counts, list(params), others, late)


# `parameters` are the fields of `SamplingTensors`, in order, and `processing` those of `LogitsProcessing` and of its
# `ProcessingTensors`, without the counts. Only the kernels take them one by one.
@torch.library.triton_op("ostinato::sample_rows", mutates_args={"token", "position", "output_counts"})
def _sample_rows(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    token: Tensor,
    position: Tensor,
    output_counts: Tensor,
    parameters: list[Tensor],
    processing: list[Tensor],
    late: bool,
) -> Tensor:
    rows, vocab = logits.shape
    warp = WARP_OF_ONE if is_one(rows) else WARP
    block = min(BLOCK, max(WARP, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block)
    pieces = blocks * (block // PIECE.value)
    tile = min(TILE, triton.next_power_of_2(pieces))
    tiles = triton.cdiv(pieces, tile)
    splits = tiles if is_one(rows) else min(SPLITS[row_class(rows)], tiles)

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=logits.device)

    bests, masses = empty(rows, blocks, dtype=torch.int64), empty(rows, blocks, dtype=torch.float32)
    tops, peaks = empty(rows, blocks, dtype=torch.int32), empty(rows, pieces, dtype=torch.int32)
    arrived, chosen = empty(rows, dtype=torch.int32), empty(rows, pieces, dtype=torch.int32)
    parts, out = empty(rows, splits, CHECKED.value, dtype=torch.float32), empty(rows, dtype=torch.int64)
    # Only rows that are processed touch it.
    changed = empty(rows, vocab, dtype=torch.float32)
    common = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": block, "LATE": late, "EARLY": starts_early()}
    launcher(rank_rows_early)[(blocks, rows)](
        logits,
        positions,
        slots,
        *parameters,
        output_counts,
        *processing,
        bests,
        masses,
        tops,
        peaks,
        arrived,
        changed,
        PART=block * 32 // warp,
        **common,
        num_warps=block // warp,
    )
    launcher(sample_rows_early)[(rows, splits)](
        logits,
        positions,
        slots,
        *parameters,
        processing[0],
        bests,
        masses,
        tops,
        peaks,
        arrived,
        changed,
        parts,
        chosen,
        token,
        position,
        output_counts,
        out,
        rows,
        TILE=tile,
        SPLITS=splits,
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
    output_counts,
    processed_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_tokens,
    bias_tokens,
    bias_values,
    bias_ends,
    allowed_tokens,
    bests,
    masses,
    tops,
    peaks,
    arrived,
    changed,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (b, r) reads BLOCK logits of row r from b * BLOCK on, and stores what `sample_rows_early` needs for the row:

    - bests [R, BLOCKS] int64, if top-k is off: the rank of the block's best token.
    - tops [R, BLOCKS] int32, if tokens may be left out: the key of the block's largest logit.
    - peaks [R, BLOCKS * BLOCK / PIECE] int32, if tokens may be left out: the key of each piece's largest logit.
    - masses [R, BLOCKS] float32, if top-p is on and top-k is off: the weight of the block's tokens together, where the most
      likely one of these weighs 1.
    - arrived [R] int32: 0.
    - changed [R, VOCAB] float32, if the row is processed: the processed logits.
    """
    start_next(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    own = tl.maximum(slot, 0)
    changes, temperature = mode_of(processed_ptr, temperature_ptr, slot, own, LATE)
    top_p = tl.load(top_p_ptr + own)
    few, filtered = _filters(temperature, tl.load(top_k_ptr + own), top_p, tl.load(min_p_ptr + own), VOCAB)
    scored = (slot >= 0) & (few == 0)
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    noise = tl.zeros((BLOCK // 4, 4), tl.float32)
    # The noise needs no logits, so it is computed while the kernel ahead still runs.
    if scored & (temperature > 0):
        noise = gumbel_noise(tl.load(seed_ptr + own), tl.load(positions + row) + 1, quads)
    first_bias = 0
    end_of_biases = 0
    if changes:
        first_bias, end_of_biases = biases_of(
            _row(bias_tokens, own, BIASES), _row(bias_ends, own, BIASES), block * BLOCK, BLOCK
        )
    wait_for_previous(EARLY)
    if slot >= 0:
        x_row = _row(logits, row, VOCAB)
        if changes:
            # A quad for each thread at a time, stored and read again: else rows that are not processed had too few registers.
            for part in range(0, BLOCK // 4, PART):
                change_quads(
                    _row(changed, row, VOCAB),
                    x_row,
                    block * (BLOCK // 4) + part + tl.arange(0, PART),
                    own,
                    tl.load(positions + row) + 1,
                    first_bias,
                    end_of_biases,
                    repetition_ptr,
                    presence_ptr,
                    frequency_ptr,
                    prompt_tokens,
                    output_counts,
                    bias_tokens,
                    bias_values,
                    bias_ends,
                    allowed_tokens,
                    VOCAB,
                )
            tl.debug_barrier()
        x_row = tl.where(changes, _row(changed, row, VOCAB), x_row)
        x, keys = read_quads(x_row, quads, quads * 4 < VOCAB, VOCAB)
        if scored:
            scores = x
            if temperature > 0:
                scores = tl.div_rn(x, temperature) + noise
            tl.store(bests + row * BLOCKS + block, best_of(scores, keys, quads, OUTSIDE + 1))
        if filtered:
            top = store_peaks(_row(peaks, row, BLOCKS * (BLOCK // PIECE)), block, keys, BLOCK)
            tl.store(tops + row * BLOCKS + block, top)
            if scored & (top_p < 1):
                weights = weights_of(x, keys, OUTSIDE + 1, number_of(top), temperature)
                tl.store(masses + row * BLOCKS + block, tl.sum(tl.sum(weights, 1), 0))
                tl.store(arrived + row, 0, mask=block == 0)


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
    processed_ptr,
    bests,
    masses,
    tops,
    peaks,
    arrived,
    changed,
    parts,
    chosen,
    token,
    position_ptr,
    output_counts,
    out,
    rows,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (r, 0) to (r, SPLITS - 1) sample for row r.

    Memory for their own use: parts [R, SPLITS, CHECKED] float32, what the programs of a row add; chosen
    [R, BLOCKS * BLOCK / PIECE] int32, lists of the pieces that programs read.
    """
    start_next(EARLY)
    row = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(slots + row)
    own = tl.maximum(slot, 0)
    changes, temperature = mode_of(processed_ptr, temperature_ptr, slot, own, LATE)
    top_k = tl.load(top_k_ptr + own)
    top_p = tl.load(top_p_ptr + own)
    min_p = tl.load(min_p_ptr + own)
    few, filtered = _filters(temperature, top_k, top_p, min_p, VOCAB)
    shared = (slot >= 0) & filtered & (few == 0) & (top_p < 1)
    last = split == 0
    if last | shared:
        seed = tl.load(seed_ptr + own)
        position = tl.load(positions + row) + 1
        keeps = (slot >= 0) & _is_last(slots, slot, row, rows)
        wait_for_previous(EARLY)
        blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
        ranks = tl.full((triton.next_power_of_2(BLOCKS),), NOTHING, tl.int64)
        if (slot >= 0) & (few == 0):
            ranks = tl.load(bests + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=NOTHING)
        x_row = tl.where(changes, _row(changed, row, VOCAB), _row(logits, row, VOCAB))
        pieces = row.to(tl.int64) * (BLOCKS * (BLOCK // PIECE))
        keys = tl.full((CHECKED,), OUTSIDE, tl.int32)
        ahead = tl.zeros((CHECKED,), tl.float32)
        if shared:
            peak = number_of(tl.max(tl.load(tops + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=OUTSIDE), 0))
            keys = checked_keys(x_row, ranks, least_key(peak, temperature, min_p), VOCAB)
            ahead = masses_ahead(
                x_row, peaks + pieces, split, keys, peak, temperature, VOCAB, BLOCKS * (BLOCK // PIECE), TILE, SPLITS
            )
            each = tl.arange(0, CHECKED)
            of_row = parts + row * (SPLITS * CHECKED)
            tl.store(of_row + split * CHECKED + each, ahead)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1
            programs = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
            # Read past the first-level cache, which other programs' writes do not reach.
            ahead = tl.sum(
                tl.load(
                    of_row + programs * CHECKED + each[None, :],
                    mask=(programs < SPLITS) & last,
                    other=0.0,
                    cache_modifier=".cg",
                ),
                0,
            )
        if last:
            sampled = tl.full((), 0, tl.int64)
            if slot >= 0:
                best = tl.max(ranks, 0)
                searched = filtered
                if few & (top_k < LISTED):
                    tokens, token_keys = largest_tokens(
                        x_row, tops + row * BLOCKS, peaks + pieces, VOCAB, BLOCKS, BLOCK, PIECE
                    )
                    best, complete = sample_listed(tokens, token_keys, temperature, top_k, top_p, min_p, seed, position)
                    searched = complete == 0
                if searched:
                    best = sample_kept(
                        x_row,
                        ranks,
                        tops + row * BLOCKS,
                        masses + row * BLOCKS,
                        peaks + pieces,
                        chosen + pieces,
                        keys,
                        ahead,
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
                # An export tries the kernel on random params, which may keep no token at all.
                sampled = tl.minimum(token_of(best), VOCAB - 1)
            tl.store(out + row, sampled)
            tl.store(token + own, sampled, mask=keeps)
            tl.store(position_ptr + own, position, mask=keeps)
            if keeps & changes:
                # Loaded again, because torch's analysis stops at loads: what the token comes from would be taken as written.
                tl.debug_barrier()
                count = _row(output_counts, own, VOCAB) + tl.load(out + row)
                tl.store(count, tl.load(count) + 1)


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
def _row(pointer, row, SIZE: tl.constexpr):
    return pointer + row.to(tl.int64) * SIZE
