"""What a person sees while an export runs: one line a stage, with its time, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class Progress:
    """Names the running stage and keeps each stage's seconds.

    On a terminal the running stage's clock ticks; elsewhere its name is written when it begins and its time when it ends.
    """

    stream: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        stop = threading.Event()
        ticker = self._start_ticker(name, begin, stop)
        if not self._ticks:
            self._write(f"  {name:<38} ")
        try:
            yield
        except BaseException:
            self._finish(stop, ticker)
            self._end(name, f"failed after {time.perf_counter() - begin:.1f} s")
            raise
        self._finish(stop, ticker)
        self.seconds[name] = time.perf_counter() - begin
        self._end(name, f"{self.seconds[name]:6.1f} s")

    def note(self, text: str) -> None:
        self._write(f"  {text}\n")

    def _start_ticker(self, name: str, begin: float, stop: threading.Event) -> threading.Thread | None:
        if not self._ticks:
            return None

        def tick() -> None:
            while not stop.wait(0.2):
                self._write(f"\r  {name:<38} {time.perf_counter() - begin:6.1f} s ...")

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        return ticker

    def _finish(self, stop: threading.Event, ticker: threading.Thread | None) -> None:
        stop.set()
        if ticker is not None:
            ticker.join()
            self._write("\r\x1b[K")

    @property
    def _ticks(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def _end(self, name: str, text: str) -> None:
        self._write(f"\r  {name:<38} {text}\n" if self._ticks else f"{text}\n")

    def _write(self, text: str) -> None:
        if self.stream is not None:
            self.stream.write(text)
            self.stream.flush()


def stderr_progress() -> Progress:
    return Progress(sys.stderr)
