"""Code that the kernels of the gated delta rule share: gates, lengths, and products with more than bfloat16's precision."""

from __future__ import annotations

import triton
import triton.language as tl

# Rows whose slots are looked at together.
SLOTS = tl.constexpr(1024)


@triton.jit
def token_count(slots: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """Number of a prompt's rows that are tokens, as `operands.token_count`: a scalar, int32."""
    count = tl.full((), 0, tl.int32)
    for begin in range(0, rows, SLOTS):
        row = begin + tl.arange(0, SLOTS)
        count += tl.sum((tl.load(slots + row, mask=row < rows, other=-1) >= 0).to(tl.int32), 0)
    return count


@triton.jit
def log_decay(a: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor) -> tl.tensor:
    """`-exp(a_log) softplus(a + dt_bias)`, float32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return -tl.exp(a_log.to(tl.float32)) * softplus(x)


@triton.jit
def write_strength(b: tl.tensor) -> tl.tensor:
    """`sigmoid(b)`, float32."""
    return tl.sigmoid(b.to(tl.float32))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + exp(x))`, in float32's precision for every x.

    The GPU's logarithm has an absolute error of 2e-7 near 1, as large as the result where decay is slow. With
    y = exp(-|x|) <= 1 and z = y / (2 + y) <= 1/3, log(1 + y) = 2 artanh(z), whose series is exact to 1e-8 after eight terms.
    """
    y = tl.exp(-tl.abs(x))
    z = y / (y + 2.0)
    square = z * z
    series = 2.0 / 15
    series = series * square + 2.0 / 13
    series = series * square + 2.0 / 11
    series = series * square + 2.0 / 9
    series = series * square + 2.0 / 7
    series = series * square + 2.0 / 5
    series = series * square + 2.0 / 3
    series = series * square + 2.0
    return tl.maximum(x, 0.0) + z * series


@triton.jit
def sum_of_squares(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Sums of squares over an axis, in float32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis)


@triton.jit
def inverse_length(square: tl.tensor) -> tl.tensor:
    """`1 / |x|` from `|x|^2`, with eps under the root as in `reference.l2_normalize`."""
    return tl.rsqrt(square + 1e-6)


@triton.jit
def multiply(x: tl.tensor, y: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """`x @ y`, both float32, in two or three dimensions. Operands keep 16 bits if PARTS is 2, else about 22 bits."""
    if len(x.shape) == 3:
        z = tl.zeros((x.shape[0], x.shape[1], y.shape[2]), tl.float32)
    else:
        z = tl.zeros((x.shape[0], y.shape[1]), tl.float32)
    if PARTS == 2:
        high, low = split(y)
        return multiply_add(x, high, tl.dot(split(x)[0], low, z))
    else:
        return multiply_add(x, y, z)


@triton.jit
def multiply_add(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """`x @ y + z`, x float32. If y is bfloat16, it is exact, and x is split into two parts with 16 bits together."""
    if y.dtype == tl.bfloat16:
        high, low = split(x)
        return tl.dot(high, y, tl.dot(low, y, z))
    else:
        return tl.dot(x, y, z, input_precision="tf32x3")


@triton.jit
def multiply_parts(
    x: tl.tensor, cells: tl.tensor, size: tl.tensor, z: tl.tensor, PARTS: tl.constexpr, inside: tl.tensor | None = None
) -> tl.tensor:
    """`x @ y + z`, x float32. y is what `store_parts` has stored at `cells`; it counts as zeros where `inside` is false."""
    other: tl.constexpr = None if inside is None else 0.0
    z = multiply_add(x, tl.load(cells, mask=inside, other=other), z)
    if PARTS == 2:
        z = tl.dot(split(x)[0], tl.load(cells + size, mask=inside, other=other), z)
    return z


@triton.jit
def split(x: tl.tensor) -> tl.tensor:
    """float32 -> (nearest bfloat16, bfloat16 of the rest).

    The rounding uses integers: a conversion whose result is also needed in float32 costs one slow instruction per element.
    """
    bits = x.to(tl.uint32, bitcast=True)
    high = ((bits + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def store_parts(
    cells: tl.tensor, x: tl.tensor, size: tl.tensor, PARTS: tl.constexpr, inside: tl.tensor | None = None
) -> None:
    """Stores x, rounded to the dtype of `cells`. If PARTS is 2, also stores the rest of x, `size` elements after it."""
    if PARTS == 2:
        high, low = split(x)
        tl.store(cells, high, mask=inside)
        tl.store(cells + size, low, mask=inside)
    else:
        tl.store(cells, x, mask=inside)


@triton.jit
def add_pairs(a0: tl.tensor, a1: tl.tensor, b0: tl.tensor, b1: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, b0: tl.tensor, b1: tl.tensor, b2: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    return a0 + b0, a1 + b1, a2 + b2
