"""How long steps take: with figures that were measured on an H200, and with odd ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate import CapacityError
from ostinato.runner import Engine
from ostinato.runner.scheduler.step_times import DEFAULT_MAX_STEP_MS, MIN_ROWS, StepTimes

from .driving import PAGE, Clock

# Qwen3.5-35B-A3B on an H200: (rows, ms) of prompts, and (sessions, rows of prompts, ms) of steps.
PROMPTS = [(16, 4.3), (128, 8.9), (256, 12.8), (512, 17.0)]
STEPS = [(32, 224, 13.65), (64, 192, 14.77), (128, 128, 16.88), (8, 120, 9.24), (102, 410, 21.7)]
BUCKETS = (16, 32, 64, 128, 256, 512)


def times(prompts: list[tuple[int, float]] = PROMPTS, max_step_ms: float = 16.0, max_rows: int = 512) -> StepTimes:
    return StepTimes(prompts, max_step_ms, BUCKETS, max_rows)


@pytest.mark.parametrize("sessions, rows, ms", STEPS)
def test_steps_are_foreseen(sessions: int, rows: int, ms: float) -> None:
    """A step fits exactly if its bound is what the step was measured to take, give or take 15 %."""
    assert times(max_step_ms=ms / 0.85).prompt_rows(sessions) >= rows
    # The next larger step takes longer than foreseen at most by as much.
    assert times(max_step_ms=ms * 0.85).prompt_rows(sessions) < rows


def test_what_fits_in_16_ms() -> None:
    found = times()
    assert found.prompt_rows(32) == 224
    assert found.prompt_rows(64) == 192
    assert found.prompt_rows(1) == 255
    # 256 rows beside 128 sessions would take more.
    assert found.prompt_rows(128) < 128


def test_more_sessions_leave_fewer_rows() -> None:
    found = [times().prompt_rows(sessions) for sessions in range(1, 512 - MIN_ROWS)]
    assert all(before >= after for before, after in pairwise(found))
    assert found[-1] == MIN_ROWS < found[0]


def test_prompts_always_get_on() -> None:
    """However long a step takes, and however many sessions there are, a prompt has rows: 16 of them, or what is left of the
    largest step. Sessions that fill it do not stop prompts."""
    for max_step_ms in (16.0, 0.001):
        rows = {sessions: times(max_step_ms=max_step_ms).prompt_rows(sessions) for sessions in range(600)}
        assert all(count >= MIN_ROWS for sessions, count in rows.items() if sessions <= 496 or sessions >= 512)
        assert all(count == 512 - sessions for sessions, count in rows.items() if 496 < sessions < 512)


@pytest.mark.parametrize("slower", [0.6, 2.0, 10.0])
def test_learns_a_slower_machine(slower: float) -> None:
    """After some steps that take so many times as long, as many rows fit as where prompts were measured so."""
    found = times()
    for _ in range(20):
        for sessions, rows, _ in STEPS:
            size = sessions + rows
            ms = slower * (_on_lines(size) + sessions * PROMPTS[-1][1] / PROMPTS[-1][0])
            found.took(sessions, rows, ms)
    expected = times([(rows, slower * ms) for rows, ms in PROMPTS])
    assert [found.prompt_rows(n) for n in (1, 8, 32, 100)] == [expected.prompt_rows(n) for n in (1, 8, 32, 100)]


def _on_lines(rows: int) -> float:
    (low, before), (high, behind) = next(pair for pair in pairwise(PROMPTS) if pair[0][0] <= rows <= pair[1][0])
    return before + (behind - before) * (rows - low) / (high - low)


def test_one_long_step_changes_little() -> None:
    """A garbage collection or another process is no slower machine."""
    found = times()
    found.took(32, 224, 10_000.0)
    assert found.prompt_rows(8) >= 120
    for _ in range(60):
        found.took(32, 224, 13.65)
    assert found.prompt_rows(32) == 224
    found.took(32, 224, 0.0)
    assert found.prompt_rows(32) == 224


@pytest.mark.parametrize("points", [[(16, 4.0)], [(16, 4.0), (64, 4.0)], [(16, 5.0), (64, 4.0)], [(250, 300.0)]])
def test_odd_measurements(points: list[tuple[int, float]]) -> None:
    """One point, rows that cost nothing, more rows that take less, and a machine that is slow from the start."""
    for buckets in (BUCKETS, (), (1024,)):
        found = StepTimes(points, 16.0, buckets, 250)
        rows = [found.prompt_rows(sessions) for sessions in range(1, 250)]
        assert all(0 < count <= 250 for count in rows)
        assert rows[0] >= MIN_ROWS
        for sessions in (1, 8, 100):
            found.took(sessions, 16, 1.0)
        assert found.prompt_rows(1) >= MIN_ROWS


def test_a_prompt_of_any_length_without_buckets() -> None:
    found = StepTimes([(16, 2.0), (64, 5.0)], 5.0, (), 250)
    # 64 rows take 5 ms alone, and each session takes 5/64 ms more.
    assert found.prompt_rows(1) == 47 and found.prompt_rows(0) == 64
    assert StepTimes([(16, 2.0), (64, 5.0)], 100.0, (), 250).prompt_rows(1) == 249


def test_measured(capitals_artifact: object) -> None:
    """Prompts are timed by the clock that is given, and nothing stays open. Without a slot there is no measurement."""
    ticks = Clock()

    def clock() -> float:
        ticks.now += 0.002
        return ticks.now

    with Engine.load(capitals_artifact) as engine:  # type: ignore[arg-type]
        found = StepTimes.measured(engine.sessions, engine.model, clock, None)
        assert found.max_step_ms == DEFAULT_MAX_STEP_MS["cpu"]
        assert found._rows == [16, 64] and found._ms == pytest.approx([2.0, 2.0])
        assert StepTimes.measured(engine.sessions, engine.model, clock, 7.0).max_step_ms == 7.0
        assert engine.sessions.free == 1
        with engine.open_session(), pytest.raises(CapacityError, match="all 1 sessions are open"):
            StepTimes.measured(engine.sessions, engine.model, clock, None)


def test_nothing_runs_without_room(capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler asks again in each step: a prompt that has room costs time as long as a longer one has none."""
    options: dict[str, Any] = {"sessions": 2, "kv_tokens": 3 * PAGE, "prefill_buckets": (16, 128)}
    with Engine.load(capitals_artifact, cuda_graph=True, **options) as engine:
        with engine.open_session() as other:
            other.prefill([1] * (PAGE + 1))
            with monkeypatch.context() as patch:
                patch.setattr(engine.sessions.steps, "prompt", lambda *given: pytest.fail("a prompt has run"))
                with pytest.raises(CapacityError, match="pages"):
                    StepTimes.measured(engine.sessions, engine.model, Clock(), None)
        assert engine.sessions.free == 2
        assert StepTimes.measured(engine.sessions, engine.model, Clock(), None)._rows == [16, 128]
