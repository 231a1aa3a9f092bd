"""Read a FlatTensor file (`.ptd`) in place.

Field numbers follow executorch's `extension/flat_tensor/serialize/flat_tensor.fbs`. The header (`FH01`) follows executorch's
`flat_tensor_header.h`.
"""

from __future__ import annotations

import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.delegate.errors import ArtifactError

from .flatbuffer import Table, damaged
from .names import MANIFEST_KEY
from .records import Manifest, constant_digest, dtype_name

_SEGMENTS, _NAMED_DATA = 1, 2

# ScalarType of executorch's scalar_type.fbs, the same codes as c10::ScalarType.
SCALAR_TYPES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}


@dataclass(frozen=True)
class Entry:
    """One named blob. `dtype` is None for data that is not a tensor; `strides` are in elements."""

    data: memoryview
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def tensor(self) -> torch.Tensor:
        """Return the tensor over the mapped file. Nothing is copied, and the tensor must not be written."""
        assert self.dtype is not None
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            # torch warns that it does not support tensors that cannot be written.
            warnings.simplefilter("ignore")
            storage = torch.frombuffer(self.data, dtype=self.dtype).untyped_storage()
        # Not a view of the flat tensor: a view keeps its base alive, and so the mapped file.
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.strides)


@dataclass(frozen=True)
class ConstantsFile:
    """A parsed `.ptd`: its manifest and its tensors by fully qualified name."""

    path: Path
    manifest: Manifest
    entries: dict[str, Entry]

    def check(self, key: str, entry: Entry) -> None:
        """Read an entry. Raises ArtifactError: it is not what the manifest lists under `key`."""
        expected = self.manifest.constants.get(key)
        dtype = dtype_name(entry.dtype) if entry.dtype else ""
        found = constant_digest(entry.data, dtype, entry.shape, entry.strides)
        if found != expected:
            raise ArtifactError(
                f"{self.path} is damaged: constant {key!r} has SHA-256 {found[:12]}..., the manifest says "
                f"{(expected or 'nothing')[:12]}...: copy the artifact again or export it again"
            )


def parse_constants(data: memoryview, path: Path) -> ConstantsFile:
    """Parse the bytes of a `.ptd`.

    Raises:
        ArtifactError: not a FlatTensor file, cut short or damaged, or without this project's manifest.
    """
    if len(data) < 48 or bytes(data[4:8]) != b"FT01" or bytes(data[8:12]) != b"FH01":
        raise ArtifactError(f"{path} is not a FlatTensor file (no 'FT01' identifier at byte 4)")
    base, size = struct.unpack_from("<QQ", data, 32)
    if base + size > len(data):
        raise ArtifactError(f"{path} is cut short: its header says {base + size} bytes, the file has {len(data)}")
    with damaged(path):
        entries = _read(data, base)
    if MANIFEST_KEY not in entries:
        raise ArtifactError(
            f"{path} has no manifest ({MANIFEST_KEY!r}): it was not made by `ostinato export`, or is damaged"
        )
    manifest = Manifest.from_bytes(bytes(entries.pop(MANIFEST_KEY).data))
    return ConstantsFile(path, manifest, entries)


def _read(data: memoryview, base: int) -> dict[str, Entry]:
    root = Table.root(data)
    segments = [(table.integer(0, "Q"), table.integer(1, "Q")) for table in root.tables(_SEGMENTS)]
    entries = {}
    for named in root.tables(_NAMED_DATA):
        key = named.text(0)
        offset, size = segments[named.integer(1)]
        blob = data[base + offset : base + offset + size]
        if len(blob) != size:
            raise ValueError(f"the data of {key!r} lies past the end of the file")
        layout = named.table(2)
        if layout is None:
            entries[key] = Entry(blob, None, (size,), (1,))
            continue
        dtype = SCALAR_TYPES[layout.integer(0, "b")]
        shape = layout.numbers(1, "i")
        if math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{key!r} has shape {list(shape)} {dtype} but {size} bytes")
        entries[key] = Entry(blob, dtype, shape, _strides(shape, layout.numbers(2, "B")))
    return entries


def _strides(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(dim_order) != list(range(len(shape))):
        raise ValueError(f"dim_order {list(dim_order)} is not an order of {len(shape)} dimensions")
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
