"""How an export quantises a checkpoint that is in floating point."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.delegate.errors import ExportError

from .format import Format
from .int4 import Int4
from .int4_min import Int4Min
from .int8 import Int8

FORMATS: dict[str, type[Format]] = {one.name: one for one in (Int4, Int4Min, Int8)}
# The group size that an export takes when none is asked for.
DEFAULT_GROUP_SIZES = {Int4.name: 128, Int4Min.name: 32, Int8.name: 32}


@dataclass(frozen=True)
class Quantization:
    """A number format for linear layers and experts, and int8 for the embedding, with bfloat16 scales.

    Router, norms, convolution and gates stay in the model's dtype.

    Attributes:
        group_size: elements that share a scale: 32, 64 or 128; 32 for int4_min.
        hqq: whether scales of int4 come from half-quadratic quantisation instead of the group's extreme values.
        format: name of the format: "int4", "int4_min" or "int8".

    Raises:
        ExportError: there is no such format or group size, or `hqq` is for another format than int4.
    """

    group_size: int = DEFAULT_GROUP_SIZES[Int4.name]
    hqq: bool = False
    format: str = Int4.name

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ExportError(f"unknown number format {self.format!r}; the formats are: {', '.join(FORMATS)}")
        if self.hqq and self.format != Int4.name:
            raise ExportError(f"half-quadratic quantisation is for {Int4.name}, not for {self.format}")
        FORMATS[self.format](self.group_size)

    @property
    def weights(self) -> Format:
        """The format of linear layers and experts."""
        return FORMATS[self.format](self.group_size)

    @property
    def embedding(self) -> Format:
        return Int8(self.group_size)

    def __str__(self) -> str:
        return f"{self.weights}{' hqq' if self.hqq else ''}"
