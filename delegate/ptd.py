"""Read a FlatTensor file (`.ptd`) in place.

executorch 1.5.1 ships no Python reader for it that leaves the data on disk, so the few fields are read here, after the
schema `extension/flat_tensor/serialize/flat_tensor.fbs` and the header of `flat_tensor_header.h` (`FH01`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from .artifact import MANIFEST_KEY, SCALAR_TYPES, Manifest
from .errors import ArtifactError


@dataclass(frozen=True)
class Entry:
    """One named blob. `dtype` and `shape` are None for data that is no tensor; `strides` in elements."""

    data: memoryview
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def tensor(self) -> torch.Tensor:
        """The tensor, on the file's map: nothing is copied."""
        assert self.dtype is not None
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self.data, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class ConstantsFile:
    """A parsed `.ptd`: its manifest and its tensors by fully qualified name."""

    path: Path
    manifest: Manifest
    entries: dict[str, Entry]


def parse_constants(data: memoryview, path: Path) -> ConstantsFile:
    """Parse the bytes of a `.ptd`.

    Raises:
        ArtifactError: not a FlatTensor file, cut short or damaged, or without this project's manifest.
    """
    if len(data) < 48 or bytes(data[4:8]) != b"FT01" or bytes(data[8:12]) != b"FH01":
        raise ArtifactError(f"{path} is not a FlatTensor file (no 'FT01' identifier at byte 4)")
    base, size = struct.unpack_from("<QQ", data, 32)
    if base + size > len(data):
        raise ArtifactError(
            f"{path} is cut short: its header speaks of {base + size} bytes, the file has {len(data)}"
        )
    try:
        entries = _read(data, base)
    except (struct.error, IndexError, ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be parsed, the file is damaged: {error}") from error
    if MANIFEST_KEY not in entries:
        raise ArtifactError(f"{path} has no manifest ({MANIFEST_KEY!r}): it was not made by `ostinato export`, or is damaged")
    manifest = Manifest.from_bytes(bytes(entries.pop(MANIFEST_KEY).data))
    return ConstantsFile(path, manifest, entries)


class _Table:
    """The three things that a FlatBuffers table can be asked for here (format: flatbuffers.dev, 'internals')."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position
        vtable = position - struct.unpack_from("<i", data, position)[0]
        count = struct.unpack_from("<H", data, vtable)[0] // 2 - 2
        self.offsets = struct.unpack_from(f"<{count}H", data, vtable + 4)

    def scalar(self, slot: int, code: str) -> int:
        at = self.offsets[slot] if slot < len(self.offsets) else 0
        return struct.unpack_from(f"<{code}", self.data, self.position + at)[0] if at else 0

    def target(self, slot: int) -> int | None:
        at = self.offsets[slot] if slot < len(self.offsets) else 0
        if not at:
            return None
        return self.position + at + struct.unpack_from("<I", self.data, self.position + at)[0]

    def vector(self, slot: int) -> tuple[int, int]:
        """(position of the first element, count)."""
        at = self.target(slot)
        return (0, 0) if at is None else (at + 4, struct.unpack_from("<I", self.data, at)[0])

    def numbers(self, slot: int, code: str) -> tuple[int, ...]:
        begin, count = self.vector(slot)
        return struct.unpack_from(f"<{count}{code}", self.data, begin) if count else ()

    def tables(self, slot: int) -> list[_Table]:
        begin, count = self.vector(slot)
        places = [begin + 4 * i for i in range(count)]
        return [_Table(self.data, at + struct.unpack_from("<I", self.data, at)[0]) for at in places]

    def text(self, slot: int) -> str:
        begin, count = self.vector(slot)
        return bytes(self.data[begin : begin + count]).decode()


def _read(data: memoryview, base: int) -> dict[str, Entry]:
    root = _Table(data, struct.unpack_from("<I", data, 0)[0])
    segments = [(table.scalar(0, "Q"), table.scalar(1, "Q")) for table in root.tables(1)]
    entries = {}
    for named in root.tables(2):
        offset, size = segments[named.scalar(1, "I")]
        blob = data[base + offset : base + offset + size]
        if len(blob) != size:
            raise ValueError(f"the data of {named.text(0)!r} lies past the end of the file")
        layout_at = named.target(2)
        if layout_at is None:
            entries[named.text(0)] = Entry(blob, None, (size,), (1,))
            continue
        layout = _Table(data, layout_at)
        dtype = SCALAR_TYPES[layout.scalar(0, "b")]
        shape = layout.numbers(1, "i")
        strides = _strides(shape, layout.numbers(2, "B"))
        count = 1
        for extent in shape:
            count *= extent
        if count * dtype.itemsize != size:
            raise ValueError(f"{named.text(0)!r} has shape {list(shape)} {dtype} but {size} bytes")
        entries[named.text(0)] = Entry(blob, dtype, shape, strides)
    return entries


def _strides(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
