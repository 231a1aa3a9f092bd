"""The delta rule and the gated norm of one decode step, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .delta_rule import gated_delta_rule


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """One token of `gated_delta_rule`, and the gated norm but for its division by each head's root mean square.

    That division is one factor for a head, which the product behind takes in with `squares`.

    Args:
        mixed: [1, 2 key_heads K + 2 H V]: q, k, v after the convolution and its SiLU, and z, the norm's gate.
        gates: [1, 2 H] float32: b, then a.
        a_log, dt_bias: [H].
        state: [H, K, V] float32, written in place.
        positions: [1] int64; at 0 the old state counts as zeros.
        norm_weight: [V] float32, no offset.
        key_heads: how many key heads.

    Returns:
        (out [1, H V] in mixed's dtype: o * norm_weight * silu(z); squares [H, P] float32, whose sum over P, here 1, is
        that of o^2).
    """
    heads, _, value_dim = state.shape
    qkv, z = mixed.split((mixed.shape[1] - heads * value_dim, heads * value_dim), dim=1)
    b, a = gates.chunk(2, dim=1)
    o = gated_delta_rule(qkv, a, b, a_log, dt_bias, state, positions, key_heads, max_tokens=1)[0].float()
    out = o * norm_weight.float() * F.silu(z.float()).unflatten(1, (heads, value_dim))[0]
    return out.reshape(1, -1).to(mixed.dtype), o.square().sum(1, keepdim=True)
