"""Causal attention over a KV cache, in plain PyTorch: by itself, and folded for a step."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import KVCache, Norm, Place, rows_to_keep


def attend(query: Tensor, cache: KVCache, positions: Tensor) -> Tensor:
    """Softmax attention of T rows over the cache; each sees the slots up to its own position.

    Args:
        query: [T, heads, D]; heads is a multiple of the cache's kv_heads.
        cache: the T tokens' own keys and values are in it already.
        positions: [T] int64, as in `Place`.

    Returns:
        [T, heads, D] in query's dtype. The softmax is float32; in bfloat16 the scores are rounded before it.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = cache.keys.shape[0]
    group = heads // kv_heads
    # Heads that share a key stand together, so one product per key head serves them all without repeating the cache.
    grouped = query.reshape(tokens, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    scores = (grouped @ cache.keys.transpose(1, 2)).float() * head_dim**-0.5
    slots = torch.arange(cache.keys.shape[1], device=positions.device)
    hidden = (slots[None, :] > positions[:, None]).repeat_interleave(group, dim=0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    out = (weights @ cache.values).unflatten(1, (tokens, group))
    return out.transpose(0, 1).reshape(tokens, heads, head_dim)


def attend_step(qkv: Tensor, q_norm: Norm, k_norm: Norm, place: Place, cache: KVCache, heads: int) -> Tensor:
    """The gated attention of T rows: norm and rotation of queries and keys, the cache's new entries, softmax
    attention, and the gate on its output.

    Args:
        qkv: [T, (2 heads + 2 kv_heads) D], float32 or the cache's dtype: for each head its query and then its gate, then
            the keys, then the values.
        q_norm, k_norm: over D elements, with the same eps.
        place: of the tokens.
        cache: written in place at the tokens' positions, and nowhere for rows that are padding.
        heads: a multiple of kv_heads.

    Returns:
        [T, heads D] in the cache's dtype: each head's output times sigmoid(gate).
    """
    kv_heads, _, head_dim = cache.keys.shape
    dtype, tokens = cache.keys.dtype, qkv.shape[0]
    sizes = (2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    queries, keys, values = qkv.float().split(sizes, dim=1)
    query, gate = queries.reshape(tokens, heads, 2 * head_dim).chunk(2, dim=-1)
    query = rotate(q_norm(query), place.cos, place.sin).to(dtype)
    key = rotate(k_norm(keys.reshape(tokens, kv_heads, head_dim)), place.cos, place.sin).to(dtype)
    value = values.reshape(tokens, kv_heads, head_dim).to(dtype)
    write_cache(key, value, cache, place.positions)
    out = attend(query, cache, place.positions).float() * torch.sigmoid(gate)
    return out.reshape(tokens, -1).to(dtype)


def write_cache(key: Tensor, value: Tensor, cache: KVCache, positions: Tensor) -> None:
    """Put key and value [T, kv_heads, D] of the tokens at `positions` into the cache; where padding repeats a position, the
    token's own are written again."""
    rows = rows_to_keep(positions)
    cache.keys.index_copy_(1, positions, key.index_select(0, rows).transpose(0, 1))
    cache.values.index_copy_(1, positions, value.index_select(0, rows).transpose(0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head by its position (RoPE, arXiv:2104.09864); the others pass through.

    x [T, heads, D], cos and sin [T, R] float32 -> x's shape and dtype; computed in float32.
    """
    size = cos.shape[-1]
    rotated, kept = x[..., :size].float(), x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat(((rotated * cos[:, None] + half * sin[:, None]).to(x.dtype), kept), dim=-1)
