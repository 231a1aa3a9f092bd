"""Routing and the routed experts, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4 import dequantize_int4


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, the k largest, scaled to sum to one.

    Args:
        logits: [T, E], any floating dtype.
        top_k: experts a token.

    Returns:
        (weights [T, k] float32, expert indices [T, k], an integer dtype).
    """
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
) -> Tensor:
    """The weighted sum of the chosen experts' SwiGLU layers.

    Args:
        x: [T, H].
        weights: [T, k] float32.
        chosen: [T, k] integer, expert indices.
        gate_up: gate and up projection stacked, [E, 2 I, H] in a floating dtype, or [E, 2 I, H / 2] uint8 (see `int4`).
        gate_up_scale: [E, 2 I, H / G] for uint8, else None.
        down: [E, H, I], or [E, H, I / 2] uint8.
        down_scale: [E, H, I / G] for uint8, else None.

    Returns:
        [T, H] in x's dtype.
    """
    if x.shape[0] == 1:
        picked = chosen[0].long()
        gate, up = (_floats(gate_up, gate_up_scale, x.dtype, picked) @ x[0]).chunk(2, dim=-1)
        out = _floats(down, down_scale, x.dtype, picked) @ (F.silu(gate) * up).unsqueeze(-1)
        return (out.squeeze(-1) * weights[0, :, None].to(x.dtype)).sum(0, keepdim=True)
    # Every expert sees every token and weights of zero drop what was not chosen: E / k times the products that are
    # needed, but static shapes and plain batched matrix products.
    share = torch.zeros(x.shape[0], gate_up.shape[0], dtype=x.dtype, device=x.device)
    share = share.scatter(1, chosen.long(), weights.to(x.dtype))
    gate, up = (x @ _floats(gate_up, gate_up_scale, x.dtype).transpose(1, 2)).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * share.t().unsqueeze(-1)
    return (hidden @ _floats(down, down_scale, x.dtype).transpose(1, 2)).sum(0)


def _floats(weight: Tensor, scale: Tensor | None, dtype: torch.dtype, picked: Tensor | None = None) -> Tensor:
    """[E, N, K] in `dtype`, or only the experts `picked`."""
    if picked is not None:
        weight = weight[picked]
        scale = None if scale is None else scale[picked]
    return weight if scale is None else dequantize_int4(weight, scale, dtype)
