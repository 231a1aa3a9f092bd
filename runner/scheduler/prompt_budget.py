"""Which prompts go into a step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ostinato.delegate.errors import CapacityError
from ostinato.runner.model.model import Model

from .answer import Answer
from .step_times import MIN_ROWS, StepTimes

# A prompt that needs more steps than this leaves half of each to those behind it.
_LONG_PROMPT = 4

# Tokens of prompts in a step, with whose they are.
Parts = Sequence[tuple[Answer, int]]


class PromptBudget:
    """Divides steps among prompts, the oldest first, and learns how long steps take.

    Args:
        model: the model.
        step_times: returns how long steps take, or raises CapacityError if it has no room to measure now.
        clock: returns seconds.
        goes_ahead: whether a step returns when the one before it is done.
    """

    def __init__(
        self,
        model: Model,
        step_times: Callable[[], StepTimes],
        clock: Callable[[], float],
        goes_ahead: Callable[[], bool],
    ) -> None:
        self._model, self._find_step_times, self._clock, self._goes_ahead = model, step_times, clock, goes_ahead
        self._step_times: StepTimes | None = None
        # Sessions and rows of prompts in the last step, and when it returned; None: nothing is to be learned from it.
        self._last: tuple[int, int, float] | None = None
        self._begun = 0.0
        self._left_to_others = False

    @property
    def is_measured(self) -> bool:
        """Whether it is known how long steps take."""
        return self._step_times is not None

    def measure(self) -> None:
        """Find out how long steps take, unless it is known. Without room for it, the next call does."""
        if self._step_times is None:
            with suppress(CapacityError):
                self._step_times = self._find_step_times()
            self._last = None

    def rows_beside(self, decoding: int) -> int:
        """Rows that prompts may have in a step of so many answers that decode. If there are none: of a prompt that stands
        alone."""
        if not decoding:
            return self._model.max_chunk
        return MIN_ROWS if self._step_times is None else self._step_times.prompt_rows(decoding)

    def parts(self, prefilling: Sequence[Answer], decoding: int) -> Parts:
        """The prompts that go into the next step, with the number of their tokens."""
        waiting = [answer for answer in prefilling if not answer.scores_prompt]
        if not waiting:
            return ()
        first, others = waiting[0], waiting[1:]
        chunk = self.rows_beside(decoding)
        rows = chunk if decoding else self._model.max_rows
        long = bool(others) and first.rest > _LONG_PROMPT * chunk
        if not decoding and first.rest > rows:
            # It stands alone, in one chunk.
            self._left_to_others = long and not self._left_to_others
            if not self._left_to_others:
                return [(first, min(first.part, chunk))]
            first, others, long = others[0], others[1:], False
            if first.rest > rows:
                return [(first, min(first.part, chunk))]
        parts = {first: min(first.part, rows // 2 if long else rows)}
        rows -= parts[first]
        for answer in others:
            if not rows:
                break
            parts[answer] = min(answer.part, rows)
            rows -= parts[answer]
        parts[first] += min(rows, first.part - parts[first])
        return [(answer, count) for answer, count in parts.items() if count]

    def begin(self) -> None:
        """Note that a step begins."""
        self._begun = self._clock()

    def learn(self, decoding: int, parts: Parts) -> None:
        """Learn how long the step took that has begun, if prompts were in it."""
        if self._step_times is None:
            return
        now, last = self._clock(), self._last
        rows = sum(count for _, count in parts)
        if self._goes_ahead():
            if last is not None and last[1] and decoding:
                self._step_times.took(last[0], last[1], 1e3 * (now - last[2]))
            self._last = (decoding, rows, now) if decoding else None
        elif decoding and rows:
            self._step_times.took(decoding, rows, 1e3 * (now - self._begun))

    def interrupt(self) -> None:
        """Learn nothing from the next step: other work comes between it and the last one."""
        self._last = None
