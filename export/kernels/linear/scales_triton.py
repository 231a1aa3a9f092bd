# mypy: allow-untyped-defs
"""Scales and minima of number formats, bfloat16 or float16, which kernels load several at a time as integers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_pair(pairs, SECOND: tl.constexpr, SCALE: tl.constexpr):
    """The first or the second number of dtype SCALE in the low 32 bits of each integer, as float32."""
    if SCALE == tl.float16:  # noqa: SIM300
        half = ((pairs >> 16) if SECOND else pairs).to(tl.int16)
        number = half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = pairs.to(tl.int32)
        number = ((bits & -65536) if SECOND else (bits << 16)).to(tl.float32, bitcast=True)
    return number
