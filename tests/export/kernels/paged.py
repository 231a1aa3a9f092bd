"""KV caches in shuffled pages of several sessions; NaN wherever no token is, and wherever a call has nothing to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ostinato.export.kernels.operands import KVCache

PAGE_SIZES = (16, 64)


def paged(
    sessions: Mapping[int, Sequence[Tensor]], slots: int, capacity: int, page_size: int = 16, seed: int = 0
) -> KVCache:
    """Caches of `slots` sessions with room for `capacity` positions each.

    Args:
        sessions: for a slot the keys and values of its first positions, [kv_heads, n, D] each. The others' are NaN, as are
            positions behind, and pages that nobody has.
    """
    keys, values = next(iter(sessions.values()))
    kv_heads, _, head_dim = keys.shape
    pages = -(-capacity // page_size)
    order = torch.randperm(slots * pages + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: slots * pages].view(slots, pages).to(keys.device, torch.int32)
    nothing = keys.new_full((len(order), kv_heads, page_size, head_dim), torch.nan)
    cache = KVCache(nothing, nothing.clone(), table)
    for slot, (keys, values) in sessions.items():
        put(cache, slot, 0, keys, values)
    return cache


def put(cache: KVCache, slot: int, first: int, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [kv_heads, n, D] of a slot's positions from `first` on."""
    page, inside = _where(cache, slot, first, keys.shape[1])
    cache.keys[page, :, inside] = keys.transpose(0, 1)
    cache.values[page, :, inside] = values.transpose(0, 1)


def held(cache: KVCache, slot: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot's `count` positions from `first` on, [kv_heads, count, D] each."""
    page, inside = _where(cache, slot, first, count)
    return cache.keys[page, :, inside].transpose(0, 1), cache.values[page, :, inside].transpose(0, 1)


def copied(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.clone(), cache.values.clone(), cache.table, cache.window)


def assert_same_elsewhere(before: KVCache, after: KVCache, written: Mapping[int, tuple[int, int]]) -> None:
    """Bit for bit, all but the positions of each slot in `written`: (first, count)."""
    expected = copied(before)
    for slot, (first, count) in written.items():
        put(expected, slot, first, *held(after, slot, first, count))
    for found, wanted in ((after.keys, expected.keys), (after.values, expected.values)):
        assert torch.equal(_bits(found), _bits(wanted))


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _where(cache: KVCache, slot: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(first, first + count, device=cache.table.device)
    return cache.table[slot, position // cache.page_size].long(), position % cache.page_size
