"""A mixture of experts for one token, the residual stream in and out, in plain PyTorch: router, gate and up, down.

The norm ahead of it and the addition behind it are part of it, as they are of the kernels in `step_moe_triton`. The int4
weights are laid out as `int4` says. Any floating dtype will do: in float64 these are what the kernels are tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4 import dequantize_int4


def route_logits(h: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """The router's logits, and last the shared expert's.

    Args:
        h: [1, H], the residual stream.
        norm_weight: [H] float32, the offset from one of the RMS norm's weight.
        eps: of the norm.
        gate: [E, H] in h's dtype.
        shared_gate: [1, H] in h's dtype, None where there is no shared expert.

    Returns:
        [1, E], or [1, E + 1] with a shared expert, in h's dtype.
    """
    rows = gate if shared_gate is None else torch.cat((gate, shared_gate))
    return _rms_norm(h, norm_weight, eps) @ rows.t()


def experts_gate_up(
    h: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
) -> Tensor:
    """The chosen experts' inner activations, silu(gate) * up.

    Args:
        h, norm_weight, eps: as for `route_logits`.
        logits: what `route_logits` gave.
        top_k: experts a token.
        gate_up: gate and up projection stacked, [E, 2 I, H / 2] uint8.
        gate_up_scale: [E, 2 I, H / G].
        shared_gate_up: the shared expert's, [2 I', H / 2] uint8, or None.
        shared_gate_up_scale: [2 I', H / G], or None.

    Returns:
        [1, k I (+ I')] in h's dtype: the experts with the k largest logits, in falling order, the lower index first where
        logits are equal, and last the shared one.
    """
    x = _rms_norm(h, norm_weight, eps)[0]
    _, chosen = _largest(logits, gate_up.shape[0], top_k)
    gate, up = (dequantize_int4(gate_up[chosen], gate_up_scale[chosen], h.dtype) @ x).chunk(2, dim=1)
    hidden = (F.silu(gate) * up).flatten()
    if shared_gate_up is not None and shared_gate_up_scale is not None:
        gate, up = (dequantize_int4(shared_gate_up, shared_gate_up_scale, h.dtype) @ x).chunk(2)
        hidden = torch.cat((hidden, F.silu(gate) * up))
    return hidden.unsqueeze(0)


def experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    down: Tensor,
    down_scale: Tensor,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    residual: Tensor,
) -> Tensor:
    """The weighted sum of the experts' down projections, plus the residual stream.

    The weights are the softmax over the chosen experts' logits, and the sigmoid of the shared expert's.

    Args:
        hidden: what `experts_gate_up` gave.
        logits, top_k: what it gave that for.
        down: [E, H, I / 2] uint8.
        down_scale: [E, H, I / G].
        shared_down: the shared expert's, [H, I' / 2] uint8, or None.
        shared_down_scale: [H, I' / G], or None.
        residual: [1, H].

    Returns:
        [1, H] in the residual's dtype.
    """
    values, chosen = _largest(logits, down.shape[0], top_k)
    weights, inner, dtype = values.float().softmax(0).to(residual.dtype), down.shape[2] * 2, residual.dtype
    parts = dequantize_int4(down[chosen], down_scale[chosen], dtype) @ hidden[0, : top_k * inner].view(top_k, inner, 1)
    out = weights @ parts.squeeze(2)
    if shared_down is not None and shared_down_scale is not None:
        shared = dequantize_int4(shared_down, shared_down_scale, dtype) @ hidden[0, top_k * inner :]
        out = out + logits[0, -1].float().sigmoid().to(dtype) * shared
    return residual + out


def _largest(logits: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The routed experts' k largest logits, falling, and whose they are; of equal ones the lower index first."""
    values, order = logits[0, :experts].sort(descending=True, stable=True)
    return values[:top_k], order[:top_k]


def _rms_norm(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`models.norms.RMSNorm`, in float32 or wider."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight)).to(h.dtype)
