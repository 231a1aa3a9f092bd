"""Causal attention over a KV cache on the GPU, for any number of tokens.

A program takes one block of queries. No slot past the last token's position is read: it may hold anything, NaN included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, MEDIUM, SMALL, fitting, launcher
from ostinato.export.kernels.length_triton import length_of
from ostinato.export.kernels.operands import KVCache

from .block_triton import TileConfig, attend_block, score_scale
from .limits import check_attention

# For bfloat16, by the shared memory of the GPU: at D = 256 these take 192, 104 and 68 KB. Before Hopper the sums of 128
# queries would spill 100 to 340 bytes per thread.
CONFIGS = {
    LARGE: TileConfig(128, keys=64, warps=8, stages=2),
    MEDIUM: TileConfig(64, keys=64, warps=8, stages=2),
    SMALL: TileConfig(64, keys=32, warps=8, stages=2),
}


def config_for(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The largest tiles whose accumulators stay in registers."""
    if dtype == torch.bfloat16:
        return fitting(CONFIGS)
    if head_dim <= 64:
        return TileConfig(64, keys=32, warps=4, stages=2)
    return TileConfig(32 if head_dim == 128 else 16, keys=32, warps=8, stages=1)


def attend(query: Tensor, cache: KVCache, positions: Tensor) -> Tensor:
    """See `reference.attend`; the cache is contiguous. Scores, softmax and sums are float32.

    Raises:
        ExportError: see `check_attention`.
    """
    check_attention(query.shape[1], cache.keys.shape[0], query.shape[2], query.dtype)
    return _attend(query.contiguous(), cache.keys, cache.values, positions)


@torch.library.triton_op("ostinato::attend", mutates_args={})
def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """query [T, heads, D], keys and values [kv_heads, S, D], positions [T] -> [T, heads, D]; all contiguous."""
    tokens, heads, head_dim = query.shape
    kv_heads, slots, _ = keys.shape
    config = config_for(head_dim, query.dtype)
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    launcher(prefill_kernel)[(heads, (tokens + config.queries - 1) // config.queries)](
        query,
        keys,
        values,
        positions,
        out,
        tokens,
        SLOTS=slots,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        SCALE=score_scale(head_dim),
        QUERIES=config.queries,
        KEYS=config.keys,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


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
    """Program (head, block of queries). The last block comes first: it has the most keys."""
    head = tl.program_id(0)
    # A symbolic size may come with 64 bits; in the loops' bounds those cost 400 instructions.
    tokens = tl.cast(tokens, tl.int32)
    length = length_of(positions, tokens)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if first >= length:
        return
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
    end = start_position + tl.minimum(first + QUERIES, length)
    # Blocks that all queries see completely need no mask. Slot 0 is in the first block, in whichever loop that is, and every
    # query sees it.
    unmasked = (start_position + first + 1) // KEYS * KEYS
    for start in range(0, unmasked, KEYS):
        total, weight, peak = attend_block(
            q, keys, values, start, end, visible, total, weight, peak, SCALE, KEYS, False
        )
    for start in range(unmasked, end, KEYS):
        total, weight, peak = attend_block(q, keys, values, start, end, visible, total, weight, peak, SCALE, KEYS, True)
    tl.store(out + place, (total * (1.0 / weight)[:, None]).to(out.dtype.element_ty), mask=(row < tokens)[:, None])
