"""The end of a step: from logits to the next token, without leaving the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.sample import workspace_size
from .linear import Build


class SamplingState(nn.Module):
    """How tokens are drawn, the last one, and where it stands: what a step needs to begin, and what it leaves for the next.

    Buffers, each written on the device: `token` [1, 1] int64 and its `position` [1] int64, which the model has not seen
    yet; `temperature` [1] float32, `top_k` [1] int64, `top_p` [1] float32, `seed` [1] int64 (see `kernels.sample`).
    """

    token: Tensor
    position: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    workspace: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._sample = build.kernels.sample
        self._sample_next = build.kernels.sample_next
        for name, value in (
            ("token", torch.zeros(1, 1, dtype=torch.int64, device="cpu")),
            ("position", torch.zeros(1, dtype=torch.int64, device="cpu")),
            ("temperature", torch.zeros(1, device="cpu")),
            ("top_k", torch.zeros(1, dtype=torch.int64, device="cpu")),
            ("top_p", torch.ones(1, device="cpu")),
            ("seed", torch.zeros(1, dtype=torch.int64, device="cpu")),
            ("workspace", torch.zeros(workspace_size(), dtype=torch.int64, device="cpu")),
        ):
            self.register_buffer(name, value, persistent=False)

    def begin(
        self, logits: Tensor, input_pos: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor
    ) -> Tensor:
        """Keep the parameters, and draw the first token, which will stand at `input_pos` [1]. logits [1, vocab] -> [1, 1]."""
        token = self._sample(logits, input_pos, temperature, top_k, top_p, seed, self.workspace)
        self.token.copy_(token)
        self.position.copy_(input_pos)
        self.temperature.copy_(temperature)
        self.top_k.copy_(top_k)
        self.top_p.copy_(top_p)
        self.seed.copy_(seed)
        return token

    def next(self, logits: Tensor) -> Tensor:
        """Draw the token after the last one, and make it the last. logits [1, vocab] -> [1, 1]."""
        return self._sample_next(
            logits,
            self.position,
            self.token,
            self.temperature,
            self.top_k,
            self.top_p,
            self.seed,
            self.workspace,
        )
