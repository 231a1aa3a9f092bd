"""Rotary position embedding (RoPE, arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Computes the angles by which the first `rotary_dim` elements of each head are rotated at a position.

    Args:
        rotary_dim: R, an even number.
        theta: the base of the frequencies.
        divisors: a model that was stretched to longer contexts divides each frequency by a number of its own, [R / 2]; empty
            for one that was not.
    """

    inv_freq: Tensor
    # Names of the values in a chain that hold what `forward` returns.
    names = ("cos", "sin")

    def __init__(self, rotary_dim: int, theta: float, divisors: Sequence[float] = ()) -> None:
        super().__init__()
        frequencies = inverse_frequencies(rotary_dim, theta)
        if divisors:
            frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32, device="cpu")
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos and sin, as in `RowIndex`."""
        angles = positions.float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class RotaryTables(nn.ModuleList):
    """Several rotary embeddings of one network, by name. A layer's link takes the values `angles_of(name)` as cos and sin.

    Attributes:
        names: see `RotaryEmbedding`.
    """

    def __init__(self, embeddings: Mapping[str, RotaryEmbedding]) -> None:
        super().__init__(embeddings.values())
        self.names = tuple(value for name in embeddings for value in angles_of(name))

    def forward(self, positions: Tensor) -> tuple[Tensor, ...]:
        """positions [T] int64 -> cos and sin of each embedding, as in `RowIndex`."""
        return tuple(angles for embedding in self for angles in embedding(positions))


def angles_of(name: str) -> tuple[str, str]:
    """Names of the values in a chain that hold cos and sin of one of `RotaryTables`."""
    return f"cos_{name}", f"sin_{name}"


def inverse_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of elements, [R / 2] float32 on the CPU."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return 1.0 / (theta**exponent)


def banded_divisors(
    rotary_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> tuple[float, ...]:
    """Divisors in three bands: frequencies that turn more than `high` times in the first context stay, those that turn less
    than `low` times are divided by `factor`, and those between go over from one to the other.

    Args:
        context: positions of the model's context before it was stretched.
    """
    found = []
    for frequency in inverse_frequencies(rotary_dim, theta).tolist():
        kept = (context * frequency / (2 * math.pi) - low) / (high - low)
        kept = min(max(kept, 0.0), 1.0)
        found.append(1 / (kept + (1 - kept) / factor))
    return tuple(found)
