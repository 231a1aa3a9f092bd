"""Layers of one kind, each with its own weights and state, as one method: the code that tests of chains and plans run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ostinato.export import Chain

WIDTH = 4
# Long calls come before short ones: a short call must not see what a longer one left.
LENGTHS = (5, 2, 8, 3, 2)
STATE = ("state", "steps")
CONSTANTS = ("bias", "shift", "weight")


class Layer(nn.Module):
    """`forward(x [T, WIDTH], seen [1]) -> (x, seen)`: all kinds of tensors that a link may hold, with different values per
    layer.

    The kinds are: a parameter, a plain attribute that is a tensor, a constant that is not contiguous, state that starts as
    zeros, state that does not, and a table that `forward` makes, which is the same for all layers.
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


def layers(count: int = 3) -> list[Layer]:
    return [Layer(index) for index in range(count)]


# Layers that are on the host in the methods of `mixed_chains`.
ON_HOST = frozenset({0, 3, 4, 6})


def mixed_chains() -> dict[str, Chain]:
    """Return methods that run partly on the host, over the same seven layers. The first two layers share one weight.

    `step` begins and ends on the host, and has two layers in a row there. Values go from the host to the device, back, and
    from one layer on the host past a graph to a later one. `inner` begins and ends on the device; its layer on the host takes
    an input that the first layer takes too, and computes a result. `ahead` begins on the host and takes nothing from the
    device there. `host` is on the host only.
    """
    from ostinato.export import Chain, Link

    stack = layers(7)
    stack[1].weight = stack[0].weight

    def link(index: int, takes: str, gives: str) -> Link:
        kind, device = ("layer on the host", "cpu") if index in ON_HOST else ("layer", None)
        return Link(
            stack[index], tuple(gives.split()), kind, f"layers.{index}.", inputs=tuple(takes.split()), device=device
        )

    step = [
        link(0, "x seen", "early seen"),
        link(1, "early seen", "x seen"),
        link(2, "x seen", "x seen"),
        link(3, "x seen", "middle seen"),
        link(4, "early seen", "x seen"),
        link(5, "middle seen", "late seen"),
        link(6, "x seen", "x seen"),
    ]
    inner = [
        link(1, "x seen", "y seen"),
        link(0, "x seen", "z seen"),
        link(2, "y seen", "y seen"),
    ]
    ahead = [link(0, "x seen", "x seen"), link(1, "x seen", "x seen"), link(2, "x seen", "x seen")]
    host = [link(0, "x seen", "x seen"), link(3, "x seen", "x seen")]
    inputs = {"x": torch.randn(5, WIDTH), "seen": torch.zeros(1, dtype=torch.int64)}
    lengths = {"x": {0: torch.export.Dim("T", min=2, max=8)}}
    return {
        "step": Chain(step, inputs, ("seen", "late", "x"), lengths),
        "inner": Chain(inner, inputs, ("y", "z", "seen"), lengths),
        "ahead": Chain(ahead, inputs, ("x", "seen"), lengths),
        "host": Chain(host, inputs, ("x", "seen"), lengths),
    }


def step_inputs(index: int) -> tuple[Tensor, Tensor]:
    length = LENGTHS[index % len(LENGTHS)]
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(100 + index))
    return x, torch.tensor([index])
