#!/usr/bin/env python3
"""Time prompts of several lengths on a GPU: with a CUDA graph for their bucket, and without graphs.

    python scripts/bench_prompts.py ARTIFACT [--lengths 16,17,...] [--depths 30000,120000] [--buckets 16,...] [-r 20]
                                    [--json FILE] [--skip-goals]

--depths are positions before a prompt of 16 tokens. A depth that does not fit in max_seq_len is left out, and the script says
so: export with --max-seq-len 131072.

The table has medians of the time of `prefill` between two synchronisations ("ms"), and of the time until `prefill` returns
while the GPU works ("host us"). "kernels" is the sum of the times that a profiler gives for a prompt's kernels, without and
with a graph. Lines below the table say what `Engine.warm_up` took.

The goals are for Qwen3.5-35B-A3B in int4 on one NVIDIA H200:
- With a graph, prompts of 16, 64 and 128 tokens take at most 4.5, 7.5 and 9 ms, and one of 512 runs at 28,000 tokens/s.
- With a graph, prompts of 16 tokens behind 30,000 and 120,000 positions take at most 6 and 8 ms.
- No length that has a bucket is slower with a graph, and the host takes at most 100 us for it.
- A prompt of 16 tokens takes at most 3 % more than its kernels.
- All buckets together take at most 300 MB and 2 s.

Exit status: 0 all held, 1 not all, 2 an error: no GPU, or an artifact that does not run here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_commands import numbers
from torch.autograd import DeviceType

from ostinato.delegate import OptionError, OstinatoError
from ostinato.delegate.memory import size_text
from ostinato.runner import Engine, WarmUp
from ostinato.runner.bench.tables import Side, table
from ostinato.runner.model.batch import Run
from ostinato.runner.model.buckets import bucket_of

# Lengths at both ends of each bucket, and beyond the last bucket.
LENGTHS = (16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 193, 256, 257, 300, 384, 385, 512, 700)
# Positions before a prompt of DEEP_TOKENS.
DEPTHS, DEEP_TOKENS = (30_000, 120_000), 16
# (tokens, depth) -> most milliseconds, with a graph.
GOALS = {(16, 0): 4.5, (64, 0): 7.5, (128, 0): 9.0, (512, 0): 512 / 28.0, (16, 30_000): 6.0, (16, 120_000): 8.0}
# Medians of the same work differ by this fraction from one measurement to the next.
NOISE = 0.015
MAX_HOST_US, MAX_OVER_KERNELS, MAX_BYTES, MAX_SECONDS = 100, 0.03, 300e6, 2


@dataclass(frozen=True)
class Times:
    """Times of one length in one mode: wall time in milliseconds, time of the host in microseconds."""

    wall_ms: float
    host_us: float


@dataclass(frozen=True)
class Row:
    """Times of one length at one depth. `kernels_ms` and `graph_kernels_ms`: sums over kernels, without and with a graph."""

    tokens: int
    depth: int
    bucket: int | None
    plain: Times
    graph: Times
    kernels_ms: float
    graph_kernels_ms: float

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens" + (f" behind {self.depth:,}" if self.depth else "")

    @property
    def goal(self) -> float | None:
        """Most milliseconds; None if there is no goal."""
        return GOALS.get((self.tokens, self.depth))

    @property
    def cells(self) -> tuple[str, ...]:
        plain, graph = self.plain, self.graph
        return (
            str(self.tokens),
            f"{self.depth:,}",
            str(self.bucket or ""),
            f"{plain.wall_ms:.2f}",
            f"{graph.wall_ms:.2f}",
            "" if self.goal is None else f"{self.goal:.2f}",
            f"{plain.wall_ms / graph.wall_ms:.2f}",
            f"{self.kernels_ms:.2f}",
            f"{self.graph_kernels_ms:.2f}",
            f"{plain.host_us:,.0f}",
            f"{graph.host_us:,.0f}",
        )


COLUMNS: dict[str, Side] = dict.fromkeys(
    (
        *("tokens", "depth", "bucket", "no graph ms", "graph ms", "goal", "ratio"),
        *("kernels", "kernels in graph", "host us", "with graph"),
    ),
    "right",
)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    try:
        if not torch.cuda.is_available():
            raise OptionError(f"timing prompts needs an NVIDIA GPU; torch {torch.__version__} sees none")
        rows, done = measure(arguments)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(COLUMNS, [row.cells for row in rows]))
    print()
    for one in done.captured:
        print(f"{one.method} of {one.rows}: {one.seconds:.2f} s, {size_text(one.pool_bytes)}{given_up(one.given_up)}")
    print(f"together: {done.seconds:.2f} s, {size_text(done.pool_bytes)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"prompts": [asdict(row) for row in rows], "warm_up": asdict(done)}))
    missed = [] if arguments.skip_goals else misses(rows, done)
    for miss in missed:
        print(f"MISSED: {miss}")
    return 1 if missed else 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, metavar="N,N")
    parser.add_argument("--depths", type=numbers, default=DEPTHS, metavar="N,N")
    parser.add_argument("--buckets", type=numbers, metavar="N,N")
    parser.add_argument("-r", "--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace) -> tuple[list[Row], WarmUp]:
    """The times of each prompt, and what the warm-up took."""
    repetitions = arguments.repetitions
    with Engine.load(arguments.artifact) as engine:
        cases = cases_of(arguments.lengths, arguments.depths, engine.model.max_seq_len)
        plain = [times(engine, *case, repetitions) for case in cases]
    with Engine.load(arguments.artifact, cuda_graph=True, prefill_buckets=arguments.buckets) as engine:
        done = engine.warm_up()
        buckets = [bucket_of(engine.model.prefill_buckets, length) for length, _ in cases]
        graph = [times(engine, *case, repetitions) for case in cases]
        # Profiled after timing: once a process has been profiled, its launches are slow.
        graph_kernels = [kernels(engine, *case) for case in cases]
    with Engine.load(arguments.artifact) as engine:
        plain_kernels = [kernels(engine, *case) for case in cases]
    columns = zip(cases, buckets, plain, graph, plain_kernels, graph_kernels, strict=True)
    return [Row(*case, *others) for case, *others in columns], done


def given_up(reason: str | None) -> str:
    return f", without a graph: {reason}" if reason else ""


def cases_of(lengths: Sequence[int], depths: Sequence[int], max_seq_len: int) -> list[tuple[int, int]]:
    """The (tokens, depth) pairs to measure. Prints which depths are left out."""
    cases = [(length, 0) for length in lengths]
    for depth in depths:
        if depth + DEEP_TOKENS <= max_seq_len:
            cases.append((DEEP_TOKENS, depth))
        else:
            print(
                f"note: left out: {DEEP_TOKENS} tokens behind {depth:,}: max_seq_len is {max_seq_len:,}, export with "
                "--max-seq-len 131072 or so",
                file=sys.stderr,
            )
    return cases


def prompt_of(length: int) -> list[int]:
    return torch.randint(1000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def times(engine: Engine, length: int, depth: int, repetitions: int) -> Times:
    tokens = prompt_of(length)
    fill(engine, depth)
    for _ in range(3):
        engine.model.step([Run(0, tokens, depth)])
    walls, hosts = [], []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.model.step([Run(0, tokens, depth)])
        hosts.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - begin)
    return Times(1e3 * statistics.median(walls), 1e6 * statistics.median(hosts))


def kernels(engine: Engine, length: int, depth: int) -> float:
    """Milliseconds that the kernels of a prompt take, summed."""
    tokens = prompt_of(length)
    fill(engine, depth)
    engine.model.step([Run(0, tokens, depth)])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.model.step([Run(0, tokens, depth)])
        torch.cuda.synchronize()
    return sum(one.time_range.elapsed_us() for one in profile.events() if one.device_type == DeviceType.CUDA) / 1e3


def fill(engine: Engine, depth: int) -> None:
    """Prefill `depth` positions before the prompt that is measured.

    Each repetition of the prompt advances the delta nets' state. The time is the same from any state.
    """
    if depth:
        engine.model.step([Run(0, prompt_of(depth), 0)])


def misses(rows: list[Row], done: WarmUp) -> list[str]:
    found = []
    for row in rows:
        if row.goal is not None and row.graph.wall_ms > row.goal:
            found.append(f"{row.name} take {row.graph.wall_ms:.2f} ms with a graph, wanted: {row.goal:.2f} at most")
        if row.bucket and row.graph.wall_ms > row.plain.wall_ms * (1 + NOISE):
            found.append(f"{row.name} are slower with a graph")
        if row.bucket and row.graph.host_us > MAX_HOST_US:
            found.append(f"the host takes more than {MAX_HOST_US} us for {row.name}")
        if (row.tokens, row.depth) == (16, 0) and row.graph.wall_ms > row.graph_kernels_ms * (1 + MAX_OVER_KERNELS):
            found.append(f"a prompt of 16 takes more than {MAX_OVER_KERNELS:.0%} over its kernels")
    prompts = [one for one in done.captured if one.rows > 1]
    if sum(one.pool_bytes for one in prompts) > MAX_BYTES:
        found.append(f"the buckets take more than {size_text(MAX_BYTES)}")
    if sum(one.seconds for one in prompts) > MAX_SECONDS:
        found.append(f"the buckets take more than {MAX_SECONDS} s to capture")
    return found


if __name__ == "__main__":
    sys.exit(main())
