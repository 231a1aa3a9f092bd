"""What a person sees while an export runs: one line per stage, with its time, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from tqdm import tqdm


@dataclass
class Progress:
    """Writes a stage's name when it begins and its time when it ends, and keeps the seconds of each.

    `stream`: None to write nothing. One thread writes.
    """

    stream: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _begin: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since it was made. Some stages run beside others, so it is less than the sum of theirs."""
        return time.perf_counter() - self._begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside; a stage that raises is written as failed, and its time is not kept."""
        begin = time.perf_counter()
        self._write(f"  {name:<38} ")
        try:
            yield
        except BaseException:
            self._end(name, _failure(time.perf_counter() - begin))
            raise
        self.seconds[name] = time.perf_counter() - begin
        self._end(name, _time(self.seconds[name]))

    def show(self, name: str) -> None:
        """On a terminal, the name of a stage that may run beside others, until the next line takes its place."""
        if self._is_terminal:
            self._write(f"\r  {name:<46.46}")

    def done(self, name: str, seconds: float) -> None:
        """The line of a stage that ran beside others, and took that long."""
        self.seconds[name] = seconds
        self._line(name, _time(seconds))

    def failed(self, name: str, seconds: float) -> None:
        """The line of such a stage that failed."""
        self._line(name, _failure(seconds))

    @contextmanager
    def bytes(self, total: int) -> Iterator[Callable[[int], object]]:
        """A bar of `total` bytes on a terminal, elsewhere nothing: call what this gives with the size of each part done.

        Inside a stage the bar takes the place of its line while it lasts. One thread at a time may advance it.
        """
        with tqdm(
            total=total, unit="B", unit_scale=True, file=self.stream, leave=False, disable=not self._is_terminal
        ) as bar:
            yield bar.update

    def note(self, text: str) -> None:
        """A line of its own."""
        self._write(f"  {text}\n")

    @property
    def _is_terminal(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def _end(self, name: str, text: str) -> None:
        if self._is_terminal:
            # The line is written anew: a bar may have stood there.
            self._line(name, text)
        else:
            self._write(f"{text}\n")

    def _line(self, name: str, text: str) -> None:
        start = "\r" if self._is_terminal else ""
        self._write(f"{start}  {name:<38} {text}\n")

    def _write(self, text: str) -> None:
        if self.stream is not None:
            self.stream.write(text)
            self.stream.flush()


def _time(seconds: float) -> str:
    return f"{seconds:6.1f} s"


def _failure(seconds: float) -> str:
    return f"failed after {seconds:.1f} s"


def stderr_progress() -> Progress:
    """What the command line shows: a line per stage, on stderr."""
    return Progress(sys.stderr)
