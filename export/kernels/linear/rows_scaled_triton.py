# mypy: allow-untyped-defs
"""Products of rows with int4 weights of any group size, where fixed point cannot be used. Weights are scaled in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous


@triton.jit
def scaled_rows_early(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N] float32, the products of x [R, K] in bfloat16 or float32 with the weight.

    K is a multiple of 64. Program (block of COLUMNS input rows, tile of ROWS weight rows). In bfloat16, weights times scales
    are rounded to bfloat16. In float32, a product consists of three tf32 products.
    """
    start_next(EARLY)
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 32)
    # Rows past the last read the last row again.
    at = tl.minimum(output, N - 1)
    weights_at = weight_ptr + at[:, None] * (K // 2) + half[None, :]
    scales_at = scale_ptr + at * (K // GROUP)
    x_at = x_ptr + row[None, :].to(tl.int64) * K + half[:, None]
    filled = (row < rows)[None, :]
    wait_for_previous(EARLY)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for element in range(0, K, 64):
        # A span has 64 elements in 32 bytes: low nibbles are its first half, high nibbles its second.
        packed = tl.load(weights_at + element // 2).to(tl.int32)
        scale = tl.load(scales_at + element // GROUP).to(tl.float32)[:, None]
        weights = (((packed & 15) - 8).to(tl.float32) * scale).to(x_ptr.dtype.element_ty)
        x = tl.load(x_at + element, mask=filled, other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="tf32x3")
        if GROUP == 32:
            scale = tl.load(scales_at + (element // GROUP + 1)).to(tl.float32)[:, None]
        weights = (((packed >> 4) - 8).to(tl.float32) * scale).to(x_ptr.dtype.element_ty)
        x = tl.load(x_at + (element + 32), mask=filled, other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="tf32x3")
    if BIAS:
        sums += tl.load(bias_ptr + at).to(tl.float32)[:, None]
    offsets = row[None, :].to(tl.int64) * N + output[:, None]
    tl.store(out_ptr + offsets, sums, mask=filled & (output < N)[:, None])
