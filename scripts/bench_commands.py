"""Helpers of the benchmarks: run commands, ours and llama.cpp's, in processes of their own, and make their options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
# Least ratio to llama.cpp that counts as not slower: two measurements of one program differ by 3 %.
SLOWER = 0.97


def ostinato(*words: str) -> str:
    """Run `ostinato` and return what it writes to stdout. If it fails, end this script with its exit status."""
    command = [sys.executable, "-m", "ostinato.runner.cli", *words]
    print(f"$ ostinato {' '.join(words)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def output_of(command: list[str]) -> str:
    """Run a command quietly and return what it writes to stdout. If it fails, end this script with exit status 2."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        fail(f"{' '.join(command)} was ended by {signal.Signals(-done.returncode).name}: {done.stderr}")
    if done.returncode:
        fail(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout


def fail(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def numbers(text: str) -> list[int]:
    """The numbers of an option, which are separated by commas."""
    return [int(word) for word in text.split(",")]


def threads_of(threads: int | None) -> list[str]:
    """llama.cpp's option for `threads` threads; None: for one per core."""
    return ["-t", str(threads or len(os.sched_getaffinity(0)))]
