"""Base of the number formats: integers in groups, and for each group a scale, and perhaps a minimum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.delegate.errors import ExportError

SCALE_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format(ABC):
    """How a weight [..., N, K] is stored, in integers q with one scale per group of `group_size` neighbours along K::

        w[n, k] = scale[n, k // G] * q[n, k] + minimum[n, k // G]

    The integers are packed into `values`. `scale` is [..., N, K / G], and so is `minimum` in formats that have one.

    Attributes:
        group_size: G.
        scale_dtype: dtype of scales and minima: bfloat16 or float16.
        name: the format's name in options and messages.
        group_sizes: the group sizes that there are.
        lowest, highest: the range of q.
        values_dtype: dtype of `values`.
        per_value: integers in one element of `values`.
        multiple: number of which K must be a multiple.
        has_minimum: whether there are minima; else they count as 0.
    """

    name: ClassVar[str]
    group_sizes: ClassVar[tuple[int, ...]]
    lowest: ClassVar[int]
    highest: ClassVar[int]
    values_dtype: ClassVar[torch.dtype]
    per_value: ClassVar[int] = 1
    multiple: ClassVar[int] = 1
    has_minimum: ClassVar[bool] = False

    group_size: int
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.group_size not in self.group_sizes:
            listed = ", ".join(map(str, self.group_sizes))
            raise ExportError(f"unsupported group size {self.group_size} for {self.name}; supported are: {listed}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ExportError(f"scales of {self.name} are bfloat16 or float16, not {self.scale_dtype}")

    def __str__(self) -> str:
        return f"{self.name} g{self.group_size}"

    @classmethod
    @abstractmethod
    def pack(cls, q: Tensor) -> Tensor:
        """Pack q [..., K], of any integer dtype, into values [..., K / per_value]."""

    @classmethod
    @abstractmethod
    def unpack(cls, values: Tensor) -> Tensor:
        """The inverse of `pack`: int8."""

    def dequantize(self, values: Tensor, scale: Tensor, minimum: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weight [..., N, K] in `dtype`. Products and sums are computed in float32."""
        groups = self.unpack(values).unflatten(-1, (scale.shape[-1], -1)).float() * scale.float().unsqueeze(-1)
        if minimum is not None:
            groups = groups + minimum.float().unsqueeze(-1)
        return groups.flatten(-2).to(dtype)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check that rows of all these lengths divide into groups.

        Args:
            sizes: name of a length in the config -> the length.

        Raises:
            ExportError: a length does not divide; the message names it.
        """
        for name, size in sizes.items():
            if size % self.multiple:
                raise ExportError(
                    f"{self.name} needs {name} to be a multiple of {self.multiple}, the config has {size}"
                )
            if size % self.group_size:
                fitting = ", ".join(str(g) for g in self.group_sizes if size % g == 0)
                raise ExportError(
                    f"group size {self.group_size} does not divide {name} ({size}); --group-size {fitting} would"
                )


@dataclass(frozen=True)
class FormatOfRows:
    """A number format of some of a weight's rows.

    Attributes:
        part: name of the module that has these rows in the checkpoint.
        rows: their number; those of one expert for experts.
        form: the format; None for the model's dtype.
    """

    part: str
    rows: int
    form: Format | None


# Name of a parameter -> the formats of its rows, in order.
StoredFormats = dict[str, tuple[FormatOfRows, ...]]
