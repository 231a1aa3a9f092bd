"""From logits to a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..delegate.errors import OptionError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
        seed: the same seed draws the same tokens from the same logits on the same device; None seeds anew.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise OptionError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be more than 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise OptionError(f"seed must be 0 to 2**64 - 1, got {self.seed}")


class Sampler:
    """Draws tokens with one random state for a whole answer."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """logits [vocab] float32 -> token id."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = self._filtered(logits / self._sampling.temperature).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        keep_k, keep_p = self._sampling.top_k, self._sampling.top_p
        if keep_k == 0 and keep_p == 1:
            return logits
        ordered, index = logits.sort(descending=True)
        if keep_k:
            ordered[keep_k:] = -torch.inf
        if keep_p < 1:
            probabilities = ordered.softmax(-1)
            # The token that crosses the sum stays, so at least one does.
            ordered[probabilities.cumsum(-1) - probabilities >= keep_p] = -torch.inf
        return torch.full_like(logits, -torch.inf).scatter(0, index, ordered)
