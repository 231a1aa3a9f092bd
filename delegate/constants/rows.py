"""Rows of state: one slot, or one page, in all mutable buffers that have it.

A row is copied to another by a few kernels for all buffers: 60 copies would take the host longer than the GPU. Buffers with
rows of one size lie side by side in one allocation, so one view has rows of all of them: what goes over the bus at once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch

from ostinato.delegate.torch_internals import copy_each

from .loading import zeros

Key = TypeVar("Key", bound=Hashable)

# Each buffer begins at a multiple of this many bytes, as torch's own allocations on a GPU do.
_ALIGNMENT = 512
# Elements of what goes over the bus: the largest size that fits.
_ELEMENTS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Number of rows whose views are kept: making them takes the host longer than the copy.
_KEPT_ROWS = 512
# Within the device, rows are copied as elements of 4 bytes, or else of one. 65.9 MB of 130 slots take an H100 53 us, and the
# host 26; by views of many buffers 66 and 51 us; in elements of 16 bytes 80 us (2026-11-26).
_COPIED = torch.int32
# Rows of this many bytes are copied by a call of their own, before the others: the host takes 20 us for a list of 30 tensors,
# and 40 for one of 80 before any of it is copied. So the GPU is at work while the host sees to the small ones.
_LARGE_BYTES = 1 << 19
# The most bytes of a piece or of a batch, if one row of a buffer is not more: a copy over the bus that is at full speed. A
# power of two, as torch rounds pinned memory up to one.
PIECE_BYTES = 16 << 20

Layout = tuple[Sequence[int], torch.dtype, torch.device]


def allocate_rows(layouts: Mapping[Key, Layout]) -> dict[Key, torch.Tensor]:
    """Make tensors of zeros of these shapes, dtypes and devices; those with rows of one size are side by side.

    A tensor's row is one index of its first dimension.
    """
    found: dict[Key, torch.Tensor] = {}

    def alike(key: Key) -> tuple[str, int, int]:
        shape, dtype, device = layouts[key]
        return str(device), math.prod(shape[1:]) * dtype.itemsize, shape[0]

    # By name, as `StateRows` looks for neighbours.
    for (_, row_bytes, count), keys in groupby(sorted(layouts, key=lambda key: (alike(key), str(key))), alike):
        together = list(keys)
        step = -(-count * row_bytes // _ALIGNMENT) * _ALIGNMENT
        storage = zeros((step * len(together),), torch.uint8, layouts[together[0]][2]).untyped_storage()
        for place, key in enumerate(together):
            shape, dtype, device = layouts[key]
            found[key] = _over(storage, dtype, device, step * place, shape, _strides(shape))
    return found


class StateRows:
    """The rows of some mutable buffers, as bytes.

    The tensors here keep the buffers' memory alive.

    Args:
        buffers: contiguous tensors with the same number of rows, by name.

    Attributes:
        bytes_by_name: bytes of one row in each buffer, in the order in which `pieces` have the buffers.
        row_bytes: bytes of one row, in all buffers together.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        def order(name: str) -> tuple[str, int, str]:
            return str(buffers[name].device), -_row_bytes(buffers[name]), name

        self.bytes_by_name = {name: _row_bytes(buffers[name]) for name in sorted(buffers, key=order)}
        self.row_bytes = sum(self.bytes_by_name.values())
        # [number of buffers, rows, elements] each.
        self._stacks = _stacks([buffers[name] for name in self.bytes_by_name])
        # Not a method of this object: the cache would refer to the object, and the object to the cache.
        self._row = functools.lru_cache(_KEPT_ROWS)(functools.partial(_views_of_row, self._stacks))

    def copy(self, source: int, target: int) -> None:
        """Copy one row to another, in all buffers. A GPU does it on the current stream."""
        for to, others in zip(self._row(target), self._row(source), strict=True):
            copy_each(to, others)

    def pieces(self, count: int) -> list[Piece]:
        """Divide `count` rows into pieces. One after the other they have the first buffer's rows, then the next one's."""
        found: list[Piece] = []
        for stack in self._stacks:
            row_bytes = stack.shape[2] * stack.itemsize
            if not count * row_bytes:
                continue
            several = max(1, PIECE_BYTES // (count * row_bytes))
            rows = min(count, max(1, PIECE_BYTES // row_bytes))
            for at in range(0, len(stack), several):
                some = stack[at : at + several]
                found += [Piece(some, first, min(first + rows, count)) for first in range(0, count, rows)]
        return found


# Numbers of rows: neighbours, or int64 on the buffers' device.
Places = range | torch.Tensor


def places_of(numbers: Sequence[int], device: torch.device) -> Places:
    """Numbers of rows as pieces take them. Neighbours are copied at the speed of the memory, others at a fraction of it."""
    neighbours = range(numbers[0], numbers[0] + len(numbers))
    if all(map(operator.eq, numbers, neighbours)):
        return neighbours
    index = torch.tensor(numbers, dtype=torch.int64)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


class Piece(NamedTuple):
    """Some rows of some buffers.

    Attributes:
        buffers: [number of buffers, all of their rows, elements], a view.
        first, end: range of these rows among those that are copied.
    """

    buffers: torch.Tensor
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        count, _, elements = self.buffers.shape
        return count * (self.end - self.first) * elements * self.buffers.itemsize

    def read(self, places: Places, out: torch.Tensor) -> None:
        """Gather. `places`: numbers of all rows that are copied; `out`: [nbytes] uint8 on the buffers' device."""
        some = places[self.first : self.end]
        if isinstance(some, range):
            self._shaped(out).copy_(self.buffers[:, some.start : some.stop])
        else:
            torch.index_select(self.buffers, 1, some, out=self._shaped(out))

    def write(self, places: Places, data: torch.Tensor) -> None:
        """Scatter what `read` gives."""
        some = places[self.first : self.end]
        if isinstance(some, range):
            self.buffers[:, some.start : some.stop].copy_(self._shaped(data))
        else:
            self.buffers.index_copy_(1, some, self._shaped(data))

    def _shaped(self, data: torch.Tensor) -> torch.Tensor:
        count, _, elements = self.buffers.shape
        return data.view(self.buffers.dtype).view(count, self.end - self.first, elements)


# Rows, and the numbers of those that are copied.
Chosen = Sequence[tuple[StateRows, Sequence[int]]]


@dataclass
class Batch:
    """Pieces whose bytes lie one after the other: what is copied over the bus at once.

    Attributes:
        device: the buffers' device.
        parts: for each piece, the number of its rows in `Chosen`, the piece, and its first byte.
        nbytes: bytes of all pieces.
    """

    device: torch.device
    parts: list[tuple[int, Piece, int]] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, piece: Piece) -> bool:
        """Whether the piece fits in, and will begin where a tensor of its elements may begin."""
        buffers = piece.buffers
        fits = self.nbytes + piece.nbytes <= PIECE_BYTES and self.nbytes % buffers.itemsize == 0
        return fits and buffers.device == self.device

    def add(self, number: int, piece: Piece) -> None:
        self.parts.append((number, piece, self.nbytes))
        self.nbytes += piece.nbytes


def batches(chosen: Chosen) -> Iterator[Batch]:
    """Yield what is copied at once. One after the other the batches have all pieces, in their order."""
    batch: Batch | None = None
    for number, (rows, numbers) in enumerate(chosen):
        for piece in rows.pieces(len(numbers)):
            if batch is None or not batch.takes(piece):
                if batch is not None:
                    yield batch
                batch = Batch(piece.buffers.device)
            batch.add(number, piece)
    if batch is not None:
        yield batch


def _stacks(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the buffers, one for neighbours with equal rows and equal distances."""
    found: list[list[torch.Tensor]] = []
    for buffer in buffers:
        if not found or not _continues(found[-1], buffer):
            found.append([])
        found[-1].append(buffer)
    return [_stack(neighbours) for neighbours in found]


def _continues(before: Sequence[torch.Tensor], buffer: torch.Tensor) -> bool:
    """Whether `buffer` lies as far behind the last of the tensors before it as these lie behind each other."""
    first, last = before[0], before[-1]
    if first.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return False
    if (len(first), _row_bytes(first)) != (len(buffer), _row_bytes(buffer)):
        return False
    step = buffer.data_ptr() - last.data_ptr()
    return step > 0 and (len(before) == 1 or step == last.data_ptr() - before[-2].data_ptr())


def _stack(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """One view over all of these buffers, [number of buffers, rows, elements]."""
    first, storage, row_bytes = buffers[0], buffers[0].untyped_storage(), _row_bytes(buffers[0])
    start = first.data_ptr() - storage.data_ptr()
    step = buffers[1].data_ptr() - first.data_ptr() if len(buffers) > 1 else first.nbytes
    sizes = (storage.data_ptr(), start, step, row_bytes)
    width, dtype = next((width, dtype) for width, dtype in _ELEMENTS if all(size % width == 0 for size in sizes))
    elements = row_bytes // width
    shape = (len(buffers), len(first), elements)
    return _over(storage, dtype, first.device, start, shape, (step // width, elements, 1))


def _views_of_row(stacks: Sequence[torch.Tensor], row: int) -> list[list[torch.Tensor]]:
    """Views of one row of each buffer, in lists of what is copied by one call: first large rows in elements of 4 bytes, then
    the others, and those in single bytes, where there are any."""
    found: dict[tuple[bool, torch.dtype], list[torch.Tensor]] = {}
    with torch.inference_mode(False):
        for stack in stacks:
            dtype = _COPIED if stack.itemsize >= _COPIED.itemsize else torch.uint8
            if nbytes := stack.shape[2] * stack.itemsize:
                views = [one.view(dtype) for one in stack[:, row]]
                found.setdefault((nbytes >= _LARGE_BYTES, dtype), []).extend(views)
    return list(found.values())


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer.nbytes // len(buffer) if len(buffer) else 0


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    begin: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A tensor over a storage, from byte `begin` on. It is no view of another tensor, which would keep the memory."""
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=dtype, device=device)
        return made.set_(storage, begin // dtype.itemsize, tuple(shape), tuple(strides))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]
