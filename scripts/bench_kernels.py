#!/usr/bin/env python3
"""Time every kernel of a decode step alone, at a model's shapes, against the time that its bytes take.

    python scripts/bench_kernels.py [--config DIR] [--quant FORMAT] [--group-size G] [--scale-dtype DTYPE]
                                    [--rows 1,8,64] [--kernels NAME,...] [--markdown] [--json FILE]

Each operation is launched some hundred times in one captured CUDA graph. Its weights and states differ from launch to launch,
and together exceed the GPU's L2 cache. Its activations are the same in each launch, because in a step they are in L2 as well.
A time is the median over repetitions.

"floor" is the time for the operation's bytes at the speed of a copy within the device's memory, measured by the same command.
"of copy" is floor / time. "early" is with programmatic edges in the graph, as the runtime does it: a kernel fetches its
weights while the kernel ahead of it ends. "per token" is how often a token needs the operation. An operation without a figure
there is measured for comparison only. An operation that has no kernel for the format is left out, and so is the sum.

With --rows there is one table for each number of rows. The rows are of different sessions, all at the same depth. "per step"
is how often such a step needs the operation. The bytes of routed experts are those of the experts that the rows are expected
to choose, if all are equally likely. For several rows and weights in a floating dtype, torch computes the products.
Operations around these products, which Inductor compiles in a program, are torch's own operators here.

Before it is timed, each operation is compared with its reference in float64. Before this call its outputs hold NaN. "error"
is the largest difference over the largest number.

stdout carries the table; progress and notes go to stderr.
Exit status: 0 done, 1 a kernel failed or gave a wrong result, 2 an error in the options or in the config.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from kernel_arguments import Arguments, RandomTensors, Shapes, add_format_options, format_of
from kernel_case import Case
from kernel_cases import decode_cases
from kernel_timing import Timing, check, copies_of, time_case

from ostinato.delegate.errors import OptionError, OstinatoError, first_line
from ostinato.delegate.memory import size_text
from ostinato.export.compile.inductor_internals import choose_ptxas
from ostinato.export.kernels.operands import MAX_ROWS
from ostinato.runner.bench.device import copy_speed, device_name
from ostinato.runner.bench.tables import Side, table

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
IN_L2 = "*"


@dataclass(frozen=True)
class Measurement:
    """Result of one case. `ordinary` and `early` are None if the case failed. `early` is also None on a GPU without early
    edges."""

    case: Case
    bytes_moved: int
    floor: float
    error: float | None = None
    failure: str | None = None
    in_l2: bool = False
    ordinary: Timing | None = None
    early: Timing | None = None

    @property
    def best(self) -> Timing | None:
        """The timing in the way that the runtime launches it."""
        return self.early or self.ordinary


@dataclass(frozen=True)
class Total:
    """Sum of all operations of a step at one depth. Times are in microseconds; None if an operation has no time."""

    rows: int
    depth: int
    floor: float
    ordinary: float | None
    early: float | None
    kernels: int | None


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        shapes = Shapes.of_folder(arguments.config, format_of(arguments), arguments.max_seq_len)
        cases = chosen_cases(shapes, arguments)
        if not torch.cuda.is_available():
            raise OptionError(f"timing kernels needs an NVIDIA GPU; torch {torch.__version__} sees none")
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choose_ptxas()
    speed = copy_speed(torch.device("cuda")).bytes_per_second
    found: list[Measurement] = []
    totals: list[Total] = []
    for rows in arguments.rows:
        some = [case for case in cases if case.rows == rows]
        if not some:
            continue
        ours = []
        for case in some:
            ours.append(measure(case, shapes, speed, arguments.reps))
            say(progress(ours[-1]))
        sums = [total(ours, depth) for depth in arguments.depth if complete(some, shapes, arguments.depth, rows)]
        print(f"{rows} rows\n\n" * (rows > 1) + render(ours, sums, markdown=arguments.markdown) + "\n", flush=True)
        found += ours
        totals += sums
    print("\n".join(notes(shapes, speed, found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(arguments, shapes, speed, found, totals), indent=1) + "\n")
    for one in found:
        if one.failure:
            print(f"failed: {one.case.name} of {one.case.rows} rows: {one.failure}", file=sys.stderr)
    return 1 if any(one.failure for one in found) else 0


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, metavar="DIR", help="folder with a config.json")
    add_format_options(parser, default="int4")
    add("--max-seq-len", type=positive, default=5120, help="positions of the KV caches (default: %(default)s)")
    add("--depth", type=numbers, default=(0, 4000), metavar="N,N", help="positions before the step (default: 0,4000)")
    add(
        "--rows", type=row_numbers, default=(1,), metavar="N,N", help=f"rows of the step, up to {MAX_ROWS} (default: 1)"
    )
    add("--kernels", metavar="NAME,NAME", help="only these: operations, or rows of the table by name")
    add("--reps", type=positive, default=20, help="how often each is timed (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures to a file as well")
    add("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args(words)


def positive(word: str) -> int:
    if word.isdecimal() and int(word) > 0:
        return int(word)
    raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, got {word!r}")


def numbers(text: str) -> tuple[int, ...]:
    if all(word.isdecimal() for word in text.split(",")):
        return tuple(dict.fromkeys(int(word) for word in text.split(",")))
    raise argparse.ArgumentTypeError(f"takes whole numbers separated by commas, got {text!r}")


def row_numbers(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if all(1 <= rows <= MAX_ROWS for rows in found):
        return found
    raise argparse.ArgumentTypeError(f"takes numbers of rows from 1 to {MAX_ROWS}, got {text!r}")


def chosen_cases(shapes: Shapes, arguments: argparse.Namespace) -> list[Case]:
    """The cases that the options choose. Raises OptionError if there is no such kernel or folder, or no room for a depth."""
    if max(arguments.depth) >= shapes.positions:
        raise OptionError(f"--depth {max(arguments.depth)} needs a --max-seq-len above it, got {shapes.positions}")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise OptionError(f"--json: no such folder: {arguments.json.absolute().parent}")
    every = [case for rows in arguments.rows for case in decode_cases(shapes, arguments.depth, rows)]
    for reason in dict.fromkeys(case.missing for case in every if case.missing):
        say(f"left out: {reason}")
    cases = [case for case in every if not case.missing]
    if arguments.kernels is None:
        return cases
    wanted = set(arguments.kernels.split(","))
    known = [name for case in cases for name in (case.function, case.name)]
    if unknown := sorted(wanted.difference(known)):
        raise OptionError(f"--kernels: no {', '.join(unknown)}; there are: {', '.join(dict.fromkeys(known))}")
    return [case for case in cases if wanted & {case.function, case.name}]


def complete(cases: Sequence[Case], shapes: Shapes, depths: tuple[int, ...], rows: int) -> bool:
    """Whether `cases` has all operations that a step needs."""
    names = {case.name for case in cases}
    return all(case.name in names for case in decode_cases(shapes, depths, rows) if case.calls)


def measure(case: Case, shapes: Shapes, speed: float, repetitions: int) -> Measurement:
    """Check and time one case. A failure is written into the result, so that the next case can follow."""
    moved = case.bytes_moved(shapes)
    floor = moved / speed * 1e6
    torch.manual_seed(0)
    error = None
    try:
        with torch.inference_mode():
            found = check(case, shapes, "cuda")
            error = found.error
            if found.failure:
                return Measurement(case, moved, floor, error, found.failure)
            torch.cuda.empty_cache()
            l2_bytes = torch.cuda.get_device_properties().L2_cache_size
            copies, in_l2 = copies_of(case, shapes, l2_bytes, torch.cuda.mem_get_info()[0])
            sets = argument_sets(case, shapes, copies)
            ordinary = time_case(case, sets, repetitions, early=False)
            early = time_case(case, sets, repetitions, early=True) if has_early_edges() else None
    except Exception as problem:  # from Triton's compiler, the driver or memory: the table shows its message
        return Measurement(case, moved, floor, error, first_line(problem))
    return Measurement(case, moved, floor, error, None, in_l2, ordinary, early)


def argument_sets(case: Case, shapes: Shapes, copies: int) -> list[Arguments]:
    """Make `copies` sets of arguments for successive launches. Each has new constants and state; all have one set of
    activations."""
    first = case.arguments(RandomTensors(shapes, "cuda"))
    activations = {name: first[name] for name in case.activations}
    return [first, *({**case.arguments(RandomTensors(shapes, "cuda")), **activations} for _ in range(copies - 1))]


def has_early_edges() -> bool:
    """Whether the GPU can start a kernel before the kernel ahead of it has ended."""
    return torch.cuda.get_device_capability() >= (9, 0)


def total(found: Sequence[Measurement], depth: int) -> Total:
    """Sum the cases of a step at `depth`. All of `found` have one number of rows."""
    needed = [one for one in found if one.case.calls and one.case.depth in (None, depth)]

    def time(timings: Sequence[Timing | None]) -> float | None:
        known = [timing.microseconds * one.case.calls for timing, one in zip(timings, needed, strict=True) if timing]
        return sum(known) if len(known) == len(needed) else None

    kernels = [one.best.kernels * one.case.calls for one in needed if one.best and one.best.kernels is not None]
    return Total(
        found[0].case.rows,
        depth,
        sum(one.floor * one.case.calls for one in needed),
        time([one.ordinary for one in needed]),
        time([one.early for one in needed]),
        sum(kernels) if len(kernels) == len(needed) else None,
    )


COLUMNS: dict[str, Side] = {
    "kernel": "left",
    "shape": "left",
    "per token": "right",
    "bytes": "right",
    "floor us": "right",
    "us": "right",
    "of copy": "right",
    "early us": "right",
    "early of copy": "right",
    "us per token": "right",
    "error": "right",
}


def render(found: Sequence[Measurement], totals: Sequence[Total], *, markdown: bool) -> str:
    """The table for one number of rows: one line per case, then one per depth for the whole step. No newline at the end."""
    columns = COLUMNS
    if found[0].case.rows > 1:
        columns = {name.replace("per token", "per step"): side for name, side in COLUMNS.items()}
    return table(columns, [*map(cells_of, found), *map(total_cells, totals)], markdown)


def cells_of(found: Measurement) -> tuple[str, ...]:
    best, case = found.best, found.case
    return (
        case.name + IN_L2 * found.in_l2,
        case.shape,
        str(case.calls) if case.calls else "",
        size_text(found.bytes_moved, 2),
        f"{found.floor:.2f}",
        *timing_cells(found.floor, microseconds(found.ordinary)),
        *timing_cells(found.floor, microseconds(found.early)),
        f"{best.microseconds * case.calls:,.1f}" if best and case.calls else "",
        "" if found.error is None else f"{found.error:.1e}",
    )


def total_cells(total: Total) -> tuple[str, ...]:
    best = total.early or total.ordinary
    return (
        f"{'one token' if total.rows == 1 else f'{total.rows} tokens'} at depth {total.depth}",
        "" if best is None else f"{total.rows * 1e6 / best:,.0f} tokens/s",
        "" if total.kernels is None else f"{total.kernels} kernels",
        "",
        f"{total.floor:,.1f}",
        *timing_cells(total.floor, total.ordinary),
        *timing_cells(total.floor, total.early),
        "" if best is None else f"{best:,.1f}",
        "",
    )


def microseconds(timing: Timing | None) -> float | None:
    return None if timing is None else timing.microseconds


def timing_cells(floor: float, time: float | None) -> tuple[str, str]:
    return ("", "") if time is None else (f"{time:,.2f}", f"{floor / time:.0%}")


def notes(shapes: Shapes, speed: float, found: Sequence[Measurement]) -> list[str]:
    form, dtype = shapes.form, shapes.config.dtype
    weights = f"{form or dtype} weights" + (f", {form.scale_dtype} scales".replace("torch.", "") if form else "")
    lines = [
        f"{device_name(torch.device('cuda'))}, torch {torch.__version__}, triton {importlib.metadata.version('triton')}, "
        f"{datetime.now().astimezone().date()}; copy {speed / 1e9:,.1f} GB/s, read and written",
        f"{weights}, {dtype} activations, max_seq_len {shapes.positions}",
    ]
    if any(one.in_l2 for one in found):
        lines.append(f"{IN_L2} its buffers fit in L2 together: the floor is not what holds it")
    return lines


def progress(found: Measurement) -> str:
    name = f"{found.case.name}, {found.case.rows} rows" if found.case.rows > 1 else found.case.name
    if found.best is None:
        return f"{name}: failed"
    return f"{name}: {found.best.microseconds:.2f} us, floor {found.floor:.2f} us"


def record(
    arguments: argparse.Namespace, shapes: Shapes, speed: float, found: Sequence[Measurement], totals: Sequence[Total]
) -> dict[str, Any]:
    """The content of the file that --json writes. Times are in microseconds, null if there is none."""
    form = shapes.form
    return {
        "config": str(arguments.config),
        "quant": arguments.quant,
        "group_size": None if form is None else form.group_size,
        "scale_dtype": None if form is None else arguments.scale_dtype,
        "max_seq_len": arguments.max_seq_len,
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "copy_bytes_per_second": speed,
        "kernels": [
            {
                "name": one.case.name,
                "shape": one.case.shape,
                "rows": one.case.rows,
                "depth": one.case.depth,
                "calls": one.case.calls,
                "bytes": one.bytes_moved,
                "floor_us": one.floor,
                "us": microseconds(one.ordinary),
                "early_us": microseconds(one.early),
                "kernels_per_call": one.best.kernels if one.best else None,
                "in_l2": one.in_l2,
                "error": one.error,
                "failure": one.failure,
            }
            for one in found
        ],
        "totals": [
            {
                "rows": one.rows,
                "depth": one.depth,
                "floor_us": one.floor,
                "us": one.ordinary,
                "early_us": one.early,
                "kernels": one.kernels,
            }
            for one in totals
        ],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
