"""Random weights for a config without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DummySpreads:
    """Exceptions in the distribution of a family's random weights.

    Attributes:
        by_ending: end of a parameter's name -> (mean, standard deviation) of its values.
        adding: name endings of the projections whose results are added to the residual stream.
    """

    by_ending: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    adding: tuple[str, ...] = ()


class DummyWeights:
    """Random weights for a network: the same for the same seed and kind of device.

    Norms and decays lie where trained ones do. The standard deviation of a matrix is 1 / sqrt(fan-in), so that logits are of
    order one. This includes the embedding, because it may also be the head.

    What one layer adds to the residual stream is small beside the embedding; all layers together add about as much as the
    embedding (the scaling of GPT-2). Otherwise rounding errors would grow from layer to layer, and after 40 layers two
    correct computations would have nothing in common.

    Args:
        shapes: parameter name -> its shape before quantisation.
        layers: number of layers of the network; each adds to the residual stream twice.
        size: elements of the residual stream.
        spreads: the family's exceptions.
        device, dtype: device and dtype of the tensors that `read` returns.
        seed: one seed for all parameters.
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
        """Return the parameter in its shape before quantisation, on the device."""
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed + zlib.crc32(name.encode()))
        mean, deviation = self._spread(name)
        noise = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device).normal_(generator=generator)
        return noise.mul_(deviation).add_(mean)

    def _spread(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation of the parameter's values."""
        for ending, spread in self._spreads.by_ending.items():
            if name.endswith(ending):
                return spread
        shape = self._shapes[name]
        if len(shape) == 1:
            return 0.0, 0.1
        fan_in = 1 / math.sqrt(shape[-1])
        adds = name.removesuffix(".weight").endswith(self._spreads.adding)
        return 0.0, fan_in * self._added if adds else fan_in
