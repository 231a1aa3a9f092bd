"""Causal attention over a KV cache on the GPU: one token split over the cache, more tokens in blocks of queries.

Both walk over the keys with a running maximum and sum, in powers of two (online softmax, in the order of FlashAttention-2,
arXiv:2307.08691). No slot past the last token's position is read: what stands there may be anything, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...delegate.errors import ExportError
from .launch import LARGE, MEDIUM, SMALL, fitting, launcher

HEAD_DIMS = (16, 32, 64, 128, 256)
# Rows of a decode tile, the fewest that tensor cores multiply: the queries that share a key head, and padding.
DECODE_ROWS = 16
# Decode programs over all key heads: about one for each of an H200's 132 multiprocessors.
DECODE_PROGRAMS = 128
# A program's share of the cache is a multiple of this, so that a few thousand tokens spread evenly.
SHARE_STEP = 16
COMBINE_WIDTH = 64


@dataclass(frozen=True)
class TileConfig:
    """Queries and keys of a tile, and how the compiler spreads the work over warps and overlaps loads with it."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the shared memory of the GPU. At D = 256 decode takes 74 KB in bfloat16, 100 or 66 in float32; prefill in bfloat16 takes
# 192, 104 and 68. Before Hopper the sums of 128 queries would spill 100 to 340 bytes a thread.
DECODE = {
    torch.bfloat16: {SMALL: TileConfig(DECODE_ROWS, keys=64, warps=4, stages=2)},
    torch.float32: {
        MEDIUM: TileConfig(DECODE_ROWS, keys=32, warps=8, stages=2),
        SMALL: TileConfig(DECODE_ROWS, keys=16, warps=8, stages=2),
    },
}
PREFILL = {
    LARGE: TileConfig(128, keys=64, warps=8, stages=2),
    MEDIUM: TileConfig(64, keys=64, warps=8, stages=2),
    SMALL: TileConfig(64, keys=32, warps=8, stages=2),
}


def prefill_config(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The largest tiles whose accumulators stay in registers."""
    if dtype == torch.bfloat16:
        return fitting(PREFILL)
    if head_dim <= 64:
        return TileConfig(64, keys=32, warps=4, stages=2)
    return TileConfig(32 if head_dim == 128 else 16, keys=32, warps=8, stages=1)


def check_shapes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raises ExportError where the kernels cannot take this attention."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ExportError(f"the attention kernels take bfloat16 or float32, got {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ExportError(f"the attention kernels take head sizes of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    if heads % kv_heads or heads // kv_heads > DECODE_ROWS:
        raise ExportError(
            f"the attention kernels take a number of heads that is 1 to {DECODE_ROWS} times that of key heads, "
            f"got {heads} heads and {kv_heads} key heads"
        )


def decode_splits(kv_heads: int, slots: int) -> int:
    """Programs that share a key head's slots, a power of two: DECODE_PROGRAMS over all key heads, fewer for a short cache."""
    most = max(1, min(DECODE_PROGRAMS // kv_heads, slots // SHARE_STEP))
    return 2 ** int(math.log2(most))


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor:
    """Softmax attention of T consecutive tokens over the cache; each sees the slots up to its own position.

    Args:
        query: [T, heads, D], bfloat16 or float32.
        k_cache, v_cache: [kv_heads, S, D] in query's dtype, the T tokens' own keys and values already in.
        positions: [T] int64, consecutive; the first is read on the device.

    Returns:
        [T, heads, D] in query's dtype. Scores, softmax and sums are float32.

    Raises:
        ExportError: see `check_shapes`.
    """
    if query.shape[0] == 1:
        return attend_one(query.contiguous(), k_cache, v_cache, positions)
    return attend_many(query.contiguous(), k_cache, v_cache, positions)


@torch.library.triton_op("ostinato::attend_one", mutates_args={})
def attend_one(query: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor:
    """`attend` for one token; all tensors contiguous. The cost grows with the position, not with S."""
    _, heads, head_dim = query.shape
    kv_heads, slots, _ = k_cache.shape
    check_shapes(heads, kv_heads, head_dim, query.dtype)
    config = fitting(DECODE[query.dtype])
    splits = decode_splits(kv_heads, slots)
    sums = torch.empty((splits, heads, head_dim), dtype=torch.float32, device=query.device)
    peaks = torch.empty((splits, heads), dtype=torch.float32, device=query.device)
    weights = torch.empty((splits, heads), dtype=torch.float32, device=query.device)
    out = torch.empty((1, heads, head_dim), dtype=query.dtype, device=query.device)
    launcher(split_kernel)[(kv_heads, splits)](
        query,
        k_cache,
        v_cache,
        positions,
        sums,
        peaks,
        weights,
        SLOTS=slots,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        SCALE=_scale(head_dim),
        SPLITS=splits,
        STEP=SHARE_STEP,
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
        STEP=SHARE_STEP,
        WIDTH=width,
        num_warps=4,
    )
    return out


@torch.library.triton_op("ostinato::attend_many", mutates_args={})
def attend_many(query: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor:
    """`attend` for two tokens or more; all tensors contiguous."""
    tokens, heads, head_dim = query.shape
    kv_heads, slots, _ = k_cache.shape
    check_shapes(heads, kv_heads, head_dim, query.dtype)
    config = prefill_config(head_dim, query.dtype)
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    launcher(prefill_kernel)[(heads, (tokens + config.queries - 1) // config.queries)](
        query,
        k_cache,
        v_cache,
        positions,
        out,
        tokens,
        SLOTS=slots,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        SCALE=_scale(head_dim),
        QUERIES=config.queries,
        KEYS=config.keys,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def _scale(head_dim: int) -> float:
    """What scores are multiplied by before powers of two."""
    return head_dim**-0.5 * math.log2(math.e)


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
    """Program (key head, split): the key head's queries over the split's share of the slots, not yet normalised."""
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
    used = (row < GROUP) & (first < tokens)
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
def prefill_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Program (head, block of queries, the last first: it has the most keys)."""
    head = tl.program_id(0)
    # A symbolic size may come with 64 bits; in the loops' bounds those cost 400 instructions.
    tokens = tl.cast(tokens, tl.int32)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    start_position = tl.load(positions).to(tl.int32)
    row = first + tl.arange(0, QUERIES)
    cell = tl.arange(0, D)[None, :]
    place = row[:, None].to(tl.int64) * (HEADS * D) + head * D + cell
    q = tl.load(query + place, mask=(row < tokens)[:, None], other=0.0)
    visible = start_position + row
    keys = k_cache + (head // GROUP).to(tl.int64) * SLOTS * D
    values = v_cache + (head // GROUP).to(tl.int64) * SLOTS * D
    total = tl.zeros([QUERIES, D], tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    end = start_position + tl.minimum(first + QUERIES, tokens)
    # Blocks that all queries see wholly need no mask. Slot 0 is in the first block, whichever loop has it, and all see that.
    unmasked = (start_position + first + 1) // KEYS * KEYS
    for start in range(0, unmasked, KEYS):
        total, weight, peak = attend_block(
            q, keys, values, start, end, visible, total, weight, peak, SCALE, KEYS, False
        )
    for start in range(unmasked, end, KEYS):
        total, weight, peak = attend_block(q, keys, values, start, end, visible, total, weight, peak, SCALE, KEYS, True)
    tl.store(out + place, (total * (1.0 / weight)[:, None]).to(out.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def attend_block(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    visible: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the slots `start` to `start + KEYS` into (total [M, D], weight [M], peak [M]).

    With MASKED, slots from `end` on are not read, and row m sees those up to visible[m]. Every row must see a slot of the
    first block it meets.
    """
    slot = start + tl.arange(0, KEYS)
    place = slot[:, None] * q.shape[1] + tl.arange(0, q.shape[1])[None, :]
    inside = (slot < end)[:, None] | (not MASKED)
    scores = multiply(
        q, tl.trans(tl.load(keys + place, mask=inside, other=0.0)), tl.zeros([q.shape[0], KEYS], tl.float32)
    )
    if MASKED:
        scores = tl.where(slot[None, :] <= visible[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    shrink = tl.exp2(peak - new_peak)
    shares = tl.exp2(scores * SCALE - new_peak[:, None])
    # Zeros for values that are not read: a weight of zero times NaN would be NaN.
    total = multiply(shares, tl.load(values + place, mask=inside, other=0.0), total * shrink[:, None])
    return total, weight * shrink + tl.sum(shares, 1), new_peak


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a @ b in float32, a rounded to b's dtype; three products in tf32 make one of float32's precision."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32x3")


@triton.jit
def share_of(tokens: tl.tensor, SPLITS: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """Slots of one split: enough that SPLITS of them hold all tokens."""
    return tl.cdiv(tokens, SPLITS * STEP) * STEP
