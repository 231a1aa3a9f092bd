"""Imports that take a second, torch's above all, on the way to the first token."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.delegate.signals import interrupts_end_at_once


@contextmanager
def long_imports() -> Iterator[None]:
    """Inside this context Ctrl-C ends the process, and Python looks for no garbage: modules make none.

    Later searches leave out what was imported. Together this saves 0.15 s of the 1.5 to a first token. Where torch is loaded
    already, nothing changes.
    """
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        with interrupts_end_at_once():
            yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
