"""Three layers of one kind, each with weights and state of its own, as one method: what tests of chains and plans run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH = 4
# Longest first: a shorter call after it must not see what the longer one left.
LENGTHS = (5, 2, 8, 3, 2)
STATE = ("state", "steps")
CONSTANTS = ("bias", "shift", "weight")


class Layer(nn.Module):
    """`forward(x [T, WIDTH], seen [1]) -> (x, seen)`: all that a link may hold, with a value of its own in each layer.

    A parameter, a plain attribute that is a tensor, a constant that is not contiguous, state that starts as zeros and state
    that does not, and a table made in `forward`, which is the same for all.
    """

    bias: Tensor
    state: Tensor
    steps: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("bias", torch.randn(WIDTH, WIDTH, generator=generator).t())
        self.shift = torch.full((WIDTH,), index + 0.5)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.full((1,), 10 * index + 1))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        self.state.mul_(0.5).add_(x.sum(0))
        self.steps.add_(x.shape[0])
        table = torch.tensor([0.25, 0.5, -0.25, -0.5])
        y = x @ self.weight + self.bias[1] + self.shift * table + self.state
        return y.sin(), seen + self.steps


class Stack(nn.Module):
    """The same layers as one module."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, seen = layer(x, seen)
        return x, seen


def layers() -> list[Layer]:
    return [Layer(index) for index in range(3)]


def step_inputs(index: int) -> tuple[Tensor, Tensor]:
    length = LENGTHS[index % len(LENGTHS)]
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(100 + index))
    return x, torch.tensor([index])
