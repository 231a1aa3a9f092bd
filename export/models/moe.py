"""Feed-forward layers of Qwen3.5: a dense SwiGLU, or routed experts and one shared expert behind its own gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import StepKernels
from .linear import SCALE_DTYPE, Build, make_linear, packed
from .norms import RMSNorm


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, inner: int, build: Build) -> None:
        super().__init__()
        self.gate_up_proj = make_linear(build.config.hidden_size, 2 * inner, build)
        self.down_proj = make_linear(inner, build.config.hidden_size, build)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def step(self, x: Tensor, norm: RMSNorm, kernels: StepKernels) -> Tensor:
        """x [1, hidden] -> x + self(norm(x))."""
        both = kernels.norm_linear(x, norm.weight, norm.eps, *packed(self.gate_up_proj), x.dtype)
        gate, up = both.chunk(2, dim=-1)
        return kernels.linear_add(F.silu(gate) * up, *packed(self.down_proj), x, None, 0.0)


class Experts(nn.Module):
    """All routed experts' weights: gate and up projection stacked, [E, 2 I, H], and down projection, [E, H, I]."""

    gate_up_proj: Tensor
    gate_up_proj_scale: Tensor | None
    down_proj: Tensor
    down_proj_scale: Tensor | None

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        for name, shape in (("gate_up_proj", (experts, 2 * inner, size)), ("down_proj", (experts, size, inner))):
            group_size = build.group_size
            weight = torch.empty(shape, dtype=build.dtype)
            scale = None
            if group_size is not None:
                weight = torch.empty(*shape[:2], shape[2] // 2, dtype=torch.uint8)
                scale = torch.empty(*shape[:2], shape[2] // group_size, dtype=SCALE_DTYPE)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
            self.register_parameter(
                f"{name}_scale", None if scale is None else nn.Parameter(scale, requires_grad=False)
            )
        self.experts = build.kernels.experts

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights [T, k] float32, chosen [T, k] -> [T, hidden]."""
        return self.experts(
            x,
            weights,
            chosen,
            self.gate_up_proj,
            self.gate_up_proj_scale,
            self.down_proj,
            self.down_proj_scale,
        )

    def packed(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Weight and scale of the gate and up projections and of the down projections, in int4."""
        assert self.gate_up_proj_scale is not None
        assert self.down_proj_scale is not None
        return (self.gate_up_proj, self.gate_up_proj_scale), (self.down_proj, self.down_proj_scale)


class SparseMoe(nn.Module):
    """Routed experts plus the gated shared expert. The router and the shared expert's gate stay in the model's dtype."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False, dtype=build.dtype)
        self.experts = Experts(build)
        self.shared_expert = SwiGLU(config.shared_expert_intermediate_size, build)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False, dtype=build.dtype)
        self.top_k = config.num_experts_per_tok
        self.route = build.kernels.route

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, chosen = self.route(self.gate(x), self.top_k)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weights, chosen) + shared

    def step(self, x: Tensor, norm: RMSNorm, kernels: StepKernels) -> Tensor:
        """x [1, hidden] -> x + self(norm(x)), in three kernels."""
        shared = self.shared_expert
        gate_up, down = self.experts.packed()
        logits = kernels.route_logits(x, norm.weight, norm.eps, self.gate.weight, self.shared_expert_gate.weight)
        hidden = kernels.experts_gate_up(
            x,
            norm.weight,
            norm.eps,
            logits,
            self.top_k,
            *gate_up,
            *packed(shared.gate_up_proj),
        )
        return kernels.experts_down(hidden, logits, self.top_k, *down, *packed(shared.down_proj), x)
