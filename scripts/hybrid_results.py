"""Results of bench_hybrid.py: their goals, their table, and their plot."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bench_commands import over_llama
from check_speed import Finding, export

from ostinato.delegate.memory import size_text
from ostinato.runner.bench.tables import Side, table

OURS, PEER = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Result:
    """Results of one artifact.

    Attributes:
        layers: N, the number of layers that keep their routed experts on the host.
        device, host: names of the program's device and of the processor.
        samples: test, such as "tg128" -> tokens/s of each repetition.
        device_loaded, device_used: bytes in use on the GPU, by all processes, after the model was loaded and after all was
            measured; None on a CPU.
        host_memory: bytes of the process outside of mapped files, after all was measured; None if the system does not say.
        expert_bytes: bytes of routed experts that one token reads on the host.
        computing_seconds: seconds of one token in which these experts are computed; None if there are none.
        copy_speed: bytes/s that a host copy reads and writes, both counted, with all threads.
        no_graph: reason why decode, or some of it, has no graph; None if all went well.
        peers: test -> llama.cpp's tokens/s.
        timelines: what ran when, as text, in a token's step and in a prompt; empty unless asked for.
        export_seconds: time that the export took; None if the artifact was there.
    """

    layers: int
    device: str
    host: str
    samples: dict[str, list[float]]
    device_loaded: int | None
    device_used: int | None
    host_memory: int | None
    expert_bytes: float
    computing_seconds: float | None
    copy_speed: float
    no_graph: str | None = None
    peers: dict[str, float] = field(default_factory=dict)
    timelines: list[str] = field(default_factory=list)
    export_seconds: float | None = None

    @property
    def speeds(self) -> dict[str, float]:
        """Median tokens/s by test, decode first."""
        return {name: statistics.median(self.samples[name]) for name in sorted(self.samples, key=_decode_first)}

    @property
    def ratios(self) -> dict[str, float]:
        """Our speed over llama.cpp's by test, for the tests that both have."""
        return {name: speed / self.peers[name] for name, speed in self.speeds.items() if name in self.peers}

    @property
    def copy_share(self) -> float | None:
        """Bytes/s at which a whole step reads experts, as a fraction of the copy's; None if it reads none."""
        decode = next(iter(self.speeds.values()))
        return self.expert_bytes * decode / self.copy_speed or None

    @property
    def computing_share(self) -> float | None:
        """Like `copy_share`, but over the time in which experts are computed instead of the whole step; None if none are."""
        return self.expert_bytes / self.computing_seconds / self.copy_speed if self.computing_seconds else None


@dataclass(frozen=True)
class Goal:
    """Goals for one N: at least these tokens/s, at most these bytes and seconds."""

    decode: float
    prefill: float
    device_used: float | None = None
    host_memory: float | None = None
    export_seconds: float = 90


# N -> goals, for Qwen3.5-35B-A3B. Prefill is of 512 tokens.
GOALS = {40: Goal(95, 2800, 4.5e9, 1e9), 20: Goal(150, 3500)}
GOAL_PROMPT = 512


def findings(results: Sequence[Result], n_gen: int) -> list[Finding]:
    """Findings for the goals of each N that has some, then for the comparison with llama.cpp."""
    found = []
    for one in results:
        goal, where = GOALS.get(one.layers), f"{one.layers} layers, "
        if goal is None:
            continue
        for name, wanted in ((f"tg{n_gen}", goal.decode), (f"pp{GOAL_PROMPT}", goal.prefill)):
            speed = one.speeds.get(name)
            text = "not measured" if speed is None else f"{speed:,.1f} tokens/s"
            found.append(Finding(where + name, text, speed is not None and speed >= wanted, f"{wanted:,.0f} or more"))
        for what, used, bound in (
            ("GPU memory", one.device_used, goal.device_used),
            ("host memory", one.host_memory, goal.host_memory),
        ):
            if bound is not None:
                held = used is not None and used <= bound
                found.append(Finding(where + what, _size(used) or "not measured", held, f"{_size(bound)} or less"))
        if one.export_seconds is not None:
            found.append(replace(export(one.export_seconds, goal.export_seconds), what=where + "export"))
    for one in results:
        found += [over_llama(f"{one.layers} layers, {name}", ratio) for name, ratio in one.ratios.items()]
    return found


def render(results: Sequence[Result]) -> str:
    """The table, with the machine above it and the meaning of the columns below it. Empty columns are left out."""
    columns: dict[str, Side] = {"N": "right", "test": "left"}
    columns |= dict.fromkeys(("tokens/s", "llama.cpp", "ratio", "experts/token", "copy GB/s", "of copy"), "right")
    columns |= dict.fromkeys(("computing", "GPU memory", "host memory"), "right")
    rows = [row for one in results for row in _rows(one)]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    headers = list(columns)
    notes = [
        "N: layers whose routed experts are on the host; experts/token: bytes of them that a token reads there",
        "of copy: these bytes times tokens/s, over what a host copy reads and writes; computing: while they are computed",
        "GPU memory: in use when all was measured; host memory: of the process, beside the mapped file",
        *(f"{one.layers} layers: not all of decode has a graph: {one.no_graph}" for one in results if one.no_graph),
    ]
    body = table({headers[i]: columns[headers[i]] for i in used}, [[row[i] for i in used] for row in rows])
    pictures = [f"\nN = {one.layers}: {text}" for one in results for text in one.timelines]
    return "\n".join([f"{_machine(results[0])}, torch {torch.__version__}", "", body, "", *notes, *pictures])


def _rows(one: Result) -> list[list[str]]:
    """One row per test. The figures of decode, and those of the whole artifact, are in the first row."""
    share, computing = one.copy_share, one.computing_share
    whole = [
        size_text(one.expert_bytes, 1) if one.expert_bytes else "",
        f"{one.copy_speed / 1e9:,.1f}",
        "" if share is None else f"{share:.0%}",
        "" if computing is None else f"{computing:.0%}",
        _size(one.device_used),
        _size(one.host_memory),
    ]
    rows = []
    for name, speed in one.speeds.items():
        peer = [f"{one.peers[name]:,.1f}", f"{one.ratios[name]:.2f}"] if name in one.peers else ["", ""]
        rows.append([str(one.layers), name, f"{speed:,.1f}", *peer, *whole])
        whole = [""] * len(whole)
    return rows


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw tokens/s over N, decode above prefill, ours and llama.cpp's. GPU memory is drawn at the side.

    The file's suffix says the format.
    """
    from matplotlib.figure import Figure

    results = sorted(results, key=lambda one: one.layers)
    figure = Figure(figsize=(11, 6), layout="constrained")
    figure.suptitle(f"Routed experts of N layers on the host: {_machine(results[0])}", fontsize=11)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.4, 1])
    decode, prefill, memory = (figure.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (slice(None), 1)))
    for axis, kind, title in ((decode, "tg", "decode"), (prefill, "pp", "prefill")):
        for name, marker in zip(
            (name for name in results[0].speeds if name.startswith(kind)), itertools.cycle("os^D"), strict=False
        ):
            _line(axis, results, [one.speeds[name] for one in results], f"{name}, ours", OURS, "-" + marker)
            _line(axis, results, [one.peers.get(name) for one in results], f"{name}, llama.cpp", PEER, "--" + marker)
        axis.set(title=title, ylabel="tokens/s")
        if axis.lines:
            axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    used = [None if one.device_used is None else one.device_used / 1e9 for one in results]
    _line(memory, results, used, "in use", OURS, "-o")
    memory.set(title="GPU memory in use" if any(used) else "GPU memory: there is no GPU", ylabel="GB")
    for axis in (decode, prefill, memory):
        axis.set(xlabel="N: layers with experts on the host", xticks=[one.layers for one in results])
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.margins(x=0.15)
        axis.yaxis.set_major_formatter("{x:,.10g}")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)


def _line(
    axis: Any, results: Sequence[Result], values: Sequence[float | None], name: str, colour: str, style: str
) -> None:
    """Draw the values over N. Missing values are left out."""
    points = [(one.layers, value) for one, value in zip(results, values, strict=True) if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), style, color=colour, label=name)


def _machine(one: Result) -> str:
    return one.host if one.device == one.host else f"{one.device}, {one.host}"


def _decode_first(name: str) -> tuple[bool, int]:
    """Sort key for the names of tests, such as "tg128", "pp512", "pp2048"."""
    return name.startswith("pp"), int(name[2:])


def _size(nbytes: float | None) -> str:
    return "" if nbytes is None else size_text(nbytes, 2)
