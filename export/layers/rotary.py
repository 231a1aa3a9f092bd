"""Rotary position embedding (RoPE, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Computes the angles by which the first `rotary_dim` elements of each head are rotated at a position."""

    inv_freq: Tensor

    def __init__(self, rotary_dim: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        self.register_buffer("inv_freq", 1.0 / (theta**exponent), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos and sin, as in `RowIndex`."""
        angles = positions.float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
