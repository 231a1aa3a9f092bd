"""Four-bit weights: the packed layout, and a linear layer over it.

A weight [..., N, K] is quantised symmetrically along K, one scale for each group of `G` elements (32, 64 or 128)::

    w[n, k] = scale[n, k // G] * q[n, k],    -8 <= q <= 7

Stored are `scale` [..., N, K / G] in bfloat16 and `weight` [..., N, K / 2] in uint8. K is cut into spans of 64 elements,
32 bytes each. Byte `j` of a span holds `q + 8` of the span's element `j` in its low four bits and of element `j + 32` in its
high four. So the low nibbles of 32 neighbouring bytes are 32 neighbouring elements, and so are the high ones: a kernel
multiplies each half by a contiguous piece of the input and never interleaves. A span lies in one group, or is two groups of
32, one a half.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantization import GROUP_SIZES as GROUP_SIZES

SPAN = 64
HALF = SPAN // 2


def pack_int4(q: Tensor) -> Tensor:
    """q [..., K] of any integer dtype, -8..7, K a multiple of 64 -> [..., K / 2] uint8."""
    spans = (q + 8).to(torch.uint8).unflatten(-1, (-1, 2, HALF))
    return (spans[..., 0, :] | (spans[..., 1, :] << 4)).flatten(-2)


def unpack_int4(weight: Tensor) -> Tensor:
    """weight [..., K / 2] uint8 -> q [..., K] int8."""
    spans = weight.unflatten(-1, (-1, HALF))
    both = torch.stack((spans & 15, spans >> 4), dim=-2)
    return both.to(torch.int8).flatten(-3) - 8


def dequantize_int4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [..., N, K / 2] uint8, scale [..., N, K / G] -> [..., N, K] in `dtype`; the product is rounded once."""
    groups = unpack_int4(weight).unflatten(-1, (scale.shape[-1], -1))
    return (groups.float() * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def int4_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [T, K] -> x @ w.T [T, N] in x's dtype, with weight [N, K / 2] uint8 and scale [N, K / G]."""
    return F.linear(x, dequantize_int4(weight, scale, x.dtype))
