"""Routing and the experts, in plain PyTorch: for any number of tokens, and for the one token of a step in three operations.

In a step the norm ahead of the experts and the residual addition behind them are part of the operations. Any floating dtype
is taken: in float64 these are what the kernels are tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, the k largest, scaled to sum to one.

    Args:
        logits: [T, E], any floating dtype.
        top_k: experts per token.

    Returns:
        (weights [T, k] float32, expert indices [T, k], an integer dtype).
    """
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    """The weighted sum of the chosen experts' SwiGLU layers.

    Args:
        x: [T, H].
        weights: [T, k] float32.
        chosen: [T, k] integer, expert indices.
        routed: of E experts.

    Returns:
        [T, H] in x's dtype.
    """
    if x.shape[0] == 1:
        picked = chosen[0].long()
        gate, up = (routed.gate_up.of_experts(picked).dequantized(x.dtype) @ x[0]).chunk(2, dim=-1)
        out = routed.down.of_experts(picked).dequantized(x.dtype) @ (F.silu(gate) * up).unsqueeze(-1)
        return (out.squeeze(-1) * weights[0, :, None].to(x.dtype)).sum(0, keepdim=True)
    # Every expert sees every token and weights of zero drop what was not chosen: E / k times the products that are
    # needed, but static shapes and plain batched matrix products.
    share = torch.zeros(x.shape[0], routed.gate_up.values.shape[0], dtype=x.dtype, device=x.device)
    share = share.scatter(1, chosen.long(), weights.to(x.dtype))
    gate, up = (x @ routed.gate_up.dequantized(x.dtype).transpose(1, 2)).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * share.t().unsqueeze(-1)
    return (hidden @ routed.down.dequantized(x.dtype).transpose(1, 2)).sum(0)


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """The router's logits of one token, and last the shared expert's.

    Args:
        x: [1, H], the residual stream.
        norm: over H elements.
        gate: [E, H] in x's dtype.
        shared_gate: [1, H] in x's dtype, None where there is no shared expert.

    Returns:
        [1, E], or [1, E + 1] with a shared expert, in x's dtype.
    """
    rows = gate if shared_gate is None else torch.cat((gate, shared_gate))
    return norm(x).to(x.dtype) @ rows.t()


def experts_gate_up(x: Tensor, norm: Norm, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None) -> Tensor:
    """The chosen experts' inner activations for one token, silu(gate) * up.

    Args:
        x, norm: as for `route_logits`.
        logits: what `route_logits` gave.
        top_k: experts per token.
        routed: gate and up projections stacked, [E, 2 I, H].
        shared: the shared expert's, [2 I', H], or None.

    Returns:
        [1, k I (+ I')] in x's dtype: the experts with the k largest logits, in falling order, the lower index first where
        logits are equal, and last the shared one.
    """
    normed = norm(x)[0].to(x.dtype)
    _, chosen = _largest(logits, routed.values.shape[0], top_k)
    gate, up = (routed.of_experts(chosen).dequantized(x.dtype) @ normed).chunk(2, dim=1)
    hidden = (F.silu(gate) * up).flatten()
    if shared is not None:
        gate, up = (shared.dequantized(x.dtype) @ normed).chunk(2)
        hidden = torch.cat((hidden, F.silu(gate) * up))
    return hidden.unsqueeze(0)


def experts_down(
    hidden: Tensor, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None, residual: Tensor
) -> Tensor:
    """The weighted sum of the experts' down projections for one token, plus the residual stream.

    The weights are the softmax over the chosen experts' logits, and the sigmoid of the shared expert's.

    Args:
        hidden: what `experts_gate_up` gave.
        logits, top_k: what it gave that for.
        routed: down projections, [E, H, I].
        shared: the shared expert's, [H, I'], or None.
        residual: [1, H].

    Returns:
        [1, H] in the residual's dtype.
    """
    dtype = residual.dtype
    values, chosen = _largest(logits, routed.values.shape[0], top_k)
    weights, inner = values.float().softmax(0).to(dtype), routed.columns
    parts = routed.of_experts(chosen).dequantized(dtype) @ hidden[0, : top_k * inner].view(top_k, inner, 1)
    out = weights @ parts.squeeze(2)
    if shared is not None:
        product = shared.dequantized(dtype) @ hidden[0, top_k * inner :]
        out = out + logits[0, -1].float().sigmoid().to(dtype) * product
    return residual + out


def _largest(logits: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The routed experts' k largest logits, falling, and whose they are; of equal ones the lower index first."""
    values, order = logits[0, :experts].sort(descending=True, stable=True)
    return values[:top_k], order[:top_k]
