"""Attention of one token in two kernels: one over parts of the cache, one that combines their sums.

No slot past the token's position is read: it may hold anything, NaN included.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import MEDIUM, SMALL, fitting, launcher

from .block_triton import TileConfig, attend_block, score_scale

# Rows of a tile, the fewest that tensor cores multiply: the queries that share a key head, and padding.
ROWS = 16
# Programs over all key heads: about one for each of an H200's 132 multiprocessors.
PROGRAMS = 128
# The slots of one split are a multiple of this, so that a few thousand tokens spread evenly.
STEP = 16
COMBINE_WIDTH = 64
# By the shared memory of the GPU. At D = 256 bfloat16 takes 74 KB, float32 100 or 66.
CONFIGS = {
    torch.bfloat16: {SMALL: TileConfig(ROWS, keys=64, warps=4, stages=2)},
    torch.float32: {
        MEDIUM: TileConfig(ROWS, keys=32, warps=8, stages=2),
        SMALL: TileConfig(ROWS, keys=16, warps=8, stages=2),
    },
}


def splits_for(kv_heads: int, slots: int) -> int:
    """Programs that share the slots of one key head, a power of two: PROGRAMS over all key heads, fewer for a short cache."""
    most = max(1, min(PROGRAMS // kv_heads, slots // STEP))
    return 2 ** int(math.log2(most))


@torch.library.triton_op("ostinato::attend_one", mutates_args={})
def attend_one(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """`attend` for one token; all tensors contiguous. The cost grows with the position, not with the number of slots.

    Args:
        query: [1, heads, D].
        keys, values: [kv_heads, S, D].
        positions: [1] int64.
    """
    _, heads, head_dim = query.shape
    kv_heads, slots, _ = keys.shape
    config = fitting(CONFIGS[query.dtype])
    splits = splits_for(kv_heads, slots)
    sums = torch.empty((splits, heads, head_dim), dtype=torch.float32, device=query.device)
    peaks = torch.empty((splits, heads), dtype=torch.float32, device=query.device)
    weights = torch.empty((splits, heads), dtype=torch.float32, device=query.device)
    out = torch.empty((1, heads, head_dim), dtype=query.dtype, device=query.device)
    launcher(split_kernel)[(kv_heads, splits)](
        query,
        keys,
        values,
        positions,
        sums,
        peaks,
        weights,
        SLOTS=slots,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        SCALE=score_scale(head_dim),
        SPLITS=splits,
        STEP=STEP,
        QUERIES=config.queries,
        KEYS=config.keys,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    width = min(head_dim, COMBINE_WIDTH)
    launcher(combine_kernel)[(heads, head_dim // width)](
        sums,
        peaks,
        weights,
        positions,
        out,
        HEADS=heads,
        D=head_dim,
        SPLITS=splits,
        STEP=STEP,
        WIDTH=width,
        num_warps=4,
    )
    return out


@triton.jit
def split_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    positions: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    weights: tl.tensor,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Program (key head, split): the key head's queries over the slots of the split, not yet normalised."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    tokens = tl.load(positions).to(tl.int32) + 1
    share = share_of(tokens, SPLITS, STEP)
    first = split * share
    last = tl.minimum(first + share, tokens)
    row = tl.arange(0, QUERIES)
    cell = tl.arange(0, D)[None, :]
    q = tl.load(query + (kv_head * GROUP + row)[:, None] * D + cell, mask=(row < GROUP)[:, None], other=0.0)
    visible = tl.zeros([QUERIES], tl.int32) + last - 1
    keys = k_cache + kv_head.to(tl.int64) * SLOTS * D
    values = v_cache + kv_head.to(tl.int64) * SLOTS * D
    total = tl.zeros([QUERIES, D], tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    for start in range(first, last, KEYS):
        total, weight, peak = attend_block(
            q, keys, values, start, last, visible, total, weight, peak, SCALE, KEYS, True
        )
    # Splits past the last token write nothing, and the combination reads nothing of them.
    used = row < tl.where(first < tokens, GROUP, 0)
    place = split * HEADS + kv_head * GROUP + row
    tl.store(sums + place[:, None] * D + cell, total, mask=used[:, None])
    tl.store(peaks + place, peak, mask=used)
    tl.store(weights + place, weight, mask=used)


@triton.jit
def combine_kernel(
    sums: tl.tensor,
    peaks: tl.tensor,
    weights: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (head, part of D): the splits' sums, brought to one maximum, over the sum of their weights."""
    head = tl.program_id(0)
    cell = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, SPLITS)
    tokens = tl.load(positions).to(tl.int32) + 1
    used = split * share_of(tokens, SPLITS, STEP) < tokens
    place = split * HEADS + head
    peak = tl.load(peaks + place, mask=used, other=float("-inf"))
    weight = tl.load(weights + place, mask=used, other=0.0)
    total = tl.load(sums + place[:, None] * D + cell[None, :], mask=used[:, None], other=0.0)
    factor = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(total * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out + head * D + cell, result.to(out.dtype.element_ty))


@triton.jit
def share_of(tokens: tl.tensor, SPLITS: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """Slots of one split: enough that SPLITS of them hold all tokens."""
    return tl.cdiv(tokens, SPLITS * STEP) * STEP
