#!/usr/bin/env python3
"""Time whole layers of a step as the runtime launches them: all kernels in one captured graph, with early edges.

    python scripts/bench_layers.py [--config DIR] [--quant FORMAT] [--group-size G] [--scale-dtype DTYPE]
                                   [--rows 1,2,4,8] [--depth N] [--layers N] [--markdown]

bench_kernels.py times each operation among launches of its own kind. Here the operations of a layer follow each other: a
kernel waits for the one ahead of it, and shares the memory with the one behind it. Each layer has weights and states of its
own. What a layer's operations would hand on to each other is random, and at one place for all layers.

For each kind of layer and number of rows, the first line has the time of a layer, and its floor: the time for its bytes at
the speed of a copy within the device's memory, measured by the same command. Routed experts count as in bench_kernels.py.
The other lines have a layer's kernels in their order. "us" is the time from the end of the kernel ahead to a kernel's own
end, the mean of all layers. A profiler makes all times longer, those of few rows most: the kernels' sum is more than the
layer.

stdout carries the tables; notes go to stderr.
Exit status: 0 done, 2 an error in the options or in the config.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from bench_kernels import DEFAULT_CONFIG, argument_sets, has_early_edges, notes, positive, row_numbers, say
from kernel_arguments import Arguments, Shapes, add_format_options, format_of
from kernel_case import Case
from kernel_cases import layer_cases
from kernel_timing import captured, replay_microseconds

from ostinato.delegate.artifact.names import REQUIRED_AHEAD
from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.export.compile.inductor_internals import choose_ptxas
from ostinato.runner.bench.device import copy_speed
from ostinato.runner.bench.tables import Side, table

REPLAYS, REPETITIONS, PROFILED = 10, 8, 2
COLUMNS: dict[str, Side] = {"kernel": "left", "us": "right", "of the layer": "right"}


class Launch(NamedTuple):
    """One kernel that a profiler has seen; times in nanoseconds."""

    name: str
    begin: int
    end: int


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        shapes = Shapes.of_folder(arguments.config, format_of(arguments), arguments.depth + 1024)
        if not torch.cuda.is_available():
            raise OptionError(f"timing layers needs an NVIDIA GPU; torch {torch.__version__} sees none")
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choose_ptxas()
    speed = copy_speed(torch.device("cuda")).bytes_per_second
    for rows in arguments.rows:
        for kind, cases in layer_cases(shapes, arguments.depth, rows).items():
            missing = next((case.missing for case in cases if case.missing), None)
            if missing:
                say(f"left out: {missing}")
                continue
            floor = sum(case.bytes_moved(shapes) for case in cases) / speed * 1e6
            with torch.inference_mode():
                microseconds, kernels = time_layers(cases, shapes, arguments.layers)
            print(f"{kind}, {rows} rows\n\n{render(microseconds, floor, kernels, arguments.markdown)}\n", flush=True)
    print("\n".join(notes(shapes, speed, [])))
    return 0


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, metavar="DIR", help="folder with a config.json")
    add_format_options(parser, default="int4")
    add("--rows", type=row_numbers, default=(1, 2, 4, 8), metavar="N,N", help="rows of the step (default: 1,2,4,8)")
    add("--depth", type=int, default=200, metavar="N", help="positions before the step (default: %(default)s)")
    add("--layers", type=positive, default=8, metavar="N", help="layers in the graph (default: %(default)s)")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    return parser.parse_args(words)


def time_layers(cases: Sequence[Case], shapes: Shapes, layers: int) -> tuple[float, list[tuple[str, float]]]:
    """Time a graph with so many layers of these operations.

    Returns:
        (microseconds of a layer; for each of a layer's kernels its name and `own_times`).
    """
    torch.manual_seed(0)
    sets = [argument_sets(case, shapes, layers) for case in cases]
    for case, arguments in zip(cases, sets, strict=True):
        case.kernel(*arguments[0].values())
    torch.cuda.synchronize()
    graph = _captured(cases, sets, layers)
    try:
        samples = [replay_microseconds(graph, REPLAYS) / layers for _ in range(1 + REPETITIONS)]
        return statistics.median(samples[1:]), own_times(_profiled(graph), layers)
    finally:
        graph.reset()


def _captured(cases: Sequence[Case], sets: Sequence[Sequence[Arguments]], layers: int) -> torch.cuda.CUDAGraph:
    def launch() -> None:
        for layer in range(layers):
            for case, arguments in zip(cases, sets, strict=True):
                case.kernel(*arguments[layer].values())

    graph, kernels = captured(launch, REQUIRED_AHEAD if has_early_edges() else None)
    say(f"{layers} layers, {kernels} kernels")
    return graph


def _profiled(graph: torch.cuda.CUDAGraph) -> list[Launch]:
    """All kernels of PROFILED replays."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Launch(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if "CUDA" in str(event.device_type())
    ]


def own_times(launches: Sequence[Launch], layers: int) -> list[tuple[str, float]]:
    """The kernels of a layer in their order, and the mean microseconds from the end of the kernel ahead to their own end.

    These add up to the layer's time. A kernel behind a pause counts from its own beginning.
    """
    ordered = sorted(launches, key=lambda one: one.begin)
    count = len(ordered) // (layers * PROFILED)
    sums = [0.0] * count
    end = 0
    for number, one in enumerate(ordered):
        sums[number % count] += max(one.end - max(one.begin, end), 0) / 1e3
        end = max(end, one.end)
    return [(one.name, total / (layers * PROFILED)) for one, total in zip(ordered, sums, strict=False)]


def render(microseconds: float, floor: float, kernels: Sequence[tuple[str, float]], markdown: bool) -> str:
    """The table of one layer, without a newline at the end."""
    sum_of_all = sum(time for _, time in kernels)
    lines = [("a layer", f"{microseconds:.1f}", f"floor {floor:.1f}, {floor / microseconds:.0%}")]
    lines += [(name, f"{time:.2f}", f"{time / sum_of_all:.0%}") for name, time in kernels]
    return table(COLUMNS, lines, markdown)


if __name__ == "__main__":
    sys.exit(main())
