"""Causal attention over a KV cache, in plain PyTorch: alone, and with the operations that a step folds into it."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import KVCache, Norm, RowIndex, runs_of, token_count


def attend(qkv: Tensor, q_norm: Norm, k_norm: Norm, index: RowIndex, cache: KVCache, heads: int) -> Tensor:
    """Gated attention of a prompt's T rows: norm and rotation of queries and keys, new entries of the cache, softmax
    attention, and the gate on its output.

    Args:
        qkv: [T, (2 heads + 2 kv_heads) D], float32 or the cache's dtype: first the query and the gate of each head in turn,
            then all keys, then all values.
        q_norm, k_norm: over D elements, with the same eps.
        index: one run, perhaps with padding behind it.
        cache: written in place at the rows' positions. Padding writes nothing.
        heads: a multiple of kv_heads.

    Returns:
        [T, heads D] in the cache's dtype: each head's output times sigmoid(gate). The softmax is float32. In bfloat16,
        scores are rounded before it.
    """
    _, kv_heads, _, head_dim = cache.keys.shape
    dtype, tokens = cache.keys.dtype, qkv.shape[0]
    sizes = (2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    queries, keys, values = qkv.float().split(sizes, dim=1)
    query, gate = queries.reshape(tokens, heads, 2 * head_dim).chunk(2, dim=-1)
    query = rotate(q_norm(query), index.cos, index.sin).to(dtype)
    key = rotate(k_norm(keys.reshape(tokens, kv_heads, head_dim)), index.cos, index.sin).to(dtype)
    write_cache(key, values.reshape(tokens, kv_heads, head_dim).to(dtype), cache, index)
    out = softmax_attention(query, cache, index)
    return (out.float() * torch.sigmoid(gate)).reshape(tokens, -1).to(dtype)


def attend_step(qkv: Tensor, q_norm: Norm, k_norm: Norm, index: RowIndex, cache: KVCache, heads: int) -> Tensor:
    """`attend` for any runs. The output for padding is zeros."""
    out = torch.zeros(qkv.shape[0], heads * cache.keys.shape[3], dtype=cache.keys.dtype, device=qkv.device)
    for _, rows in runs_of(index.slots):
        out[rows] = attend(qkv[rows], q_norm, k_norm, RowIndex(*(values[rows] for values in index)), cache, heads)
    return out


def softmax_attention(query: Tensor, cache: KVCache, index: RowIndex) -> Tensor:
    """Softmax attention of a prompt's T rows over the cache. Each row sees the positions up to its own.

    Args:
        query: [T, heads, D]; heads is a multiple of the cache's kv_heads.
        cache: keys and values, which already include those of the T rows.
        index: as in `attend`.

    Returns:
        [T, heads, D] in query's dtype.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    pages = cache.table.index_select(0, index.slots[:1])[0]
    keys, values = (pool.index_select(0, pages).transpose(0, 1).flatten(1, 2) for pool in (cache.keys, cache.values))
    # Heads that share a key stand together, so one product per key head serves them all without repeating the cache.
    grouped = query.reshape(tokens, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    scores = (grouped @ keys.transpose(1, 2)).float() * head_dim**-0.5
    at = torch.arange(keys.shape[1], device=query.device)
    hidden = (at[None, :] > index.positions[:, None]).repeat_interleave(group, dim=0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    # Values behind the last position may be anything, NaN included.
    last = index.positions.index_select(0, token_count(index.slots) - 1)
    values = values.masked_fill((at > last)[:, None], 0)
    out = (weights @ values).unflatten(1, (tokens, group))
    return out.transpose(0, 1).reshape(tokens, heads, head_dim)


def write_cache(key: Tensor, value: Tensor, cache: KVCache, index: RowIndex) -> None:
    """Write key and value [T, kv_heads, D] of a prompt's rows to the cache. Padding writes the last token's key and value
    again, because a traced write has no row that can be left out."""
    rows = torch.arange(key.shape[0], device=key.device).minimum(token_count(index.slots) - 1)
    positions = index.positions.index_select(0, rows)
    pages = cache.table.index_select(0, index.slots[:1])[0]
    page = pages.index_select(0, positions // cache.page_size).long()
    heads = torch.arange(key.shape[1], device=key.device)
    at = (page[:, None], heads[None, :], (positions % cache.page_size)[:, None])
    cache.keys.index_put_(at, key.index_select(0, rows))
    cache.values.index_put_(at, value.index_select(0, rows))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head by its position (RoPE, arXiv:2104.09864). The others stay as they are.

    x [T, heads, D], cos and sin [T, R] float32 -> x's shape and dtype. Computed in float32.
    """
    size = cos.shape[-1]
    rotated, kept = x[..., :size].float(), x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat(((rotated * cos[:, None] + half * sin[:, None]).to(x.dtype), kept), dim=-1)
