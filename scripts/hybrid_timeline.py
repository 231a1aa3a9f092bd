"""Timeline of a step of a program with experts on the host, as text: a line each for GPU, bus (both directions), and CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ostinato.delegate.code.method_code import MethodCode
from ostinato.runner.bench.bench import BenchSpec
from ostinato.runner.model.batch import Run
from ostinato.runner.model.model import Model

DEVICE, TO_HOST, TO_DEVICE, CPU = "GPU", "GPU -> host", "host -> GPU", "CPU experts"
LANES = (DEVICE, TO_HOST, TO_DEVICE, CPU)
_ANCHOR = "ostinato: where two clocks meet"
WIDTH = 100
# Fraction of a column that must be busy for the column to be marked.
_SEEN = 0.1


def pictures(model: Model, spec: BenchSpec, vocabulary: int) -> list[str]:
    """Timelines of two layers in the middle of a token's step, and of a prompt of the first length in `spec`."""
    length = next(case.tokens for case in spec.cases if case.kind == "pp")
    tokens = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    def prompt() -> None:
        model.step([Run(0, tokens, 0)])

    def token() -> None:
        model.step([Run(0, [0], length)])

    found = []
    for title, step in (("one token", token), (f"a prompt of {length}", prompt)):
        prompt()
        step()
        spans = record(step, model.program.device)
        found.append(draw(f"{title}, two layers", spans, *window(spans, 2)))
    return found


@dataclass(frozen=True)
class Span:
    """Time in which something runs on a lane, from `begin` to `end`, in microseconds."""

    lane: str
    begin: float
    end: float


def record(step: Callable[[], object], device: torch.device) -> list[Span]:
    """What ran in the step, in the order in which it began. On a CPU, the device's and the host's segments are timed as
    calls."""
    calls: list[tuple[str, int, int]] = []
    run_segment = MethodCode.run_segment

    def timed(code: MethodCode, index: int, values: dict[int, torch.Tensor]) -> None:
        begin = time.perf_counter_ns()
        run_segment(code, index, values)
        on_host = code.segments[index].on_host
        if on_host or device.type == "cpu":
            calls.append((CPU if on_host else DEVICE, begin, time.perf_counter_ns()))

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    with mock.patch.object(MethodCode, "run_segment", timed), profile(activities=activities) as profiler:
        with record_function(_ANCHOR):
            anchor = time.perf_counter_ns()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    zero = next(event.time_range.start for event in events if event.name == _ANCHOR) - anchor / 1e3
    spans = [Span(lane, zero + begin / 1e3, zero + end / 1e3) for lane, begin, end in calls]
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.name.startswith(_ANCHOR):
            spans.append(Span(_lane_of(event.name), event.time_range.start, event.time_range.end))
    return sorted(spans, key=lambda span: span.begin)


def _lane_of(name: str) -> str:
    if name.startswith("Memcpy DtoH"):
        return TO_HOST
    return TO_DEVICE if name.startswith("Memcpy HtoD") else DEVICE


def window(spans: Sequence[Span], layers: int) -> tuple[float, float]:
    """Time range of `layers` layers in the middle of the step; of the whole step if it has fewer layers.

    The range begins and ends where the CPU begins with the experts of a layer.
    """
    begins = [span.begin for span in spans if span.lane == CPU]
    if len(begins) <= layers:
        return min(span.begin for span in spans), max(span.end for span in spans)
    first = (len(begins) - layers) // 2
    return begins[first], begins[first + layers]


def draw(title: str, spans: Sequence[Span], begin: float, end: float) -> str:
    """Lanes as text, with WIDTH columns from `begin` to `end`. Lanes in which nothing runs are left out."""
    column = (end - begin) / WIDTH
    lines = [f"{title}: {end - begin:,.0f} us, {column:,.1f} us for each column"]
    for lane in LANES:
        busy = [0.0] * WIDTH
        for span in spans:
            if span.lane != lane:
                continue
            for index in range(WIDTH):
                left = begin + index * column
                busy[index] += max(0.0, min(span.end, left + column) - max(span.begin, left))
        if any(busy):
            marks = "".join("#" if time > _SEEN * column else " " for time in busy)
            lines.append(f"{lane:<12}|{marks}| {sum(busy):,.0f} us")
    return "\n".join(lines)
