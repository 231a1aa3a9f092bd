"""Linear layers of a decode step with what stands before or after them: a norm, a convolution, a residual.

One token only. The norm is `RMSNorm` of `models.norms`, `x / rms(x) * (1 + norm_weight)`; a weight is four-bit, in the layout
of `int4`. All is computed in float32, or in float64 where x is, and rounded to the output's dtype once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4 import dequantize_int4


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """x [1, K], norm_weight [K] float32, weight [N, K / 2] uint8, scale [N, K / G] -> normed x @ w.T [1, N], `out_dtype`."""
    normed = _normed(x, norm_weight, eps)
    return F.linear(normed, dequantize_int4(weight, scale, normed.dtype)).to(out_dtype)


def norm_linear_conv(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    extra: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """A gated delta-net's projections of one token, and the causal depthwise convolution and SiLU over their first C outputs.

    Args:
        x: [1, K].
        norm_weight: [K] float32.
        eps: added to the mean square.
        weight, scale: [N, K / 2] uint8 and [N, K / G].
        extra: [M, K] in x's dtype, more rows of the same product.
        conv_weight: [C, 1, W] in x's dtype, W >= 2, C <= N.
        conv_state: [W - 1, C] in x's dtype, the last inputs of the convolution, the oldest first; moved on by one in place.
        positions: [1] int64; where it is 0 the inputs so far count as zeros.

    Returns:
        [1, N] in x's dtype, of which the outputs from C on are plain products, and [1, M] float32.
    """
    normed = _normed(x, norm_weight, eps)
    product = F.linear(normed, dequantize_int4(weight, scale, normed.dtype)).to(x.dtype)
    channels = conv_state.shape[1]
    before = torch.where(positions[0] == 0, torch.zeros_like(conv_state), conv_state)
    window = torch.cat((before, product[:, :channels]))
    mixed = F.silu((window.to(normed.dtype) * conv_weight[:, 0].to(normed.dtype).t()).sum(0, keepdim=True))
    conv_state.copy_(window[1:])
    gates = F.linear(normed, extra.to(normed.dtype))
    return torch.cat((mixed.to(x.dtype), product[:, channels:]), dim=1), gates.float()


def linear_add(
    x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, squares: Tensor | None, eps: float
) -> Tensor:
    """residual [1, N] + x [1, K] @ w.T, [1, N] in the residual's dtype, with the heads of x normed on the way.

    Args:
        x: [1, K].
        weight, scale: [N, K / 2] uint8 and [N, K / G].
        residual: [1, N] in x's dtype.
        squares: None, or [heads, P] float32: row h sums to the squares of what the K / heads elements of head h are to be
            divided by the root mean square of.
        eps: added to that mean square.
    """
    wide = x.to(_accumulated_in(x))
    if squares is not None:
        heads = squares.shape[0]
        mean = squares.to(wide.dtype).sum(1, keepdim=True) / (x.shape[1] // heads)
        wide = (wide.view(heads, -1) * torch.rsqrt(mean + eps)).view(1, -1)
    return (residual + F.linear(wide, dequantize_int4(weight, scale, wide.dtype))).to(residual.dtype)


def _accumulated_in(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _normed(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    wide = x.to(_accumulated_in(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + norm_weight)
