"""Base of linear layers, experts and the embedding: weights that are stored in the model's dtype or in a number format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.export.formats.format import Format, FormatOfRows, StoredFormats
from ostinato.export.formats.int8 import Int8
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
        quantize: whether the weights may be in a number format.
    """

    def __init__(self, dtype: torch.dtype, quantize: bool = True) -> None:
        super().__init__()
        self.quantize = quantize
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

    def store_rows(self, name: str, rows: tuple[FormatOfRows, ...]) -> None:
        """Make the parameters of a weight anew, in the formats of its rows; in int8 if these differ."""
        formats = {one.form for one in rows}
        self.store_as(name, formats.pop() if len(formats) == 1 else Int8(scale_dtype=torch.float16))

    def stored(self, name: str, bias: Tensor | None = None) -> Weight:
        """A weight as kernels take it."""
        values, scale, minimum = (getattr(self, name + ending) for ending in ("", "_scale", "_minimum"))
        return Weight(values, scale, minimum, bias, self.formats[name], name in self.panels)


def store_formats(network: nn.Module, formats: StoredFormats) -> None:
    """Store a network's weights in these formats. The network's parameters have no values yet."""
    for prefix, module in list(network.named_modules()):
        if isinstance(module, StoredWeights) and module.quantize:
            for name in list(module.formats):
                rows = formats.get(f"{prefix}.{name}")
                if rows is not None:
                    module.store_rows(name, rows)


def kind_of(layer: nn.Module, name: str) -> str:
    """The name of a layer's kind: `name`, and the number formats of its weights."""
    stored = [module for module in layer.modules() if isinstance(module, StoredWeights) and module.quantize]
    formats = ["-" if form is None else str(form) for module in stored for form in module.formats.values()]
    if set(formats) == {"-"}:
        return name
    return f"{name} in {formats[0] if len(set(formats)) == 1 else ' '.join(formats)}"
