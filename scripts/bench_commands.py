"""Helpers of the benchmarks: commands, ours and llama.cpp's, in processes of their own, their options, and findings."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from check_speed import Finding

from ostinato.runner.bench.tables import Side, table

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


def add_llama_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured beside ours."""
    parser.add_argument("--llama-batched-bench", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, help="of both on a CPU (default: as many as there are cores)")


def check_llama_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the script unless both files of llama.cpp are given, or none."""
    if (arguments.llama_batched_bench is None) != (arguments.gguf is None):
        parser.error("--llama-batched-bench and --gguf go together")


def llama_command(program: Path, gguf: str | Path, device: str, threads: int | None) -> list[str]:
    """The command of llama-batched-bench with a model: on all of a GPU, or on `threads` threads of the CPU."""
    where = ["-ngl", "99", "-b", "2048", "-ub", "2048"] if device == "cuda" else threads_of(threads)
    return [str(program), "-m", str(gguf), *where, "-fa", "on"]


def llama_words(command: Sequence[str], prompt: int, answer: int, batches: Sequence[int]) -> list[str]:
    """The command `llama_command` with its batches of sequences, which have so many tokens each. Its output is jsonl."""
    lengths = ["-c", str(max(batches) * (prompt + answer)), "-npp", str(prompt), "-ntg", str(answer)]
    return [*command, *lengths, "-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]


def llama_output(words: list[str]) -> str:
    """Say what runs, and return what it writes to stdout. If it fails, end this script with exit status 2."""
    print(f"$ {' '.join(words)}", file=sys.stderr, flush=True)
    return output_of(words)


def llama_records(output: str) -> list[dict[str, Any]]:
    """One record for each batch that llama-batched-bench has run, from its output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def over_llama(name: str, ratio: float) -> Finding:
    """The finding of a speed that is `ratio` times llama.cpp's."""
    least = f"{SLOWER} or more: two runs differ by 3%"
    return Finding(f"{name} over llama.cpp", f"{ratio:.3f}", ratio >= SLOWER, least)


def told(found: Sequence[Finding]) -> int:
    """Print what was missed, and return the exit status: 1 if anything was."""
    missed = [one for one in found if not one.held]
    for one in missed:
        print(f"MISSED: {one.what}: {one.found}, wanted: {one.wanted}")
    return 1 if missed else 0


def filled_table(columns: Mapping[str, Side], rows: Sequence[Mapping[str, str]]) -> str:
    """The table, without columns that have no value in any row."""
    used = {name: side for name, side in columns.items() if any(row[name] for row in rows)}
    return table(used, [[row[name] for name in used] for row in rows])


def fail(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def numbers(text: str) -> list[int]:
    """The numbers of an option, which are separated by commas."""
    return [int(word) for word in text.split(",")]


def threads_of(threads: int | None) -> list[str]:
    """llama.cpp's option for `threads` threads; None: for one per core."""
    return ["-t", str(threads or len(os.sched_getaffinity(0)))]
