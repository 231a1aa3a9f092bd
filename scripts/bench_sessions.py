#!/usr/bin/env python3
"""Time what moves a session's state, each beside a plain copy of the same bytes: snapshot, restore, fork, offload and onload.

    python scripts/bench_sessions.py ARTIFACT [--cuda_graph] [--depths 4000,32000] [-r 20] [--json FILE] [--skip-goals]

The session has as many tokens as a depth says. A depth that does not fit in max_seq_len is left out. Times are medians of -r
repetitions, of the wall between two synchronisations; on a GPU "host us" is until the call returns. A plain copy is one call
of torch's `copy_` over as many bytes in one piece: within the device's memory, or over the bus from or to pinned memory.
Lines below the table say how long a step of another session takes, alone and beside an offload that is under way.

The goals are for Qwen3.5-35B-A3B on one NVIDIA H200: behind 4,000 tokens a snapshot and a restore take at most 60 us each,
and a fork at most 100 us; an offload and an onload take at most 1.3 times as long as a plain copy.

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
from bench_commands import numbers

from ostinato.delegate import Growth, OptionError, OstinatoError
from ostinato.delegate.memory import size_text
from ostinato.runner import Engine, Session
from ostinato.runner.bench.device import device_name, synchronize
from ostinato.runner.bench.tables import Side, table

# Name of an operation -> most microseconds, behind GOAL_DEPTH tokens or fewer.
GOALS, GOAL_DEPTH = {"snapshot": 60.0, "restore": 60.0, "fork": 100.0}, 4000
MAX_OVER_PLAIN = 1.3
WARM = 3
Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operation: its bytes, its median time, that of the host for it, and that of a plain copy of as many bytes."""

    name: str
    depth: int
    nbytes: int
    us: float
    host_us: float
    plain_us: float

    @property
    def goal(self) -> float | None:
        """The most microseconds that it may take."""
        if self.name in GOALS:
            return GOALS[self.name] if self.depth <= GOAL_DEPTH else None
        return MAX_OVER_PLAIN * self.plain_us


@dataclass(frozen=True)
class Steps:
    """Microseconds of a step of another session, alone and beside an offload."""

    depth: int
    alone_us: float
    beside_us: float


class Bench:
    """Measures with one engine, with room for two sessions and two snapshots."""

    def __init__(self, engine: Engine, repetitions: int) -> None:
        self._engine, self._repetitions = engine, repetitions
        self._device = engine.program.device

    def rows(self, depth: int) -> list[Row]:
        """All operations with a session of `depth` tokens."""
        with self._engine.open_session() as session:
            session.prefill([place % 1000 for place in range(depth)])
            self._engine.step([session])
            state = self._engine.program.rows_of(Growth.SLOTS).row_bytes
            session.offload()
            assert session._offloaded is not None
            moved = session._offloaded.rows.nbytes
            session.onload()
            within, out, back = self._plain(state), self._plain(moved, to="host"), self._plain(moved, to="device")
            return [
                Row(name, depth, nbytes, us, host_us, plain)
                for name, nbytes, (us, host_us), plain in (
                    *((name, state, found, within) for name, found in self._copies(session).items()),
                    ("offload", moved, self._median(session.offload, session.onload), out),
                    ("onload", moved, self._median(session.onload, session.offload, before=session.offload), back),
                )
            ]

    def steps(self, depth: int) -> Steps:
        """Steps of a session, while another one with `depth` tokens is offloaded."""
        engine = self._engine
        with engine.open_session() as session, engine.open_session() as other:
            session.prefill([place % 1000 for place in range(depth)])
            other.prefill([1, 2, 3])

            def step() -> None:
                engine.step([other])

            (alone, _) = self._median(step)

            def beside() -> float:
                session.offload()
                begin = time.perf_counter()
                step()
                spent = 1e6 * (time.perf_counter() - begin)
                synchronize(self._device)
                session.onload()
                synchronize(self._device)
                return spent

            found = [beside() for _ in range(WARM + self._repetitions)][WARM:]
            return Steps(depth, alone, statistics.median(found))

    def _copies(self, session: Session) -> dict[str, tuple[float, float]]:
        kept = session.snapshot()
        taken = []
        forks = []
        found = {
            "snapshot": self._median(lambda: taken.append(session.snapshot()), lambda: taken.pop().close()),
            "restore": self._median(lambda: session.restore(kept)),
            "fork": self._median(lambda: forks.append(session.fork()), lambda: forks.pop().close()),
        }
        kept.close()
        return found

    def _plain(self, nbytes: int, to: str = "within") -> float:
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        if to == "within":
            other = torch.zeros_like(on_device)
        else:
            other = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        source, target = (other, on_device) if to == "device" else (on_device, other)
        return self._median(lambda: target.copy_(source, non_blocking=True))[0]

    def _median(self, work: Work, after: Work | None = None, before: Work | None = None) -> tuple[float, float]:
        """Median time of `work`, and of the host for it. `after` follows each time, and does not count."""
        if before is not None:
            before()
        times = []
        for number in range(WARM + self._repetitions):
            synchronize(self._device)
            begin = time.perf_counter()
            work()
            returned = time.perf_counter()
            synchronize(self._device)
            times.append((1e6 * (time.perf_counter() - begin), 1e6 * (returned - begin)))
            # With `before`, the last time leaves the state as it was.
            if after is not None and (before is None or number < WARM + self._repetitions - 1):
                after()
        wall, host = zip(*times[WARM:], strict=True)
        return statistics.median(wall), statistics.median(host)


def render(rows: Sequence[Row]) -> str:
    cells = [
        [
            row.name,
            f"{row.depth:,}",
            size_text(row.nbytes),
            f"{row.us:,.1f}",
            f"{row.host_us:,.1f}",
            f"{row.plain_us:,.1f}",
            f"{row.us / row.plain_us:.2f}",
            f"{row.nbytes / row.us / 1e3:,.1f}",
        ]
        for row in rows
    ]
    columns: dict[str, Side] = {"operation": "left"}
    columns |= dict.fromkeys(("depth", "bytes", "us", "host us", "plain copy, us", "ratio", "GB/s"), "right")
    return table(columns, cells)


def misses(rows: Sequence[Row]) -> list[str]:
    """One line for each operation that takes longer than its goal."""
    return [
        f"{row.name} behind {row.depth:,} tokens takes {row.us:,.1f} us, the goal is {row.goal:,.1f} us"
        for row in rows
        if row.goal is not None and row.us > row.goal
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", metavar="ARTIFACT")
    parser.add_argument("--cuda_graph", action="store_true")
    parser.add_argument("--depths", type=numbers, default=[4000, 32_000], metavar="N,N")
    parser.add_argument("-r", "--repetitions", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true", help="for another model or GPU")
    arguments = parser.parse_args(words)
    try:
        with Engine.load(arguments.artifact, cuda_graph=arguments.cuda_graph, sessions=2, snapshots=2) as engine:
            depths = []
            for depth in arguments.depths:
                if depth + 2 <= engine.max_seq_len:
                    depths.append(depth)
                else:
                    print(f"note: left out: {depth:,} tokens, max_seq_len is {engine.max_seq_len:,}", file=sys.stderr)
            if not depths:
                raise OptionError("no depth is left")
            bench = Bench(engine, arguments.repetitions)
            rows = [row for depth in depths for row in bench.rows(depth)]
            steps = [bench.steps(depth) for depth in depths]
            print(render(rows))
            for one in steps:
                print(
                    f"a step of another session: {one.alone_us:,.0f} us; {one.beside_us:,.0f} us beside an offload behind "
                    f"{one.depth:,} tokens"
                )
            print(f"\n{device_name(engine.program.device)}, torch {torch.__version__}")
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        found = {"rows": [asdict(row) for row in rows], "steps": [asdict(one) for one in steps]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [] if arguments.skip_goals else misses(rows)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
