"""What the benchmarks run in processes of their own, ours and llama.cpp's, and how they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
# A run of one and the next differ by this much.
SLOWER = 0.97


def ostinato(*words: str) -> str:
    """What `ostinato` writes to stdout; ends this script with its exit status if it fails."""
    command = [sys.executable, "-m", "ostinato.runner.cli", *words]
    print(f"$ ostinato {' '.join(words)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def output_of(command: list[str]) -> str:
    """What a quiet command writes to stdout; ends this script with exit status 2 if it fails."""
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
    """Those of an option, separated by commas."""
    return [int(word) for word in text.split(",")]


def threads_of(threads: int | None) -> list[str]:
    """llama.cpp's option for as many threads, or as there are cores."""
    return ["-t", str(threads or len(os.sched_getaffinity(0)))]
