"""The first kernel of attention for any runs and prompts: it writes keys and values to the cache, and prepares queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, starts_early

from .block_triton import norm_weights, normed_and_rotated, padded_group


def place_rows(
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
) -> Tensor:
    """Norm queries and keys, if there are norms, rotate them, and write keys and values to the cache. For use inside an
    operator.

    Arguments are as in `rows_triton.attend_step`.

    Returns:
        The queries, [T, heads, D] in the cache's dtype.
    """
    rows, (kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape[1:]
    query = torch.empty((rows, heads, head_dim), dtype=keys.dtype, device=qkv.device)
    launcher(place_rows_early)[(rows, kv_heads)](
        qkv,
        # Without norms, any tensor stands in their places.
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        positions,
        slots,
        cos,
        sin,
        keys,
        values,
        table,
        query,
        PAGES=table.shape[1],
        PAGE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        ROTARY=cos.shape[1],
        NORMED=q_norm is not None,
        GATED=gated,
        EPS=eps,
        GROUP=max(8, padded_group(heads // kv_heads)),
        EARLY=starts_early(),
        num_warps=4,
    )
    return query


@triton.jit
def place_rows_early(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    query: tl.tensor,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row, key head): writes normed, rotated queries to query [R, HEADS, D], and key and value to their page."""
    start_next(EARLY)
    HEADS_OF_KEY: tl.constexpr = HEADS // KV_HEADS
    QUERY: tl.constexpr = 2 * D if GATED else D
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row)
    position = tl.maximum(tl.load(positions + row), 0)
    page = tl.load(table + tl.maximum(slot, 0) * PAGES + position // PAGE).to(tl.int64)
    head = tl.arange(0, GROUP)
    real = (head < HEADS_OF_KEY)[:, None]
    every = tl.zeros([GROUP, D], tl.int32) + tl.arange(0, D)[None, :]
    rotated = every < ROTARY
    # Element i is rotated with the element that is ROTARY / 2 after or before it.
    other = tl.where(every < ROTARY // 2, every + ROTARY // 2, every - ROTARY // 2)
    norm, other_norm = norm_weights(q_norm, every, other, rotated, NORMED)
    key_norm, other_key_norm = norm_weights(k_norm, every, other, rotated, NORMED)
    cosine = tl.load(cos + row * ROTARY + every, mask=rotated, other=1.0)
    sine = tl.load(sin + row * ROTARY + every, mask=rotated, other=0.0)
    sine = tl.where(every < ROTARY // 2, -sine, sine)

    wait_for_previous(EARLY)
    of_row = qkv + row * (HEADS * QUERY + 2 * KV_HEADS * D)
    start = (kv_head * HEADS_OF_KEY + head)[:, None] * QUERY
    x = tl.load(of_row + start + every, mask=real, other=0.0)
    other_x = tl.load(of_row + start + other, mask=real & rotated, other=0.0)
    own = HEADS * QUERY + kv_head * D
    key = tl.load(of_row + own + every)
    other_key = tl.load(of_row + own + other, mask=rotated, other=0.0)
    value = tl.load(of_row + own + KV_HEADS * D + every)
    q = normed_and_rotated(x, other_x, norm, other_norm, cosine, sine, NORMED, EPS).to(query.dtype.element_ty)
    k = normed_and_rotated(key, other_key, key_norm, other_key_norm, cosine, sine, NORMED, EPS).to(
        k_cache.dtype.element_ty
    )
    to = (row * HEADS + kv_head * HEADS_OF_KEY + head[:, None]) * D + every
    tl.store(query + to, q, mask=real)
    kept = ((head == 0) & (slot >= 0))[:, None]
    new = (page * KV_HEADS + kv_head) * (PAGE * D) + position % PAGE * D + every
    tl.store(k_cache + new, k, mask=kept)
    tl.store(v_cache + new, value.to(v_cache.dtype.element_ty), mask=kept)
