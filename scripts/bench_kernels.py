#!/usr/bin/env python3
"""Time every kernel of a decode step alone, at a model's shapes, against the time that its bytes take.

    python scripts/bench_kernels.py [--config DIR] [--quant none] [--kernels NAME,...] [--json FILE] [--markdown]

Each operation is launched some hundred times in one captured CUDA graph, over weights and states that together exceed the
GPU's L2 cache, and over the same activations, which in a step lie in L2 as well; a time is the median over repetitions. Its
floor is its bytes over the speed of a copy within the device's memory, measured in the same run; "of copy" is floor / time.
"early": with programmatic edges in the graph, so that a kernel fetches its weights while the one ahead of it ends, as the
runtime does it. "per token" is how often a token needs the operation; one with no figure there is measured for comparison.

Before it is timed, each operation is compared with its reference in float64, its outputs holding NaN before; "error" is
the largest difference over the largest number.

stdout carries the table; progress and notes go to stderr.
Exit status: 0 done, 1 a kernel failed or gave a wrong result, 2 an error in what was asked or given.
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
from kernel_arguments import Arguments, Draw, Shapes
from kernel_cases import Case, decode_cases
from kernel_timing import Timing, check, copies_of, time_case

from ostinato.delegate.errors import OptionError, OstinatoError, first_line
from ostinato.delegate.memory import size_text
from ostinato.export.formats import GROUP_SIZES
from ostinato.runner.device import copy_speed, device_name
from ostinato.runner.tables import Side, table

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
IN_L2 = "*"


@dataclass(frozen=True)
class Row:
    """What was found of a case. `ordinary` and `early` are None where it failed, or this machine has no such edges."""

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
        """As the runtime launches it."""
        return self.early or self.ordinary


@dataclass(frozen=True)
class Total:
    """All operations of a token at one depth. Times in microseconds; None where one of them has none."""

    depth: int
    floor: float
    ordinary: float | None
    early: float | None
    kernels: int | None


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        group_size = arguments.group_size if arguments.quant == "int4" else None
        shapes = Shapes.of_folder(arguments.config, group_size, arguments.max_seq_len)
        cases = chosen_cases(shapes, arguments)
        if not torch.cuda.is_available():
            raise OptionError(f"timing kernels needs an NVIDIA GPU; torch {torch.__version__} sees none")
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    speed = copy_speed(torch.device("cuda")).bytes_per_second
    rows = []
    for case in cases:
        rows.append(measure(case, shapes, speed, arguments.reps))
        say(progress(rows[-1]))
    totals = [total(rows, depth) for depth in arguments.depth if complete(cases, shapes, arguments.depth)]
    print(render(rows, totals, markdown=arguments.markdown))
    print("\n".join(["", *notes(shapes, speed, rows)]))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(arguments, speed, rows, totals), indent=1) + "\n")
    for row in rows:
        if row.failure:
            print(f"failed: {row.case.name}: {row.failure}", file=sys.stderr)
    return 1 if any(row.failure for row in rows) else 0


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, metavar="DIR", help="folder with a config.json")
    add("--quant", choices=("int4", "none"), default="int4", help="format of the weights (default: %(default)s)")
    add(
        "--group-size",
        type=int,
        default=128,
        choices=GROUP_SIZES,
        help="elements that share a scale (default: %(default)s)",
    )
    add("--max-seq-len", type=positive, default=5120, help="positions of the KV caches (default: %(default)s)")
    add("--depth", type=numbers, default=(0, 4000), metavar="N,N", help="positions before the step (default: 0,4000)")
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


def chosen_cases(shapes: Shapes, arguments: argparse.Namespace) -> list[Case]:
    """Raises OptionError where there is no such kernel, or no room for a depth."""
    if max(arguments.depth) >= shapes.positions:
        raise OptionError(f"--depth {max(arguments.depth)} needs a --max-seq-len above it, got {shapes.positions}")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise OptionError(f"--json: no such folder: {arguments.json.absolute().parent}")
    cases = decode_cases(shapes, arguments.depth)
    if arguments.kernels is None:
        return cases
    wanted = set(arguments.kernels.split(","))
    known = [name for case in cases for name in (case.function, case.name)]
    if unknown := sorted(wanted.difference(known)):
        raise OptionError(f"--kernels: no {', '.join(unknown)}; there are: {', '.join(dict.fromkeys(known))}")
    return [case for case in cases if wanted & {case.function, case.name}]


def complete(cases: Sequence[Case], shapes: Shapes, depths: tuple[int, ...]) -> bool:
    """Whether there is all that a token needs."""
    names = {case.name for case in cases}
    return all(case.name in names for case in decode_cases(shapes, depths) if case.calls)


def measure(case: Case, shapes: Shapes, speed: float, repetitions: int) -> Row:
    """Check and time one case; what goes wrong stands in its row, and the next one follows."""
    moved = case.bytes_moved(shapes)
    floor = moved / speed * 1e6
    torch.manual_seed(0)
    error = None
    try:
        with torch.inference_mode():
            found = check(case, shapes, "cuda")
            error = found.error
            if found.failure:
                return Row(case, moved, floor, error, found.failure)
            torch.cuda.empty_cache()
            l2_bytes = torch.cuda.get_device_properties().L2_cache_size
            copies, in_l2 = copies_of(case, shapes, l2_bytes, torch.cuda.mem_get_info()[0])
            sets = argument_sets(case, shapes, copies)
            ordinary = time_case(case, sets, repetitions, early=False)
            early = time_case(case, sets, repetitions, early=True) if has_early_edges() else None
    except Exception as problem:  # of Triton's compiler, the driver, memory: the table says what any of them says
        return Row(case, moved, floor, error, first_line(problem))
    return Row(case, moved, floor, error, None, in_l2, ordinary, early)


def argument_sets(case: Case, shapes: Shapes, copies: int) -> list[Arguments]:
    """Arguments for one launch after another: constants and state drawn anew for each, the same activations for all."""
    first = case.arguments(Draw(shapes, "cuda"))
    activations = {name: first[name] for name in case.activations}
    return [first, *({**case.arguments(Draw(shapes, "cuda")), **activations} for _ in range(copies - 1))]


def has_early_edges() -> bool:
    """Whether the GPU starts a kernel before the one ahead of it has ended."""
    return torch.cuda.get_device_capability() >= (9, 0)


def total(rows: Sequence[Row], depth: int) -> Total:
    needed = [row for row in rows if row.case.calls and row.case.depth in (None, depth)]

    def time(timings: Sequence[Timing | None]) -> float | None:
        known = [timing.microseconds * row.case.calls for timing, row in zip(timings, needed, strict=True) if timing]
        return sum(known) if len(known) == len(needed) else None

    kernels = [row.best.kernels * row.case.calls for row in needed if row.best and row.best.kernels is not None]
    return Total(
        depth,
        sum(row.floor * row.case.calls for row in needed),
        time([row.ordinary for row in needed]),
        time([row.early for row in needed]),
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


def render(rows: Sequence[Row], totals: Sequence[Total], *, markdown: bool) -> str:
    """One line per case, and one per depth for the whole token, without a newline at the end."""
    return table(COLUMNS, [*map(cells_of, rows), *map(total_cells, totals)], markdown)


def cells_of(row: Row) -> tuple[str, ...]:
    best = row.best
    return (
        row.case.name + IN_L2 * row.in_l2,
        row.case.shape,
        str(row.case.calls) if row.case.calls else "",
        size_text(row.bytes_moved, 2),
        f"{row.floor:.2f}",
        *timing_cells(row.floor, microseconds(row.ordinary)),
        *timing_cells(row.floor, microseconds(row.early)),
        f"{best.microseconds * row.case.calls:,.1f}" if best and row.case.calls else "",
        "" if row.error is None else f"{row.error:.1e}",
    )


def total_cells(total: Total) -> tuple[str, ...]:
    best = total.early or total.ordinary
    return (
        f"one token at depth {total.depth}",
        "" if best is None else f"{1e6 / best:,.0f} tokens/s",
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


def notes(shapes: Shapes, speed: float, rows: Sequence[Row]) -> list[str]:
    weights = f"{shapes.config.dtype} weights" if shapes.group is None else f"int4 in groups of {shapes.group}"
    lines = [
        f"{device_name(torch.device('cuda'))}, torch {torch.__version__}, triton {importlib.metadata.version('triton')}, "
        f"{datetime.now().astimezone().date()}; copy {speed / 1e9:,.1f} GB/s, read and written",
        f"{weights}, {shapes.config.dtype} activations, max_seq_len {shapes.positions}",
    ]
    if any(row.in_l2 for row in rows):
        lines.append(f"{IN_L2} its buffers fit in L2 together: the floor is not what holds it")
    return lines


def progress(row: Row) -> str:
    if row.best is None:
        return f"{row.case.name}: failed"
    return f"{row.case.name}: {row.best.microseconds:.2f} us, floor {row.floor:.2f} us"


def record(arguments: argparse.Namespace, speed: float, rows: Sequence[Row], totals: Sequence[Total]) -> dict[str, Any]:
    """What --json writes. Times in microseconds, null where there is none."""
    return {
        "config": str(arguments.config),
        "quant": arguments.quant,
        "group_size": arguments.group_size,
        "max_seq_len": arguments.max_seq_len,
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "copy_bytes_per_second": speed,
        "kernels": [
            {
                "name": row.case.name,
                "shape": row.case.shape,
                "depth": row.case.depth,
                "calls": row.case.calls,
                "bytes": row.bytes_moved,
                "floor_us": row.floor,
                "us": microseconds(row.ordinary),
                "early_us": microseconds(row.early),
                "kernels_per_call": row.best.kernels if row.best else None,
                "in_l2": row.in_l2,
                "error": row.error,
                "failure": row.failure,
            }
            for row in rows
        ],
        "totals": [
            {
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
