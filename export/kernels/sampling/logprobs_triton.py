# mypy: allow-untyped-defs
"""Log-probabilities in two kernels that start early.

1. `weigh_rows_early` reads all logits once. For each block it stores the key of the largest logit, the weight of all relative
   to it, and the number of logits that reach the given token's. For each piece it stores the key of the largest logit.
2. `logprobs_rows_early` has one program per row. It adds up the blocks, and finds the most likely tokens
   (`largest_triton.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.delegate.sampling_params import MAX_LOGPROBS
from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, starts_early

from .largest_triton import LISTED, largest_tokens
from .rows_triton import BLOCK, WARP
from .token_ranks_triton import OUTSIDE, PIECE, finite, key_of, number_of, read_quads, store_peaks

assert LISTED.value >= MAX_LOGPROBS
# Warps of the second kernel.
WARPS = 8


def logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.logprobs`; logits contiguous."""
    numbers, values = _logprobs_rows(logits, tokens)
    return numbers, values


@torch.library.triton_op("ostinato::logprobs_rows", mutates_args={})
def _logprobs_rows(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    block = min(BLOCK, max(WARP, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block)

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=logits.device)

    tops, counts, peaks = empty(rows, blocks), empty(rows, blocks), empty(rows, blocks * (block // PIECE.value))
    masses = empty(rows, blocks, dtype=torch.float32)
    listed = min(MAX_LOGPROBS, vocab)
    numbers, values = empty(rows, 1 + listed), empty(rows, 1 + listed, dtype=torch.float32)
    common = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": block, "EARLY": starts_early()}
    launcher(weigh_rows_early)[(blocks, rows)](
        logits, tokens, tops, peaks, masses, counts, **common, num_warps=max(1, block // WARP)
    )
    launcher(logprobs_rows_early)[(rows,)](
        logits, tokens, tops, peaks, masses, counts, numbers, values, COUNT=listed, **common, num_warps=WARPS
    )
    return numbers, values


@triton.jit
def weigh_rows_early(
    logits,
    tokens,
    tops,
    peaks,
    masses,
    counts,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (b, r) reads BLOCK logits of row r from b * BLOCK on, and stores [R, BLOCKS] each tops, masses and counts, and
    [R, BLOCKS * BLOCK / PIECE] peaks."""
    start_next(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    wait_for_previous(EARLY)
    x_row = logits + row * VOCAB
    own = _key_of_own(x_row, tokens + row, VOCAB)
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    x, keys = read_quads(x_row, quads, quads * 4 < VOCAB, VOCAB)
    top = store_peaks(peaks + row * (BLOCKS * (BLOCK // PIECE)), block, keys, BLOCK)
    place = row * BLOCKS + block
    tl.store(tops + place, top)
    weights = tl.where(keys > OUTSIDE, tl.exp(x - number_of(top)), 0.0)
    tl.store(masses + place, tl.sum(tl.sum(weights, 1), 0))
    tl.store(counts + place, tl.sum(tl.sum((keys >= own).to(tl.int32), 1), 0))


@triton.jit
def logprobs_rows_early(
    logits,
    tokens,
    tops,
    peaks,
    masses,
    counts,
    numbers,
    values,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program r stores `numbers` and `values` of row r, [R, 1 + COUNT] each."""
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(EARLY)
    x_row = logits + row * VOCAB
    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
    inside = blocks < BLOCKS
    place = row * BLOCKS + blocks
    keys = tl.load(tops + place, mask=inside, other=OUTSIDE)
    weights = tl.load(masses + place, mask=inside, other=0.0)
    reached = tl.sum(tl.load(counts + place, mask=inside, other=0), 0)
    own = _key_of_own(x_row, tokens + row, VOCAB)
    peak = number_of(tl.max(keys, 0))
    total = tl.log(tl.sum(tl.where(inside, weights * tl.exp(number_of(keys) - peak), 0.0), 0))
    found, found_keys = largest_tokens(
        x_row, tops + row * BLOCKS, peaks + row * (BLOCKS * (BLOCK // PIECE)), VOCAB, BLOCKS, BLOCK, PIECE
    )
    of_row = row * (1 + COUNT)
    tl.store(numbers + of_row, reached)
    tl.store(values + of_row, number_of(own) - peak - total)
    places = tl.arange(0, LISTED)
    stored = (places < COUNT) & (found >= 0)
    tl.store(numbers + of_row + 1 + places, found, mask=stored)
    tl.store(values + of_row + 1 + places, number_of(found_keys) - peak - total, mask=stored)


@triton.jit
def _key_of_own(x_row, token_ptr, VOCAB: tl.constexpr):
    """Key of the given token's logit. An export tries the kernels on tokens that do not exist."""
    token = tl.load(token_ptr)
    return key_of(finite(tl.load(x_row + token, mask=(token >= 0) & (token < VOCAB), other=0.0)))
