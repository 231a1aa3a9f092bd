"""Sizes that the Triton kernels of attention take."""

from __future__ import annotations

import torch

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex

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


def check_step(q_norm: Norm, k_norm: Norm, index: RowIndex, cache: KVCache, heads: int) -> None:
    """Raises ExportError as `check_attention` does, or if R is odd or larger than D, or if the norms differ in eps."""
    head_dim, rotary = cache.keys.shape[3], index.cos.shape[1]
    check_attention(heads, cache.keys.shape[1], head_dim, cache.keys.dtype)
    if rotary % 2 or rotary > head_dim:
        raise ExportError(f"the attention kernels rotate an even number of a head's {head_dim} elements, got {rotary}")
    if q_norm.eps != k_norm.eps:
        raise ExportError(f"the attention kernels take one eps for both norms, got {q_norm.eps} and {k_norm.eps}")
