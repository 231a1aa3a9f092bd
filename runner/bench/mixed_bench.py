"""How long a step takes in which a prompt rides beside sessions, and how long the two take one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.delegate.errors import OptionError
from ostinato.delegate.program import Program
from ostinato.runner.model.model import Model
from ostinato.runner.sessions.session import Session
from ostinato.runner.sessions.sessions import Sessions

from .bench import MODE_NAMES
from .device import device_name, synchronize
from .tables import Side, as_csv, as_json, table

_SEED = 0


@dataclass(frozen=True)
class MixedSpec:
    """Sizes to measure.

    Attributes:
        cases: (sessions, tokens of the prompt that rides beside them).
        depth: tokens that each session has.
        repetitions: how often each case is timed.

    Raises:
        OptionError: no case, or a number below 1.
    """

    cases: tuple[tuple[int, int], ...]
    depth: int
    repetitions: int

    def __post_init__(self) -> None:
        if not self.cases or min(min(case) for case in self.cases) < 1 or self.depth < 1 or self.repetitions < 1:
            raise OptionError("--mixed takes sessions + tokens of a prompt, such as 32+224, both 1 or more")

    @property
    def sessions(self) -> int:
        """Number of sessions that the largest case needs."""
        return max(sessions for sessions, _ in self.cases) + 1

    @property
    def positions(self) -> int:
        """Positions that one session needs."""
        warm = 4
        return max(self.depth + 3 * (self.repetitions + warm), max(prompt for _, prompt in self.cases) + 2)


@dataclass(frozen=True)
class MixedMeasurement:
    """One case in one mode. Nanoseconds of each repetition: of a step of the sessions, of the prompt, and of both in one."""

    sessions: int
    prompt: int
    cuda_graph: bool
    step_ns: tuple[int, ...]
    prompt_ns: tuple[int, ...]
    together_ns: tuple[int, ...]

    @property
    def step_ms(self) -> float:
        return statistics.median(self.step_ns) / 1e6

    @property
    def prompt_ms(self) -> float:
        return statistics.median(self.prompt_ns) / 1e6

    @property
    def together_ms(self) -> float:
        return statistics.median(self.together_ns) / 1e6

    @property
    def ratio(self) -> float:
        """How many times as long the two take one after the other."""
        return (self.step_ms + self.prompt_ms) / self.together_ms


def measure_mixed(model: Model, spec: MixedSpec, vocabulary: int, say: Callable[[str], None]) -> list[MixedMeasurement]:
    """Measure all cases with one loaded model, each after a warm-up. `say` gets a line after each case."""
    generator = torch.Generator().manual_seed(_SEED)
    sessions = Sessions(model)
    found = []
    for count, length in spec.cases:
        tokens = torch.randint(vocabulary, (count, spec.depth), generator=generator).tolist()
        prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
        opened = [sessions.open() for _ in range(count)]
        try:
            for session, history in zip(opened, tokens, strict=True):
                session.prefill(history)
            # All may have graphs, which are captured in the warm-up.
            for _ in range(model.warmup_steps + 1):
                _once(sessions, model, opened, prompt)
            samples = [_once(sessions, model, opened, prompt) for _ in range(spec.repetitions)]
        finally:
            for session in opened:
                session.close()
        one = MixedMeasurement(count, length, model.cuda_graph, *zip(*samples, strict=True))
        found.append(one)
        say(f"{MODE_NAMES[model.cuda_graph]:<14}{count} + {length}: {one.together_ms:.2f} ms, {one.ratio:.2f} times")
    return found


def _once(sessions: Sessions, model: Model, opened: Sequence[Session], prompt: Sequence[int]) -> tuple[int, int, int]:
    """Nanoseconds of a step of the sessions, of a prompt, and of both in one step."""
    device = model.program.device

    def timed(work: Callable[[], object]) -> int:
        synchronize(device)
        begin = time.perf_counter_ns()
        work()
        synchronize(device)
        return time.perf_counter_ns() - begin

    step = timed(lambda: sessions.step(opened))
    with sessions.open() as other:
        alone = timed(lambda: other.prefill(prompt))
    with sessions.open() as other:
        return step, alone, timed(lambda: sessions.step(opened, prefill={other: prompt}))


def records(program: Program, rows: Sequence[MixedMeasurement]) -> list[dict[str, Any]]:
    """One flat record per measurement; times in ms."""
    return [
        {
            "sessions": row.sessions,
            "prompt": row.prompt,
            "cuda_graph": row.cuda_graph,
            "step_ms": row.step_ms,
            "prompt_ms": row.prompt_ms,
            "together_ms": row.together_ms,
            "ratio": row.ratio,
            "device": device_name(program.device),
            "torch": torch.__version__,
        }
        for row in rows
    ]


def render_mixed(program: Program, rows: Sequence[MixedMeasurement], depth: int, style: str) -> str:
    """Return the measurements in one of `report.FORMATS`, without a newline at the end."""
    if style == "json":
        return as_json(records(program, rows))
    if style == "csv":
        return as_csv(records(program, rows))
    columns: dict[str, Side] = {"sessions": "right", "prompt": "right", "mode": "left"}
    columns |= dict.fromkeys(("step, ms", "prompt, ms", "both in one step, ms", "apart / together"), "right")
    cells = [
        [
            str(row.sessions),
            str(row.prompt),
            MODE_NAMES[row.cuda_graph],
            f"{row.step_ms:.2f}",
            f"{row.prompt_ms:.2f}",
            f"{row.together_ms:.2f}",
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    notes = [
        f"each session has {depth} tokens and a few more; medians of {len(rows[0].step_ns)} repetitions",
        f"machine: {device_name(program.device)}, torch {torch.__version__}",
    ]
    if style == "md":
        return "\n".join([table(columns, cells, markdown=True), "", *(f"- {note}" for note in notes)])
    return "\n".join([table(columns, cells), "", *notes])
