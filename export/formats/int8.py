"""Eight-bit integers, symmetric, with one scale per group::

    w[n, k] = scale[n, k // G] * q[n, k],    -128 <= q <= 127

`values` are the integers, [..., N, K] int8. GGUF's Q8_0 becomes this format as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .format import Format


@dataclass(frozen=True)
class Int8(Format):
    """Symmetric eight-bit integers."""

    name = "int8"
    group_sizes = (32, 64, 128)
    lowest, highest = -128, 127
    values_dtype = torch.int8

    group_size: int = 32

    @classmethod
    def pack(cls, q: Tensor) -> Tensor:
        return q.to(torch.int8)

    @classmethod
    def unpack(cls, values: Tensor) -> Tensor:
        return values
