#!/usr/bin/env python3
"""Say what the scheduler costs: the GPU's idle time between kernels, and Python's time per step, with callers held.

    python scripts/profile_load.py ARTIFACT [--cuda_graph] [--callers 1,32,128] [-p 1024] [-n 256] [--max-step-ms MS]
                                   [--seconds 5] [--json FILE] [--skip-goals]

So many callers send a request each, and the next one when it has ended, in this process, with prompts and answers of 80 to
120 % of -p and -n random tokens. A third of --seconds passes first, so that their prompts are apart. Then the steps are timed
for --seconds, and on a GPU kernels are recorded for another second: at work is the share of the time in which one runs. The
recording itself holds the host up, so that share is a lower bound.

Python's time of a step is without waits for the GPU, and known on a GPU alone; the scheduler's own is a part of it.

The goals are for one H200: at work 97 % of the time from 32 callers on, and the scheduler's own 60 us at 1 and 400 at 128.

Exit status: 0 all was measured, and every goal held; 1 not so; 2 an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_commands import fail, numbers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ostinato.delegate.errors import OstinatoError
from ostinato.runner import Engine, Request
from ostinato.runner.bench.device import device_name
from ostinato.runner.bench.load_bench import percentile
from ostinato.runner.bench.tables import Side, table

GOAL_AT_WORK, GOAL_CALLERS = 0.97, 32
# Callers -> microseconds of the scheduler's own Python in a step.
OWN_GOALS = {1: 60.0, 128: 400.0}


@dataclass(frozen=True)
class Row:
    """Result of one number of callers.

    Attributes:
        callers: number of callers.
        speed: output tokens per second.
        decoding: mean number of answers that decode in a step.
        step_ms, step_p99_ms: median and 99th percentile of a step.
        python_us, own_us: mean microseconds of a step in Python, and in the scheduler alone; None on a CPU.
        at_work: share of the time in which a kernel runs; None on a CPU.
    """

    callers: int
    speed: float
    decoding: float
    step_ms: float
    step_p99_ms: float
    python_us: float | None
    own_us: float | None
    at_work: float | None


class Callers:
    """Callers of an engine, each of which always has a request."""

    def __init__(self, engine: Engine, count: int, prompt: int, answer: int) -> None:
        self._engine, self._prompt, self._answer = engine, prompt, answer
        self._drawn, self._sent = random.Random(0), 0
        self._vocabulary = range(engine.model.vocab)
        for _ in range(count):
            self._send()

    def run(self, seconds: float) -> list[tuple[float, int, int]]:
        """Step for so long. Returns the seconds of each step, the number of its tokens, and of the answers that decode."""
        scheduler, steps = self._engine.driver.scheduler, []
        begin = now = time.perf_counter()
        while now - begin < seconds:
            outputs = scheduler.step()
            before, now = now, time.perf_counter()
            steps.append((now - before, sum(len(output.tokens) for output in outputs), scheduler.stats.decoding))
            for output in outputs:
                if output.error is not None:
                    raise output.error.error()
                if output.finish_reason is not None:
                    self._send()
        return steps

    def _send(self) -> None:
        self._sent += 1
        prompt, answer = (self._drawn.randint(mean * 4 // 5, mean * 6 // 5) for mean in (self._prompt, self._answer))
        tokens = self._drawn.choices(self._vocabulary, k=max(prompt, 1))
        request = Request(id=str(self._sent), tokens=tokens, max_tokens=max(answer, 1), ignore_eos=True)
        self._engine.driver.scheduler.add(request)


def measure(engine: Engine, callers: int, prompt: int, answer: int, seconds: float) -> Row:
    """Measure one number of callers with an engine that has nothing to do."""
    held = Callers(engine, callers, prompt, answer)
    held.run(seconds / 3)
    sessions = engine.sessions
    host, wait = sessions.host_seconds, sessions.wait_seconds
    steps = held.run(seconds)
    took = [step for step, _, _ in steps]
    python = own = None
    if (
        host is not None
        and wait is not None
        and sessions.host_seconds is not None
        and sessions.wait_seconds is not None
    ):
        waited = sessions.wait_seconds - wait
        python = 1e6 * (sum(took) - waited) / len(steps)
        own = 1e6 * (sum(took) - waited - (sessions.host_seconds - host)) / len(steps)
    return Row(
        callers,
        sum(tokens for _, tokens, _ in steps) / sum(took),
        statistics.mean(decoding for _, _, decoding in steps),
        1e3 * statistics.median(took),
        1e3 * (percentile(took, 99) or 0.0),
        python,
        own,
        at_work(held) if engine.program.device.type == "cuda" else None,
    )


def at_work(held: Callers) -> float:
    """Share of a second of steps in which a kernel runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        held.run(1.0)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    begin = end = spans[0][0]
    busy = 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / (end - begin)


def misses(rows: Sequence[Row]) -> list[str]:
    """What the goals are that do not hold, a line each."""
    found = []
    for row in rows:
        if row.at_work is not None and row.callers >= GOAL_CALLERS and row.at_work < GOAL_AT_WORK:
            found.append(
                f"{row.callers} callers: at work {row.at_work:.1%} of the time, the goal is {GOAL_AT_WORK:.0%}"
            )
        goal = OWN_GOALS.get(row.callers)
        if goal is not None and row.own_us is not None and row.own_us > goal:
            found.append(
                f"{row.callers} callers: the scheduler takes {row.own_us:.0f} us of a step, the goal is {goal:.0f}"
            )
    return found


def render(rows: Sequence[Row]) -> str:
    columns: dict[str, Side] = dict.fromkeys(
        (
            *("callers", "output tokens/s", "decoding", "step, ms", "p99"),
            *("Python, us", "the scheduler's", "GPU at work"),
        ),
        "right",
    )
    cells = [
        [
            str(row.callers),
            f"{row.speed:,.0f}",
            f"{row.decoding:.1f}",
            f"{row.step_ms:.2f}",
            f"{row.step_p99_ms:.2f}",
            "" if row.python_us is None else f"{row.python_us:.0f}",
            "" if row.own_us is None else f"{row.own_us:.0f}",
            "" if row.at_work is None else f"{row.at_work:.1%}",
        ]
        for row in rows
    ]
    return table(columns, cells)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", metavar="ARTIFACT")
    parser.add_argument("--cuda_graph", "--cuda-graph", action="store_true")
    parser.add_argument("--callers", type=numbers, default=[1, 32, 128], metavar="N,N")
    parser.add_argument("-p", dest="prompt", type=int, default=1024, metavar="N")
    parser.add_argument("-n", dest="answer", type=int, default=256, metavar="N")
    parser.add_argument("--max-step-ms", type=float, metavar="MS")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true")
    arguments = parser.parse_args(words)
    rows = []
    try:
        for callers in arguments.callers:
            longest = (arguments.prompt + arguments.answer) * 6 // 5 + 1
            with Engine.load(
                arguments.artifact,
                cuda_graph=arguments.cuda_graph,
                sessions=callers,
                # A page more for each, which the scheduler keeps free.
                kv_tokens=callers * (longest + 128),
                max_step_ms=arguments.max_step_ms,
            ) as engine:
                engine.warm_up(beside_sessions=True)
                gc.collect()
                gc.freeze()
                rows.append(measure(engine, callers, arguments.prompt, arguments.answer, arguments.seconds))
                device = device_name(engine.program.device)
            print(f"{callers} callers: {rows[-1].speed:,.0f} tokens/s", file=sys.stderr, flush=True)
    except OstinatoError as error:
        fail(str(error))
    print(f"\n{device}, torch {torch.__version__}; about {arguments.prompt} + {arguments.answer} tokens each\n")
    print(render(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]) + "\n")
    missed = [] if arguments.skip_goals else misses(rows)
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
