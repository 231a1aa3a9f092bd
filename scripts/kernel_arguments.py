"""Random arguments of kernels at a model's shapes: tensors, numbers, and the records of `ostinato.export.kernels.operands`.

A record's tensors are named by its argument and its field: "weight.values", "cache.keys".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.delegate.errors import OptionError
from ostinato.delegate.logits_processing import Processing, processing_tensors
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.commands.export import add_group_size, group_size_of
from ostinato.export.formats.format import SCALE_DTYPES, Format
from ostinato.export.formats.quantization import FORMATS
from ostinato.export.kernels.operands import HeadSquares, LogitsProcessing, Norm, RowIndex, Weight
from ostinato.export.models import read_config
from ostinato.export.models.dense import DenseConfig
from ostinato.export.models.qwen3_5 import Qwen3_5Config

# Partial sums of squares per head. `delta_step` chooses their number, and `linear_add` takes any. Their bytes are not
# counted.
PARTIAL_SUMS = 16
# Least gap between a chosen and a rejected logit of a router. The logits are about twice a normal distribution, and bfloat16
# rounds those near 4 to multiples of 1 / 64.
CLEARANCE = 0.1

# Name -> argument, in the order of the function's parameters.
Arguments = dict[str, Any]


def add_format_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options that `format_of` reads; `default` is that of --quant."""
    add = parser.add_argument
    add("--quant", choices=(*FORMATS, "none"), default=default, help="format of the weights (default: %(default)s)")
    add_group_size(parser)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES]
    add("--scale-dtype", choices=dtypes, default=dtypes[0], help="dtype of the scales (default: %(default)s)")


def format_of(arguments: argparse.Namespace) -> Format | None:
    """The number format that the options choose; None for the model's dtype. Raises ExportError: no such group size."""
    if arguments.quant == "none":
        return None
    return FORMATS[arguments.quant](group_size_of(arguments), getattr(torch, arguments.scale_dtype))


def tensors_of(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """All tensors in the arguments: name -> tensor."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        else:
            found |= tensors_of(_fields(value), f"{prefix}{name}.")
    return found


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An argument with each tensor in it replaced by `change` of it."""
    if isinstance(value, Tensor):
        return change(value)
    parts = {name: with_tensors(part, change) for name, part in _fields(value).items()}
    return type(value)(**parts) if parts else value


def _fields(value: Any) -> dict[str, Any]:
    """A record's fields; empty for anything else."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return {}


@dataclass(frozen=True)
class Shapes:
    """Sizes on which the shapes of arguments depend.

    Attributes:
        config: the model's config.
        form: number format of the weights; None for the model's dtype.
        positions: positions of a session for which the KV caches have room.
    """

    config: Qwen3_5Config | DenseConfig
    form: Format | None
    positions: int

    @classmethod
    def of_folder(cls, folder: Path, form: Format | None, positions: int) -> Shapes:
        """The shapes for a checkpoint folder.

        Raises:
            CheckpointError: see `read_config`.
            OptionError: the kernels of this family are not known here.
        """
        config = read_config(folder)[1]
        if not isinstance(config, Qwen3_5Config | DenseConfig):
            raise OptionError(
                f"kernels are timed for Qwen3.5 and dense decoders, {folder} has a config of {config.model_type}"
            )
        return cls(config, form, positions)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        config = self.config
        return config.rotary_dim if isinstance(config, Qwen3_5Config) else config.attention.head_dim


@dataclass(frozen=True)
class RandomTensors:
    """Makes random arguments on one device, from torch's own seed. On "meta" they have shapes and no values."""

    shapes: Shapes
    device: str

    def normal(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal random numbers, in the model's dtype unless another is given."""
        return (torch.randn(size, device=self.device) * scale).to(dtype or self.shapes.dtype)

    def wide(self, *size: int, scale: float = 1.0) -> Tensor:
        """Normal random numbers in float32."""
        return self.normal(*size, dtype=torch.float32, scale=scale)

    def zeros(self, *size: int) -> Tensor:
        """Zeros in float32."""
        return torch.zeros(size, device=self.device)

    def whole(self, value: int, rows: int) -> Tensor:
        """`value` for each row: [rows] int64."""
        return torch.full((rows,), value, dtype=torch.int64, device=self.device)

    def positions(self, rows: int) -> Tensor:
        """A random position for each row: [rows] int64."""
        return torch.randint(0, 100_000, (rows,), device=self.device)

    def slots(self, rows: int) -> Tensor:
        """A slot of its own for each row: [rows] int64."""
        return torch.arange(rows, device=self.device)

    def index(self, position: int, rows: int) -> RowIndex:
        """The `RowIndex` of rows that are all at `position`, each in its own slot."""
        angles = self.wide(rows, self.shapes.rotary_dim)
        return RowIndex(self.whole(position, rows), self.slots(rows), angles.cos(), angles.sin())

    def order(self, pages: int, rows: int) -> Tensor:
        """A block table, [rows, pages] int32: all pages, shuffled, `pages` of them for each slot."""
        return torch.randperm(rows * pages, device=self.device).to(torch.int32).view(rows, pages)

    def weight(self, *size: int, bias: bool = False) -> Weight:
        """A weight [..., N, K] whose products with a normal input are about normal, in the format of `shapes`."""
        added = self.normal(size[-2]) if bias else None
        form, spread = self.shapes.form, size[-1] ** -0.5
        if form is None:
            return Weight(self.normal(*size, scale=spread), bias=added)
        # Every value of an element is one of packed integers.
        stored, (*rows, k) = torch.iinfo(form.values_dtype), size
        packed = (*rows, k // form.per_value)
        values = torch.randint(stored.min, stored.max + 1, packed, dtype=form.values_dtype, device=self.device)
        groups, largest = (*rows, k // form.group_size), form.highest - form.lowest
        # The integers are spread evenly: by a root of 12 less than from the lowest to the highest.
        scale = self.normal(*groups, dtype=form.scale_dtype, scale=12**0.5 * spread / largest)
        minimum = self.normal(*groups, dtype=form.scale_dtype, scale=spread) if form.has_minimum else None
        return Weight(values, scale, minimum, added, form)

    def norm(self, size: int) -> Norm:
        return Norm(1 + self.wide(size, scale=0.4), self.shapes.config.rms_norm_eps)

    def squares(self, heads: int, size: int) -> HeadSquares:
        """Partial sums of squares for `heads` heads, of all rows together. Each head has `size` numbers that are about
        normal."""
        sums = self.wide(heads, PARTIAL_SUMS).square() * (size / PARTIAL_SUMS)
        return HeadSquares(sums, self.shapes.config.rms_norm_eps)

    def clear_choices(self, rows: int, norm: Norm, gate: Tensor, top_k: int) -> Tensor:
        """An input [rows, H] for which the router's `top_k` largest logits are clearly larger than the others.

        So the same experts are chosen in every precision.
        """
        size = gate.shape[1]
        if self.device == "meta" or top_k == gate.shape[0]:
            return self.normal(rows, size)
        kept: list[Tensor] = []
        while len(kept) < rows:
            x = self.normal(8 * rows, size)
            largest = functional.linear(norm(x), gate.float()).sort(descending=True).values
            kept += x[largest[:, top_k - 1] - largest[:, top_k] > CLEARANCE]
        return torch.stack(kept[:rows])

    def distinct(self, count: int) -> Tensor:
        """Numbers [1, count] that differ in bfloat16 for a count of up to 512, so that the largest are the same in every
        precision."""
        order = torch.randperm(count, device=self.device) - count // 2
        return (order / 32)[None].to(self.shapes.dtype)

    def sampling(self, params: SamplingParams, rows: int) -> SamplingTensors:
        """The same parameters for each row, [rows] each."""
        return with_tensors(params.tensors(), lambda value: value.to(self.device).repeat(rows))

    def processing(self, params: SamplingParams, rows: int) -> LogitsProcessing:
        """How each row's logits are processed, after a prompt of 500 tokens and 500 outputs. [rows, ...] each."""
        vocab = self.shapes.config.vocab_size
        history = [number * number % vocab for number in range(1000)]
        given = processing_tensors(params, history, 500, vocab, ())
        when = Processing.IN_STEP if params.processes else Processing.OFF
        repeated = with_tensors(given, lambda value: value.to(self.device).repeat(rows, *[1] * (value.dim() - 1)))
        return LogitsProcessing(self.whole(when.value, rows), repeated)
