"""Small modules with state, for tests that need an artifact and no language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCAB, WIDTH, MAX_SEQ_LEN = 11, 6, 32


class Recurrent(nn.Module):
    """A toy language model with everything that matters to the runtime.

    It has a weight matrix, a running sum that starts again at position 0, a cache written at `input_pos`, and a step counter
    that starts at 100. `forward(tokens [1, T], input_pos [T]) -> logits [1, VOCAB]`.
    """

    cache: Tensor
    total: Tensor
    steps: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(WIDTH, VOCAB, generator=generator))
        self.register_buffer("cache", torch.zeros(MAX_SEQ_LEN, WIDTH))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.full((1,), 100, dtype=torch.int64))
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        x = self.embed[tokens[0]]
        total = torch.where(input_pos[0] == 0, torch.zeros_like(self.total), self.total) + x.sum(0)
        self.total.copy_(total)
        self.cache.index_copy_(0, input_pos, x)
        self.steps.add_(input_pos.shape[0])
        seen = (torch.arange(MAX_SEQ_LEN, device=x.device) <= input_pos[-1])[:, None]
        mixed = torch.where(seen, self.cache, torch.zeros_like(self.cache)).sum(0).sin() + total.tanh()
        return (mixed @ self.head)[None]


class Stateless(nn.Module):
    """A model that takes the whole sequence in each call: `forward(tokens [1, T]) -> logits [1, T, VOCAB]`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(WIDTH, VOCAB, generator=generator))
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed[tokens].cumsum(1).sin() @ self.head


def recurrent_methods(
    module: Recurrent, longest: int = MAX_SEQ_LEN - 1
) -> dict[str, tuple[nn.Module, tuple[Tensor, ...], object]]:
    """`prefill` (2 <= T <= longest) and `decode` (T = 1)."""
    length = torch.export.Dim("T", min=2, max=longest)
    return {
        "prefill": (module, (torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)), ({1: length}, {0: length})),
        "decode": (module, (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)), None),
    }
