"""Linear layers, in plain PyTorch: alone, and for a step together with the operations around them.

In a step, kernels for GPUs take up to `MAX_ROWS` rows, kernels for CPUs any number. The operations of a step include the norm
ahead of a product, and the convolution or the residual addition behind it. They compute in float32 (in float64 if x is), and
round to the output's dtype once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.delta_rule.reference import conv_rows
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, RowIndex, Weight


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] -> x @ w.T + bias [T, N] in x's dtype."""
    return F.linear(x, weight.dequantized(x.dtype), weight.bias)


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """x [T, K] -> normed x @ w.T + bias [T, N] in `out_dtype`."""
    return _product(norm(x), weight).to(out_dtype)


def norm_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """x [T, K] -> silu(gate) * up [T, N / 2] in x's dtype: gate and up are the halves of normed x @ w.T + bias."""
    gate, up = _product(norm(x), weight).chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """A gated delta-net's projections for the rows of any runs, with causal convolution and SiLU over their first C outputs.

    Args:
        x: [T, K].
        norm: the norm over K elements.
        weight: [N, K].
        gates: [M, K] in x's dtype: the gates' weight rows, which multiply the same normed x.
        conv: the convolution over C <= N channels, in x's dtype. Its state is updated in place, for the slots that have rows.
        index: the rows' positions and slots. Where a run begins at position 0, earlier inputs count as zeros.

    Returns:
        [T, N] in x's dtype, whose outputs from C on are plain products, and the gates' products [T, M] float32.
    """
    normed = norm(x)
    product = _product(normed, weight).to(x.dtype)
    gated = F.linear(normed, gates.to(normed.dtype))
    return conv_rows(product, conv, index), gated.float()


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """residual [T, N] + x [T, K] @ w.T + bias: [T, N] in the residual's dtype. With `squares`, heads of x are normed first.

    Args:
        x: [T, K].
        weight: [N, K].
        residual: [T, N] in x's dtype.
        squares: the heads' sums of squares; a head has K / heads elements. None: x is multiplied as it is.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if squares is not None:
        of_heads = wide.view(squares.sums.shape[0], -1)
        mean = squares.sums.to(wide.dtype).sum(1, keepdim=True) / of_heads.shape[1]
        wide = (of_heads * torch.rsqrt(mean + squares.eps)).view(x.shape)
    return (residual + _product(wide, weight)).to(residual.dtype)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """x @ w.T + bias, computed in x's dtype, which is float32 or float64."""
    return F.linear(x, weight.dequantized(x.dtype), None if weight.bias is None else weight.bias.to(x.dtype))
