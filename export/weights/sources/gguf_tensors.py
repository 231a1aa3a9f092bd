"""The tensors of a GGUF file as the checkpoint has them: under its names, in its order, and in our number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError
from ostinato.export.formats.format import Format
from ostinato.export.weights.quantize import Quantized, quantize

from .gguf import FLOATS, GgufFile
from .gguf_blocks import kept_as


@dataclass(frozen=True)
class GgufOrder:
    """An order of rows or columns that two loops are exchanged in: the file counts them as [outer, n, inner, size], and the
    checkpoint as [outer, inner, n, size]. n is what is left of their number.

    Attributes:
        inner, outer: counts, see above.
        size: number of neighbours that stay together.
        first: number of rows or columns before these, which stay in their places.
    """

    inner: int
    outer: int = 1
    size: int = 1
    first: int = 0

    def keeps(self, block: int) -> bool:
        """Whether blocks of so many neighbours stay together, such as those that have a scale in common."""
        return self.size % block == 0 and self.first % block == 0

    def restore(self, value: Tensor, dim: int, block: int = 1) -> Tensor:
        """Put a dimension into the checkpoint's order. It counts rows or columns, or blocks of `block` of them."""
        assert self.keeps(block)
        first, rest = value.tensor_split((self.first // block,), dim)
        loops = rest.unflatten(dim, (self.outer, -1, self.inner, self.size // block))
        moved = loops.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)
        return torch.cat((first, moved), dim) if self.first else moved


@dataclass(frozen=True)
class GgufChange:
    """The way from a tensor in the file to the checkpoint's.

    Attributes:
        rows, columns: the file's order of the first dimension and of the last one; None: it is the checkpoint's.
        values: function from the file's values to the checkpoint's; None: they are equal.
        shape: the checkpoint's shape, where the file may lack dimensions of one element; None: the file has it.
    """

    rows: GgufOrder | None = None
    columns: GgufOrder | None = None
    values: Callable[[Tensor], Tensor] | None = None
    shape: tuple[int, ...] | None = None

    def order(self, value: Tensor, block: int = 1) -> Tensor:
        """Put rows and columns into the checkpoint's order. A column stands for `block` of the tensor's."""
        if self.rows is not None:
            value = self.rows.restore(value, 0)
        if self.columns is not None:
            value = self.columns.restore(value, value.dim() - 1, block)
        return value

    def apply(self, value: Tensor) -> Tensor:
        value = self.order(value)
        if self.values is not None:
            value = self.values(value)
        return value.view(self.shaped(tuple(value.shape)))

    def shaped(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the checkpoint's shape if it is that of the file but for dimensions of one element; else the file's."""
        same = self.shape is not None and [n for n in self.shape if n != 1] == [n for n in stored if n != 1]
        return self.shape if same and self.shape is not None else stored


_AS_IT_IS = GgufChange()


class GgufTensors:
    """The tensors of a GGUF file under the names that transformers has for them.

    Args:
        file: an open file.
        names: name of a tensor in the file -> transformers' name. The file's other tensors are left out.
        changes: end of transformers' name -> how to make the checkpoint's tensor; others are as the file has them.
    """

    def __init__(self, file: GgufFile, names: Mapping[str, str], changes: Mapping[str, GgufChange]) -> None:
        self._file = file
        self._changes = changes
        self._stored = {wanted: name for name, wanted in names.items()}
        if len(self._stored) < len(names):
            raise CheckpointError(f"{file.path} is damaged: two of its tensors have one meaning")

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU; float32 if the file has it quantised."""
        return self._change(name).apply(self._file.read(self._stored[name]))

    def format(self, name: str) -> Format | None:
        """Return the number format that the tensor becomes if its integers are kept; None for a floating dtype."""
        tensor = self._file.tensors[self._stored[name]]
        kept = kept_as(tensor.kind, tensor.shape[-1])
        return None if kept is None else kept.form

    def keeps_integers(self, name: str, form: Format) -> bool:
        """Whether `stored` gives the file's own integers. Else it rounds once more."""
        change = self._change(name)
        in_groups = change.columns is None or change.columns.keeps(form.group_size)
        own = self.format(name) == form and self._file.has_integers(self._stored[name])
        return own and change.values is None and in_groups

    def stored(self, name: str, form: Format) -> Quantized | None:
        """Return what `form` stores of the tensor; None if its format is another one."""
        if self.format(name) != form:
            return None
        if not self.keeps_integers(name, form):
            return quantize(self.read(name), form, False, torch.device("cpu"))
        change = self._change(name)
        q, scale, minimum = self._file.integers(self._stored[name])
        ordered = change.order(q), change.order(scale, form.group_size)
        return form.pack(ordered[0]), ordered[1], None if minimum is None else change.order(minimum, form.group_size)

    @property
    def quantised(self) -> bool:
        """Whether any of the tensors is."""
        return any(self.format(name) is not None for name in self)

    def dtype(self, name: str) -> str:
        """Return the dtype of what `read` gives, as safetensors calls it."""
        kind = self._file.tensors[self._stored[name]].kind
        return kind if kind in FLOATS else "F32"

    def kind(self, name: str) -> str:
        """Return the name of the tensor's type in the file."""
        return self._file.tensors[self._stored[name]].kind

    def shape(self, name: str) -> tuple[int, ...]:
        return self._change(name).shaped(self._file.tensors[self._stored[name]].shape)

    def _change(self, name: str) -> GgufChange:
        return next((change for end, change in self._changes.items() if name.endswith(end)), _AS_IT_IS)
