"""Routing and the experts, in plain PyTorch: as functions of their own, and for a step as three operations or as one.

The operations of a step include the norm ahead of the experts and the residual addition behind them. All functions take any
floating dtype: the kernels are tested against them in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight


def route(logits: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest softmax weights of each token, scaled to sum to one, and their experts.

    The softmax is over all experts, in float32.

    Args:
        logits: [T, E], any floating dtype.
        top_k: experts per token.
        slots: [T] int64, as in `RowIndex`.

    Returns:
        (weights [T, k] float32, expert indices [T, k], an integer dtype). Padding rows reach no expert: their indices are E.
    """
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    chosen = chosen.masked_fill((slots < 0)[:, None], logits.shape[1])
    return weights / weights.sum(-1, keepdim=True), chosen


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    """The weighted sum of the chosen experts' SwiGLU layers.

    Args:
        x: [T, H].
        weights: [T, k] float32.
        chosen: [T, k] integer, expert indices; E stands for no expert and adds nothing.
        routed: the weights of E experts.

    Returns:
        [T, H] in x's dtype.
    """
    if x.shape[0] == 1:
        picked = chosen[0].long()
        gate, up = (routed.gate_up.of_experts(picked).dequantized(x.dtype) @ x[0]).chunk(2, dim=-1)
        out = routed.down.of_experts(picked).dequantized(x.dtype) @ (F.silu(gate) * up).unsqueeze(-1)
        return (out.squeeze(-1) * weights[0, :, None].to(x.dtype)).sum(0, keepdim=True)
    # Every expert computes every token, and a weight of zero drops the experts that a token did not choose. That is E / k
    # times the products that are needed, but shapes are static and the products are plain batched ones.
    count = routed.gate_up.values.shape[0]
    share = torch.zeros(x.shape[0], count + 1, dtype=x.dtype, device=x.device)
    share = share.scatter(1, chosen.long(), weights.to(x.dtype))[:, :count]
    gate, up = (x @ routed.gate_up.dequantized(x.dtype).transpose(1, 2)).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * share.t().unsqueeze(-1)
    return (hidden @ routed.down.dequantized(x.dtype).transpose(1, 2)).sum(0)


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """The router's logits for each token; the last column is the shared expert's logit.

    Args:
        x: [T, H], the residual stream.
        norm: the norm over H elements.
        gate: [E, H] in x's dtype.
        shared_gate: [1, H] in x's dtype, None where there is no shared expert.

    Returns:
        [T, E], or [T, E + 1] with a shared expert, in x's dtype.
    """
    rows = gate if shared_gate is None else torch.cat((gate, shared_gate))
    return norm(x).to(x.dtype) @ rows.t()


def experts_gate_up(x: Tensor, norm: Norm, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None) -> Tensor:
    """The chosen experts' inner activations for each token, silu(gate) * up.

    Args:
        x, norm: as for `route_logits`.
        logits: the result of `route_logits`.
        top_k: experts per token.
        routed: gate and up projections stacked, [E, 2 I, H].
        shared: the same projections of the shared expert, [2 I', H], or None.

    Returns:
        [T, k I (+ I')] in x's dtype: first the k experts with the largest logits, in falling order of the logits (where
        logits are equal, the lower index first), then the shared expert.
    """
    normed = norm(x).to(x.dtype)
    _, chosen = _largest(logits, routed.values.shape[0], top_k)
    both = routed.of_experts(chosen).dequantized(x.dtype) @ normed[:, None, :, None]
    gate, up = both.squeeze(-1).chunk(2, dim=-1)
    hidden = (F.silu(gate) * up).flatten(1)
    if shared is not None:
        gate, up = (normed @ shared.dequantized(x.dtype).t()).chunk(2, dim=1)
        hidden = torch.cat((hidden, F.silu(gate) * up), dim=1)
    return hidden


def experts_down(
    hidden: Tensor, logits: Tensor, top_k: int, routed: Weight, shared: Weight | None, residual: Tensor
) -> Tensor:
    """The weighted sum of the experts' down projections for each token, plus the residual stream.

    The weights are the softmax over the chosen experts' logits. The shared expert's weight is the sigmoid of its logit.

    Args:
        hidden: the result of `experts_gate_up`.
        logits, top_k: as for `experts_gate_up`.
        routed: down projections, [E, H, I].
        shared: the shared expert's down projection, [H, I'], or None.
        residual: [T, H].

    Returns:
        [T, H] in the residual's dtype.
    """
    dtype = residual.dtype
    values, chosen = _largest(logits, routed.values.shape[0], top_k)
    weights, inner = values.float().softmax(-1).to(dtype), routed.columns
    parts = routed.of_experts(chosen).dequantized(dtype) @ hidden[:, : top_k * inner].view(-1, top_k, inner, 1)
    out = (weights.unsqueeze(1) @ parts.squeeze(-1)).squeeze(1)
    if shared is not None:
        product = hidden[:, top_k * inner :] @ shared.dequantized(dtype).t()
        out = out + logits[:, -1:].float().sigmoid().to(dtype) * product
    return residual + out


def sparse_moe(
    x: Tensor,
    norm: Norm,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    slots: Tensor | None,
) -> Tensor:
    """A layer's mixture of experts in a step: the three operations, one after the other.

    Args:
        x: [T, H], the residual stream.
        norm, gate, shared_gate: as for `route_logits`.
        top_k: experts per token.
        routed: the weights of E experts.
        shared: the shared expert's weights, or None.
        slots: [T] int64. A row with a negative slot is padding: it needs no expert, and its output means nothing. None if no
            row is padding.

    Returns:
        [T, H] in x's dtype: x plus the experts' output for the normed x.
    """
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    logits = route_logits(x, norm, gate, shared_gate)
    hidden = experts_gate_up(x, norm, logits, top_k, routed.gate_up, gate_up)
    return experts_down(hidden, logits, top_k, routed.down, down, x)


def _largest(logits: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Each token's k largest logits of routed experts in falling order, and their experts; equal logits in order of index."""
    values, order = logits[:, :experts].sort(descending=True, stable=True)
    return values[:, :top_k], order[:, :top_k]
