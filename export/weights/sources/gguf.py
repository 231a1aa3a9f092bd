"""Reader for a GGUF file (ggml's container, version 2 or 3): metadata, and tensors that are dequantised when they are read.

The header is read here and not by the package `gguf`, whose reader believes every count in a file: a damaged one may keep it
busy for ever, and a vocabulary takes it seconds. The package does dequantise.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError

from .gguf_blocks import Integers, kept_as
from .safetensors import shortened, some_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Number of a type in a file -> (name, elements of a block, bytes of a block), of those that are read.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_DIMS = 4
_SPLIT = re.compile(r"(?P<name>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_ALIGNMENT = 32
# Bytes of a tensor that are converted at once.
_AT_A_TIME = 1 << 17
_STRING, _ARRAY = 8, 9
# Number of a value's type -> its form for `struct`, and for numpy.
_SCALARS = {
    0: ("B", "u1"),
    1: ("b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file. `kind` is the name of its type, `shape` is as torch has it: the last dimension is
    contiguous."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """A GGUF file, or all parts of one that was split (`NAME-00001-of-00003.gguf` and so on; `path` is the first).

    Attributes:
        path: the file, or its first part.
        metadata: key -> number, text, or list of these.
        tensors: name in the file -> where it lies.

    Raises:
        CheckpointError: the file is no GGUF file, is damaged, lacks a part, or holds a type that is not read; or it has
            quantised tensors, and there is no package `gguf`. The message says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self._parts = [_Part(part) for part in _parts_of(path)]
        self.metadata = self._parts[0].metadata
        for part in self._parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"{part.path} is damaged: an earlier part has {shortened(name)} too")
                self.tensors[name] = tensor
        count = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self._parts) > 1 and count != len(self.tensors):
            raise CheckpointError(
                f"{path} and its parts have {len(self.tensors)} tensors, and say that they have {count}"
            )
        if any(tensor.kind not in FLOATS for tensor in self.tensors.values()):
            # Now, and not after the code is compiled.
            _gguf()

    @property
    def architecture(self) -> Any:
        """`general.architecture`, a text if the file is sound; None if it is absent."""
        return self.metadata.get("general.architecture")

    def setting(self, name: str) -> Any:
        """Return the architecture's value of this name, such as "block_count"; None if it is absent."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU: in its own dtype, or dequantised to float32."""
        stored = self.tensors[name]
        with self._bytes_of(name) as data:
            if stored.kind in FLOATS:
                return torch.from_numpy(data.copy()).view(FLOATS[stored.kind]).view(stored.shape)
            quants = _gguf()
            kind = quants.GGMLQuantizationType[stored.kind]

            def dequantised(rows: Bytes) -> tuple[Tensor, ...]:
                # Scales may be infinite or NaN; then so are values.
                with np.errstate(all="ignore"):
                    return (torch.from_numpy(quants.dequantize(rows, kind)),)

            (values,) = _by_rows(dequantised, data.reshape(math.prod(stored.shape[:-1]), -1))
        return values.view(stored.shape)

    def has_integers(self, name: str) -> bool:
        """Whether the tensor's type has integers that are kept (`gguf_blocks`)."""
        tensor = self.tensors[name]
        kept = kept_as(tensor.kind, tensor.shape[-1])
        return kept is not None and kept.integers is not None

    def integers(self, name: str) -> Integers:
        """Return the tensor's own integers [..., N, K] with scales and minima. It `has_integers`."""
        tensor = self.tensors[name]
        kept = kept_as(tensor.kind, tensor.shape[-1])
        assert kept is not None and kept.integers is not None
        _, _, size = next(known for known in TYPES.values() if known[0] == tensor.kind)
        integers = kept.integers
        with self._bytes_of(name) as data:
            parts = _by_rows(
                lambda rows: integers(rows.reshape(len(rows), -1, size)), data.reshape(math.prod(tensor.shape[:-1]), -1)
            )
        q, scale, *minimum = (part.view(*tensor.shape[:-1], -1) for part in parts)
        return q, scale, minimum[0] if minimum else None

    @contextmanager
    def _bytes_of(self, name: str) -> Iterator[Bytes]:
        """The tensor's bytes in the file. Afterwards this process holds no memory for them."""
        part = next(part for part in self._parts if name in part.tensors)
        yield part.bytes_of(name)
        part.forget(name)


class _Part:
    """One file: its metadata, and where its tensors lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._bytes: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
        reader = _Reader(path, self._bytes)
        if reader.take(4) != MAGIC:
            raise CheckpointError(f"not a folder, and no GGUF file, which would begin with {MAGIC.decode()}: {path}")
        version = reader.scalar(4)
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path} is GGUF of version {version}; read are: {', '.join(map(str, VERSIONS))}, little-endian"
            )
        tensors, values = reader.count(24), reader.count(12)
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = reader.text()
            if key in self.metadata:
                raise reader.damaged(f"the key {shortened(key)} stands there twice")
            self.metadata[key] = reader.value()
        self.tensors = self._placed(reader, self._infos(reader, tensors))

    def bytes_of(self, name: str) -> Bytes:
        stored = self.tensors[name]
        return np.frombuffer(self._bytes, np.uint8, stored.nbytes, stored.offset)

    def forget(self, name: str) -> None:
        """Give back the memory that a tensor takes in this process. Its bytes are read again when they are needed."""
        stored = self.tensors[name]
        begin = stored.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.nbytes:
            self._bytes.madvise(mmap.MADV_DONTNEED, begin, stored.offset + stored.nbytes - begin)

    def _infos(self, reader: _Reader, count: int) -> dict[str, StoredTensor]:
        """Read what the header says of the tensors. Offsets begin behind the header."""
        found: dict[str, StoredTensor] = {}
        for _ in range(count):
            name = reader.text()
            if name in found:
                raise reader.damaged(f"the tensor {shortened(name)} stands there twice")
            dims = reader.scalar(4)
            if not 1 <= dims <= MAX_DIMS:
                raise reader.damaged(f"the tensor {shortened(name)} has {dims} dimensions")
            sizes = tuple(reader.scalar(10) for _ in range(dims))
            kind, offset = reader.scalar(4), reader.scalar(10)
            if kind not in TYPES:
                known = ", ".join(kept for kept, _, _ in TYPES.values())
                raise CheckpointError(
                    f"{self.path}: the tensor {shortened(name)} has a type that is not read (ggml's number {kind}); "
                    f"read are: {known}"
                )
            label, block, size = TYPES[kind]
            if sizes[0] % block or not all(sizes):
                raise reader.damaged(f"the tensor {shortened(name)} of type {label} has the sizes {list(sizes)}")
            found[name] = StoredTensor(label, sizes[::-1], offset, math.prod(sizes) // block * size)
        return found

    def _placed(self, reader: _Reader, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Turn offsets into those of the file, and check that tensors lie in it, one behind the other."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise reader.damaged(f"general.alignment is {alignment!r}")
        end = start = -(-reader.at // alignment) * alignment
        placed = {}
        for name, one in sorted(found.items(), key=lambda item: item[1].offset):
            begin = start + one.offset
            if begin < end or begin + one.nbytes > len(self._bytes):
                raise reader.damaged(f"the tensor {shortened(name)} overlaps another one, or lies outside the file")
            end = begin + one.nbytes
            placed[name] = replace(one, offset=begin)
        return placed


def _by_rows(make: Callable[[Bytes], Sequence[Tensor | None]], data: Bytes) -> list[Tensor]:
    """Call `make` with some rows of `data` at a time, on all cores, and put together what it returns but None.

    Few rows at a time stay in a core's caches, and are too few for threads of torch's own.
    """
    step = max(1, _AT_A_TIME // data.shape[1])

    def made(begin: int) -> list[Tensor]:
        return [part for part in make(data[begin : begin + step]) if part is not None]

    first = made(0)
    if len(data) <= step:
        return first
    whole = [np.empty((len(data), *part.shape[1:]), part.numpy().dtype) for part in first]

    def fill(begin: int, parts: Sequence[Tensor]) -> None:
        for to, part in zip(whole, parts, strict=True):
            to[begin : begin + step] = part.numpy()

    fill(0, first)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda begin: fill(begin, made(begin)), range(step, len(data), step)):
            pass
    return [torch.from_numpy(one) for one in whole]


def _parts_of(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['name']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    if not names or path.name != names[0]:
        raise CheckpointError(
            f"{path} is one of {count} parts: give the first, {match['name']}-00001-of-{count:05}.gguf"
        )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} of {count} parts: {some_of(missing)}")
    return [path.parent / name for name in names]


class _Reader:
    """Takes values from the file's beginning, one after the other. No count is believed that the file has no bytes for."""

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self._data = path, data
        self.at = 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}")

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self.damaged("it ends too early")
        taken: bytes = self._data[self.at : self.at + count]
        self.at += count
        return taken

    def scalar(self, kind: int) -> Any:
        form = _SCALARS[kind][0]
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least: int) -> int:
        """A number of things, of which each takes `least` bytes or more."""
        number: int = self.scalar(10)
        if number * least > len(self._data) - self.at:
            raise self.damaged(f"it says that {number} values follow, and ends before them")
        return number

    def text(self) -> str:
        try:
            return self.take(self.count(1)).decode()
        except UnicodeDecodeError as error:
            raise self.damaged("a text in it is not UTF-8") from error

    def value(self) -> Any:
        kind = self.scalar(4)
        if kind != _ARRAY:
            return self._one(kind)
        inner = self.scalar(4)
        if inner == _STRING:
            return [self.text() for _ in range(self.count(8))]
        if inner not in _SCALARS:
            raise self.damaged(f"it has an array of values of type {inner}")
        dtype = np.dtype(_SCALARS[inner][1])
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype).tolist()

    def _one(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise self.damaged(f"it has a value of type {kind}")
        return self.scalar(kind)


def _gguf() -> Any:
    try:
        from gguf import quants
    except ImportError as error:
        raise CheckpointError("quantised GGUF files need the package gguf: pip install 'ostinato[gguf]'") from error
    return quants
