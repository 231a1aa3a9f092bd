"""Root-mean-square norms. Both compute in float32 and return the dtype of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostinato.export.kernels.operands import Norm

from .build import parameter


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    @property
    def operand(self) -> Norm:
        """The norm as kernels take it."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., K] in the dtype of x."""
        return self.operand(x).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`x / rms(x) * weight * silu(gate)`: the norm at the end of a gated delta-net."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., K] -> [..., K] in the dtype of x."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = self.weight * (wide * scale).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)
