"""Sizes that the Triton kernels of attention take."""

from __future__ import annotations

import torch

from ostinato.delegate.errors import ExportError

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
