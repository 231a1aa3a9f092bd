"""The gated attention of one decode step, from the projection's output to that of the heads, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attend


def attend_step(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    heads: int,
) -> Tensor:
    """Norm and rotation of queries and key, the caches' new entries, softmax attention, the gate on its output.

    Args:
        qkv: [1, (2 heads + 2 kv_heads) D], float32 or the caches' dtype: for each head its query and then its gate, then
            the keys, then the values.
        q_norm, k_norm: [D] float32, the RMS norms' weights, stored as offsets from one.
        eps: of both norms.
        cos, sin: [1, R] float32, of the angles by which the first R elements of queries and keys are turned.
        k_cache, v_cache: [kv_heads, S, D], written in place at the token's position.
        positions: [1] int64.
        heads: a multiple of kv_heads.

    Returns:
        [1, heads D] in the caches' dtype: each head's output times sigmoid(gate).
    """
    kv_heads, _, head_dim = k_cache.shape
    sizes = (2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    queries, keys, values = qkv.float().split(sizes, dim=1)
    query, gate = queries.reshape(1, heads, 2 * head_dim).chunk(2, dim=-1)
    query = _rotate(_normed(query, q_norm, eps), cos, sin).to(k_cache.dtype)
    key = _rotate(_normed(keys.reshape(1, kv_heads, head_dim), k_norm, eps), cos, sin).to(k_cache.dtype)
    value = values.reshape(1, kv_heads, head_dim).to(v_cache.dtype)
    k_cache.index_copy_(1, positions, key.transpose(0, 1))
    v_cache.index_copy_(1, positions, value.transpose(0, 1))
    out = attend(query, k_cache, v_cache, positions).float() * torch.sigmoid(gate)
    return out.reshape(1, -1).to(k_cache.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, heads, D]; elements past the R of cos and sin pass through."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None], kept), dim=-1)
