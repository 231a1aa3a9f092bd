"""Progress display while a large artifact is loaded: one line on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from ostinato.delegate.memory import size_text

if TYPE_CHECKING:
    from tqdm import tqdm

# A load under 1 GB is over before a bar could be read.
_SMALLEST = 10**9


class LoadBar:
    """Progress display of one load: on a terminal a bar of tqdm, which disappears at the end, and everywhere one final line.

    >>> with LoadBar() as bar:
    ...     engine = Engine.load("artifact/", on_total=bar.begin, on_load=bar.advance)
    loaded 18.1 GB in 4.3 s  4.2 GB/s

    Loads under `smallest` bytes show nothing. `verb` says what is done, if not "load". Any thread may call `begin` and
    `advance`.
    """

    def __init__(self, stream: TextIO | None = None, smallest: int = _SMALLEST, verb: str = "load") -> None:
        self._stream = stream or sys.stderr
        self._smallest = smallest
        self._verb = verb
        # tqdm's count is not safe to raise from several threads.
        self._lock = threading.Lock()
        self._bar: tqdm[Any] | None = None
        self._total = 0
        self._done = 0
        self._begun = 0.0

    def begin(self, total: int) -> None:
        """Start the clock for a load of `total` bytes."""
        with self._lock:
            self._total, self._done = total, 0
            self._begun = time.perf_counter()
            if self._shows and self._stream.isatty():
                # Imported here: the import takes as long as a small load, which shows nothing.
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total, desc=f"{self._verb}ing", unit="B", unit_scale=True, file=self._stream, leave=False
                )

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes have been loaded."""
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)

    def __enter__(self) -> LoadBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            if self._shows and kind is None:
                seconds = time.perf_counter() - self._begun
                speed = size_text(int(self._done / seconds) if seconds else 0)
                self._stream.write(f"{self._verb}ed {size_text(self._done)} in {seconds:.1f} s  {speed}/s\n")
                self._stream.flush()

    @property
    def _shows(self) -> bool:
        return self._total >= max(1, self._smallest)
