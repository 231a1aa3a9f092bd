"""C++ compilers, several at a time, beside the Python that generates what they compile.

Only the compilers run beside each other. Inductor itself stays in one process and one thread, with its CUDA context: it keeps
much in globals, and a forked process could not ask a GPU what it is.
"""

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
    """A compiler failed; the message is its complaint."""


class CompilersStopped(BaseException):
    """A compiler was ended because the export ends. No `Exception`: Inductor takes those as "the compiler cannot do this"."""


class Compilers:
    """As many compilers at a time as there are cores. Leaving it ends those that still run, and waits for their end."""

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
        """Call it in a thread, after all that were started before; those it may wait for. It may call `run`."""
        return self._pool.submit(work, *arguments)

    def run(self, command: Sequence[str], folder: str | Path) -> None:
        """Run a compiler in a folder.

        Raises:
            CompilerError: it failed, or something killed it.
            CompilersStopped: `Compilers` was left.
        """
        with self._lock:
            if self._stopped:
                raise CompilersStopped
            # A process group of its own: the compiler's driver would leave its parts behind.
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
    """What it gives, and the seconds that it took."""
    begin = time.perf_counter()
    return work(*arguments), time.perf_counter() - begin


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, after which a compiler takes away the half of a file that it has written."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def _complaint(compiler: str, status: int, output: str) -> str:
    """One line: the first error among the warnings."""
    lines = output.strip().splitlines()
    killed = -status if status < 0 else None
    if killed is None and any("Killed signal" in line for line in lines):
        killed = signal.SIGKILL
    if killed is not None:
        return f"{compiler} was killed ({signal.Signals(killed).name}): the machine may have too little memory"
    errors = [line for line in lines if "error:" in line]
    return f"{compiler} failed: {(errors or lines or [f'exit status {status}'])[0].strip()}"
