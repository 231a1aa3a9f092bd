"""Output of `ostinato bench`: a table for people, or Markdown, CSV or JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from ostinato.delegate.artifact import names
from ostinato.delegate.memory import size_text
from ostinato.delegate.program import Program

from .bench import MODE_NAMES, Measurement, ModeResult
from .device import CopySpeed, DeviceMemory
from .tables import Side, as_csv, as_json, table

FORMATS = ("table", "md", "csv", "json")


@dataclass(frozen=True)
class Reads:
    """Bytes that a decode step reads or writes at least once: `fixed`, and `per_position` for each position of the sequence.

    `exact` is false if the program does not give these numbers. Then `fixed` is an upper bound: all constants and all state.
    """

    fixed: int
    per_position: int
    exact: bool

    @classmethod
    def of(cls, program: Program) -> Reads:
        """Take the numbers from the program's constant methods, or else from its loaded constants and state."""
        fixed = program.metadata.get(names.META_DECODE_BYTES)
        if fixed is None:
            return cls(program.stats.constant_bytes + program.stats.mutable_buffer_bytes, 0, False)
        return cls(int(fixed), int(program.metadata.get(names.META_KV_BYTES, 0)), True)

    def per_token(self, measurement: Measurement) -> float | None:
        """Mean bytes over the steps of a decode measurement: the i-th step sees depth + i positions. None for a prefill."""
        case = measurement.case
        if case.kind != "tg":
            return None
        return self.fixed + self.per_position * (case.depth + (case.tokens + 1) / 2)


@dataclass(frozen=True)
class Subject:
    """The artifact and the machine of a report. Sizes in bytes; `date` in ISO 8601; `memory` after loading, None on a CPU."""

    artifact: str
    model_type: str
    dtype: str
    n_layers: int | None
    max_seq_len: int
    constant_bytes: int
    state_bytes: int
    load_seconds: float
    device: str
    torch: str
    date: str
    memory: DeviceMemory | None
    copy: CopySpeed
    reads: Reads


@dataclass(frozen=True)
class Report:
    """Results of one run of the command, in both modes or in one."""

    subject: Subject
    modes: tuple[ModeResult, ...]

    @property
    def rows(self) -> list[Measurement]:
        """All measurements, with the modes of a case side by side."""
        return [row for rows in zip(*(mode.measurements for mode in self.modes), strict=True) for row in rows]

    def ratio(self, row: Measurement) -> float | None:
        """Speed relative to that without a graph; None if only one mode was measured."""
        if len(self.modes) < 2:
            return None
        base = next(one for one in self.modes[0].measurements if one.case == row.case)
        return row.median / base.median

    def bandwidth(self, row: Measurement) -> float | None:
        """Bytes per second that decode had to move; None for a prefill."""
        per_token = self.subject.reads.per_token(row)
        return None if per_token is None else per_token * row.median

    def share(self, row: Measurement) -> float | None:
        """`bandwidth` as a fraction of the copy speed; None for a prefill."""
        moved = self.bandwidth(row)
        return None if moved is None else moved / self.subject.copy.bytes_per_second


def render(report: Report, style: str) -> str:
    """The report in one of FORMATS, without a newline at its end."""
    if style in ("csv", "json"):
        return (as_csv if style == "csv" else as_json)(records(report))
    return _as_markdown(report) if style == "md" else _as_table(report)


def records(report: Report) -> list[dict[str, Any]]:
    """One flat record per measurement, by llama-bench's names where these exist. `_ns`: nanoseconds, `_ts`: tokens/s."""
    subject = report.subject
    modes = {mode.cuda_graph: mode for mode in report.modes}
    return [
        {
            "test": row.case.name,
            "n_prompt": row.case.tokens if row.case.kind == "pp" else 0,
            "n_gen": row.case.tokens if row.case.kind == "tg" else 0,
            "n_depth": row.case.depth,
            "cuda_graph": row.cuda_graph,
            "median_ts": row.median,
            "min_ts": min(row.samples),
            "max_ts": max(row.samples),
            "avg_ts": statistics.mean(row.samples),
            "stddev_ts": statistics.stdev(row.samples) if len(row.samples) > 1 else 0.0,
            "ratio": report.ratio(row),
            "bytes_per_token": subject.reads.per_token(row),
            "bytes_per_token_exact": subject.reads.exact,
            "bytes_per_second": report.bandwidth(row),
            "copy_share": report.share(row),
            "copy_bytes_per_second": subject.copy.bytes_per_second,
            "artifact": subject.artifact,
            "model_type": subject.model_type,
            "dtype": subject.dtype,
            "n_layers": subject.n_layers,
            "max_seq_len": subject.max_seq_len,
            "constant_bytes": subject.constant_bytes,
            "state_bytes": subject.state_bytes,
            "load_seconds": subject.load_seconds,
            "device": subject.device,
            "device_memory_used": subject.memory.used if subject.memory else None,
            "device_memory_allocated": subject.memory.allocated if subject.memory else None,
            "torch": subject.torch,
            "date": subject.date,
            "fallback_reason": modes[row.cuda_graph].fallback_reason(row.case.kind),
            **_graph_counts(row, modes[row.cuda_graph]),
            "host_us_per_token": row.host_us if row.case.kind == "tg" else None,
            "host_us_per_prompt": row.host_us if row.case.kind == "pp" else None,
            "samples_ns": list(row.samples_ns),
            "samples_ts": row.samples,
            "phases": [asdict(phase) for phase in modes[row.cuda_graph].phases],
            "methods": modes[row.cuda_graph].methods,
        }
        for row in report.rows
    ]


def _graph_counts(row: Measurement, mode: ModeResult) -> dict[str, int | None]:
    """Numbers of kernels per token, for a case that decodes with a CUDA graph; None for all other cases."""
    plan = mode.plan if row.case.kind == "tg" else None
    return {
        "kernels_per_token": plan["graph_kernels"] if plan else None,
        "early_kernels_per_token": plan["early_kernels"] if plan else None,
    }


def _as_table(report: Report) -> str:
    columns, rows = _cells(report)
    # The second mode of a case stands under the first one, without the case's name.
    rows = [["", *row[1:]] if number % len(report.modes) else row for number, row in enumerate(rows)]
    preamble = [f"{name:<9} {text}" for name, text in _preamble(report)]
    return "\n".join([*preamble, "", table(columns, rows), "", *_notes(report)])


def _as_markdown(report: Report) -> str:
    lines = [table(*_cells(report), markdown=True), "", *(f"- {name}: {text}" for name, text in _preamble(report))]
    return "\n".join(lines + [f"- {note}" for note in _notes(report)])


def _preamble(report: Report) -> list[tuple[str, str]]:
    subject = report.subject
    layers = "" if subject.n_layers is None else f"{subject.n_layers} layers, "
    sizes = f"{layers}constants {size_text(subject.constant_bytes, 2)}, state {size_text(subject.state_bytes, 2)}"
    rows = [
        ("artifact", f"{subject.artifact}, loaded in {duration(subject.load_seconds)}"),
        ("model", f"{subject.model_type}, {subject.dtype}, {sizes}, max_seq_len {subject.max_seq_len}"),
        ("machine", f"{subject.device}, torch {subject.torch}, {subject.date[:10]}"),
    ]
    if subject.memory:
        memory = subject.memory
        rows.append(
            (
                "memory",
                f"{size_text(memory.used, 2)} of {size_text(memory.total, 2)} in use on the device after loading, "
                f"{size_text(memory.allocated, 2)} of it tensors",
            )
        )
    copy = subject.copy
    speed = f"{copy.bytes_per_second / 1e9:,.1f} GB/s"
    rows.append(
        ("copy", f"{speed}, read and written, best of {copy.rounds} rounds over {size_text(copy.buffer_bytes, 2)}")
    )
    reads = subject.reads
    if reads.exact:
        rows.append(("a token", f"reads {size_text(reads.fixed, 2)} + {size_text(reads.per_position, 2)} per position"))
    else:
        rows.append(
            (
                "a token",
                f"reads at most {size_text(reads.fixed, 2)}: all constants and state (the program does not say)",
            )
        )
    return rows


def _cells(report: Report) -> tuple[dict[str, Side], list[list[str]]]:
    """Columns and rows; empty columns are left out."""
    at_most = "" if report.subject.reads.exact else "<= "
    columns: dict[str, Side] = {"test": "left", "mode": "left"}
    columns |= dict.fromkeys(("tokens/s", "min .. max", "ratio"), "right")
    columns |= dict.fromkeys((at_most + name for name in ("read/token", "GB/s", "of copy")), "right")
    rows = [_row(report, row) for row in report.rows]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    headers = list(columns)
    return {headers[i]: columns[headers[i]] for i in used}, [[row[i] for i in used] for row in rows]


def _row(report: Report, row: Measurement) -> list[str]:
    ratio, moved, share = report.ratio(row), report.bandwidth(row), report.share(row)
    per_token = report.subject.reads.per_token(row)
    return [
        row.case.name,
        MODE_NAMES[row.cuda_graph],
        f"{row.median:,.1f}",
        f"{min(row.samples):,.1f} .. {max(row.samples):,.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        "" if per_token is None else size_text(per_token, 2),
        "" if moved is None else f"{moved / 1e9:,.1f}",
        "" if share is None else f"{share:.1%}",
    ]


def _notes(report: Report) -> list[str]:
    count = len(report.rows[0].samples_ns)
    notes = [f"tokens/s: median of {count} {'repetition' if count == 1 else 'repetitions'}, after a warm-up"]
    if any((report.share(row) or 0) > 1 for row in report.rows):
        notes.append("of copy over 100%: a step only reads, the copy writes too; or what a step reads fits in a cache")
    notes += [f"first answer, {MODE_NAMES[mode.cuda_graph] + ':':<13} {phase_text(mode)}" for mode in report.modes]
    notes += [f"{MODE_NAMES[mode.cuda_graph]}: {graph_text(mode.plan)}" for mode in report.modes if mode.plan]
    notes += [f"{MODE_NAMES[mode.cuda_graph]}: {plan_text(mode.plan)}" for mode in report.modes if mode.plan]
    notes += [f"{MODE_NAMES[mode.cuda_graph]}: {host_text(mode)}" for mode in report.modes if mode.host_us is not None]
    notes += [
        f"{MODE_NAMES[mode.cuda_graph]}: not all of {what} has a graph, a capture failed: {mode.fallback_reason(kind)}"
        for mode in report.modes
        for kind, what in (("pp", "prefill"), ("tg", "decode"))
        if mode.fallback_reason(kind)
    ]
    return notes


def phase_text(mode: ModeResult) -> str:
    """`prefill 512: 124.9 ms, warmup 3: 60.2 ms, ...`: per phase, the number of tokens or steps and their time together."""
    return ", ".join(f"{phase.name} {phase.calls}: {duration(phase.seconds)}" for phase in mode.phases)


def graph_text(plan: dict[str, Any]) -> str:
    """`243 kernels per token, 240 of them start before the one ahead has ended`, and the note if there is one."""
    kernels, early, note = plan["graph_kernels"], plan["early_kernels"], plan["graph_note"]
    if kernels is None:
        return f"its kernels were not counted: {note}"
    text = f"{kernels:,} kernels per token, {early or 'none'} of them start before the one ahead has ended"
    return f"{text}: {note}" if note else text


def plan_text(plan: dict[str, Any]) -> str:
    """`1 graph per token, recorded in 2.1 ms, made executable in 0.4 ms, for which the pool grew by 2.1 MB`, and the number
    of called pieces."""
    graphs = f"{plan['captured']} {'graph' if plan['captured'] == 1 else 'graphs'}"
    called = f" and {plan['called']} called {'piece' if plan['called'] == 1 else 'pieces'}" if plan["called"] else ""
    times = (
        f"recorded in {duration(plan['record_us'] / 1e6)}, made executable in {duration(plan['instantiate_us'] / 1e6)}"
    )
    return f"{graphs}{called} per token, {times}, for which the pool grew by {size_text(plan['pool_bytes'])}"


def host_text(mode: ModeResult) -> str:
    """`Python takes 12.3 us per token on the host (median), not counting waits for the GPU`: largest of the decode cases."""
    return f"Python takes {mode.host_us:.1f} us per token on the host (median), not counting waits for the GPU"


def duration(seconds: float) -> str:
    """`1.25 s` or `3.4 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
