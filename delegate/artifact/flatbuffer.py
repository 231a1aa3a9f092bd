"""A small FlatBuffers reader: it has what the two ExecuTorch files need, and reads in place.

executorch's own readers (1.5.1) do not fit. They are generated for `.pte` only, live under `executorch.exir`, whose import
takes seconds, and work only after that package has patched them. A field is read by its number: its index in the schema,
where a union counts as two fields (its kind, then its value). ExecuTorch's schemas only grow at the end.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ostinato.delegate.errors import ArtifactError

_DEFAULTS: dict[str, int | float | bool] = {"?": False, "d": 0.0}


class Table:
    """A FlatBuffers table at `position` in `data`. Absent fields read as 0, empty or None, the format's defaults."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position
        vtable = position - struct.unpack_from("<i", data, position)[0]
        count = struct.unpack_from("<H", data, vtable)[0] // 2 - 2
        self._offsets = struct.unpack_from(f"<{count}H", data, vtable + 4)

    @classmethod
    def root(cls, data: memoryview) -> Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def number(self, field: int, code: str) -> int | float | bool:
        """A scalar field; `code` is its letter in the `struct` module."""
        at = self._offset(field)
        return struct.unpack_from(f"<{code}", self.data, self.position + at)[0] if at else _DEFAULTS.get(code, 0)

    def integer(self, field: int, code: str = "I") -> int:
        return int(self.number(field, code))

    def numbers(self, field: int, code: str) -> tuple[int, ...]:
        """A vector of scalars."""
        begin, count = self._vector(field, struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, begin) if count else ()

    def blob(self, field: int) -> memoryview:
        """A vector of bytes, not copied."""
        begin, count = self._vector(field, 1)
        return self.data[begin : begin + count]

    def text(self, field: int) -> str:
        return bytes(self.blob(field)).decode()

    def table(self, field: int) -> Table | None:
        at = self._target(field)
        return None if at is None else Table(self.data, at)

    def tables(self, field: int) -> list[Table]:
        """A vector of tables."""
        begin, count = self._vector(field, 4)
        places = [begin + 4 * i for i in range(count)]
        return [Table(self.data, at + struct.unpack_from("<I", self.data, at)[0]) for at in places]

    def _offset(self, field: int) -> int:
        return self._offsets[field] if field < len(self._offsets) else 0

    def _target(self, field: int) -> int | None:
        at = self._offset(field)
        if not at:
            return None
        return self.position + at + struct.unpack_from("<I", self.data, self.position + at)[0]

    def _vector(self, field: int, width: int) -> tuple[int, int]:
        """Return (position of the first element, count) of a vector whose elements have `width` bytes."""
        at = self._target(field)
        if at is None:
            return 0, 0
        count = struct.unpack_from("<I", self.data, at)[0]
        # Checked before anything of that size is made: a flipped bit can ask for 4 billion elements.
        if at + 4 + count * width > len(self.data):
            raise ValueError("a vector runs past the end of the file")
        return at + 4, count


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turns the errors that a damaged file causes in a parser into an ArtifactError that names the file."""
    try:
        yield
    except (struct.error, IndexError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise ArtifactError(f"{path} cannot be parsed, the file is damaged: {error}") from error


def map_file(path: Path) -> memoryview:
    """Map the whole file as shared, read-only memory. A page is read when it is touched.

    The map is not private: CUDA would copy each page of a private map before it reads the page.

    Raises:
        ArtifactError: the file is missing, unreadable or empty.
    """
    with _opened(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_file(path: Path) -> memoryview:
    """Read the whole file into memory that no one else can write. Raises ArtifactError: it is missing or unreadable."""
    with _opened(path) as file:
        return memoryview(file.read())


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
