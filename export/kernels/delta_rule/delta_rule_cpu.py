"""The gated delta rule for CPUs, for any number of tokens: `reference.delta_step`."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import Decay, RecurrentState, RowIndex
from ostinato.export.kernels.operators_cpu import LIBRARY

_LANES = 16


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`. The sum of squares of a head has one part for each 16 of its outputs.

    No update of the state may be pending.
    """
    out, squares = _delta_step(
        mixed, gates, decay.a_log, decay.dt_bias, state.stored, index.positions, index.slots, norm_weight, key_heads
    )
    return out, squares


@LIBRARY.operator(
    "delta_step(Tensor mixed, Tensor gates, Tensor a_log, Tensor dt_bias, Tensor(a!) state, Tensor positions, "
    "Tensor slots, Tensor norm, int key_heads) -> (Tensor, Tensor)"
)
def _delta_step(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    norm: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    tokens = mixed.shape[0]
    _, heads, _, value_dim = state.shape
    squares = mixed.new_empty(tokens * heads, (value_dim + _LANES - 1) // _LANES, dtype=torch.float32)
    return mixed.new_empty(tokens, heads * value_dim), squares
