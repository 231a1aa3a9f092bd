"""The end of a network: from the last layer to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .build import Build
from .linear import Linear
from .norms import RMSNorm


class Head(nn.Module):
    """The final norm and the product with the vocabulary."""

    def __init__(self, norm: RMSNorm, lm_head: Linear, build: Build) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.kernels = build.kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> logits of the last of the T tokens, [1, V] float32."""
        if not self.kernels.folds_steps:
            return self.lm_head(self.norm(x[-1:])).float()
        # A copy: the kernel takes an input aligned to 16 bytes, which a row among others need not be.
        return self.step(x.index_select(0, torch.full((1,), x.shape[0] - 1, device=x.device)))

    def step(self, x: Tensor) -> Tensor:
        """x [1, H] -> logits [1, V] float32, in one kernel."""
        return self.kernels.norm_linear(x, self.norm.operand, self.lm_head.operand, torch.float32)
