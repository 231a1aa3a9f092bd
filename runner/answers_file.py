"""The output of `run --prompts`: a line for each answer, in a file that a later run goes on with, or on standard output."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ostinato.delegate.errors import InputError, OptionError

from .prompt_lines import LineId

# What all lines begin with.
_BEGIN = b'{"id":'


class AnswersFile:
    """A file to which one process at a time adds lines, each by one write. The half line of a process that was killed is cut
    off when the file is opened.

    Args:
        path: the file; None: standard output.

    Attributes:
        answered: ids of the prompts that have a line, with an answer or an error.
        failed: number of lines with an error.

    Raises:
        OptionError: it cannot be written, or another process writes to it.
        InputError: it has a line that is no answer.
    """

    def __init__(self, path: Path | None) -> None:
        self.answered: set[LineId] = set()
        self.failed = 0
        self._file: int | None = None
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                self._lock(path)
                self._read(path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise OptionError(f"--output {path}: cannot be written: {error.strerror}") from error
            raise

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line, and hand it to the system."""
        data = msgspec.json.encode(line) + b"\n"
        if self._file is None:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        else:
            while data:
                data = data[os.write(self._file, data) :]
        self.failed += _status(line) != 200

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, path: Path) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(f"--output {path}: another process writes to it") from error
        except OSError:
            # Some file systems have no locks.
            pass

    def _read(self, path: Path) -> None:
        assert self._file is not None
        end = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                whole = text.endswith(b"\n")
                if not (text.startswith(_BEGIN) or (not whole and _BEGIN.startswith(text))):
                    raise InputError(f"--output {path}: line {number} is no answer: give a new file")
                if not whole:
                    os.ftruncate(self._file, end)
                    return
                end += len(text)
                try:
                    line = msgspec.json.decode(text)
                    self.answered.add(line["custom_id"] if "response" in line else line["id"])
                    self.failed += _status(line) != 200
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise InputError(f"--output {path}: line {number} is no answer: give a new file") from error


def _status(line: Mapping[str, Any]) -> int:
    status = line.get("response", line).get("status_code", 200)
    return int(status)
