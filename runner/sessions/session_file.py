"""A session in a file: its history, and the bytes that offloading moves, checked against the artifact that they belong to.

    magic, 8 bytes with the header's length, 32 with its SHA-256    the header: JSON    the body: rows of state

As `llama_state_seq_save_file` does, a file has the tokens beside the state, so it can be read without its model.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ostinato.delegate import HostRows
from ostinato.delegate.errors import SessionFileError

MAGIC = b"ostinato session"
# Raised when the layout of the header or of the body changes.
VERSION = 2
_PREFIX = struct.Struct("<16sQ32s")


def write_session(path: Path, header: dict[str, Any], body: Sequence[torch.Tensor]) -> None:
    """Write a file. It appears under its name when it is complete.

    Args:
        path: the file.
        header: values in JSON's types.
        body: [n] uint8 each, on the host.

    Raises:
        SessionFileError: the file cannot be written.
    """
    digest = hashlib.sha256()
    for data in body:
        digest.update(data.numpy().data)
    nbytes = sum(data.nbytes for data in body)
    text = json.dumps({**header, "version": VERSION, "bytes": nbytes, "sha256": digest.hexdigest()}).encode()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _named(path, "written"):
        try:
            with open(beside, "xb") as file:
                file.write(_PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text)
                for data in body:
                    file.write(data.numpy().data)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def opened_session(path: Path, artifact: str) -> Iterator[tuple[dict[str, Any], BinaryIO]]:
    """Open a file, and give its header and what `read_rows` takes.

    Args:
        artifact: digest of the artifact that the session must belong to.

    Raises:
        SessionFileError: the file cannot be read, is no session, is damaged or cut short, or belongs to another artifact.
    """
    with _named(path, "read"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC:
            raise SessionFileError(f"{path} is no saved session")
        if len(prefix) < _PREFIX.size:
            raise SessionFileError(f"{path} is cut short: it has {size} bytes")
        _, length, digest = _PREFIX.unpack(prefix)
        text = file.read(min(length, size))
        if hashlib.sha256(text).digest() != digest:
            raise SessionFileError(f"{path} is damaged: its header's SHA-256 is another")
        header = json.loads(text)
        if header["version"] != VERSION:
            raise SessionFileError(f"{path} has version {header['version']}, this runtime reads version {VERSION}")
        if header["artifact"] != artifact:
            raise SessionFileError(
                f"{path} was saved with another artifact ({header['artifact'][:8]}, this one is {artifact[:8]})"
            )
        wanted = _PREFIX.size + length + header["bytes"]
        if size != wanted:
            raise SessionFileError(f"{path} is cut short or too long: it has {size} bytes, its header says {wanted}")
        yield header, file


def read_rows(path: Path, header: dict[str, Any], file: BinaryIO, rows: HostRows) -> None:
    """Read the body. Raises SessionFileError: it does not fit, is damaged or cannot be read."""
    if header["bytes"] != rows.nbytes:
        raise SessionFileError(f"{path} has {header['bytes']} bytes of state, the program's are {rows.nbytes}")
    digest = hashlib.sha256()
    for data in rows.data:
        memory = data.numpy().data
        file.readinto(memory)  # type: ignore[attr-defined]
        digest.update(memory)
    if digest.hexdigest() != header["sha256"]:
        raise SessionFileError(f"{path} is damaged: the SHA-256 of its state is another")


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SessionFileError(f"{path} cannot be {what}: {error.strerror}") from error
