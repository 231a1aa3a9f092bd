"""Causal attention of a prompt over a KV cache on the GPU, for any number of tokens.

A program takes a tile of queries: those of a few tokens, for all heads that share a key head. So each key is loaded once for
all of them. Where there are few tiles, the positions that a tile sees are split among several programs (as in flash-decoding,
Dao et al., 2023), and a second kernel adds up their sums. Positions that no token sees are not read: they may hold
anything, NaN included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, MEDIUM, SMALL, fitting, launcher
from ostinato.export.kernels.operands import Heads, KVCache, RowIndex

from .block_triton import PROGRAMS, TileConfig, attend_range, first_seen, padded_group, score_scale
from .limits import check_step
from .place_triton import place_rows

# Tiles for bfloat16, by the GPU's shared memory. At D = 256 these take 192, 104 and 68 KB. On GPUs before Hopper, the sums of
# 128 queries would spill 100 to 340 bytes per thread.
CONFIGS = {
    LARGE: TileConfig(128, keys=64, warps=8, stages=2),
    MEDIUM: TileConfig(64, keys=64, warps=8, stages=2),
    SMALL: TileConfig(64, keys=32, warps=8, stages=2),
}
# The most programs if tiles are split: two for each multiprocessor, so that little is idle at the end.
PARTS = 2 * PROGRAMS
MAX_SPLITS = 64
# The fewest positions of a split.
MIN_SPLIT = 128
SUM_WARPS = 4


def config_for(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The largest tile whose accumulators stay in registers."""
    if dtype == torch.bfloat16:
        return fitting(CONFIGS)
    if head_dim <= 64:
        return TileConfig(64, keys=32, warps=4, stages=2)
    return TileConfig(32 if head_dim == 128 else 16, keys=32, warps=8, stages=1)


def attend(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """See `reference.attend`; all tensors contiguous. Scores, softmax and sums are float32.

    Raises:
        ExportError: see `check_step`.
    """
    check_step(heads, index, cache)
    out = _attend(qkv, *heads.arguments, *index, *cache.arguments)
    if not heads.gated:
        return out
    gate = qkv[:, : 2 * out.shape[1]].unflatten(1, (heads.count, 2, -1))[:, :, 1]
    return (out * torch.sigmoid(gate.float()).flatten(1)).to(out.dtype)


@torch.library.triton_op("ostinato::attend", mutates_args={"keys", "values"})
def _attend(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    gated: bool,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    window: int,
) -> Tensor:
    """Inputs as in `Heads`, `RowIndex` and `KVCache` -> the heads' outputs without their gates, [T, heads D]."""
    tokens, (kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape[1:]
    config = config_for(head_dim, keys.dtype)
    query = place_rows(qkv, q_norm, k_norm, eps, heads, gated, positions, slots, cos, sin, keys, values, table)
    group = padded_group(heads // kv_heads)
    rows = max(1, config.queries // group)
    tiles = (tokens + rows - 1) // rows
    # T may be a symbol: the code below is the same for every T.
    splits = torch.sym_max(1, PARTS // torch.sym_max(tiles * kv_heads, PARTS // MAX_SPLITS))
    # The most rows of `sums` that are needed; none is needed if there is one split.
    parts = PARTS * rows * group
    sums = torch.empty((parts, head_dim), dtype=torch.float32, device=query.device)
    # For each sum: the peak of its scores, and the sum of its weights.
    scales = torch.empty((2, parts), dtype=torch.float32, device=query.device)
    out = torch.empty((tokens, heads * head_dim), dtype=query.dtype, device=query.device)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "GROUP": group}
    sizes |= {"ROWS": rows, "MIN_SPLIT": MIN_SPLIT, "WINDOW": window}
    launcher(prefill_kernel)[(kv_heads, tiles, splits)](
        query,
        keys,
        values,
        table,
        positions,
        slots,
        sums,
        scales,
        out,
        tokens,
        splits,
        PAGES=table.shape[1],
        PAGE=page_size,
        SCALE=score_scale(head_dim),
        KEYS=config.keys,
        SUMS=parts,
        num_warps=config.warps,
        num_stages=config.stages,
        **sizes,
    )
    # With more tokens than this, there are too many tiles to split them.
    max_tokens = PARTS // 2 // kv_heads * rows
    launcher(prefill_sum_kernel)[(torch.sym_min(tokens, max_tokens), heads)](
        sums,
        scales,
        positions,
        slots,
        out,
        tokens,
        splits,
        KEYS=config.keys,
        SUMS=parts,
        SPLITS=MAX_SPLITS,
        num_warps=SUM_WARPS,
        **sizes,
    )
    return out


@triton.jit
def prefill_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """Program (key head, tile, split). The last tile comes first: it has the most keys.

    A tile is ROWS tokens by GROUP heads. Only HEADS / KV_HEADS of these heads exist; the others are masked.
    """
    # A symbolic size may have 64 bits, which would cost 400 instructions in the bounds of the loops.
    tokens = tl.cast(tokens, tl.int32)
    splits = tl.cast(splits, tl.int32)
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    start_position = tl.load(positions).to(tl.int32)
    count, origin, length, share = tile_share(
        tile, start_position, slots, tokens, splits, ROWS, KEYS, MIN_SPLIT, WINDOW
    )
    begin = origin + tl.program_id(2) * share
    seen = origin + length
    if (count == 0) | (begin >= seen):
        return
    row = tl.arange(0, ROWS * GROUP)
    token = tile * ROWS + row // GROUP
    head = row % GROUP
    real = (token < tokens) & (head < HEADS // KV_HEADS)
    offsets = (row // GROUP * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    origin = (tile.to(tl.int64) * (ROWS * HEADS) + kv_head * (HEADS // KV_HEADS)) * D
    q = tl.load(query + origin + offsets, mask=real[:, None], other=0.0)
    total, weight, peak = attend_range(
        q,
        k_cache + kv_head * PAGE * D,
        v_cache + kv_head * PAGE * D,
        table + tl.maximum(tl.load(slots), 0) * PAGES,
        begin,
        tl.minimum(begin + share, seen),
        start_position + token,
        start_position + tile * ROWS,
        SCALE,
        KV_HEADS * PAGE * D,
        PAGE,
        KEYS,
        ROWS,
        WINDOW,
    )
    if share < length:
        part = part_of(kv_head, tile, tl.program_id(2), splits, KV_HEADS) * (ROWS * GROUP) + row
        tl.store(sums + part[:, None] * D + tl.arange(0, D)[None, :], total)
        tl.store(scales + part, peak)
        tl.store(scales + SUMS + part, weight)
    else:
        tl.store(out + origin + offsets, (total * (1.0 / weight)[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def prefill_sum_kernel(
    sums: tl.tensor,
    scales: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Program (token, head): brings the sums of the splits to one peak. Does nothing for a tile that is not split."""
    tokens = tl.cast(tokens, tl.int32)
    splits = tl.cast(splits, tl.int32)
    token = tl.program_id(0)
    head = tl.program_id(1)
    tile = token // ROWS
    start_position = tl.load(positions).to(tl.int32)
    count, _, length, share = tile_share(tile, start_position, slots, tokens, splits, ROWS, KEYS, MIN_SPLIT, WINDOW)
    if (token - tile * ROWS >= count) | (share >= length):
        return
    split = tl.arange(0, SPLITS)
    used = split * share < length
    kv_head = head // (HEADS // KV_HEADS)
    part = part_of(kv_head, tile, split, splits, KV_HEADS) * (ROWS * GROUP)
    part += token % ROWS * GROUP + head % (HEADS // KV_HEADS)
    cell = tl.arange(0, D)
    total = tl.load(sums + part[:, None] * D + cell[None, :], mask=used[:, None], other=0.0)
    peak = tl.load(scales + part, mask=used, other=float("-inf"))
    weight = tl.load(scales + SUMS + part, mask=used, other=0.0)
    # Every token sees its own position, so the highest peak is finite.
    factor = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(total * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out + (token * HEADS + head) * D + cell, result.to(out.dtype.element_ty))


@triton.jit
def tile_share(
    tile: tl.tensor,
    start_position: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    splits: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(tokens of a tile, first position of its splits, positions from there to the last token's, positions of one split).

    The tile is split only if the fourth is smaller than the third.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    count = tl.sum((tl.load(slots + row, mask=row < tokens, other=-1) >= 0).to(tl.int32), 0)
    origin = first_seen(start_position + tile * ROWS, WINDOW, KEYS)
    length = start_position + tile * ROWS + count - origin
    return count, origin, length, tl.maximum(tl.cdiv(length, splits * KEYS) * KEYS, MIN_SPLIT)


@triton.jit
def part_of(
    kv_head: tl.tensor,
    tile: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    KV_HEADS: tl.constexpr,
) -> tl.tensor:
    """Index of a split's sums among those of all tiles."""
    return (tile * splits + split) * KV_HEADS + kv_head
