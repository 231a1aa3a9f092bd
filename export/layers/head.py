"""The end of a network: turns the last layer's output into logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.export.kernels.operands import token_count

from .build import Build
from .linear import Linear
from .norms import RMSNorm


class Head(nn.Module):
    """The final norm and the projection to the vocabulary."""

    def __init__(self, norm: RMSNorm, lm_head: Linear, build: Build) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.kernels = build.kernels

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """A prompt's x [T, H], slots [T] as in `RowIndex` -> logits of the prompt's last token, [1, V] float32."""
        # Copied, because a step's kernel needs an input aligned to 16 bytes, and a row inside another tensor may not be.
        last = x.index_select(0, (token_count(slots) - 1).clamp(min=0))
        return self.step(last) if self.kernels.folds_steps else self.lm_head(self.norm(last)).float()

    def rows(self, x: Tensor, logits_indices: Tensor) -> Tensor:
        """x [T, H], logits_indices [L] int64, the indices of rows -> logits of these rows, [L, V] float32. -1 stands for no
        row, and its logits mean nothing."""
        return self.step(x.index_select(0, logits_indices.clamp(min=0)))

    def step(self, x: Tensor) -> Tensor:
        """x [T, H] -> logits [T, V] float32, in one kernel."""
        return self.kernels.norm_linear(x, self.norm.operand, self.lm_head.operand, torch.float32)
