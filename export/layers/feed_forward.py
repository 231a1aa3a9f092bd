"""The dense feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .build import Build
from .linear import Linear
from .norms import RMSNorm


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, size: int, inner: int, build: Build, divisible: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = Linear(size, 2 * inner, build, divisible=divisible)
        self.down_proj = Linear(inner, size, build)
        self.kernels = build.kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def step(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [T, H] -> x + self(norm(x)), in two kernels."""
        if self.gate_up_proj.parts:
            gate, up = self.gate_up_proj.normed(x, norm, x.dtype).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = self.kernels.norm_swiglu(x, norm.operand, self.gate_up_proj.operand)
        return self.kernels.linear_add(hidden, self.down_proj.operand, x)
