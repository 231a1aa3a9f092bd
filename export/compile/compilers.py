"""Runs C++ compilers, several at a time, while Python generates more code for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


class CompilerError(Exception):
    """A compiler failed. The message is the compiler's complaint."""


class CompilersStopped(BaseException):
    """A compiler was ended because the export ends. Not an `Exception`: Inductor takes those as "the compiler cannot do
    this"."""


class Compilers:
    """Runs at most one compiler per core at a time. On exit, it ends the compilers that still run, and waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compiler")
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = Lock()
        self._stopped = False

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                _end(process)
        self._pool.shutdown(cancel_futures=True)

    def start(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call `work` in a thread. Calls begin in the order of `start`, so `work` may wait for earlier ones. It may also call
        `run`."""
        return self._pool.submit(work, *arguments)

    def run(self, command: Sequence[str], folder: str | Path) -> None:
        """Run a compiler in a folder until it ends.

        Raises:
            CompilerError: the compiler failed, or something killed it.
            CompilersStopped: this `Compilers` was left.
        """
        with self._lock:
            if self._stopped:
                raise CompilersStopped
            # In a process group of its own: ending only the compiler's driver would leave the driver's children behind.
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        output, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                raise CompilersStopped
        if process.returncode:
            raise CompilerError(_complaint(command[0], process.returncode, output))


def timed(work: Callable[..., Result], *arguments: Any) -> tuple[Result, float]:
    """The result of `work`, and the seconds that it took."""
    begin = time.perf_counter()
    return work(*arguments), time.perf_counter() - begin


def _end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM: then a compiler deletes the unfinished file that it was writing."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def _complaint(compiler: str, status: int, output: str) -> str:
    """One line of a compiler's output: the first error among the warnings."""
    lines = output.strip().splitlines()
    killed = -status if status < 0 else None
    if killed is None and any("Killed signal" in line for line in lines):
        killed = signal.SIGKILL
    if killed is not None:
        return f"{compiler} was killed ({signal.Signals(killed).name}): the machine may have too little memory"
    errors = [line for line in lines if "error:" in line]
    return f"{compiler} failed: {(errors or lines or [f'exit status {status}'])[0].strip()}"
