"""Output of a load test: a table, Markdown, CSV or JSON, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .load_bench import LoadMeasurement, LoadSpec, percentile
from .tables import Side, as_csv, as_json, table

_PERCENTS = {"median": 50.0, "p95": 95.0, "p99": 99.0}


def latencies(row: LoadMeasurement) -> dict[str, list[float]]:
    """Milliseconds of all requests that did not fail: time to first token, per output token, and between outputs."""
    done = row.done
    return {
        "ttft": [sample.ttft_ms for sample in done],
        "tpot": [tpot for sample in done if (tpot := sample.tpot_ms) is not None],
        "itl": [gap for sample in done for gap in sample.itl_ms],
    }


def records(spec: LoadSpec, rows: Sequence[LoadMeasurement], subject: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record per load, by the names of `vllm bench serve` where these exist: seconds, tokens per second, milliseconds.

    Args:
        subject: what is said of the artifact, the engine and the machine, or of the server.
    """
    return [
        {
            "max_concurrency": row.load.concurrency,
            "request_rate": row.load.rate,
            "completed": len(row.done),
            "failed": row.failed,
            "error": next((sample.error for sample in row.samples if sample.error is not None), None),
            "duration": row.seconds,
            "total_input_tokens": row.prompt_tokens,
            "total_reused_tokens": row.reused_tokens,
            "total_output_tokens": row.output_tokens,
            "request_throughput": len(row.done) / row.seconds,
            "output_throughput": row.speed,
            "steady_output_throughput": row.steady_speed,
            "total_token_throughput": (row.prompt_tokens + row.output_tokens) / row.seconds,
            **_percentiles(row),
            "mean_in_flight": row.in_flight,
            **{name: row.counts.get(name) for name in ("put_back", "refused", "steps")},
            **_step_times(row),
            "client_cpu_share": row.client_share,
            "input": spec.prompt,
            "output": spec.answer,
            "range_ratio": spec.range_ratio,
            "turns": spec.turns,
            "shared_prefix": spec.shared_prefix,
            "seed": spec.seed,
            "sampling": dict(spec.sampling),
            **subject,
            "samples": [
                {
                    "caller": sample.caller,
                    "turn": sample.turn,
                    "input_tokens": sample.prompt_tokens,
                    "reused_tokens": sample.reused_tokens,
                    "output_tokens": sample.tokens,
                    "sent": round(sample.sent, 6),
                    "ttft_ms": round(sample.ttft_ms, 3) if sample.arrivals else None,
                    "itl_ms": [round(gap, 3) for gap in sample.itl_ms],
                    "error": sample.error,
                }
                for sample in row.samples
            ],
        }
        for row in rows
    ]


def _percentiles(row: LoadMeasurement) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, values in latencies(row).items():
        found[f"mean_{name}_ms"] = statistics.mean(values) if values else None
        found |= {f"{which}_{name}_ms": percentile(values, percent) for which, percent in _PERCENTS.items()}
    return found


def _step_times(row: LoadMeasurement) -> dict[str, float | None]:
    """Mean milliseconds of the run for each step, and microseconds of Python and of waits for the GPU in each."""
    host, wait, steps = row.per_step("host_seconds"), row.per_step("wait_seconds"), row.counts.get("steps")
    return {
        "ms_per_step": 1e3 * row.seconds / steps if steps else None,
        "host_us_per_step": None if host is None else 1e6 * host,
        "wait_us_per_step": None if wait is None else 1e6 * wait,
    }


def render_loads(spec: LoadSpec, rows: Sequence[LoadMeasurement], subject: Mapping[str, Any], style: str) -> str:
    """Return the measurements in one of `report.FORMATS`, without a newline at the end. `subject`: see `records`."""
    if style in ("csv", "json"):
        return (as_csv if style == "csv" else as_json)(records(spec, rows, subject))
    columns: dict[str, Side] = dict.fromkeys(
        ("callers" if rows[0].load.rate is None else "rate", "requests", "output tokens/s", "steady", "total tokens/s"),
        "right",
    )
    columns |= dict.fromkeys(("requests/s", "first token, ms", "per token, ms", "between tokens, ms"), "right")
    reuses = any(row.reused_tokens for row in rows)
    counted = any("put_back" in row.counts for row in rows)
    columns |= dict.fromkeys((*(["reused"] if reuses else []), *(["put back"] if counted else []), "failed"), "right")
    cells = [
        [
            row.load.name,
            str(len(row.samples)),
            f"{row.speed:,.1f}",
            "" if row.steady_speed is None else f"{row.steady_speed:,.1f}",
            f"{(row.prompt_tokens + row.output_tokens) / row.seconds:,.1f}",
            f"{len(row.done) / row.seconds:,.2f}",
            *(_three(values) for values in latencies(row).values()),
            *([f"{100 * row.reused_tokens / max(row.prompt_tokens, 1):.1f}%"] if reuses else []),
            *([f"{row.counts['put_back']}"] if counted else []),
            str(row.failed),
        ]
        for row in rows
    ]
    if not any(row.steady_speed for row in rows):
        del columns["steady"]
        for line in cells:
            del line[3]
    notes = _notes(spec, rows, subject)
    if style == "md":
        return "\n".join([table(columns, cells, markdown=True), "", *(f"- {note}" for note in notes)])
    return "\n".join([table(columns, cells), "", *notes])


def _three(values: Sequence[float]) -> str:
    found = [percentile(values, percent) for percent in _PERCENTS.values()]
    return " / ".join(f"{value:,.1f}" if value >= 100 else f"{value:.2f}" for value in found if value is not None)


def _notes(spec: LoadSpec, rows: Sequence[LoadMeasurement], subject: Mapping[str, Any]) -> list[str]:
    notes = [
        f"each request: {_range(spec, spec.prompt)} random tokens, and {_range(spec, spec.answer)} tokens of answer",
        *([f"each conversation: {spec.turns} requests, each with all that was said before"] if spec.turns > 1 else []),
        *([f"the first {spec.shared_prefix} tokens of all conversations are the same"] if spec.shared_prefix else []),
        "all requests count, from the first one sent to the end of the last; steady: from when every caller has a token "
        "until the first has nothing more to send",
        "milliseconds: median / p95 / p99; per token: (last - first) / (tokens - 1) of a request; between tokens: each gap",
    ]
    for row in rows:
        notes.append(
            f"{row.load.name}: {_step_text(row)}{row.in_flight:.1f} requests at a time; the callers took "
            f"{row.client_share:.1%} of a core"
        )
        failed = next((sample.error for sample in row.samples if sample.error is not None), None)
        if failed is not None:
            notes.append(f"{row.load.name}: {row.failed} of {len(row.samples)} requests failed, the first: {failed}")
    return [*notes, ", ".join(f"{name} {value}" for name, value in subject.items())]


def _step_text(row: LoadMeasurement) -> str:
    """Text about the steps, with a semicolon behind it; empty if nothing is known of them."""
    steps, times = row.counts.get("steps"), _step_times(row)
    if steps is None:
        return ""
    text = f"{steps:,} steps"
    if times["ms_per_step"] is not None:
        text += f", {times['ms_per_step']:.3f} ms of the run each"
    host, wait = times["host_us_per_step"], times["wait_us_per_step"]
    if host is not None and wait is not None:
        text += f", {host:.1f} us of it Python that launches, {wait:.1f} us waits for the GPU"
    return f"{text}; "


def _range(spec: LoadSpec, mean: int) -> str:
    low, high = spec.range_of(mean)
    return str(low) if low == high else f"{low} to {high}"


def draw_loads(spec: LoadSpec, rows: Sequence[LoadMeasurement], subject: Mapping[str, Any], path: Path) -> None:
    """Write the picture: output tokens per second, and the time between tokens, over the load."""
    from matplotlib.figure import Figure

    from .plot import legend_below

    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    where = subject["device"] if "device" in subject else f"{subject['model']} at {subject['url']}"
    figure.suptitle(f"{spec.prompt} + {spec.answer} tokens each, on {where}", fontsize=11)
    left, right = figure.subplots(1, 2)
    places = [row.load.concurrency or row.load.rate for row in rows]
    style: dict[str, Any] = {"marker": "o", "markersize": 5}
    left.plot(places, [row.speed for row in rows], label="all requests", color="#0072b2", **style)
    if any(row.steady_speed is not None for row in rows):
        left.plot(places, [row.steady_speed for row in rows], label="steady", color="#56b4e9", **style)
    for (which, percent), colour in zip(_PERCENTS.items(), ("#0072b2", "#e69f00", "#d55e00"), strict=True):
        values = [percentile(latencies(row)["itl"], percent) for row in rows]
        right.plot(places, values, label=which, color=colour, **style)
    what = "callers" if rows[0].load.rate is None else "requests sent per second"
    for axis, title, unit in ((left, "output", "tokens/s"), (right, "between tokens", "milliseconds")):
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=what, ylabel=unit)
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [row.load.name for row in rows])
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(axis="y", alpha=0.25)
        legend_below(axis, 3)
    figure.savefig(path, dpi=150)
