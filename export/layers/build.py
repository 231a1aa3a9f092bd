"""Settings that all layers of one network share: the device's kernels, number formats, lengths. Also makes parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import PageGroup
from ostinato.export.formats.format import Format
from ostinato.export.formats.quantization import Quantization
from ostinato.export.kernels import Kernels

from .state import EXAMPLE_SLOTS

# Positions in a page. A kernel takes tiles of 16 to 64 keys, and a tile never crosses a page. The half page that a session
# leaves empty (0.65 MB) is little beside its state that does not grow (69 MB with 30 delta-nets of 32 heads).
PAGE_SIZE = 64


@dataclass(frozen=True)
class Build:
    """Settings of a network of any family.

    Attributes:
        kernels: the functions for the device that the code is compiled for.
        dtype: dtype of activations, and of weights that are not quantised.
        max_seq_len: positions that a session may have.
        max_chunk: most tokens of a prompt that one call takes.
        quant: number formats of linear layers, experts and the embedding; None: all in `dtype`.
        cpu_moe: number of layers, counted from the first, whose routed experts stay on the host.
        host_kernels: the functions for these experts.
        page_size: positions in a page of the KV caches.
        state_dtype: dtype of recurrent states.
    """

    kernels: type[Kernels]
    dtype: torch.dtype
    max_seq_len: int
    max_chunk: int
    quant: Quantization | None = None
    cpu_moe: int = 0
    host_kernels: type[Kernels] = Kernels
    page_size: int = PAGE_SIZE
    state_dtype: torch.dtype = torch.float32

    @property
    def format(self) -> Format | None:
        """The number format of linear layers and experts; None for `dtype`."""
        return None if self.quant is None else self.quant.weights

    def block_table(self, group: PageGroup) -> Tensor:
        """The block table of `KVCache`, [slots, pages of a session] int32. All attention layers of a page group share it."""
        if group not in self._block_tables:
            pages = -(-self.max_seq_len // self.page_size)
            self._block_tables[group] = torch.zeros(EXAMPLE_SLOTS, pages, dtype=torch.int32, device="cpu")
        return self._block_tables[group]

    @cached_property
    def _block_tables(self) -> dict[PageGroup, Tensor]:
        return {}


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without a value. Networks are built for their shapes; the values come when the artifact is written."""
    return frozen(torch.empty(shape, dtype=dtype))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
