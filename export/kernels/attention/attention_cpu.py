"""Gated attention for CPUs, for any runs of tokens: `reference.attend_step`."""

from __future__ import annotations

from torch import Tensor

from ostinato.export.kernels.operands import KVCache, Norm, RowIndex
from ostinato.export.kernels.operators_cpu import LIBRARY


def attend_step(qkv: Tensor, q_norm: Norm, k_norm: Norm, index: RowIndex, cache: KVCache, heads: int) -> Tensor:
    """See `reference.attend_step`."""
    return _attend_step(
        qkv, q_norm.weight, k_norm.weight, q_norm.eps, *index, cache.keys, cache.values, cache.table, heads
    )


@LIBRARY.operator(
    "attend_step(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps, Tensor positions, Tensor slots, Tensor cos, "
    "Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor table, int heads) -> Tensor"
)
def _attend_step(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    heads: int,
) -> Tensor:
    return keys.new_empty(qkv.shape[0], heads * keys.shape[3])
