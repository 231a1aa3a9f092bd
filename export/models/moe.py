"""Mixture of experts of Qwen3.5: top-k routed experts and one shared expert behind its own gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class Router(nn.Module):
    """Softmax over all experts in float32, the k largest, scaled to sum to one."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype))
        self.top_k = config.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (weights [T, k] in x's dtype, expert indices [T, k] int64)."""
        probabilities = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


class Experts(nn.Module):
    """All routed experts' weights: gate and up projection stacked, [E, 2 I, H], and down projection, [E, H, I]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, size, inner, dtype=dtype))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights and chosen [T, k] -> [T, hidden]."""
        return self._of_one_token(x, weights, chosen) if x.shape[0] == 1 else self._of_many(x, weights, chosen)

    def _of_one_token(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        picked = chosen[0]
        gate, up = (self.gate_up_proj[picked] @ x[0]).chunk(2, dim=-1)
        out = self.down_proj[picked] @ (F.silu(gate) * up).unsqueeze(-1)
        return (out.squeeze(-1) * weights[0, :, None]).sum(0, keepdim=True)

    def _of_many(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        # Every expert sees every token and weights of zero drop what was not chosen: E / k times the products that are
        # needed, but static shapes and plain batched matrix products on every device.
        share = torch.zeros(x.shape[0], self.gate_up_proj.shape[0], dtype=x.dtype, device=x.device)
        share = share.scatter(1, chosen, weights)
        gate, up = (x @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * share.t().unsqueeze(-1)
        return (hidden @ self.down_proj.transpose(1, 2)).sum(0)


class SharedExpert(nn.Module):
    """SwiGLU feed-forward layer that every token passes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(size, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nn.Module):
    """Routed experts plus the gated shared expert."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(config, dtype)
        self.experts = Experts(config, dtype)
        self.shared_expert = SharedExpert(config, dtype)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, chosen = self.gate(x)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weights, chosen) + shared
