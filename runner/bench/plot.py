"""The picture of a benchmark: speed over depth, and the first answer's time by phase. Needs matplotlib, an optional extra."""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import OptionError
from ostinato.delegate.memory import size_text

from .bench import MODE_NAMES
from .report import Report, phase_text

MODE_COLOURS = {False: "#8a8f98", True: "#0072b2"}
_PHASE_COLOURS = {
    "prefill": "#56b4e9",
    "run": "#8a8f98",
    "warmup": "#e69f00",
    "capture": "#d55e00",
    "replay": "#0072b2",
}
# Line and marker of each size. At a single depth only the markers tell the sizes apart.
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
_TITLES = {"pp": "prefill", "tg": "decode"}


def check_plot(path: Path) -> None:
    """Raise OptionError unless `draw` can write `path`: before a long measurement, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'ostinato[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        why = f"{path.suffix!r} is not a picture format" if kind else "there is no suffix"
        raise OptionError(f"--plot {path}: {why}; use .png, .svg or .pdf")
    check_writable("--plot", path)


def check_writable(option: str, path: Path) -> None:
    """Raise OptionError unless the file that `option` names can be written: also before a measurement."""
    if path.is_dir():
        raise OptionError(f"{option} {path}: that is a folder")
    try:
        if path.exists():
            path.open("r+b").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OptionError(f"{option} {path}: cannot be written: {os.strerror(error.errno or 0)}") from error


def draw(report: Report, path: Path) -> None:
    """Write the picture; its format follows the suffix."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("tg", "pp") if any(row.case.kind == kind for row in report.rows)]
    figure = Figure(figsize=(4.2 * len(kinds) + 6.0, 4.4), layout="constrained")
    figure.suptitle(_title(report), fontsize=11)
    axes = figure.subplots(1, len(kinds) + 1, width_ratios=[1.0] * len(kinds) + [1.4], squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=False):
        _speed_over_depth(axis, report, kind)
    _time_by_phase(axes[-1], report)
    figure.savefig(path, dpi=150)


def _title(report: Report) -> str:
    subject = report.subject
    return f"{subject.model_type}, {size_text(subject.constant_bytes, 2)} of constants, on {subject.device}"


def _speed_over_depth(axis: Any, report: Report, kind: str) -> None:
    """Draw medians, one line per mode and size; bars reach from the slowest to the fastest repetition."""
    every = [row for row in report.rows if row.case.kind == kind]
    sizes = list(dict.fromkeys(row.case.tokens for row in every))
    for mode in report.modes:
        for size, (line, marker) in zip(sizes, itertools.cycle(_STYLES), strict=False):
            rows = [row for row in mode.measurements if (row.case.kind, row.case.tokens) == (kind, size)]
            rows.sort(key=lambda row: row.case.depth)
            low = [row.median - min(row.samples) for row in rows]
            high = [max(row.samples) - row.median for row in rows]
            name = MODE_NAMES[mode.cuda_graph]
            axis.errorbar(
                [row.case.depth for row in rows],
                [row.median for row in rows],
                yerr=[low, high],
                label=name if len(sizes) == 1 else f"{kind}{size} {name}",
                color=MODE_COLOURS[mode.cuda_graph],
                linestyle=line,
                marker=marker,
                markersize=5,
                capsize=3,
            )
    depths = sorted({row.case.depth for row in every})
    axis.set_title(f"{_TITLES[kind]} ({', '.join(f'{kind}{size}' for size in sizes)})", fontsize=10)
    axis.set(xlabel="depth: tokens in the state before", ylabel="tokens/s")
    axis.set_ylim(0, 1.1 * max(max(row.samples) for row in every))
    axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
    axis.margins(x=0.12)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="y", alpha=0.25)
    legend_below(axis, 2)


def _time_by_phase(axis: Any, report: Report) -> None:
    """Draw one bar per mode, one section per phase, and the figures above the bar: some sections are too small to see."""
    longest = max(sum(phase.seconds for phase in mode.phases) for mode in report.modes)
    scale, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
    labelled: set[str] = set()
    for place, mode in enumerate(report.modes):
        left = 0.0
        for phase in mode.phases:
            label = None if phase.name in labelled else phase.name
            labelled.add(phase.name)
            width = phase.seconds * scale
            axis.barh(place, width, left=left, height=0.36, color=_PHASE_COLOURS[phase.name], label=label)
            left += width
        text = f"{MODE_NAMES[mode.cuda_graph]}\n{phase_text(mode)}"
        axis.annotate(text, (0, place - 0.2), (4, 2), textcoords="offset points", fontsize=8, va="bottom")
    axis.set_title("first answer, by phase", fontsize=10)
    axis.set(xlabel=unit, yticks=[], ylim=(len(report.modes) - 0.6, -0.7), xlim=(0, longest * scale * 1.03))
    axis.grid(axis="x", alpha=0.25)
    legend_below(axis, len(_PHASE_COLOURS))


def legend_below(axis: Any, columns: int) -> None:
    """Put a legend under the axis, without a frame."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.17))
