"""A linear layer on the GPU for any number of tokens: torch's product, and a kernel that dequantises integer weights for it.

Another kernel brings int4 weights that are stored for a CPU, in panels, into the order that the GPU's kernels read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher, pointers
from ostinato.export.kernels.operands import Weight

from . import reference
from .limits import check_weight
from .panels import LANES, unpack_panels, unpack_scale
from .step_triton import bits_of

# Pieces of 16 bytes of a weight's values per program: 4 KB in, 16 KB of bfloat16 out, for eight-bit integers 8 KB.
DEQUANTIZE_BLOCK = 256
# Eights (groups of eight bytes) of each row of a panel, per program of the kernel that takes weights out of panels.
UNPACK_BLOCK = 64


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `reference.linear`; the weight is contiguous. Dequantised weights are rounded to x's dtype.

    Raises:
        ExportError: see `check_weight`.
    """
    check_weight(weight, x.dtype)
    if weight.scale is None:
        return reference.linear(x, weight)
    values, scale, minimum, _, form = weight.arguments
    return F.linear(x, dequantize(values, scale, minimum, form, x.dtype), weight.bias)


@torch.library.triton_op("ostinato::dequantize", mutates_args={})
def dequantize(values: Tensor, scale: Tensor | None, minimum: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """The result of `Format.dequantize`, bit for bit, for contiguous tensors of two dimensions."""
    weight = Weight.of(values, scale, minimum, None, form)
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=values.device)
    pieces = values.numel() // 16
    launcher(dequantize_kernel)[((pieces + DEQUANTIZE_BLOCK - 1) // DEQUANTIZE_BLOCK,)](
        *pointers(values, scale, minimum),
        out,
        PIECES=pieces,
        GROUP=weight.group_size,
        BITS=bits_of(weight),
        MINIMUM=minimum is not None,
        BLOCK=DEQUANTIZE_BLOCK,
        num_warps=4,
    )
    return out


def without_panels(weight: Weight) -> Weight:
    """The same weight [..., N, K] in rows, without panels. N must be a multiple of 16 for four-bit integers in panels."""
    if not weight.in_panels:
        return weight
    if weight.format is not None and weight.format.per_value == 2:
        check_weight(weight, torch.bfloat16)
        values = unpack_int4_panels(weight.values)
    else:
        values = unpack_panels(weight.format, weight.values, None)[0]
    scale, minimum = (None if one is None else unpack_scale(one) for one in (weight.scale, weight.minimum))
    return Weight(values, scale, minimum, format=weight.format)


@torch.library.triton_op("ostinato::unpack_int4_panels", mutates_args={})
def unpack_int4_panels(values: Tensor) -> Tensor:
    """int4 values [..., N, K / 2] in panels -> the same in rows, as `panels.unpack_panels`. N is a multiple of 16."""
    rows, eights = values.numel() // values.shape[-1], values.shape[-1] // 8
    out = torch.empty_like(values)
    block = min(UNPACK_BLOCK, triton.next_power_of_2(eights))
    grid = (rows // LANES, (eights + block - 1) // block)
    launcher(unpack_panels_kernel)[grid](values, out, EIGHTS=eights, LANES=LANES, BLOCK=block, num_warps=4)
    return out


@triton.jit
def unpack_panels_kernel(
    panels: tl.tensor,
    out: tl.tensor,
    EIGHTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write BLOCK eights of each row of one panel per program. An eight is eight bytes, a quarter of a span of 64 elements.

    In a panel, a word has eight neighbouring elements: the first four in the low nibbles of its bytes, the others in the high
    nibbles. In a row, a byte has an element of a span in its low nibble, and the element 32 places behind in its high nibble.
    So two words of a panel, a row's words i and i + 4, become two neighbouring words of the row.
    """
    panel = tl.program_id(0).to(tl.int64)
    eight = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    words = panels.to(tl.pointer_type(tl.uint32)) + panel * (2 * EIGHTS * LANES)
    from_words = words + (eight // 4 * 8 + eight % 4)[:, None] * LANES + lane[None, :]
    inside = eight < EIGHTS
    first = tl.load(from_words, mask=inside[:, None], other=0)
    second = tl.load(from_words + 4 * LANES, mask=inside[:, None], other=0)
    low = (first & 0x0F0F0F0F) | ((second & 0x0F0F0F0F) << 4)
    high = ((first >> 4) & 0x0F0F0F0F) | (second & 0xF0F0F0F0)
    both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    to = out.to(tl.pointer_type(tl.uint64)) + (panel * LANES + lane)[:, None] * EIGHTS + eight[None, :]
    tl.store(to, tl.trans(both), mask=inside[None, :])


@triton.jit
def dequantize_kernel(
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Dequantise BLOCK pieces of 16 bytes per program; rows are contiguous. MINIMUM: whether groups have minima.

    Eight-bit integers are 16 elements of one group. Four-bit integers are 16 elements of the first half of a span of 64, in
    the low nibbles, and 16 of its second half. Each half lies in one group.
    """
    piece = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < PIECES
    byte = tl.arange(0, 16)[None, :]
    stored = tl.load(weight_ptr + piece[:, None] * 16 + byte, mask=inside[:, None], other=0)
    if BITS == 8:
        first = piece * 16
        weights = scaled(stored.to(tl.float32), scale_ptr, minimum_ptr, first // GROUP, inside, MINIMUM)
        tl.store(out_ptr + first[:, None] + byte, weights.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        first = piece // 2 * 64
        out = out_ptr + first[:, None] + piece[:, None] % 2 * 16 + byte
        for half in tl.static_range(2):
            nibble = ((stored >> 4) if half == 1 else (stored & 15)).to(tl.float32)
            number = nibble if MINIMUM else nibble - 8.0
            weights = scaled(number, scale_ptr, minimum_ptr, (first + half * 32) // GROUP, inside, MINIMUM)
            tl.store(out + half * 32, weights.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def scaled(
    numbers: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    group: tl.tensor,
    inside: tl.tensor,
    MINIMUM: tl.constexpr,
) -> tl.tensor:
    """numbers [BLOCK, 16] times the scales of their groups [BLOCK], plus the minima. The product is exact in float32."""
    weights = numbers * tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)[:, None]
    if MINIMUM:
        weights += tl.load(minimum_ptr + group, mask=inside, other=0.0).to(tl.float32)[:, None]
    return weights
