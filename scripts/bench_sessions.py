#!/usr/bin/env python3
"""Time what moves a session's state: snapshot, restore and fork, each beside a plain copy of the same bytes.

    python scripts/bench_sessions.py ARTIFACT [--depth 4000] [-r 20] [--json FILE] [--skip-goals]

The session has --depth tokens. Times are medians of -r repetitions, of the wall between two synchronisations. A plain copy is
one call of torch's `copy_` over as many bytes in one piece. Bytes over a time are GB/s; within the device's memory each byte
is read and written, and counts once.

The goals are for Qwen3.5-35B-A3B on one NVIDIA H200: a snapshot and a restore take at most 60 us each, a fork at most 100 us.

Exit status: 0 all held, 1 not all, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_commands import fail

from ostinato.delegate import Growth, OstinatoError
from ostinato.delegate.memory import size_text
from ostinato.runner import Engine, Session
from ostinato.runner.bench.device import device_name, synchronize
from ostinato.runner.bench.tables import Side, table

# Name of an operation -> most microseconds.
GOALS = {"snapshot": 60.0, "restore": 60.0, "fork": 100.0}
WARM = 5


@dataclass(frozen=True)
class Row:
    """One operation: the bytes that it copies, its median time, and that of a plain copy of as many bytes."""

    name: str
    nbytes: int
    us: float
    plain_us: float

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.us / 1e3


def median_us(work: Callable[[], object], after: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median time of `work`. `after` follows each time, and does not count."""
    times = []
    for _ in range(WARM + repetitions):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - begin))
        after()
    return statistics.median(times[WARM:])


def plain_us(nbytes: int, device: torch.device, repetitions: int) -> float:
    """Median time of a copy of so many bytes within the device's memory."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return median_us(lambda: target.copy_(source), lambda: None, device, repetitions)


def measure(engine: Engine, depth: int, repetitions: int) -> list[Row]:
    device = engine.program.device
    row_bytes = engine.program.rows_of(Growth.SLOTS).row_bytes
    plain = plain_us(row_bytes, device, repetitions)
    made: list[Session] = []
    with engine.open_session() as session:
        session.prefill([place % 1000 for place in range(depth)])
        kept, taken = session.snapshot(), [session.snapshot()]

        def again() -> None:
            taken.append(session.snapshot())

        taken.pop().close()
        found = {
            "snapshot": median_us(again, lambda: taken.pop().close(), device, repetitions),
            "restore": median_us(lambda: session.restore(kept), lambda: None, device, repetitions),
            "fork": median_us(lambda: made.append(session.fork()), lambda: made.pop().close(), device, repetitions),
        }
        kept.close()
    return [Row(name, row_bytes, us, plain) for name, us in found.items()]


def render(rows: Sequence[Row]) -> str:
    cells = [
        [
            row.name,
            size_text(row.nbytes),
            f"{row.us:.1f}",
            f"{row.plain_us:.1f}",
            f"{row.us / row.plain_us:.2f}",
            f"{row.speed:.1f}",
        ]
        for row in rows
    ]
    columns: dict[str, Side] = {"operation": "left"}
    columns |= dict.fromkeys(("bytes", "us", "plain copy, us", "ratio", "GB/s"), "right")
    return table(columns, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", metavar="ARTIFACT")
    parser.add_argument(
        "--depth", type=int, default=4000, metavar="N", help="tokens of the session (default: %(default)s)"
    )
    parser.add_argument("-r", "--repetitions", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true", help="for another model or GPU")
    arguments = parser.parse_args()
    try:
        with Engine.load(arguments.artifact, sessions=2, snapshots=2) as engine:
            rows = measure(engine, min(arguments.depth, engine.max_seq_len - 2), arguments.repetitions)
            print(render(rows))
            print(f"\n{device_name(engine.program.device)}, torch {torch.__version__}")
    except OstinatoError as error:
        fail(str(error))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.us > GOALS[row.name] and not arguments.skip_goals]
    for row in missed:
        print(f"MISSED: {row.name}: {row.us:.1f} us, the goal is {GOALS[row.name]:.0f} us", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
