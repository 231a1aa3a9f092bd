"""Random weights in every number format, beside their exact numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.operands import Norm, Weight

from .runs import DEVICE

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
EPS = 1e-6


@dataclass(frozen=True)
class Operand:
    """A weight as a form takes it, and its exact numbers, [..., N, K] float32, or float64 for weights in float64."""

    weight: Weight
    numbers: Tensor


class Random:
    """Random tensors from one seed, on one device.

    Args:
        panels: whether weights are stored in panels.
    """

    def __init__(self, seed: int, device: str = DEVICE, panels: bool = False) -> None:
        self.generator, self.device, self.panels = torch.Generator().manual_seed(seed), device, panels

    def normal(self, *sizes: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(sizes, generator=self.generator).to(self.device, dtype)

    def norm(self, size: int, dtype: torch.dtype = F32) -> Norm:
        """Return a norm with factors of both signs, of a size near one; in float64 for inputs in float64."""
        wide = torch.promote_types(dtype, F32)
        sign = self.normal(size, dtype=wide).sign()
        return Norm(sign * (1 + 0.3 * self.normal(size, dtype=wide)), EPS)

    def weight(
        self, *sizes: int, group: int | Format | None, dtype: torch.dtype, form: Format | None = None
    ) -> Operand:
        """Make a weight [..., N, K] whose products are about as large as its inputs; scales have both signs.

        Args:
            group: weights that share a scale, in int4; or a number format; None for weights in `dtype`.
            form: another number format.
        """
        scale: Tensor | None = None
        minimum: Tensor | None = None
        if form is None:
            form = Int4(group) if isinstance(group, int) else group
        if form is None:
            values = self.normal(*sizes, dtype=dtype) * sizes[-1] ** -0.5
            numbers = values if dtype == F64 else values.float()
        else:
            q = torch.randint(form.lowest, form.highest + 1, sizes, generator=self.generator, dtype=torch.int16)
            groups, largest = (*sizes[:-1], sizes[-1] // form.group_size), (form.highest - form.lowest) / 4
            scale = (self.normal(*groups) * sizes[-1] ** -0.5 / largest).to(form.scale_dtype)
            if form.has_minimum:
                minimum = (self.normal(*groups) * sizes[-1] ** -0.5).to(form.scale_dtype)
            q = q.to(torch.int8).to(self.device)
            values = form.pack(q)
            numbers = q.unflatten(-1, (-1, form.group_size)) * scale.float().unsqueeze(-1)
            numbers = (numbers if minimum is None else numbers + minimum.float().unsqueeze(-1)).flatten(-2)
        if self.panels:
            values, scale, minimum = pack_panels(form, values, scale, minimum)
        return Operand(Weight(values, scale, minimum, format=form, in_panels=self.panels), numbers)
