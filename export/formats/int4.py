"""The int4 format of weights: what `--quant int4` means, and how four-bit integers are packed.

A weight [..., N, K] is quantised symmetrically along K, with one scale per group of `G` elements (32, 64 or 128)::

    w[n, k] = scale[n, k // G] * q[n, k],    -8 <= q <= 7

Two tensors are stored: `scale` [..., N, K / G] in bfloat16 and `values` [..., N, K / 2] in uint8. K is cut into spans of 64
elements, 32 bytes each. Byte `j` of a span holds two elements as `q + 8`: the span's element `j` in its low four bits, and
element `j + 32` in its high four bits.

So the low nibbles of 32 neighbouring bytes are 32 neighbouring elements, and so are the high nibbles. A kernel can multiply
each half by a contiguous range of the input, and never interleaves. With groups of 64 or 128 a span lies in one group; with
groups of 32 each half of a span is one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.delegate.errors import ExportError

GROUP_SIZES = (32, 64, 128)
SCALE_DTYPE = torch.bfloat16
SPAN = 64
HALF_SPAN = SPAN // 2


@dataclass(frozen=True)
class Quantization:
    """Symmetric int4 for linear layers and experts, int8 for the embedding, bfloat16 scales.

    Router, norms, convolution and gates stay in the model's dtype, and so do linear layers with a bias.

    Attributes:
        group_size: elements that share a scale: 32, 64 or 128.
        hqq: whether scales come from half-quadratic quantisation instead of the group's extreme values.

    Raises:
        ExportError: `group_size` is another number.
    """

    group_size: int = 128
    hqq: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ExportError(
                f"unsupported group size {self.group_size}; supported are: {', '.join(map(str, GROUP_SIZES))}"
            )

    def __str__(self) -> str:
        return f"int4 g{self.group_size}{' hqq' if self.hqq else ''}"


def check_groups(sizes: Mapping[str, int], group_size: int) -> None:
    """Check that rows of all these lengths divide into groups of int4 weights.

    Args:
        sizes: name of a length in the config -> the length.
        group_size: elements that share a scale.

    Raises:
        ExportError: a length does not divide; the message names it.
    """
    for name, size in sizes.items():
        if size % SPAN:
            raise ExportError(f"int4 needs {name} to be a multiple of {SPAN}, the config has {size}")
        if size % group_size:
            fitting = ", ".join(str(g) for g in GROUP_SIZES if size % g == 0)
            raise ExportError(f"group size {group_size} does not divide {name} ({size}); --group-size {fitting} would")


def pack_int4(q: Tensor) -> Tensor:
    """Pack q [..., K], of any integer dtype, -8 to 7, K a multiple of 64, into [..., K / 2] uint8."""
    spans = (q + 8).to(torch.uint8).unflatten(-1, (-1, 2, HALF_SPAN))
    return (spans[..., 0, :] | (spans[..., 1, :] << 4)).flatten(-2)


def unpack_int4(values: Tensor) -> Tensor:
    """Unpack values [..., K / 2] uint8 into q [..., K] int8."""
    spans = values.unflatten(-1, (-1, HALF_SPAN))
    both = torch.stack((spans & 15, spans >> 4), dim=-2)
    return both.to(torch.int8).flatten(-3) - 8


def dequantize_int4(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise values [..., N, K / 2] uint8 and scale [..., N, K / G] to [..., N, K] in `dtype`. The product is rounded
    once."""
    groups = unpack_int4(values).unflatten(-1, (scale.shape[-1], -1))
    return (groups.float() * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)
