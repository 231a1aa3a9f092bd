"""Random weights, where there is a config and no checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DummySpreads:
    """What is special about the distribution of a family's random weights.

    Attributes:
        by_ending: the end of a parameter's name -> (mean, standard deviation).
        adding: ends of the names of projections whose results are added to the residual stream.
    """

    by_ending: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    adding: tuple[str, ...] = ()


class DummyWeights:
    """Random weights of a network's shape, the same for the same seed and device kind.

    Matrices have a standard deviation of one over the root of their fan-in (an embedding too: it may be the head), so that
    logits are of order one; norms and decays lie where trained ones do. What the layers add to the embedding is small beside
    it, together as large (the scaling of GPT-2): else rounding would grow from layer to layer until after 40 of them two
    right computations had nothing in common.

    Args:
        shapes: parameter name -> its shape in floating point.
        layers: of the network; each adds twice to the residual stream.
        size: elements of the residual stream.
        spreads: the family's.
        device, dtype: of the tensors that `read` gives.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        layers: int,
        size: int,
        spreads: DummySpreads,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self._shapes = shapes
        self._spreads = spreads
        self._device = device
        self._dtype = dtype
        self._seed = seed
        self._added = 1 / math.sqrt(2 * layers * size)

    def read(self, name: str) -> Tensor:
        """The parameter, in its floating-point shape, on the device."""
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed + zlib.crc32(name.encode()))
        mean, deviation = self._spread(name)
        noise = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device).normal_(generator=generator)
        return noise.mul_(deviation).add_(mean)

    def _spread(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation."""
        for ending, spread in self._spreads.by_ending.items():
            if name.endswith(ending):
                return spread
        shape = self._shapes[name]
        if len(shape) == 1:
            return 0.0, 0.1
        fan_in = 1 / math.sqrt(shape[-1])
        adds = name.removesuffix(".weight").endswith(self._spreads.adding)
        return 0.0, fan_in * self._added if adds else fan_in
