"""Random weights for the C++ kernels, in panels, with their numbers in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.export.formats import dequantize_int4, pack_int4
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.operands import Norm, Weight

F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# From one row to more than any kernel has at a time, with and without a rest.
ROWS = (1, 2, 3, 5, 31, 33, 70)
# Relative error of a product with inputs in float32; rounded once to bfloat16, and where the CPU multiplies bfloat16 numbers,
# with inputs rounded to it.
TOLERANCE = {F32: 5e-6, BF16: 6e-3}
# Of a product with four-bit weights: inputs are bytes with a scale for each group of 32, 64 or 128, or bfloat16.
INT4_TOLERANCE = 1.2e-2


@dataclass(frozen=True)
class Operand:
    """A weight: as the kernels take it, and exactly, for the references."""

    packed: Weight
    exact: Weight

    def tolerance(self, dtype: torch.dtype) -> float:
        return TOLERANCE[dtype] if self.packed.scale is None else INT4_TOLERANCE


class Draw:
    """Random numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(size, generator=self.generator).to(dtype)

    def norm(self, size: int) -> Norm:
        return Norm(self.normal(size) * 0.3, EPS)

    def operand(self, *size: int, group: int | None, dtype: torch.dtype, bias: bool = False) -> Operand:
        """A weight [..., N, K] that keeps the size of what it is multiplied with."""
        scale: Tensor | None = None
        if group is None:
            values = self.normal(*size, dtype=dtype) * size[-1] ** -0.5
            exact = values.double()
        else:
            q = torch.randint(-8, 8, size, generator=self.generator)
            scale = (self.normal(*size[:-1], size[-1] // group) * size[-1] ** -0.5 / 4).bfloat16()
            values = pack_int4(q)
            exact = dequantize_int4(values, scale, torch.float64)
        added = self.normal(size[-2], dtype=dtype) if bias else None
        packed = Weight(*pack_panels(values, scale), added, in_panels=True)
        return Operand(packed, Weight(exact, None, None if added is None else added.double()))

    def rows(self, *size: int, dtype: torch.dtype) -> Operand:
        """A weight in `dtype` that operators take as a plain tensor."""
        return self.operand(*size, group=None, dtype=dtype)


def doubled(norm: Norm) -> Norm:
    return Norm(norm.weight.double(), norm.eps)
