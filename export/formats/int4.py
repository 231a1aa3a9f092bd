"""The int4 format of weights: what `--quant int4` means, and how four-bit integers are packed.

A weight [..., N, K] is quantised symmetrically along K, with one scale per group of `G` elements (32, 64 or 128)::

    w[n, k] = scale[n, k // G] * q[n, k],    -8 <= q <= 7

Two tensors are stored: `scale` [..., N, K / G] and `values` [..., N, K / 2] in uint8. K is cut into spans of 64 elements, 32
bytes each. Byte `j` of a span holds two elements as `q + 8`: the span's element `j` in its low four bits, and element
`j + 32` in its high four bits.

So the low nibbles of 32 neighbouring bytes are 32 neighbouring elements, and so are the high nibbles. A kernel can multiply
each half by a contiguous range of the input, and never interleaves. With groups of 64 or 128 a span lies in one group; with
groups of 32 each half of a span is one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .format import Format

SPAN = 64
HALF_SPAN = SPAN // 2


@dataclass(frozen=True)
class Int4(Format):
    """Symmetric four-bit integers."""

    name = "int4"
    group_sizes = (32, 64, 128)
    lowest, highest = -8, 7
    values_dtype = torch.uint8
    per_value = 2
    multiple = SPAN

    @classmethod
    def pack(cls, q: Tensor) -> Tensor:
        """Pack q [..., K], K a multiple of 64, into [..., K / 2] uint8."""
        return pack_nibbles(q + 8)

    @classmethod
    def unpack(cls, values: Tensor) -> Tensor:
        """Unpack values [..., K / 2] uint8 into q [..., K] int8."""
        return unpack_nibbles(values) - 8


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Pack numbers [..., K] from 0 to 15, K a multiple of 64, into [..., K / 2] uint8."""
    spans = numbers.to(torch.uint8).unflatten(-1, (-1, 2, HALF_SPAN))
    return (spans[..., 0, :] | (spans[..., 1, :] << 4)).flatten(-2)


def unpack_nibbles(values: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`, int8."""
    spans = values.unflatten(-1, (-1, HALF_SPAN))
    return torch.stack((spans & 15, spans >> 4), dim=-2).to(torch.int8).flatten(-3)
