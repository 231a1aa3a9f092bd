"""Warm-up: captures all graphs at once before the first prompt, not at their first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ostinato.delegate.artifact.names import SAMPLE
from ostinato.delegate.errors import CapacityError
from ostinato.delegate.graphs.state_machine import Phase
from ostinato.runner.model.batch import LastTokens, Run
from ostinato.runner.model.buckets import known_buckets
from ostinato.runner.model.model import Model

from .sessions import Sessions


@dataclass(frozen=True)
class Captured:
    """A plan that a warm-up has made, or could not make.

    Attributes:
        method: name of the method that has the plan.
        rows: number of rows of the plan: the bucket, or 1 for the decode of one session and for the token after a prompt.
        seconds: time that warm-up and capture took.
        pool_bytes: device memory that the plan's graphs took; 0 if they were given up.
        given_up: why the plan has no graph, None if it has one.
    """

    method: str
    rows: int
    seconds: float
    pool_bytes: int
    given_up: str | None


@dataclass(frozen=True)
class WarmUp:
    """Result of `Engine.warm_up`: the plans, and their sums."""

    captured: tuple[Captured, ...]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.captured)

    @property
    def pool_bytes(self) -> int:
        return sum(one.pool_bytes for one in self.captured)


def warm_up(
    model: Model, sessions: Sessions, buckets: Sequence[int] | None = None, beside_sessions: bool = False
) -> WarmUp:
    """See `Engine.warm_up`."""
    chosen = known_buckets(model.prefill_buckets, buckets)
    if not model.cuda_graph:
        return WarmUp(())

    def prefill(bucket: int) -> None:
        with sessions.open() as session:
            session.prefill([0] * bucket)

    def step() -> None:
        with sessions.open() as session:
            session.append(0)
            sessions.step([session])

    if beside_sessions and model.max_chunk > max(chosen, default=0):
        # What has no graph is loaded by its first call: 40 to 90 ms for 40 layers.
        with suppress(CapacityError):
            prefill(min(model.max_chunk, model.max_seq_len - 1))
    captured = []
    # The longest first: memory that it leaves free in the graphs' pool is used for the others.
    for bucket in sorted(chosen, reverse=True):
        captured.append(_capture(model, model.prompt_method(bucket), partial(prefill, bucket), bucket))
        for outputs in model.outputs_beside_prompts(bucket) if beside_sessions else ():
            # Rows of no session, too.
            runs = [*[Run(-1)] * (outputs - 1), Run(-1, [0] * (bucket - outputs + 1), 0)]
            captured.append(_capture(model, model.step_method(bucket), partial(model.step, runs), bucket))
    captured.append(_capture(model, model.step_method(1), step, 1))
    if model.samples:
        captured.append(_capture(model, SAMPLE, model.sample_nothing, 1))
    for bucket in reversed(model.row_buckets):
        # All rows are padding: no session's state changes.
        captured.append(
            _capture(model, model.step_method(bucket), partial(model.step, LastTokens([-1] * bucket)), bucket)
        )
    return WarmUp(tuple(one for one in captured if one is not None))


def _capture(model: Model, method: str, call: Callable[[], object], tokens: int) -> Captured | None:
    """Repeat `call` until the method has a plan for it, or has given the plan up. Return None if nothing is new."""
    # A method may be loaded by its first call.
    begin, before = time.perf_counter(), _tries(model.method_stats.get(method))
    for _ in range(model.warmup_steps + 1):
        call()
        if model.method_stats[method]["next_phase"] in (Phase.REPLAY.value, Phase.DISABLED.value):
            break
    after = model.method_stats[method]
    if _tries(after) == before:
        return None
    plan = after["plans"][-1]
    nbytes = plan["pool_bytes"] if plan["given_up"] is None else 0
    return Captured(method, tokens, time.perf_counter() - begin, nbytes, plan["given_up"])


def _tries(stats: dict[str, Any] | None) -> tuple[int, int]:
    """Numbers of captures that a method has made, and has given up."""
    if stats is None:
        return 0, 0
    return stats["captures"], sum(plan["given_up"] is not None for plan in stats["plans"])
