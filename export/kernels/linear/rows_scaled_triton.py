# mypy: allow-untyped-defs
"""Products of rows with integer weights of any format, in float32 and in other odd cases. Weights are scaled in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, pointers, starts_early
from ostinato.export.kernels.operands import Weight

from .step_triton import bits_of

# Weight rows per program.
ROWS = 64


@torch.library.triton_op("ostinato::rows_scaled_product", mutates_args={})
def scaled_product(
    x: Tensor,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    columns: int,
) -> Tensor:
    """x [R, K] @ w.T + bias: [R, N] float32; `columns` input rows per program. All tensors contiguous."""
    weight = Weight.of(values, scale, minimum, bias, form)
    rows, n = x.shape[0], weight.rows
    out = torch.empty((rows, n), dtype=torch.float32, device=x.device)
    launcher(scaled_rows_early)[((rows + columns - 1) // columns, triton.cdiv(n, ROWS))](
        *pointers(x, values, scale, minimum, bias),
        out,
        rows,
        N=n,
        K=weight.columns,
        GROUP=weight.group_size,
        BITS=bits_of(weight),
        MINIMUM=minimum is not None,
        BIAS=bias is not None,
        ROWS=ROWS,
        COLUMNS=columns,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def scaled_rows_early(
    x_ptr,
    weight_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N] float32, the products of x [R, K] in bfloat16 or float32 with the weight.

    K is a multiple of 64 for four-bit weights, of 32 for eight-bit weights. Program (block of COLUMNS input rows, tile of
    ROWS weight rows). In bfloat16, dequantised weights are rounded to bfloat16. In float32, a product consists of three tf32
    products.
    """
    start_next(EARLY)
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 32)
    # Rows past the last read the last row again.
    at = tl.minimum(output, N - 1)
    weights_at = weight_ptr + at[:, None] * (K * BITS // 8) + half[None, :]
    groups_at = at * (K // GROUP)
    x_at = x_ptr + row[None, :].to(tl.int64) * K + half[:, None]
    filled = (row < rows)[None, :]
    wait_for_previous(EARLY)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    # 32 bytes hold 32 elements, or a span of 64: low nibbles are its first half, high nibbles its second.
    for element in range(0, K, 256 // BITS):
        stored = tl.load(weights_at + element * BITS // 8).to(tl.int32)
        for part in tl.static_range(8 // BITS):
            number = stored
            if BITS == 4:
                number = ((stored >> 4) if part == 1 else (stored & 15)) - (0 if MINIMUM else 8)
            group = groups_at + (element + part * 32) // GROUP
            weights = number.to(tl.float32) * tl.load(scale_ptr + group).to(tl.float32)[:, None]
            if MINIMUM:
                weights += tl.load(minimum_ptr + group).to(tl.float32)[:, None]
            x = tl.load(x_at + (element + part * 32), mask=filled, other=0.0)
            sums = tl.dot(weights.to(x_ptr.dtype.element_ty), x, sums, input_precision="tf32x3")
    if BIAS:
        sums += tl.load(bias_ptr + at).to(tl.float32)[:, None]
    offsets = row[None, :].to(tl.int64) * N + output[:, None]
    tl.store(out_ptr + offsets, sums, mask=filled & (output < N)[:, None])
