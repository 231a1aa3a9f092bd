"""Arguments for the C++ kernels: random weights in panels, with their numbers in float64, and rows of several sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.export.formats.int4 import dequantize_int4, pack_int4
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.operands import Norm, RowIndex, Weight

F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# From one row to more than any kernel has at a time, with and without a rest.
ROWS = (1, 2, 3, 5, 31, 33, 70)
# Relative error of a product with inputs in float32; rounded once to bfloat16, and where the CPU multiplies bfloat16 numbers,
# with inputs rounded to it.
TOLERANCE = {F32: 5e-6, BF16: 6e-3}
# Of a product with four-bit weights: inputs are bytes with a scale for each group of 32, 64 or 128, or bfloat16.
INT4_TOLERANCE = 1.2e-2


class Span(NamedTuple):
    """Neighbouring rows: a run of a slot from a position on, or padding, whose slot is -1."""

    slot: int
    position: int
    rows: int


def padding(rows: int) -> Span:
    """Rows whose position no cache has."""
    return Span(-1, 2**40, rows)


# Slots are below SLOTS, and there are some without rows.
SLOTS = 9
MIXES = {
    "one row": [Span(1, 37, 1)],
    "first row": [Span(0, 0, 1)],
    "padding": [padding(1)],
    "much padding": [padding(20)],
    "rows of several": [Span(3, 5, 1), Span(0, 0, 1), Span(7, 130, 1), Span(2, 64, 1), Span(5, 63, 1)],
    "rows and padding": [Span(4, 99, 1), padding(2), Span(1, 200, 1), padding(1)],
    "padding first": [padding(3), Span(1, 16, 5), padding(1), Span(0, 47, 1)],
    "prompt and padding": [Span(6, 30, 17), padding(15)],
    "prompt and rows": [Span(2, 0, 40), Span(6, 300, 1), Span(0, 31, 1), Span(3, 15, 17)],
    "prompts": [Span(0, 0, 70), Span(8, 100, 33), Span(1, 0, 2)],
    "deep and many": [Span(2, 1000, 1), *(Span(slot, 7 * slot, 1) for slot in range(3, 9)), Span(1, 500, 3)],
}


def rows_index(spans: Sequence[Span], rotated: int = 0, seed: int = 0) -> RowIndex:
    """Where these rows stand; what belongs to padding is NaN."""
    slots = torch.cat([torch.full((span.rows,), span.slot) for span in spans])
    positions = torch.cat([span.position + torch.arange(span.rows) * (span.slot >= 0) for span in spans])
    angles = Draw(seed).normal(len(slots), rotated // 2).repeat(1, 2).masked_fill((slots < 0)[:, None], torch.nan)
    return RowIndex(positions, slots, angles.cos(), angles.sin())


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """NaN is equal to itself there."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


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
