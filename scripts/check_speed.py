#!/usr/bin/env python3
"""Compare what `ostinato bench` measured with the goals.

    python scripts/check_speed.py BENCH.json [--decode N] [--loss 5] [--kernels 255] [--prefill N] [--host 40]
                                  [--export-seconds N] [--export 90]

BENCH.json is what `ostinato bench ARTIFACT -p 512 -n 128 -d 0,4000 --save BENCH.json` wrote. Decode counts with --cuda_graph:
at every other depth it may be at most LOSS percent slower than at depth 0. Prefill counts at depth 0, in its faster mode.
Python's time per token counts with --cuda_graph, in the median, without waits for the GPU; hold it against its goal where
nobody shares the host. With --export-seconds, the time that the export took counts too. The defaults are for Qwen3.5-35B-A3B
in int4 on one NVIDIA H200 with 16 cores: 95 % of the speeds that scripts/FIGURES.md states, and a third of what an export
took before its code was generated in several processes.

Exit status: 0 all held, 1 something did not, 2 an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.errors import OstinatoError
from ostinato.runner.bench.tables import Side, table

Records = list[dict[str, Any]]

# Tokens/s as FIGURES.md states them, which a test checks. Measured speeds differ by 1 or 2 % between measurements or
# machines.
STATED_DECODE = 1061
STATED_PREFILL = 29600
SHARE = 0.95


class RecordsError(OstinatoError):
    """The file is not what `ostinato bench --save` writes, or lacks a test."""


@dataclass(frozen=True)
class Finding:
    """One row of the table: what was measured, the result, whether it is enough, and what is wanted."""

    what: str
    found: str
    held: bool
    wanted: str


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bench", type=Path, metavar="BENCH.json")
    decode_goal, prefill_goal = SHARE * STATED_DECODE, SHARE * STATED_PREFILL
    add("--decode", type=float, default=decode_goal, metavar="N", help="tokens/s at depth 0, or more (%(default)g)")
    add("--loss", type=float, default=5, metavar="N", help="percent slower further on, or less (default: %(default)s)")
    add("--kernels", type=int, default=255, metavar="N", help="kernels per token, or fewer (default: %(default)s)")
    add("--prefill", type=float, default=prefill_goal, metavar="N", help="tokens/s, or more (default: %(default)g)")
    add("--host", type=float, default=40, metavar="N", help="Python's us per token, or fewer (default: %(default)s)")
    add("--export-seconds", type=float, metavar="N", help="seconds that the export took")
    add("--export", type=float, default=90, metavar="N", help="seconds that it may take (default: %(default)s)")
    arguments = parser.parse_args(words)
    try:
        records = read(arguments.bench)
        findings = [
            *decode(records, arguments.decode, arguments.loss / 100),
            kernels(records, arguments.kernels),
            prefill(records, arguments.prefill),
            host(records, arguments.host),
        ]
        if arguments.export_seconds is not None:
            findings.append(export(arguments.export_seconds, arguments.export))
    except RecordsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns: dict[str, Side] = {"what": "left", "measured": "right", "held": "left", "wanted": "left"}
    rows = [(one.what, one.found, "yes" if one.held else "NO", one.wanted) for one in findings]
    print(table(columns, rows))
    return 0 if all(finding.held for finding in findings) else 1


def read(path: Path) -> Records:
    records = read_json(path, RecordsError)
    keys = {"n_prompt", "n_gen", "n_depth", "cuda_graph", "median_ts"}
    keys |= {"kernels_per_token", "host_us_per_token", "fallback_reason"}
    if not isinstance(records, list) or not all(isinstance(one, dict) and keys <= one.keys() for one in records):
        raise RecordsError(f"{path} is not what `ostinato bench --save` writes")
    return records


def decode(records: Records, wanted: float, loss: float) -> list[Finding]:
    """Compare depth 0 with the goal, and the other depths with depth 0."""
    speeds = {one["n_depth"]: one["median_ts"] for one in records if one["n_gen"] and one["cuda_graph"]}
    if 0 not in speeds or len(speeds) < 2:
        raise RecordsError(
            "there is no decode with --cuda_graph at depth 0 and another one: bench with -n 128 -d 0,4000"
        )
    base = speeds.pop(0)
    findings = [Finding("decode at depth 0", f"{base:,.1f} tokens/s", base >= wanted, f"{wanted:,.0f} or more")]
    for depth, speed in sorted(speeds.items()):
        slower = 1 - speed / base
        aim = f"at most {loss:.0%} below depth 0 (it is {abs(slower):.1%} {'below' if slower > 0 else 'above'})"
        findings.append(Finding(f"decode at depth {depth}", f"{speed:,.1f} tokens/s", slower <= loss, aim))
    return findings


def kernels(records: Records, wanted: int) -> Finding:
    """Compare the number of kernels in the captured step with the goal. The step is the same at every depth."""
    decoding = next(one for one in records if one["n_gen"] and one["cuda_graph"])
    count = decoding["kernels_per_token"]
    if count is None:
        return Finding("kernels per token", "not counted", False, decoding["fallback_reason"] or "bench says why")
    return Finding("kernels per token", str(count), count <= wanted, f"{wanted} or fewer")


def prefill(records: Records, wanted: float) -> Finding:
    found = [(one["median_ts"], one["n_prompt"]) for one in records if one["n_prompt"] and not one["n_depth"]]
    if not found:
        raise RecordsError("there is no prefill at depth 0: bench with -p 512")
    speed, tokens = max(found)
    return Finding(f"prefill of {tokens}", f"{speed:,.1f} tokens/s", speed >= wanted, f"{wanted:,.0f} or more")


def host(records: Records, most: float) -> Finding:
    """Compare Python's time per token, of the slowest depth, with the goal."""
    times = [one["host_us_per_token"] for one in records if one["n_gen"] and one["cuda_graph"]]
    if None in times:
        return Finding("Python per token", "not known", False, "a GPU, whose waits can be told apart")
    return Finding("Python per token", f"{max(times):.1f} us", max(times) <= most, f"{most:g} us or less")


def export(seconds: float, most: float) -> Finding:
    return Finding("export", f"{seconds:.0f} s", seconds <= most, f"{most:.0f} s or less")


if __name__ == "__main__":
    sys.exit(main())
