"""A linear layer, in the model's dtype or in a number format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ostinato.export.formats.format import FormatOfRows
from ostinato.export.kernels.operands import Weight

from .build import Build, parameter
from .norms import RMSNorm
from .stored import StoredWeights


class Linear(StoredWeights):
    """`x @ weight.T + bias`.

    `weight` [N, K] is stored as the build says; with `quantize=False` it stays in the model's dtype, and a bias always does.
    A layer with `divisible` whose rows are in several formats has one layer for each of its parts, and no weight itself.

    Attributes:
        parts: name -> layer. Empty for a layer that has a weight.
    """

    weight: Tensor
    weight_scale: Tensor | None
    weight_minimum: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        build: Build,
        *,
        bias: bool = False,
        quantize: bool = True,
        divisible: bool = False,
    ) -> None:
        super().__init__(build.dtype, quantize)
        self.divisible = divisible
        self.build = build
        self.kernels = build.kernels
        self.panels = ("weight",) if build.kernels.has_panels else ()
        self.bias = parameter(out_features, dtype=build.dtype) if bias else None
        self.parts = nn.ModuleDict()
        self.store_as("weight", build.format if quantize else None, (out_features, in_features))

    def store_rows(self, name: str, rows: tuple[FormatOfRows, ...]) -> None:
        """Make the weight's parameters anew, in the formats of its rows: as parts if these differ and the layer may be
        divided, else in int8."""
        if not self.divisible or len({one.form for one in rows}) == 1:
            super().store_rows(name, rows)
            return
        columns = self.shapes[name][1]
        for one in rows:
            self.parts[one.part] = part = Linear(columns, one.rows, self.build, bias=self.bias is not None)
            part.store_as(name, one.form)
        self.formats, self.panels = {}, ()
        self.weight = self.weight_scale = self.weight_minimum = self.bias = None  # type: ignore[assignment]

    @property
    def operand(self) -> Weight:
        """The weight as kernels take it. A layer with parts has none."""
        assert not self.parts
        return self.stored("weight", self.bias)

    @property
    def operands(self) -> list[Weight]:
        """The weights of all parts."""
        return [cast(Linear, part).operand for part in self.parts.values()] if self.parts else [self.operand]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        return _joined([self.kernels.linear(x, weight) for weight in self.operands])

    def normed(self, x: Tensor, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
        """x [T, K] -> self(norm(x)) [T, N] in `dtype`, in one kernel for each part."""
        return _joined([self.kernels.norm_linear(x, norm.operand, weight, dtype) for weight in self.operands])


def _joined(products: Sequence[Tensor]) -> Tensor:
    return products[0] if len(products) == 1 else torch.cat(list(products), dim=1)
