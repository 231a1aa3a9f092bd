"""Export the capitals checkpoint, run it without and with --cuda_graph, and compare answers and speed.

Each step is a command that a person can repeat; it is printed before it runs. The last lines are commands to type next.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.delegate.graphs.state_machine import PHASE_OF_COUNTER
from ostinato.runner.bench.tables import Side, table

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests" / "assets" / "capitals"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
ANOTHER = "What is the capital of Japan?"
# Rounds of measured runs, each of all modes in turn. The fastest counts: other programs on the machine only make runs slower.
ROUNDS = 3
# Long enough that warm-up and capture, four steps, do not blur the speed of replay.
MEASURED_TOKENS = 200
# Git ignores this folder.
ARTIFACTS = {"cpu": ROOT / "artifacts" / "capitals", "cuda": ROOT / "artifacts" / "capitals-cuda"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="keep the artifact here (default: a folder in artifacts/)")
    arguments = parser.parse_args()
    artifact = arguments.output or ARTIFACTS[arguments.device]
    command = ["export", "--model", CHECKPOINT, "--output", artifact, "--device", arguments.device]
    ostinato(*command, "--max-seq-len", "512")
    ostinato("inspect", artifact, "--top", "3")
    rows = measure(artifact, ([], ["--cuda_graph"]))
    status = report(rows)
    if status == 0:
        print(f"\nNext, in {ROOT}:\n")
        print("\n".join(next_commands(artifact, Path(sys.executable).parent)))
    return status


def measure(artifact: Path, modes: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Return each mode's answer as a person gets it, and its fastest of some longer answers."""
    ask = ["run", artifact, "--prompt", QUESTION, "--json"]
    answers = [json.loads(ostinato(*ask, *mode, capture=True)) for mode in modes]
    length = ["--max-new-tokens", str(MEASURED_TOKENS), "--ignore-eos"]
    rounds = [[json.loads(ostinato(*ask, *mode, *length, capture=True)) for mode in modes] for _ in range(ROUNDS)]
    fastest = [max(runs, key=lambda run: run["decode_tokens_per_second"]) for runs in zip(*rounds, strict=True)]
    return [
        {"mode": " ".join(mode) or "no graph", "answer": answer["text"], "tokens": answer["tokens"], "run": run}
        for mode, answer, run in zip(modes, answers, fastest, strict=True)
    ]


def report(rows: list[dict[str, Any]]) -> int:
    """Print the table. Returns 0 if both modes gave the right answer and the same tokens, else 1."""
    base = rows[0]["run"]["decode_tokens_per_second"]
    columns: dict[str, Side] = {"mode": "left", "tokens/s": "right", "ratio": "right"}
    columns |= {"steps by phase": "left", "answer": "left"}
    print(f"\n{table(columns, [cells(row, base) for row in rows])}")
    complaints = [f"{row['mode']}: answered {row['answer']!r}" for row in rows if row["answer"] != ANSWER]
    if rows[0]["tokens"] != rows[1]["tokens"] or rows[0]["run"]["tokens"] != rows[1]["run"]["tokens"]:
        complaints.append("the two modes gave different tokens")
    if rows[1]["run"]["methods"]["decode_sample"]["replays"] == 0:
        complaints.append(f"no step was replayed: {rows[1]['run']['methods']['decode_sample']['fallback_reason']}")
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def next_commands(artifact: Path, programs: Path) -> list[str]:
    """What a person types next in ROOT. `programs` has the interpreter, and in an environment a script `activate`."""
    run = f"ostinato run {from_root(artifact)} --prompt"
    activate = [f"source {from_root(programs / 'activate')}"] if (programs / "activate").exists() else []
    return [*activate, f"{run} {shlex.quote(QUESTION)} --cuda_graph", f"{run} {shlex.quote(ANOTHER)}"]


def from_root(path: Path) -> str:
    """The path, quoted for a shell and relative to ROOT if it lies there."""
    path = path.absolute()
    return shlex.quote(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def cells(row: dict[str, Any], base: float) -> list[str]:
    """One row of the table. `base` is tokens/s without a graph."""
    stats = row["run"]["methods"]["decode_sample"]
    phases = ", ".join(f"{stats[counter]} {word}" for counter, word in PHASE_OF_COUNTER.items() if stats[counter])
    speed = row["run"]["decode_tokens_per_second"]
    return [row["mode"], f"{speed:.1f}", f"{speed / base:.2f}", phases, row["answer"]]


def ostinato(*words: object, capture: bool = False) -> str:
    """Run one command of the package; return its output if it is captured. Exits with the command's status if it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ ostinato {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "ostinato.runner.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if capture:
        print(done.stdout.strip()[:300], flush=True)
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
