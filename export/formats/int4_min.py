"""Four-bit integers from 0 to 15 with a scale and a minimum for each group of 32 elements::

    w[n, k] = scale[n, k // 32] * q[n, k] + minimum[n, k // 32],    0 <= q <= 15

`values` are packed as in `int4.py`; a nibble is q itself. GGUF's Q4_1 and Q4_K become this format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .format import Format
from .int4 import SPAN, pack_nibbles, unpack_nibbles


@dataclass(frozen=True)
class Int4Min(Format):
    """Four-bit integers with a minimum."""

    name = "int4_min"
    group_sizes = (32,)
    lowest, highest = 0, 15
    values_dtype = torch.uint8
    per_value = 2
    multiple = SPAN
    has_minimum = True

    group_size: int = 32

    @classmethod
    def pack(cls, q: Tensor) -> Tensor:
        return pack_nibbles(q)

    @classmethod
    def unpack(cls, values: Tensor) -> Tensor:
        return unpack_nibbles(values)
