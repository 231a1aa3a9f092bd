"""Attention for CPUs, for any runs of tokens: `reference.attend_step`."""

from __future__ import annotations

from torch import Tensor

from ostinato.export.kernels.operands import Heads, KVCache, RowIndex
from ostinato.export.kernels.operators_cpu import LIBRARY


def attend_step(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """See `reference.attend_step`."""
    return _attend_step(qkv, *heads.arguments, *index, *cache.arguments)


@LIBRARY.operator(
    "attend_step(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, int heads, bool gated, Tensor positions, "
    "Tensor slots, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor table, int window) -> Tensor"
)
def _attend_step(
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
    window: int,
) -> Tensor:
    return keys.new_empty(qkv.shape[0], heads * keys.shape[3])
