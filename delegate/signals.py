"""Handlers of Ctrl-C and SIGTERM for commands.

Outside the main thread, and where a caller has handlers of its own, nothing changes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM came. It is handled as Ctrl-C is, until the command has cleaned up."""


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Inside this context Ctrl-C ends the process, with status 130. For imports: there is nothing to clean up yet.

    KeyboardInterrupt would not do: torch's imports catch it here and there and go on, or turn it into other errors.
    """

    def end(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    with _handling(signal.SIGINT, signal.default_int_handler, end):
        yield


@contextmanager
def cleaned_up_before_sigterm() -> Iterator[None]:
    """Inside this context SIGTERM raises Terminated. When that has left the context, the signal ends the process."""

    def stop(*_: object) -> None:
        # One is enough: a second one must not cut the cleaning short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    try:
        with _handling(signal.SIGTERM, signal.SIG_DFL, stop):
            yield
    except Terminated:
        os.write(2, b"terminated\n")
        os.kill(os.getpid(), signal.SIGTERM)
        raise


@contextmanager
def _handling(number: int, usual: Any, handler: Callable[..., None]) -> Iterator[None]:
    """Use `handler` inside this context, if the usual one is in use."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not usual:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, usual)
