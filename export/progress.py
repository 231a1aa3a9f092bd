"""Progress of an export as a person sees it: one line per stage, with its time, on stderr."""

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
    """Writes a stage's name when it begins and its time when it ends. Keeps the seconds of each stage in `seconds`.

    `stream` is where lines are written; None writes nothing. Only one thread may write.
    """

    stream: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _begin: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made. Stages can run at the same time, so their seconds may add up to more."""
        return time.perf_counter() - self._begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the code inside the `with` block. A stage that raises is written as failed, and its time is not kept."""
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
        """Show on a terminal the name of a stage that may run beside others. The next line takes its place."""
        if self._is_terminal:
            self._write(f"\r  {name:<46.46}")

    def done(self, name: str, seconds: float) -> None:
        """Write the line of a stage that ran beside others and took `seconds`."""
        self.seconds[name] = seconds
        self._line(name, _time(seconds))

    def failed(self, name: str, seconds: float) -> None:
        """Write the line of a stage that ran beside others and failed after `seconds`."""
        self._line(name, _failure(seconds))

    @contextmanager
    def bytes(self, total: int) -> Iterator[Callable[[int], object]]:
        """Show a bar of `total` bytes on a terminal; elsewhere show nothing.

        Gives a function: call it with the number of bytes that were done since the last call. Inside a stage, the bar covers
        the stage's line until the block ends. Only one thread at a time may advance the bar.
        """
        with tqdm(
            total=total, unit="B", unit_scale=True, file=self.stream, leave=False, disable=not self._is_terminal
        ) as bar:
            yield bar.update

    def note(self, text: str) -> None:
        """Write `text` as a line of its own."""
        self._write(f"  {text}\n")

    @property
    def _is_terminal(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def _end(self, name: str, text: str) -> None:
        if self._is_terminal:
            # The whole line is written again, because a bar may have covered it.
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
    """Return the progress that the command line shows: one line per stage, on stderr."""
    return Progress(sys.stderr)
