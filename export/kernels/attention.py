"""Causal attention over a KV cache, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor:
    """Softmax attention of T consecutive tokens over the cache; each sees the slots up to its own position.

    Args:
        query: [T, heads, D].
        k_cache, v_cache: [kv_heads, S, D], the T tokens' own keys and values already in; heads is a multiple of kv_heads.
        positions: [T] int64, consecutive.

    Returns:
        [T, heads, D] in query's dtype. The softmax is float32; in bfloat16 the scores are rounded before it.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = k_cache.shape[0]
    group = heads // kv_heads
    # Heads that share a key stand together, so one product a key head serves them all without repeating the cache.
    grouped = query.reshape(tokens, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    scores = (grouped @ k_cache.transpose(1, 2)).float() * head_dim**-0.5
    slots = torch.arange(k_cache.shape[1], device=positions.device)
    hidden = (slots[None, :] > positions[:, None]).repeat_interleave(group, dim=0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    out = (weights @ v_cache).unflatten(1, (tokens, group))
    return out.transpose(0, 1).reshape(tokens, heads, head_dim)
