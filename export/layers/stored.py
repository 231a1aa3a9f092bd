"""What linear layers, experts and the embedding share: weights that are stored in the model's dtype or in a number format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.export.formats.format import Format
from ostinato.export.kernels.operands import Weight

from .build import parameter


class StoredWeights(nn.Module):
    """A module with weights [..., N, K], each stored as `store_as` was told.

    Of a weight `name` in a number format, the parameters are `name`, which is what the format makes of the values,
    `name_scale`, and `name_minimum` if the format has minima; in the model's dtype, only `name`.

    Attributes:
        formats: name of a weight -> its number format; None for the model's dtype.
        shapes: name of a weight -> its shape [..., N, K].
        panels: names of the weights that are stored in panels (kernels/linear/panels.py), with scales and minima.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.formats: dict[str, Format | None] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.panels: tuple[str, ...] = ()

    def store_as(self, name: str, form: Format | None, shape: tuple[int, ...] | None = None) -> None:
        """Make the parameters of a weight, or make them anew in another format. The first time, `shape` is given."""
        shape = self.shapes[name] if shape is None else shape
        self.shapes[name], self.formats[name] = shape, form
        scale = minimum = None
        if form is None:
            values = parameter(*shape, dtype=self.dtype)
        else:
            values = parameter(*shape[:-1], shape[-1] // form.per_value, dtype=form.values_dtype)
            groups = (*shape[:-1], shape[-1] // form.group_size)
            scale = parameter(*groups, dtype=form.scale_dtype)
            minimum = parameter(*groups, dtype=form.scale_dtype) if form.has_minimum else None
        for ending, value in (("", values), ("_scale", scale), ("_minimum", minimum)):
            setattr(self, name + ending, value)

    def stored(self, name: str, bias: Tensor | None = None) -> Weight:
        """A weight as kernels take it."""
        values, scale, minimum = (getattr(self, name + ending) for ending in ("", "_scale", "_minimum"))
        return Weight(values, scale, minimum, bias, self.formats[name], name in self.panels)
