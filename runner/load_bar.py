"""What a person sees while a large artifact is loaded: one line on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from ..delegate.memory import size_text

_CELLS = 10
# Seconds between two drawings.
_INTERVAL = 0.1
# A load under 1 GB is over before a bar could be read.
_SMALLEST = 10**9


class LoadBar:
    """Progress of one load; on a terminal a line that redraws, elsewhere one line when the load is over.

    >>> with LoadBar() as bar:
    ...     engine = Engine.load("artifact/", on_total=bar.begin, on_load=bar.advance)
    loading 18.1 GB  [#####.....]  54 %  4.2 GB/s

    Loads under `smallest` bytes show nothing. Any thread may call `begin` and `advance`.
    """

    def __init__(self, stream: TextIO | None = None, smallest: int = _SMALLEST) -> None:
        self._stream = stream or sys.stderr
        self._smallest = smallest
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._begun = self._drawn = 0.0

    def begin(self, total: int) -> None:
        """Start the clock; `total` bytes are to come."""
        with self._lock:
            self._total, self._done = total, 0
            self._begun = time.perf_counter()
            self._draw()

    def advance(self, nbytes: int) -> None:
        """`nbytes` more have been loaded."""
        with self._lock:
            self._done += nbytes
            if time.perf_counter() - self._drawn >= _INTERVAL:
                self._draw()

    def __enter__(self) -> LoadBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if not self._shows:
                return
            if self._redraws:
                self._write("\r\x1b[K")
            if kind is None:
                seconds = time.perf_counter() - self._begun
                self._write(f"loaded {size_text(self._done)} in {seconds:.1f} s  {self._speed}\n")

    def _draw(self) -> None:
        if not self._shows or not self._redraws:
            return
        self._drawn = time.perf_counter()
        share = min(1.0, self._done / self._total)
        bar = "#" * int(share * _CELLS)
        percent = int(share * 100)
        self._write(f"\rloading {size_text(self._total)}  [{bar:.<{_CELLS}}] {percent:3d} %  {self._speed}\x1b[K")

    @property
    def _shows(self) -> bool:
        return self._total >= max(1, self._smallest)

    @property
    def _redraws(self) -> bool:
        return self._stream.isatty()

    @property
    def _speed(self) -> str:
        seconds = time.perf_counter() - self._begun
        return f"{size_text(int(self._done / seconds) if seconds else 0)}/s"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
