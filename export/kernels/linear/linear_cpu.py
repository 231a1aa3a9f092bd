"""Linear layers for CPUs, for any number of tokens: the functions of `reference.py`, with weights in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, RowIndex, Weight
from ostinato.export.kernels.operators_cpu import LIBRARY

# A weight in an operator's schema: `Weight.arguments`.
WEIGHT = "Tensor values, Tensor? scale, Tensor? minimum, Tensor? bias, str form"


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """As `reference.norm_linear`."""
    return _norm_linear(x, norm.weight, norm.eps, *weight.arguments, out_dtype)


@LIBRARY.operator(f"norm_linear(Tensor x, Tensor norm, float eps, {WEIGHT}, ScalarType dtype) -> Tensor")
def _norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0], dtype=dtype)


def norm_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """As `reference.norm_swiglu`."""
    return _norm_swiglu(x, norm.weight, norm.eps, *weight.arguments)


@LIBRARY.operator(f"norm_swiglu(Tensor x, Tensor norm, float eps, {WEIGHT}) -> Tensor")
def _norm_swiglu(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0] // 2)


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """As `reference.norm_linear_conv`; `gates` is in panels too."""
    mixed, gated = _norm_linear_conv(
        x,
        norm.weight,
        norm.eps,
        *weight.arguments,
        gates,
        conv.weight,
        conv.state,
        index.positions,
        index.slots,
    )
    return mixed, gated


@LIBRARY.operator(
    f"norm_linear_conv(Tensor x, Tensor norm, float eps, {WEIGHT}, Tensor gates, Tensor taps, "
    "Tensor(a!) state, Tensor positions, Tensor slots) -> (Tensor, Tensor)"
)
def _norm_linear_conv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    gates: Tensor,
    taps: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    return x.new_empty(tokens, values.shape[0]), x.new_empty(tokens, gates.shape[0], dtype=torch.float32)


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """As `reference.linear_add`."""
    sums, eps = (None, 0.0) if squares is None else (squares.sums, squares.eps)
    return _linear_add(x, *weight.arguments, residual, sums, eps)


@LIBRARY.operator(f"linear_add(Tensor x, {WEIGHT}, Tensor residual, Tensor? squares, float eps) -> Tensor")
def _linear_add(
    x: Tensor,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    residual: Tensor,
    squares: Tensor | None,
    eps: float,
) -> Tensor:
    return torch.empty_like(residual)
