"""Sizes and dtypes that the Triton kernels of linear layers take."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.operands import HeadSquares, Weight

DTYPES = (torch.bfloat16, torch.float32)


def check_weight(weight: Weight, dtype: torch.dtype) -> None:
    """Raises ExportError unless the kernels take this weight, in a floating dtype or of integers, and inputs of `dtype`."""
    if dtype not in DTYPES:
        raise ExportError(f"the linear kernels take inputs in bfloat16 or float32, got {dtype}")
    n, k = weight.rows, weight.columns
    if weight.format is None:
        if weight.values.dtype not in DTYPES:
            raise ExportError(
                "the linear kernels take weights in bfloat16, float32 or a format of integers, got "
                f"{weight.values.dtype}"
            )
        return
    if k % weight.format.multiple or k % weight.format.group_size:
        raise ExportError(
            f"the {weight.format.name} kernels take weights [N, K] with K a multiple of {weight.format.multiple} and of "
            f"the group size; got [{n}, {k}] with groups of {weight.format.group_size}"
        )


def heads_of(x: Tensor, squares: HeadSquares) -> int:
    """The number of heads of a row of x [R, K]. Raises ExportError if a row does not divide into them."""
    heads = int(squares.sums.shape[0] // x.shape[0])
    if x.shape[1] % heads:
        raise ExportError(f"an input of {x.shape[1]} elements cannot be divided into {heads} heads")
    return heads
