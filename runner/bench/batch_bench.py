"""The speed of several sessions that step together, measured as llama-batched-bench does: all of them start at once.

Each session prefills a prompt of its own, one after the other, and samples its first token. Then all sessions step together.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate.errors import OptionError
from ostinato.delegate.memory import size_text
from ostinato.delegate.program import Program
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.model.model import Model
from ostinato.runner.sessions.sessions import Sessions

from .bench import MODE_NAMES, take_steps
from .device import device_name, synchronize
from .tables import Side, as_csv, as_json, table

_SEED = 0


@dataclass(frozen=True)
class BatchSpec:
    """Sizes to measure: sessions in each batch, and tokens of each session's prompt and answer.

    `sampling`: fields of the `SamplingParams` of all sessions. Each of these is measured with each batch.

    Raises:
        OptionError: no batch, or a number below 1.
    """

    batches: tuple[int, ...]
    prompt: int
    answer: int
    repetitions: int
    sampling: tuple[Mapping[str, Any], ...] = ({},)

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.prompt < 1 or self.answer < 1:
            raise OptionError("--batch takes numbers of sessions from 1 on, and needs a prompt (-p) and an answer (-n)")
        if self.repetitions < 1:
            raise OptionError(f"-r must be 1 or more, got {self.repetitions}")

    @property
    def max_batch(self) -> int:
        """Number of sessions in the largest batch."""
        return max(self.batches)

    @property
    def positions(self) -> int:
        """Positions that one session needs."""
        return self.prompt + self.answer + 1


@dataclass(frozen=True)
class BatchMeasurement:
    """One batch in one mode: nanoseconds of each repetition for all prompts, and for all steps after them.

    `host_us`: microseconds of Python in a step, without waits for the GPU, in the median; None if it is not known.
    """

    batch: int
    cuda_graph: bool
    sampling: Mapping[str, Any]
    prompt: int
    answer: int
    prompt_ns: tuple[int, ...]
    answer_ns: tuple[int, ...]
    host_us: float | None
    pool_bytes: int

    @property
    def prompt_speed(self) -> float:
        """Tokens per second of all prompts together; the median."""
        return self.batch * self.prompt / statistics.median(self.prompt_ns) * 1e9

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together; the median."""
        return self.batch * self.answer / statistics.median(self.answer_ns) * 1e9

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of all answers together, for each repetition."""
        return [self.batch * self.answer / nanoseconds * 1e9 for nanoseconds in self.answer_ns]

    @property
    def step_ms(self) -> float:
        """Milliseconds of one step, in which each session gets a token; the median."""
        return statistics.median(self.answer_ns) / self.answer / 1e6


def check_length(positions: int, max_seq_len: int) -> None:
    """Raises OptionError: the tokens of a session do not fit into max_seq_len."""
    if positions > max_seq_len:
        raise OptionError(
            f"a session would have {positions} tokens, max_seq_len is {max_seq_len}: ask for less, or export with a "
            "larger --max-seq-len"
        )


def measure_batches(
    model: Model, spec: BatchSpec, vocabulary: int, say: Callable[[str], None]
) -> list[BatchMeasurement]:
    """Measure all batches with one loaded model, each after a warm-up. `say` gets a line after each batch."""
    generator = torch.Generator().manual_seed(_SEED)
    prompts = torch.randint(vocabulary, (spec.max_batch, spec.prompt), generator=generator).tolist()
    sessions = Sessions(model)
    found = []
    # Prompts and steps may have graphs, which are captured in the warm-up.
    warm, rounds = replace(spec, answer=1), model.warmup_steps + 1 if model.cuda_graph else 1
    for batch, sampling in product(spec.batches, spec.sampling):
        params = SamplingParams(**sampling)
        for _ in range(rounds):
            _once(sessions, model, prompts[:batch], warm, params)
        samples = [_once(sessions, model, prompts[:batch], spec, params) for _ in range(spec.repetitions)]
        prompt_ns, answer_ns, host_us = zip(*samples, strict=True)
        each = list(chain.from_iterable(host_us))
        one = BatchMeasurement(
            batch,
            model.cuda_graph,
            sampling,
            spec.prompt,
            spec.answer,
            prompt_ns,
            answer_ns,
            statistics.median(each) if each else None,
            _pool_bytes(model),
        )
        found.append(one)
        say(f"{MODE_NAMES[model.cuda_graph]:<14}batch {batch:<6}{one.speed:>10,.1f} tokens/s{one.step_ms:>10.3f} ms")
    return found


def _once(
    sessions: Sessions, model: Model, prompts: Sequence[Sequence[int]], spec: BatchSpec, params: SamplingParams
) -> tuple[int, int, list[float]]:
    """Nanoseconds of all prompts, with the first tokens after them, and of all further steps; and what `take_steps` gives."""
    device = model.program.device
    opened = [sessions.open(params) for _ in prompts]
    try:
        synchronize(device)
        begin = time.perf_counter_ns()
        for session, prompt in zip(opened, prompts, strict=True):
            session.prefill(prompt)
        sessions.step(opened)
        synchronize(device)
        prompted = time.perf_counter_ns()
        host_us = take_steps(sessions, opened, spec.answer)
        synchronize(device)
        return prompted - begin, time.perf_counter_ns() - prompted, host_us
    finally:
        for session in opened:
            session.close()


def _pool_bytes(model: Model) -> int:
    return sum(plan["pool_bytes"] for stats in model.method_stats.values() for plan in stats["plans"])


def records(program: Program, rows: Sequence[BatchMeasurement]) -> list[dict[str, Any]]:
    """One flat record per measurement, by llama-batched-bench's names where these exist: times in s, speeds in tokens/s."""
    capacity = program.capacity
    return [
        {
            "pp": row.prompt,
            "tg": row.answer,
            "pl": row.batch,
            "n_kv": row.batch * (row.prompt + row.answer),
            "cuda_graph": row.cuda_graph,
            "sampling": dict(row.sampling),
            "t_pp": statistics.median(row.prompt_ns) / 1e9,
            "speed_pp": row.prompt_speed,
            "t_tg": statistics.median(row.answer_ns) / 1e9,
            "speed_tg": row.speed,
            "min_tg": min(row.speeds),
            "max_tg": max(row.speeds),
            "step_ms": row.step_ms,
            "host_us": row.host_us,
            "graph_pool_bytes": row.pool_bytes,
            "slots": capacity.slots,
            "kv_tokens": capacity.kv_tokens,
            "slot_bytes": capacity.slot_bytes,
            "page_bytes": sum(group.page_bytes for group in capacity.groups),
            "device": device_name(program.device),
            "torch": torch.__version__,
        }
        for row in rows
    ]


def render_batches(program: Program, rows: Sequence[BatchMeasurement], style: str) -> str:
    """Return the measurements in one of `report.FORMATS`, without a newline at the end."""
    if style == "json":
        return as_json(records(program, rows))
    if style == "csv":
        return as_csv(records(program, rows))
    sampled = any(row.sampling for row in rows)
    columns: dict[str, Side] = {"sessions": "right", "mode": "left"}
    if sampled:
        columns["sampling"] = "left"
    columns |= dict.fromkeys(("prompts, tokens/s", "answers, tokens/s", "min .. max", "ms per step"), "right")
    timed = any(row.host_us is not None for row in rows)
    if timed:
        columns["Python, us"] = "right"
    columns["speed-up"] = "right"
    # Over the fewest sessions; with several ways of sampling, over the first of them.
    base = [(row.cuda_graph, row.batch if sampled else None) for row in rows]
    first = dict(reversed(list(zip(base, rows, strict=True))))
    cells = [
        [
            str(row.batch),
            MODE_NAMES[row.cuda_graph],
            *([json.dumps(row.sampling) if row.sampling else "greedy"] if sampled else []),
            f"{row.prompt_speed:,.0f}",
            f"{row.speed:,.1f}",
            f"{min(row.speeds):,.1f} .. {max(row.speeds):,.1f}",
            f"{row.step_ms:.3f}",
            *(["" if row.host_us is None else f"{row.host_us:.1f}"] if timed else []),
            f"{row.speed / first[key].speed:.3f}" if sampled else f"{row.speed / first[key].speed:.2f}",
        ]
        for key, row in zip(base, rows, strict=True)
    ]
    capacity = program.capacity
    base_name = "the first way of sampling" if sampled else "the fewest sessions"
    notes = [
        f"each session: a prompt of {rows[0].prompt} tokens, and {rows[0].answer} steps behind it, all sessions together",
        *(["Python: on the host, of each step, without waits for the GPU (median)"] if timed else []),
        f"speed-up: of the answers, over {base_name} in the same mode",
        ", ".join([f"room: {capacity.slots} sessions of {size_text(capacity.slot_bytes)}", *capacity.page_texts]),
        f"machine: {device_name(program.device)}, torch {torch.__version__}",
    ]
    if style == "md":
        return "\n".join([table(columns, cells, markdown=True), "", *(f"- {note}" for note in notes)])
    return "\n".join([table(columns, cells), "", *notes])


def draw_batches(program: Program, rows: Sequence[BatchMeasurement], path: Path) -> None:
    """Write the picture: one line per mode."""
    from .plot import MODE_COLOURS

    series: dict[str, tuple[str, dict[int, float]]] = {}
    for row in rows:
        series.setdefault(MODE_NAMES[row.cuda_graph], (MODE_COLOURS[row.cuda_graph], {}))[1][row.batch] = row.speed
    draw_speeds(f"{rows[0].prompt} + {rows[0].answer} tokens each, on {device_name(program.device)}", series, path)


def draw_speeds(title: str, series: Mapping[str, tuple[str, Mapping[int, float]]], path: Path) -> None:
    """Write the picture: throughput, and time per token of a session, over the number of sessions.

    Args:
        series: name -> (colour, number of sessions -> tokens per second of all of them together).
    """
    from matplotlib.figure import Figure

    from .plot import legend_below

    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    batches = sorted({batch for _, speeds in series.values() for batch in speeds})
    for name, (colour, speeds) in series.items():
        style: dict[str, Any] = {"label": name, "color": colour, "marker": "o", "markersize": 5}
        left.plot(list(speeds), list(speeds.values()), **style)
        right.plot(list(speeds), [1e3 * batch / speed for batch, speed in speeds.items()], **style)
    for axis, what, unit in ((left, "throughput", "tokens/s"), (right, "time per token of a session", "milliseconds")):
        axis.set_title(what, fontsize=10)
        axis.set(xlabel="sessions that step together", ylabel=unit)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(axis="y", alpha=0.25)
        legend_below(axis, 2)
    figure.savefig(path, dpi=150)
