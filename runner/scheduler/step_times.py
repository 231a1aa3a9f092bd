"""How long a step takes, and so how many tokens of prompts fit in one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ostinato.runner.model.model import Model
from ostinato.runner.sessions.sessions import Sessions

# The most that a step with prompts should take, by type of device. What a person reads comes at 60 and at 10 tokens a second.
DEFAULT_MAX_STEP_MS = {"cuda": 16.0, "cpu": 100.0}
# The same with experts on the host: most of a step with prompts is spent on sending or reading their weights, whether 48 rows
# or 512 use them.
STREAMED_MAX_STEP_MS = 250.0
# Rows that a step with prompts has at least, so that prompts end however long a step takes.
MIN_ROWS = 16
# Lengths of prompts that are timed where prompts have no buckets: on two cores, more would take seconds.
_TIMED_ROWS = (16, 64)
# The same with experts on the host.
_TIMED_STREAMED_ROWS = (16, 64, 512)
# Weight of a new measurement beside those before it: after 50 steps they have no say.
_WEIGHT = 0.05
# A step may take so much longer than foreseen, or shorter, that something else was at work. It then counts as this.
_MIN_FACTOR, _MAX_FACTOR = 0.5, 4.0


class StepTimes:
    """Foresees milliseconds of steps in which prompts ride beside sessions.

    A step takes what a prompt of as many rows takes, and for each session as much as a row costs more: a session reads its
    own state and its own keys. That holds within 10 % for Qwen3.5-35B-A3B on an H200 (8 + 120 to 102 + 410 rows behind 128
    tokens, 2026-11-24). Steps that were measured correct it by a factor, which grows with the sessions' depth.

    Args:
        prompts: (rows, milliseconds) of prompts that stand alone, ascending, at least one.
        max_step_ms: the most that a step should take.
        buckets: numbers of rows that steps are padded to, ascending. (): any number.
        max_rows: the most rows of a step.
    """

    def __init__(
        self, prompts: Sequence[tuple[int, float]], max_step_ms: float, buckets: Sequence[int], max_rows: int
    ) -> None:
        self.max_step_ms = max_step_ms
        self._rows, self._ms = [rows for rows, _ in prompts], [ms for _, ms in prompts]
        if len(prompts) == 1:
            # A second point, as if rows cost nothing: the factor corrects it.
            self._rows.append(2 * self._rows[0])
            self._ms.append(self._ms[0])
        self._session_ms = self._ms[-1] / self._rows[-1]
        self._sizes = [size for size in buckets if size <= max_rows] or _sizes(max_rows)
        self._foreseen = list(accumulate(map(self._prompt_ms, self._sizes), max))
        self._factor = 1.0

    @classmethod
    def measured(
        cls, sessions: Sessions, model: Model, clock: Callable[[], float], max_step_ms: float | None
    ) -> StepTimes:
        """Time prompts, in a session of their own.

        Args:
            max_step_ms: the most that a step with prompts should take; None: DEFAULT_MAX_STEP_MS of the device, or
                STREAMED_MAX_STEP_MS.

        Raises:
            CapacityError: no slot or too few pages are free. Nothing has run.
        """
        # With experts on the host, the steps that have graphs are too short for prompts beside sessions.
        buckets = () if model.streams_experts else model.prefill_buckets
        lengths = _TIMED_STREAMED_ROWS if model.streams_experts else buckets or _TIMED_ROWS
        longest = min(model.max_rows, model.max_chunk, model.max_seq_len - 1)
        points = []
        # The longest first: the scheduler asks in each step until there is room, and only this one can lack it.
        for rows in sorted((rows for rows in lengths if rows <= longest), reverse=True) or [longest]:
            # Tokens that differ: those that are alike go to the same experts.
            prompt = [7919 * number % model.vocab for number in range(rows)]
            seconds = []
            for _ in range(2):
                with sessions.open() as session:
                    begin = clock()
                    session.prefill(prompt)
                    sessions.step([session])
                    seconds.append(clock() - begin)
            points.append((rows, 1e3 * min(seconds)))
        if max_step_ms is None:
            default = DEFAULT_MAX_STEP_MS[model.program.device.type]
            max_step_ms = STREAMED_MAX_STEP_MS if model.streams_experts else default
        return cls(points[::-1], max_step_ms, buckets, model.max_rows)

    def prompt_rows(self, sessions: int) -> int:
        """Number of rows that prompts may have in a step beside `sessions` sessions."""
        bound = self.max_step_ms / self._factor - sessions * self._session_ms
        fitting = bisect_right(self._foreseen, bound)
        rows = self._sizes[fitting - 1] - sessions if fitting else 0
        left = self._sizes[-1] - sessions
        # Where the sessions fill a step, prompts are a second one.
        return max(rows, left if 0 < left < MIN_ROWS else MIN_ROWS)

    def took(self, sessions: int, rows: int, ms: float) -> None:
        """Learn from a step that had `rows` rows of prompts."""
        size = next((size for size in self._sizes if size >= sessions + rows), sessions + rows)
        foreseen = self._prompt_ms(size) + sessions * self._session_ms
        factor = min(max(ms / foreseen, _MIN_FACTOR * self._factor), _MAX_FACTOR * self._factor)
        self._factor += _WEIGHT * (factor - self._factor)

    def _prompt_ms(self, rows: int) -> float:
        """Milliseconds of a prompt of `rows` rows, on lines between those that were measured and beyond them."""
        after = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        (low, high), (before, behind) = self._rows[after - 1 : after + 1], self._ms[after - 1 : after + 1]
        return max(before + (behind - before) * (rows - low) / (high - low), min(self._ms[0], before))


def _sizes(max_rows: int) -> list[int]:
    """Numbers of rows to choose from where no step is padded: 16, 24, 32, 48, 64, ... and the largest."""
    sizes = [MIN_ROWS << power for power in range(max_rows.bit_length())]
    sizes += [size * 3 // 2 for size in sizes]
    return sorted({*(size for size in sizes if size < max_rows), max_rows})
