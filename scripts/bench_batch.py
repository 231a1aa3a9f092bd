#!/usr/bin/env python3
"""Time several sessions that step together, beside llama.cpp's llama-batched-bench on the same shape, on a GPU or a CPU.

    python scripts/bench_batch.py ARTIFACT [--cuda_graph] [--batch 1,2,4,8,16,32,64,128] [-p 128] [-n 128] [-r 3]
                                  [--llama-batched-bench FILE --gguf FILE] [--threads N]
                                  [--json FILE] [--plot FILE] [--skip-goals]

All sessions start at once, each with a prompt of its own of -p tokens. Then all generate -n tokens together. Only this
generation is compared, in tokens per second of all sessions together: speed_tg of `ostinato bench --batch`, and S_TG of
llama-batched-bench. Both are medians of -r repetitions. Ours samples each token; llama.cpp's step ends with the logits, and
its next tokens are random.

A batch of one session is measured in a process of its own, which has room for no other session. If 1 and 64 are both among
the batches, one session is measured again in the process of 64, as "1 of 64": one slot is in use, the others are free.
llama.cpp gets the same batches, in the same number of processes. On a CPU nothing else may run: llama.cpp's threads wait for
each other busily, so losing a core to other work costs it much more than that core's share.

The goals are for Qwen3.5-35B-A3B in int4 on one NVIDIA H200, with --cuda_graph and 128 tokens behind 128: tokens/s, and what
Python takes of a step of 128 sessions on the host. There are none for other lengths or a CPU. --skip-goals is for another
model or GPU.

Exit status: 0 all was measured, nothing is slower than llama.cpp, and every goal held; 1 not so; 2 an error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_commands import (
    add_llama_options,
    check_llama_options,
    fail,
    filled_table,
    llama_command,
    llama_output,
    llama_records,
    llama_words,
    numbers,
    ostinato,
    over_llama,
    told,
)
from check_speed import Finding

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.runner.bench.batch_bench import BatchSpec, draw_speeds
from ostinato.runner.bench.plot import check_plot
from ostinato.runner.bench.tables import Side

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Slots of the measurement "1 of 64", in which one is in use.
SLOTS = 64
# `Row.name` -> tokens/s, for prompts and answers of GOAL_TOKENS: 95 % of what FIGURES.md states.
GOALS = {
    "1": 1085,
    f"1 of {SLOTS}": 1080,
    "2": 1695,
    "4": 2665,
    "8": 3625,
    "16": 4475,
    "32": 5595,
    "64": 8055,
    "128": 11480,
}
# `Row.name` -> microseconds of Python in a step, without waits for the GPU.
HOST_GOALS = {"128": 250.0}
GOAL_TOKENS = 128
OURS, PEER = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Row:
    """Result of one batch.

    Attributes:
        sessions: number of sessions that step together.
        slots: number of sessions that there is room for.
        speed: tokens/s of all sessions together.
        peer: llama.cpp's tokens/s; None if it was not measured.
        host_us: microseconds of Python in a step, without waits for the GPU; None if they are not known.
        machine: device, torch version and graph mode of our measurement.
    """

    sessions: int
    slots: int
    speed: float
    peer: float | None
    host_us: float | None
    machine: str

    @property
    def name(self) -> str:
        alone = self.sessions == 1 and self.slots > 1
        return f"1 of {self.slots}" if alone else str(self.sessions)

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.speed / self.peer

    @property
    def token_ms(self) -> float:
        """Milliseconds of a step: from one token of a session to its next."""
        return 1e3 * self.sessions / self.speed


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    try:
        spec = BatchSpec(
            tuple(sorted(set(arguments.batch))), arguments.n_prompt, arguments.n_gen, arguments.repetitions
        )
        check_files(arguments)
        device = device_of(arguments.artifact)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    llama = None
    if arguments.gguf:
        llama = llama_command(arguments.llama_batched_bench, arguments.gguf, device, arguments.threads)
    rows = measure(arguments.artifact, spec, arguments.cuda_graph, llama)
    goals = goals_of(spec, device, arguments.skip_goals)
    print(f"\n{rows[0].machine}; each session: {spec.prompt} + {spec.answer} tokens\n\n{render(rows, goals)}\n")
    found = findings(rows, goals)
    if arguments.json:
        records = [asdict(row) | {"ratio": row.ratio, "token_ms": row.token_ms} for row in rows]
        arguments.json.write_text(
            json.dumps({"batches": records, "goals": [asdict(one) for one in found]}, indent=1) + "\n"
        )
    if arguments.plot:
        draw(rows, spec, arguments.plot)
    return told(found)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--cuda_graph", "--cuda-graph", action="store_true")
    parser.add_argument("--batch", type=numbers, default=BATCHES, metavar="N,N")
    parser.add_argument("-p", "--n-prompt", type=int, default=GOAL_TOKENS)
    parser.add_argument("-n", "--n-gen", type=int, default=GOAL_TOKENS)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    add_llama_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true")
    arguments = parser.parse_args(words)
    check_llama_options(parser, arguments)
    return arguments


def check_files(arguments: argparse.Namespace) -> None:
    """Raise OptionError if a file is missing or could not be written."""
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise OptionError(f"--json: no such folder: {arguments.json.absolute().parent}")
    for file in (arguments.llama_batched_bench, arguments.gguf):
        if file is not None and not file.is_file():
            raise OptionError(f"no such file: {file}")


def device_of(artifact: Path) -> str:
    """The device that the artifact was compiled for, `cpu` or `cuda`. Raises ArtifactError."""
    parsed, _ = open_artifact(*artifact_paths(artifact), verify=False)
    return next(iter(parsed.methods.values())).target.device


def goals_of(spec: BatchSpec, device: str, skip: bool) -> dict[str, float]:
    """Goals of this measurement: `Row.name` -> tokens/s; empty if there are none."""
    known = device == "cuda" and spec.prompt == spec.answer == GOAL_TOKENS
    return {} if skip or not known else dict(GOALS)


# --- measuring


def measure(artifact: Path, spec: BatchSpec, cuda_graph: bool, llama: Sequence[str] | None) -> list[Row]:
    """Measure all batches of `spec`, ours and llama.cpp's. `llama` is the result of `llama_command`, or None."""
    rows = []
    for batches in groups(spec.batches):
        part = replace(spec, batches=batches)
        records = ours(artifact, part, cuda_graph)
        peers = {} if llama is None else llama_speeds(llama, part)
        rows += [row_of(record, peers.get(record["pl"])) for record in records]
    return rows


def row_of(record: Mapping[str, Any], peer: float | None) -> Row:
    """The row for one record of `ours`."""
    machine = f"{record['device']}, torch {record['torch']}, {'--cuda_graph' if record['cuda_graph'] else 'no graph'}"
    return Row(record["pl"], record["slots"], record["speed_tg"], peer, record["host_us"], machine)


def groups(batches: Sequence[int]) -> list[tuple[int, ...]]:
    """Group rising batches by the process that measures them. A process has room for its largest batch."""
    one, several = [batch for batch in batches if batch == 1], [batch for batch in batches if batch > 1]
    split = [one, several]
    if one and SLOTS in several:
        few, many = ([batch for batch in several if (batch <= SLOTS) == wanted] for wanted in (True, False))
        split = [one, [1, *few], many]
    return [tuple(group) for group in split if group]


def ours(artifact: Path, spec: BatchSpec, cuda_graph: bool) -> list[dict[str, Any]]:
    """The records of `ostinato bench --batch`, one per batch."""
    lengths = ["-p", str(spec.prompt), "-n", str(spec.answer), "-r", str(spec.repetitions)]
    words = ["--batch", ",".join(map(str, spec.batches)), *lengths, "--cuda_graph", "on" if cuda_graph else "off"]
    records: list[dict[str, Any]] = json.loads(ostinato("bench", str(artifact), *words, "--output", "json"))
    return records


def llama_speeds(command: Sequence[str], spec: BatchSpec) -> dict[int, float]:
    """Run llama-batched-bench, each batch once per repetition. Returns batch -> median tokens/s of generation (S_TG)."""
    asked = [batch for batch in spec.batches for _ in range(spec.repetitions)]
    words = llama_words(command, spec.prompt, spec.answer, asked)
    samples = read_llama(llama_output(words))
    missing = [str(batch) for batch in spec.batches if len(samples.get(batch, ())) != spec.repetitions]
    if missing:
        fail(f"llama-batched-bench did not measure batches of {', '.join(missing)}: {' '.join(words)}")
    return {batch: statistics.median(speeds) for batch, speeds in samples.items()}


def read_llama(text: str) -> dict[int, list[float]]:
    """Batch -> tokens/s of generation (S_TG) of each repetition, from llama-batched-bench's output in jsonl."""
    samples: dict[int, list[float]] = {}
    for record in llama_records(text):
        samples.setdefault(record["pl"], []).append(record["speed_tg"])
    return samples


# --- what was found


def findings(rows: Sequence[Row], goals: Mapping[str, float]) -> list[Finding]:
    """Findings for the goals of the batches that were measured, then for the comparison with llama.cpp."""
    found = []
    for row in rows:
        if row.name in goals:
            wanted = goals[row.name]
            found.append(Finding(row.name, f"{row.speed:,.1f} tokens/s", row.speed >= wanted, f"{wanted:,.0f} or more"))
        if goals and row.name in HOST_GOALS:
            most = HOST_GOALS[row.name]
            taken = "not known" if row.host_us is None else f"{row.host_us:.1f} us"
            held = row.host_us is not None and row.host_us <= most
            found.append(Finding(f"{row.name}: Python per step", taken, held, f"{most:g} us or less"))
    return found + [over_llama(row.name, row.ratio) for row in rows if row.ratio is not None]


def render(rows: Sequence[Row], goals: Mapping[str, float]) -> str:
    """The table. Columns without any value are left out."""
    columns: dict[str, Side] = {"sessions": "right"}
    columns |= dict.fromkeys(("tokens/s", "llama.cpp", "ratio", "ms per token", "Python, us", "goal"), "right")
    columns["held"] = "left"
    cells = []
    for row in rows:
        goal = goals.get(row.name)
        cells.append(
            {
                "sessions": row.name,
                "tokens/s": f"{row.speed:,.1f}",
                "llama.cpp": "" if row.peer is None else f"{row.peer:,.1f}",
                "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
                "ms per token": f"{row.token_ms:.3f}",
                "Python, us": "" if row.host_us is None else f"{row.host_us:.1f}",
                "goal": "" if goal is None else f"{goal:,.0f}",
                "held": "" if goal is None else "yes" if row.speed >= goal else "NO",
            }
        )
    return filled_table(columns, cells)


def draw(rows: Sequence[Row], spec: BatchSpec, path: Path) -> None:
    """Write the picture. "1 of 64" is left out."""
    shown = [row for row in rows if row.name == str(row.sessions)]
    series = {"Ostinato": (OURS, {row.sessions: row.speed for row in shown})}
    peers = {row.sessions: row.peer for row in shown if row.peer is not None}
    if peers:
        series["llama.cpp"] = (PEER, peers)
    draw_speeds(f"{spec.prompt} + {spec.answer} tokens each, on {rows[0].machine}", series, path)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
