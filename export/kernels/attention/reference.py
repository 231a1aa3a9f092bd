"""Causal attention over a KV cache, in plain PyTorch: alone, and with the operations that a step folds into it."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import Heads, KVCache, Norm, RowIndex, runs_of, token_count


def attend(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """Attention of a prompt's T rows: norm and rotation of queries and keys, new entries of the cache, softmax attention, and
    the gate on its output, if there is one.

    Args:
        qkv: [T, elements of `heads`], float32 or the cache's dtype.
        heads: how a row of `qkv` divides, with the norms.
        index: one run, perhaps with padding behind it.
        cache: written in place at the rows' positions. Padding writes nothing.

    Returns:
        [T, heads D] in the cache's dtype. The softmax is float32. In bfloat16, scores are rounded before it.
    """
    _, kv_heads, _, head_dim = cache.keys.shape
    dtype, tokens = cache.keys.dtype, qkv.shape[0]
    queries, keys, values = qkv.float().split(heads.split(kv_heads, head_dim), dim=1)
    query = queries.reshape(tokens, heads.count, -1)
    key = keys.reshape(tokens, kv_heads, head_dim)
    placed = place(query[..., :head_dim], heads.q_norm, index).to(dtype)
    write_cache(
        place(key, heads.k_norm, index).to(dtype), values.reshape(tokens, kv_heads, head_dim).to(dtype), cache, index
    )
    out = softmax_attention(placed, cache, index)
    if heads.gated:
        out = (out.float() * torch.sigmoid(query[..., head_dim:])).to(dtype)
    return out.reshape(tokens, -1)


def attend_step(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """`attend` for any runs. The output for padding is zeros."""
    out = torch.zeros(qkv.shape[0], heads.count * cache.keys.shape[3], dtype=cache.keys.dtype, device=qkv.device)
    for _, rows in runs_of(index.slots):
        out[rows] = attend(qkv[rows], heads, RowIndex(*(values[rows] for values in index)), cache)
    return out


def softmax_attention(query: Tensor, cache: KVCache, index: RowIndex) -> Tensor:
    """Softmax attention of a prompt's T rows over the cache. Each row sees the positions up to its own, or the last ones of
    them that the cache's window holds.

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
    # A window as long as the cache hides nothing.
    window = keys.shape[1] if cache.window is None else cache.window
    positions = index.positions[:, None]
    hidden = ((at > positions) | (at <= positions - window)).repeat_interleave(group, dim=0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    # Values that no row sees may be anything, NaN included.
    last = index.positions.index_select(0, token_count(index.slots) - 1)
    values = values.masked_fill(((at > last) | (at <= index.positions[:1] - window))[:, None], 0)
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


def place(x: Tensor, norm: Norm | None, index: RowIndex) -> Tensor:
    """Norm, if there is one, and rotation of queries or keys, [T, heads, D]."""
    return rotate(x if norm is None else norm(x), index.cos, index.sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head by its position (RoPE, arXiv:2104.09864). The others stay as they are.

    x [T, heads, D], cos and sin [T, R] float32 -> x's shape and dtype. Computed in float32.
    """
    size = cos.shape[-1]
    rotated, kept = x[..., :size].float(), x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat(((rotated * cos[:, None] + half * sin[:, None]).to(x.dtype), kept), dim=-1)
