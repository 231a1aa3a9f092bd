#!/usr/bin/env python3
"""Time callers that send requests of their own, beside llama.cpp's llama-batched-bench on the same lengths, on a GPU or CPU.

    python scripts/bench_load.py ARTIFACT [--cuda_graph] [--concurrency 1,8,32,64,128] [-p 1024] [-n 256] [--range-ratio 0.2]
                                 [--requests N] [--llama-batched-bench FILE --gguf FILE] [--threads N]
                                 [--json FILE] [--plot FILE] [--skip-goals]

Ours is `ostinato bench --load`: output tokens per second of all requests, with the time of their prompts, with lengths that
differ, and a new request wherever one has ended. llama-batched-bench starts all sequences at once, runs them to one length,
and its S_TG leaves out the time of the prompts. So what is compared is the tokens that it generates over its whole time T. It
samples nothing; ours does.

The goals are for Qwen3.5-35B-A3B in int4 on one NVIDIA H200, with --cuda_graph and 256 tokens behind 1,024: output tokens/s,
and the 99th percentile of the time between tokens. There are none for other lengths or a CPU. --skip-goals is for another
model or GPU.

Exit status: 0 all was measured, nothing failed or is slower than llama.cpp, and every goal held; 1 not so; 2 an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_batch import check_files, device_of
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

from ostinato.delegate.errors import OstinatoError
from ostinato.runner.bench.tables import Side

GOAL_PROMPT, GOAL_ANSWER = 1024, 256


@dataclass(frozen=True)
class Goal:
    """Output tokens per second, or more; and milliseconds between tokens in the 99th percentile, or fewer."""

    speed: float
    p99_itl_ms: float


# Number of callers -> goal, for GOAL_PROMPT and GOAL_ANSWER.
GOALS = {
    1: Goal(900, 1.5),
    8: Goal(1750, 14),
    32: Goal(2850, 16),
    64: Goal(3300, 17),
    128: Goal(3300, 18),
}


@dataclass(frozen=True)
class Row:
    """Result of one number of callers.

    Attributes:
        callers: number of callers; of llama.cpp's sequences.
        speed, steady_speed: output tokens/s, see `LoadMeasurement`.
        first_ms: milliseconds to the first token, median.
        itl_ms, p99_itl_ms: milliseconds between tokens: median, 99th percentile.
        failed: number of requests that failed.
        peer: llama.cpp's generated tokens over its whole time, in tokens/s; None if it was not measured.
    """

    callers: int
    speed: float
    steady_speed: float | None
    first_ms: float
    itl_ms: float
    p99_itl_ms: float
    failed: int
    peer: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.speed / self.peer


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    try:
        check_files(arguments)
        device = device_of(arguments.artifact)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    records = ours(arguments)
    peers: dict[int, float] = {}
    if arguments.gguf:
        command = llama_command(arguments.llama_batched_bench, arguments.gguf, device, arguments.threads)
        peers = llama_speeds(command, arguments.concurrency, arguments.n_prompt, arguments.n_gen)
    rows = [row_of(record, peers.get(record["max_concurrency"])) for record in records]
    known = device == "cuda" and (arguments.n_prompt, arguments.n_gen) == (GOAL_PROMPT, GOAL_ANSWER)
    goals = GOALS if known and not arguments.skip_goals else {}
    first = records[0]
    graph = "--cuda_graph" if first["cuda_graph"] else "no graph"
    print(
        f"\n{first['device']}, torch {first['torch']}, {graph}; about {arguments.n_prompt} + {arguments.n_gen} tokens each"
    )
    print(f"\n{render(rows, goals)}\n")
    found = findings(rows, goals)
    if arguments.json:
        found_rows = [asdict(row) | {"ratio": row.ratio} for row in rows]
        arguments.json.write_text(
            json.dumps({"loads": found_rows, "goals": [asdict(one) for one in found], "records": records}) + "\n"
        )
    return told(found)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--cuda_graph", "--cuda-graph", action="store_true")
    parser.add_argument("--concurrency", type=numbers, default=[*GOALS], metavar="N,N")
    parser.add_argument("-p", "--n-prompt", type=int, default=GOAL_PROMPT)
    parser.add_argument("-n", "--n-gen", type=int, default=GOAL_ANSWER)
    parser.add_argument("--range-ratio", type=float, default=0.2)
    parser.add_argument("--requests", type=int, help="of each number of callers (default: as `ostinato bench --load`)")
    add_llama_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="see `ostinato bench --plot`")
    parser.add_argument("--skip-goals", action="store_true")
    arguments = parser.parse_args(words)
    check_llama_options(parser, arguments)
    arguments.concurrency = sorted({*arguments.concurrency})
    return arguments


# --- measuring


def ours(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of `ostinato bench --load`, one per number of callers."""
    words = ["--load", "--concurrency", ",".join(map(str, arguments.concurrency))]
    words += ["-p", str(arguments.n_prompt), "-n", str(arguments.n_gen), "--range-ratio", str(arguments.range_ratio)]
    words += ["--cuda_graph", "on" if arguments.cuda_graph else "off"]
    for option in ("requests", "plot"):
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option}", str(value)]
    records: list[dict[str, Any]] = json.loads(ostinato("bench", str(arguments.artifact), *words, "--output", "json"))
    return records


def row_of(record: Mapping[str, Any], peer: float | None) -> Row:
    """The row for one record of `ours`. Ends the script if all requests failed: there are no times then."""
    if not record["completed"]:
        fail(f"all requests of {record['max_concurrency']} callers failed: {record['error']}")
    return Row(
        callers=record["max_concurrency"],
        speed=record["output_throughput"],
        steady_speed=record["steady_output_throughput"],
        first_ms=record["median_ttft_ms"],
        itl_ms=record["median_itl_ms"],
        p99_itl_ms=record["p99_itl_ms"],
        failed=record["failed"],
        peer=peer,
    )


def llama_speeds(command: Sequence[str], concurrency: Sequence[int], prompt: int, answer: int) -> dict[int, float]:
    """Run llama-batched-bench. Returns number of sequences -> generated tokens over its whole time, in tokens/s."""
    words = llama_words(command, prompt, answer, concurrency)
    speeds = read_llama(llama_output(words))
    missing = [str(number) for number in concurrency if number not in speeds]
    if missing:
        fail(f"llama-batched-bench did not measure {', '.join(missing)} sequences: {' '.join(words)}")
    return speeds


def read_llama(text: str) -> dict[int, float]:
    """Number of sequences -> generated tokens over the time of prompts and generation, from llama-batched-bench's jsonl; of
    several such lines, the last."""
    return {record["pl"]: record["pl"] * record["tg"] / record["t"] for record in llama_records(text)}


# --- what was found


def findings(rows: Sequence[Row], goals: Mapping[int, Goal]) -> list[Finding]:
    """Findings for the goals of what was measured, then for failures, then for the comparison with llama.cpp."""
    found = []
    for row in rows:
        if (goal := goals.get(row.callers)) is not None:
            fast, even = row.speed >= goal.speed, row.p99_itl_ms <= goal.p99_itl_ms
            found.append(
                Finding(f"{row.callers}: output", f"{row.speed:,.1f} tokens/s", fast, f"{goal.speed:,.0f} or more")
            )
            what, wanted = f"{row.callers}: between tokens, p99", f"{goal.p99_itl_ms:g} ms or less"
            found.append(Finding(what, f"{row.p99_itl_ms:.2f} ms", even, wanted))
    found += [Finding(f"{row.callers}: failed", f"{row.failed} requests", False, "0") for row in rows if row.failed]
    return found + [over_llama(str(row.callers), row.ratio) for row in rows if row.ratio is not None]


def render(rows: Sequence[Row], goals: Mapping[int, Goal]) -> str:
    """The table. Columns without any value are left out."""
    columns: dict[str, Side] = {"callers": "right"}
    columns |= dict.fromkeys(("output tokens/s", "steady", "llama.cpp", "ratio", "goal"), "right")
    columns["held"] = "left"
    columns |= dict.fromkeys(("first token, ms", "between tokens, ms", "p99", "p99 goal"), "right")
    columns["p99 held"] = "left"
    cells = []
    for row in rows:
        goal = goals.get(row.callers)
        cells.append(
            {
                "callers": str(row.callers),
                "output tokens/s": f"{row.speed:,.1f}",
                "steady": "" if row.steady_speed is None else f"{row.steady_speed:,.1f}",
                "llama.cpp": "" if row.peer is None else f"{row.peer:,.1f}",
                "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
                "goal": "" if goal is None else f"{goal.speed:,.0f}",
                "held": "" if goal is None else "yes" if row.speed >= goal.speed else "NO",
                "first token, ms": f"{row.first_ms:,.1f}",
                "between tokens, ms": f"{row.itl_ms:.2f}",
                "p99": f"{row.p99_itl_ms:.2f}",
                "p99 goal": "" if goal is None else f"{goal.p99_itl_ms:g}",
                "p99 held": "" if goal is None else "yes" if row.p99_itl_ms <= goal.p99_itl_ms else "NO",
            }
        )
    return filled_table(columns, cells)


if __name__ == "__main__":
    sys.exit(main())
