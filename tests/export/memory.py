"""The memory that this process uses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

MIB = 1 << 20


def anonymous_memory() -> int:
    """Bytes of this process that are in RAM and not from a file."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells what of a process's memory was touched")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


class Peak:
    """The largest growth of the process's anonymous memory while the block runs, in bytes."""

    def __init__(self) -> None:
        self.grown = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, args=(anonymous_memory(),))

    def _look(self, before: int) -> None:
        while not self._done.wait(0.001):
            self.grown = max(self.grown, anonymous_memory() - before)

    def __enter__(self) -> Peak:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
