"""Linear layers over four-bit weights on the GPU: a matrix-vector kernel for one token, dequantise and multiply for more.

The layout is that of `int4`. Read as 32-bit words, word `j` of a span's eight holds in its nibbles 0, 2, 4, 6 the elements
`4 j` to `4 j + 3` and in its nibbles 1, 3, 5, 7 those 32 further on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...delegate.errors import ExportError
from .int4 import GROUP_SIZES, SPAN
from .launch import launcher

# A nibble masked out of its word, taken for the bits of a float32, is the number q 2^(p - 149), p being the place of its
# lowest bit: subnormal numbers and those of the first exponent are evenly spaced, so this holds up to bit 23. The input is
# multiplied by 2^(SHIFT - p) beforehand and the sum by 2^(149 - SHIFT) afterwards, all exact. So an AND and a multiply-add do
# for a nibble. At the memory's full speed a multiprocessor meets 37 nibbles a clock and has 128 lanes to issue on, too few
# for extraction and conversion. With 80, inputs may be as large as 2^47, and what is lost of them lies below 2^-69.
SHIFT = tl.constexpr(80)
# Half spans of 32 elements a program: 4 KB of bytes in, 16 KB of bfloat16 out.
DEQUANTIZE_BLOCK = 256


@dataclass(frozen=True)
class MatvecConfig:
    """What one program, a single warp, does.

    Attributes:
        rows: outputs it makes.
        per_lane: neighbouring 32-bit words of a row that a lane loads at once.
        unroll: how many such tiles of each row are in one turn of the loop.
    """

    rows: int
    per_lane: int
    unroll: int

    @property
    def words(self) -> int:
        """32-bit words of a row in a tile."""
        return 32 * self.per_lane


def config_for(n: int, k: int) -> MatvecConfig:
    """The matrix-vector kernel's configuration for a weight [n, k].

    The more rows a warp has, the more products share what it costs to prepare x; but 1,024 warps, eight for each of an
    H200's multiprocessors, are wanted to keep enough loads in flight. Few rows need more of each row in flight instead.
    """
    rows = 16
    while rows > 1 and n < 1024 * rows:
        rows //= 2
    words = k // 8
    per_lane = max(1, min(4, triton.next_power_of_2(words) // 32))
    unroll = min(triton.cdiv(words, 32 * per_lane), max(2, 8 // rows))
    return MatvecConfig(rows, per_lane, unroll)


def check_shapes(n: int, k: int, groups: int, dtype: torch.dtype) -> None:
    """Raises ExportError where the kernels cannot take a weight [n, k] with `groups` scales a row and inputs of `dtype`."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ExportError(f"the int4 kernels take inputs in bfloat16 or float32, got {dtype}")
    if k % SPAN or groups < 1 or k % groups or k // groups not in GROUP_SIZES:
        raise ExportError(
            f"the int4 kernels take weights [N, K] with K a multiple of {SPAN} and of the group size, which is one of "
            f"{', '.join(map(str, GROUP_SIZES))}; got [{n}, {k}] with {groups} groups a row"
        )


def int4_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [T, K] -> x @ w.T [T, N] in x's dtype, with weight [N, K / 2] uint8 and scale [N, K / G] bfloat16.

    One token is multiplied by the weights as they are stored, in float32; more tokens by the weights rounded to x's dtype.
    """
    if x.shape[0] == 1:
        return int4_matvec(x.contiguous(), weight, scale)
    return F.linear(x, dequantize_int4(weight, scale, x.dtype))


@torch.library.triton_op("ostinato::int4_matvec", mutates_args={})
def int4_matvec(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [1, K], weight [N, K / 2] uint8, scale [N, K / G], all contiguous and x aligned to 8 bytes -> [1, N] in x's dtype."""
    n, k = weight.shape[0], weight.shape[1] * 2
    groups = scale.shape[1]
    check_shapes(n, k, groups, x.dtype)
    config = config_for(n, k)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    launcher(matvec_kernel)[((n + config.rows - 1) // config.rows,)](
        x,
        weight,
        scale,
        out,
        N=n,
        K=k,
        GROUP=k // groups,
        ROWS=config.rows,
        WORDS=config.words,
        PER_LANE=config.per_lane,
        UNROLL=config.unroll,
        num_warps=1,
    )
    return out


@torch.library.triton_op("ostinato::dequantize_int4", mutates_args={})
def dequantize_int4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`int4.dequantize_int4` of a contiguous weight [N, K / 2], bit for bit."""
    n, k = weight.shape[0], weight.shape[1] * 2
    groups = scale.shape[1]
    check_shapes(n, k, groups, dtype)
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    halves = n * k // 32
    launcher(dequantize_kernel)[((halves + DEQUANTIZE_BLOCK - 1) // DEQUANTIZE_BLOCK,)](
        weight,
        scale,
        out,
        HALVES=halves,
        GROUP=k // groups,
        BLOCK=DEQUANTIZE_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def matvec_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PER_LANE: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """A tile is WORDS words of one row, so that a lane meets the same inputs in all rows and keeps them in registers.

    One warp and tiles of one dimension: all loads then share one layout, and nothing passes through shared memory.
    """
    first_row = tl.program_id(0) * ROWS
    weight_words = weight_ptr.to(tl.pointer_type(tl.int32)) + first_row.to(tl.int64) * (K // 8)
    scales = scale_ptr + first_row.to(tl.int64) * (K // GROUP)
    sums = ()
    for _ in tl.static_range(ROWS):
        # Triton takes neither a starred expression nor a tuple's type.
        sums = sums + (tl.zeros([WORDS // PER_LANE], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in tl.range(0, K // 8, WORDS, loop_unroll_factor=UNROLL):
        word = start + tl.arange(0, WORDS)
        lane_word = start + tl.arange(0, WORDS // PER_LANE) * PER_LANE
        # Where WORDS divides the row, the compiler sees a constant and drops the masks.
        inside = (word < K // 8) | (K // 8 % WORDS == 0)
        lane_inside = (lane_word < K // 8) | (K // 8 % WORDS == 0)
        x = load_inputs(x_ptr, word, inside)
        added = ()
        for row in tl.static_range(ROWS):
            # Rows past the last one read it again, which needs no mask; where there are none, offsets stay constants.
            step = row if N % ROWS == 0 else tl.minimum(row, N - 1 - first_row)
            packed = tl.load(weight_words + word + step * (K // 8), mask=inside, other=0)
            row_scales = scales + step * (K // GROUP)
            product = multiply_row(packed, x, row_scales, lane_word, lane_inside, GROUP, PER_LANE)
            added = added + (sums[row] + product,)  # type: ignore[assignment, misc]  # noqa: RUF005
        sums = added
    for row in tl.static_range(ROWS):
        total = tl.sum(sums[row], axis=0) * 2.0 ** (149 - SHIFT)
        tl.store(out_ptr + first_row + row, total.to(out_ptr.dtype.element_ty), mask=first_row + row < N)


@triton.jit
def load_inputs(x_ptr: tl.tensor, word: tl.tensor, inside: tl.tensor) -> tl.tuple:
    """The eight inputs that each word's nibbles multiply, in the order of the nibbles, as float32 tiles like `word`."""
    # A word's low nibbles meet four neighbours, its high nibbles the four that are 32 further on.
    quad = word // 8 * 16 + word % 8
    if x_ptr.dtype.element_ty == tl.bfloat16:
        # Four at once in 64 bits; a bfloat16 is the upper half of the same float32.
        quads = x_ptr.to(tl.pointer_type(tl.int64))
        low = tl.load(quads + quad, mask=inside, other=0)
        high = tl.load(quads + quad + 8, mask=inside, other=0)
        x0, x2, x4, x6 = upper_half(low << 16), upper_half(low), upper_half(low >> 16), upper_half(low >> 32)
        x1, x3, x5, x7 = upper_half(high << 16), upper_half(high), upper_half(high >> 16), upper_half(high >> 32)
    else:
        low = x_ptr + quad * 4
        high = low + 32
        x0, x1 = tl.load(low, mask=inside, other=0.0), tl.load(high, mask=inside, other=0.0)
        x2, x3 = tl.load(low + 1, mask=inside, other=0.0), tl.load(high + 1, mask=inside, other=0.0)
        x4, x5 = tl.load(low + 2, mask=inside, other=0.0), tl.load(high + 2, mask=inside, other=0.0)
        x6, x7 = tl.load(low + 3, mask=inside, other=0.0), tl.load(high + 3, mask=inside, other=0.0)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def upper_half(bits: tl.tensor) -> tl.tensor:
    """The float32 whose upper half is bits 16 to 31 of an int64."""
    return (bits & 0xFFFF0000).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def multiply_row(
    packed: tl.tensor,
    x: tl.tuple,
    scales: tl.tensor,
    lane_word: tl.tensor,
    lane_inside: tl.tensor,
    GROUP: tl.constexpr,
    PER_LANE: tl.constexpr,
) -> tl.tensor:
    """The sum over each lane's words of weight times input, times 2^(SHIFT - 149)."""
    shifted = packed >> 8
    # The 8 of each nibble's q + 8 comes off first, word by word, so that nothing large cancels.
    low = (x[0] + x[2] + x[4] + x[6]) * (-8.0 * 2.0 ** (SHIFT - 149))
    high = (x[1] + x[3] + x[5] + x[7]) * (-8.0 * 2.0 ** (SHIFT - 149))
    if GROUP > 32:
        low += high
    low = multiply_nibble(low, packed, x[0], 0)
    low = multiply_nibble(low, packed, x[2], 8)
    low = multiply_nibble(low, packed, x[4], 16)
    low = multiply_nibble(low, shifted, x[6], 16)
    if GROUP > 32:
        high = low
    high = multiply_nibble(high, packed, x[1], 4)
    high = multiply_nibble(high, packed, x[3], 12)
    high = multiply_nibble(high, packed, x[5], 20)
    high = multiply_nibble(high, shifted, x[7], 20)
    if GROUP == 32:
        group = scales + lane_word // 8 * 2
        low_scale = tl.load(group, mask=lane_inside, other=0.0).to(tl.float32)
        high_scale = tl.load(group + 1, mask=lane_inside, other=0.0).to(tl.float32)
        return sum_lane(low, PER_LANE) * low_scale + sum_lane(high, PER_LANE) * high_scale
    scale = tl.load(scales + lane_word * 8 // GROUP, mask=lane_inside, other=0.0).to(tl.float32)
    return sum_lane(high, PER_LANE) * scale


@triton.jit
def multiply_nibble(total: tl.tensor, words: tl.tensor, x: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """total + 2^(SHIFT - 149) x (the nibble at bit PLACE of each word)."""
    return total + (words & (15 << PLACE)).to(tl.float32, bitcast=True) * (x * 2.0 ** (SHIFT - PLACE))


@triton.jit
def sum_lane(x: tl.tensor, PER_LANE: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.reshape(x, [x.shape[0] // PER_LANE, PER_LANE]), axis=1)


@triton.jit
def dequantize_kernel(
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK half spans of 32 elements a program, 16 bytes of packed weights each; rows follow one another without a gap."""
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
