"""What all layers of one network are built for: the device's kernels, number formats, lengths; and their parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.export.kernels import Kernels


@dataclass(frozen=True)
class Build:
    """How a network is built, whatever its family.

    Attributes:
        kernels: the functions for the device that the code is compiled for.
        dtype: of activations, and of weights that are not quantised.
        max_seq_len: slots of the KV caches.
        max_chunk: most tokens of one call.
        group_size: elements per scale, for int4 linear layers and experts and an int8 embedding; None: no quantisation.
        cpu_moe: layers, counted from the first, whose routed experts stay on the host.
        host_kernels: the functions for these.
    """

    kernels: type[Kernels]
    dtype: torch.dtype
    max_seq_len: int
    max_chunk: int
    group_size: int | None = None
    cpu_moe: int = 0
    host_kernels: type[Kernels] = Kernels


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without a value: networks are built for their shapes, values come when the artifact is written."""
    return frozen(torch.empty(shape, dtype=dtype))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
