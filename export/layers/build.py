"""What all layers of one network are built for: the device's kernels, number formats, lengths; and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ostinato.export.kernels import Kernels

from .state import EXAMPLE_SLOTS

# Positions in a page. A tile of keys that a kernel takes at once is 16 to 64, and never crosses a page. Beside the state of a
# session that does not grow (64 MB with 30 delta-nets of 32 heads) half a page that stays empty (0.65 MB) is nothing.
PAGE_SIZE = 64


@dataclass(frozen=True)
class Build:
    """How a network is built, whatever its family.

    Attributes:
        kernels: the functions for the device that the code is compiled for.
        dtype: of activations, and of weights that are not quantised.
        max_seq_len: positions that a session may have.
        max_chunk: most tokens of one prompt's call.
        group_size: elements per scale, for int4 linear layers and experts and an int8 embedding; None: no quantisation.
        cpu_moe: layers, counted from the first, whose routed experts stay on the host.
        host_kernels: the functions for these.
        page_size: positions in a page of the KV caches.
    """

    kernels: type[Kernels]
    dtype: torch.dtype
    max_seq_len: int
    max_chunk: int
    group_size: int | None = None
    cpu_moe: int = 0
    host_kernels: type[Kernels] = Kernels
    page_size: int = PAGE_SIZE

    @cached_property
    def block_table(self) -> Tensor:
        """[slots, pages of a session] int32, one for all attention layers, as in `KVCache`."""
        pages = -(-self.max_seq_len // self.page_size)
        return torch.zeros(EXAMPLE_SLOTS, pages, dtype=torch.int32, device="cpu")


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without a value: networks are built for their shapes, values come when the artifact is written."""
    return frozen(torch.empty(shape, dtype=dtype))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
