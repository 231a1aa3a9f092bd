"""A linear layer, in the model's dtype or in int4."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.export.formats.int4 import SCALE_DTYPE
from ostinato.export.kernels.operands import Weight

from .build import Build, parameter


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    If the build asks for int4, `weight` is [N, K / 2] uint8 and `weight_scale` is [N, K / G], in the layout of
    formats/int4.py. With `quantize=False` the weight stays in the model's dtype; a bias always does. If the kernels have
    panels, values and scales are stored in panels (kernels/linear/panels.py).

    Attributes:
        panels: names of the parameters whose values are stored in panels.
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, build: Build, *, bias: bool = False, quantize: bool = True
    ) -> None:
        super().__init__()
        self.weight, self.weight_scale = weight_parameters((out_features, in_features), build, quantize=quantize)
        self.bias = parameter(out_features, dtype=build.dtype) if bias else None
        self.linear = build.kernels.linear
        self.panels = ("weight",) if build.kernels.has_panels else ()

    @property
    def operand(self) -> Weight:
        """The weight as kernels take it."""
        return Weight(self.weight, self.weight_scale, self.bias, bool(self.panels))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        return self.linear(x, self.operand)


def weight_parameters(
    shape: tuple[int, ...], build: Build, *, quantize: bool = True
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Values and scale of a weight [..., N, K]. The scale is None if the weight stays in the model's dtype."""
    if build.group_size is None or not quantize:
        return parameter(*shape, dtype=build.dtype), None
    values = parameter(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    return values, parameter(*shape[:-1], shape[-1] // build.group_size, dtype=SCALE_DTYPE)
