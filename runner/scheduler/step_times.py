"""How long a step takes, and so how many tokens of prompts fit in one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

# Rows that a step with prompts has at least, so that prompts end however long a step takes.
MIN_ROWS = 16
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

    def prompt_rows(self, sessions: int) -> int:
        """Number of rows that prompts may have in a step beside `sessions` sessions."""
        bound = self.max_step_ms / self._factor - sessions * self._session_ms
        fitting = bisect_right(self._foreseen, bound)
        rows = self._sizes[fitting - 1] - sessions if fitting else 0
        return max(rows, min(MIN_ROWS, self._sizes[-1] - sessions), 0)

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
