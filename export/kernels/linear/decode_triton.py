"""A linear layer with int4 weights for one token: a matrix-vector kernel without other operations folded into it.

`step_tiles_triton` says how a word's nibbles become numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher

from .step_tiles_triton import SHIFT


@dataclass(frozen=True)
class MatvecConfig:
    """What one program, a single warp, does.

    Attributes:
        rows: outputs that it computes.
        per_lane: neighbouring 32-bit words of a row that a lane loads at once.
        unroll: how many such tiles of each row are in one iteration of the loop.
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

    The more rows a warp has, the more products share the cost of preparing x. But 1,024 warps, eight per multiprocessor of an
    H200, are needed to keep enough loads in flight. Few rows need more of each row in flight instead.
    """
    rows = 16
    while rows > 1 and n < 1024 * rows:
        rows //= 2
    words = k // 8
    per_lane = max(1, min(4, triton.next_power_of_2(words) // 32))
    unroll = min(triton.cdiv(words, 32 * per_lane), max(2, 8 // rows))
    return MatvecConfig(rows, per_lane, unroll)


@torch.library.triton_op("ostinato::int4_matvec", mutates_args={})
def int4_matvec(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """x [1, K], values [N, K / 2] uint8, scale [N, K / G], all contiguous and x aligned to 8 bytes -> [1, N] in x's dtype."""
    n, k = values.shape[0], values.shape[1] * 2
    config = config_for(n, k)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    launcher(matvec_kernel)[((n + config.rows - 1) // config.rows,)](
        x,
        values,
        scale,
        out,
        N=n,
        K=k,
        GROUP=k // scale.shape[1],
        ROWS=config.rows,
        WORDS=config.words,
        PER_LANE=config.per_lane,
        UNROLL=config.unroll,
        num_warps=1,
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
    """A tile is WORDS words of one row, so that a lane uses the same inputs in all rows and keeps them in registers.

    With one warp and tiles of one dimension all loads share one layout, and nothing passes through shared memory.
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
            # Rows past the last one read the last one again, which needs no mask; without such rows offsets stay constants.
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
    # A word's low nibbles multiply four neighbours, its high nibbles the four that are 32 elements after those.
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
    # The 8 in each nibble's q + 8 is subtracted first, word by word, so that no large numbers cancel.
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
