"""What `--quant int4` means."""

from __future__ import annotations

from dataclasses import dataclass

from ..delegate.errors import ExportError

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """Symmetric int4 for linear layers and experts, int8 for the embedding, bfloat16 scales.

    Router, norms, convolution and gates stay in the model's dtype, and so do linear layers with a bias.

    Attributes:
        group_size: elements that share a scale: 32, 64 or 128.
        hqq: scales by half-quadratic quantisation instead of the group's extreme values.

    Raises:
        ExportError: another group size.
    """

    group_size: int = 128
    hqq: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ExportError(
                f"unsupported group size {self.group_size}; supported are: {', '.join(map(str, GROUP_SIZES))}"
            )

    def __str__(self) -> str:
        return f"int4 g{self.group_size}{' hqq' if self.hqq else ''}"
