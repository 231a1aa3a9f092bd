"""Linear layers, in plain PyTorch: for any number of tokens, and for the one token of a step with what stands around them.

In a step the norm ahead of a product, the convolution or the residual addition behind it are part of the operation. There
all is computed in float32, or in float64 where x is, and rounded to the output's dtype once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, Weight


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] -> x @ w.T + bias [T, N] in x's dtype."""
    return F.linear(x, weight.dequantized(x.dtype), weight.bias)


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """x [1, K] -> normed x @ w.T + bias [1, N] in `out_dtype`."""
    return _product(norm(x), weight).to(out_dtype)


def norm_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """x [1, K] -> silu(gate) * up [1, N / 2] in x's dtype: gate and up are the halves of normed x @ w.T + bias."""
    gate, up = _product(norm(x), weight).chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """A gated delta-net's projections of one token, and the causal convolution and SiLU over their first C outputs.

    Args:
        x: [1, K].
        norm: over K elements.
        weight: [N, K].
        gates: [M, K] in x's dtype, more rows of the same product.
        conv: in x's dtype, C <= N; its state is moved on by one in place.
        positions: [1] int64; where it is 0 the inputs so far count as zeros.

    Returns:
        [1, N] in x's dtype, of which the outputs from C on are plain products, and [1, M] float32.
    """
    normed = norm(x)
    product = _product(normed, weight).to(x.dtype)
    channels = conv.state.shape[1]
    before = torch.where(positions[0] == 0, torch.zeros_like(conv.state), conv.state)
    window = torch.cat((before, product[:, :channels]))
    mixed = F.silu((window.to(normed.dtype) * conv.weight[:, 0].to(normed.dtype).t()).sum(0, keepdim=True))
    conv.state.copy_(window[1:])
    gated = F.linear(normed, gates.to(normed.dtype))
    return torch.cat((mixed.to(x.dtype), product[:, channels:]), dim=1), gated.float()


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """residual [1, N] + x [1, K] @ w.T + bias, [1, N] in the residual's dtype, with the heads of x normed on the way.

    Args:
        x: [1, K].
        weight: [N, K].
        residual: [1, N] in x's dtype.
        squares: of the heads of x, K / heads elements each; None: x is multiplied as it is.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if squares is not None:
        heads = squares.sums.shape[0]
        mean = squares.sums.to(wide.dtype).sum(1, keepdim=True) / (x.shape[1] // heads)
        wide = (wide.view(heads, -1) * torch.rsqrt(mean + squares.eps)).view(1, -1)
    return (residual + _product(wide, weight)).to(residual.dtype)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """In x's dtype, which is wide."""
    return F.linear(x, weight.dequantized(x.dtype), None if weight.bias is None else weight.bias.to(x.dtype))
