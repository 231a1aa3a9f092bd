"""A linear layer on the GPU for any number of tokens: torch's product, and a kernel that dequantises int4 weights for it.

Besides, what brings int4 weights that are stored for a CPU into the order that kernels here read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher
from ostinato.export.kernels.operands import Weight

from . import reference
from .limits import check_weight
from .panels import LANES, unpack_panels, unpack_scale

# Half spans of 32 elements per program: 4 KB of bytes in, 16 KB of bfloat16 out.
DEQUANTIZE_BLOCK = 256
# Bytes per program of the kernel that takes weights out of panels.
UNPACK_BLOCK = 2048


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `reference.linear`; the weight is contiguous. Int4 weights are rounded to x's dtype.

    Raises:
        ExportError: see `check_weight`.
    """
    if weight.scale is None:
        return reference.linear(x, weight)
    check_weight(weight, x.dtype)
    return F.linear(x, dequantize_int4(weight.values, weight.scale, x.dtype), weight.bias)


@torch.library.triton_op("ostinato::dequantize_int4", mutates_args={})
def dequantize_int4(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`formats.dequantize_int4` of contiguous values [N, K / 2], bit for bit."""
    n, k = values.shape[0], values.shape[1] * 2
    out = torch.empty((n, k), dtype=dtype, device=values.device)
    halves = n * k // 32
    launcher(dequantize_kernel)[((halves + DEQUANTIZE_BLOCK - 1) // DEQUANTIZE_BLOCK,)](
        values,
        scale,
        out,
        HALVES=halves,
        GROUP=k // scale.shape[1],
        BLOCK=DEQUANTIZE_BLOCK,
        num_warps=4,
    )
    return out


def without_panels(weight: Weight) -> Weight:
    """The same weight [..., N, K] as rows; N is a multiple of 16 where it is int4 in panels."""
    if not weight.in_panels:
        return weight
    if weight.scale is None:
        return Weight(unpack_panels(weight.values, None)[0])
    return Weight(unpack_int4_panels(weight.values), unpack_scale(weight.scale))


@torch.library.triton_op("ostinato::unpack_int4_panels", mutates_args={})
def unpack_int4_panels(values: Tensor) -> Tensor:
    """The bytes [..., N, K / 2] of `panels.unpack_panels`, N being a multiple of 16."""
    rows, width = values.numel() // values.shape[-1], values.shape[-1]
    out = torch.empty_like(values)
    grid = ((rows * width + UNPACK_BLOCK - 1) // UNPACK_BLOCK,)
    launcher(unpack_panels_kernel)[grid](values, out, rows * width, width, LANES, UNPACK_BLOCK, num_warps=4)
    return out


@triton.jit
def unpack_panels_kernel(
    panels: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK bytes of rows per program: a byte is element i of a span of 64, and the one 32 behind it."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    row, column = place // WIDTH, place % WIDTH
    element = (column // 32 * 64 + column % 32).to(tl.int32)
    # A panel has four bytes of each row for eight neighbours: the first four in the low halves, the others in the high ones.
    of_row = panels + row // LANES * (LANES * WIDTH) + row % LANES * 4 + element % 4
    high = element % 8 // 4 * 4
    first = tl.load(of_row + element // 8 * (LANES * 4), mask=inside, other=0) >> high
    second = tl.load(of_row + (element // 8 + 4) * (LANES * 4), mask=inside, other=0) >> high
    tl.store(out + place, ((first & 15) | (second << 4)).to(tl.uint8), mask=inside)


@triton.jit
def dequantize_kernel(
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK half spans of 32 elements per program, 16 bytes of packed weights each; there is no gap between rows."""
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Chunk c holds 16 elements of the first half of span c // 2 and 16 of its second.
    inside = chunk < HALVES
    element = tl.arange(0, 16)[None, :]
    packed = tl.load(weight_ptr + chunk[:, None] * 16 + element, mask=inside[:, None], other=0)
    first = chunk // 2 * 64
    low_scale = tl.load(scale_ptr + first // GROUP, mask=inside, other=0.0).to(tl.float32)
    high_scale = tl.load(scale_ptr + (first + 32) // GROUP, mask=inside, other=0.0).to(tl.float32)
    low = ((packed & 15).to(tl.float32) - 8.0) * low_scale[:, None]
    high = ((packed >> 4).to(tl.float32) - 8.0) * high_scale[:, None]
    out = out_ptr + first[:, None] + chunk[:, None] % 2 * 16 + element
    tl.store(out, low.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(out + 32, high.to(out_ptr.dtype.element_ty), mask=inside[:, None])
