"""Sizes that the Triton kernels of attention take."""

from __future__ import annotations

import torch

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.operands import Heads, KVCache, RowIndex

HEAD_DIMS = (16, 32, 64, 128, 256)
# The most heads that share a key head. For one token these heads are the rows of a tile, which has up to 16.
MAX_GROUP = 16


def check_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raises ExportError if the kernels cannot compute this attention."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ExportError(f"the attention kernels take bfloat16 or float32, got {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ExportError(f"the attention kernels take head sizes of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ExportError(
            f"the attention kernels take a number of heads that is 1 to {MAX_GROUP} times that of key heads, "
            f"got {heads} heads and {kv_heads} key heads"
        )


def check_step(heads: Heads, index: RowIndex, cache: KVCache) -> None:
    """Raises ExportError as `check_attention` does, or if R is odd or larger than D, or if there is one norm only, or if they
    differ in eps, or if the window has no position."""
    head_dim, rotary = cache.keys.shape[3], index.cos.shape[1]
    check_attention(heads.count, cache.keys.shape[1], head_dim, cache.keys.dtype)
    if rotary % 2 or rotary > head_dim:
        raise ExportError(f"the attention kernels rotate an even number of a head's {head_dim} elements, got {rotary}")
    eps = tuple(None if norm is None else norm.eps for norm in (heads.q_norm, heads.k_norm))
    if eps[0] != eps[1]:
        raise ExportError(f"the attention kernels take one eps for both norms, got {eps[0]} and {eps[1]}")
    if cache.window is not None and cache.window < 1:
        raise ExportError(f"the attention kernels take a window of 1 position or more, got {cache.window}")
