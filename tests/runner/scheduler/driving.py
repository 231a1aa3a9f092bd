"""Drives a scheduler step by step, and finds what its answers must be: those of sessions that step alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.sampling_params import TokenLogprobs
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.model.steps import _HostTokens
from ostinato.runner.scheduler.messages import Ended, Output, Request
from ostinato.runner.scheduler.scheduler import Scheduler
from ostinato.runner.scheduler.step_times import StepTimes
from ostinato.runner.sessions.prefix_cache import PrefixCache
from ostinato.runner.sessions.session import Session

PAGE = 64
# How the tests run the model: one step after the other; with the next step begun before the last one's tokens are taken, as
# on a GPU; and so that sessions leave for the host, as they do there.
CPU_MODES = ("in turn", "ahead", "ahead, to the host")
GPU_MODES = (pytest.param("GPU", marks=pytest.mark.gpu),)


@contextmanager
def loaded(request: pytest.FixtureRequest, mode: str, **options: Any) -> Iterator[Engine]:
    """An engine of the shipped model in one of the modes."""
    name = "capitals_cuda" if mode == "GPU" else "capitals_artifact"
    path: Path = request.getfixturevalue(name)
    with Engine.load(path, cuda_graph=mode == "GPU", warmup_steps=1, **options) as engine:
        if mode.startswith("ahead"):
            steps: Any = engine.sessions.steps
            steps.goes_ahead, steps._pending = True, _HostTokens
        yield engine


def settle(engine: Engine) -> None:
    """Wait for sessions that are on their way to the host."""
    while engine.sessions.tier.settle(wait=True):
        pass


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FixedRows(StepTimes):
    """Prompts have so many rows beside others, however long steps take."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def prompt_rows(self, sessions: int) -> int:
        return self.rows

    def took(self, sessions: int, rows: int, ms: float) -> None:
        pass


@dataclass
class Found:
    """What has come of an answer so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reason: str | None = None
    error: Ended | None = None

    def add(self, output: Output) -> None:
        assert self.reason is None, "an output behind the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = list(output.prompt_logprobs)
        self.reason, self.error = output.finish_reason, output.error


class Driven:
    """A scheduler with what it has given.

    Args:
        engine: the engine whose sessions it steps, without the engine's own scheduler.
        rows: the most rows of prompts beside others.
        options: as `Scheduler` has them. By default there is no prefix cache, which would divide prompts.

    Attributes:
        reference: an engine with a free session, whose answers are the right ones.
        found: (id, index) -> the answer.
        steps: for each step of the sessions, the number of those that decode, and the numbers of tokens of prompts.
    """

    def __init__(self, engine: Engine, mode: str = "in turn", rows: int = 32, **options: Any) -> None:
        self.engine, self.reference, self.clock = engine, engine, Clock()
        options = {"prefix_caching": False, **options}
        self.scheduler = Scheduler(engine.sessions, engine.model, lambda: FixedRows(rows), self.clock, **options)
        if mode == "ahead, to the host":
            self.scheduler._offloads = self.scheduler.kept._offloads = True
        self.found: dict[tuple[str, int], Found] = {}
        self.steps: list[tuple[int, list[int]]] = []
        self.count = 0

    def add(self, tokens: Sequence[int], max_tokens: int = 8, *, bitmask: Any = None, **options: Any) -> Request:
        """Add a request with a new id, and return it."""
        self.count += 1
        request = Request(id=str(self.count), tokens=list(tokens), max_tokens=max_tokens, **options)
        self.scheduler.add(request, bitmask)
        self.found |= {(request.id, index): Found() for index in range(request.n)}
        return request

    def of(self, request: Request, index: int = 0) -> Found:
        return self.found[request.id, index]

    def step(self, count: int = 1) -> None:
        step = self.engine.sessions.step

        def counted(
            sessions: Sequence[Session], more: bool = False, prefill: Mapping[Session, Sequence[int]] | None = None
        ) -> list[int]:
            found = step(sessions, more, prefill)
            self.steps.append((len(sessions), [len(tokens) for tokens in (prefill or {}).values()]))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine.sessions, "step", counted)
            for _ in range(count):
                for output in self.scheduler.step():
                    self.found[output.id, output.index].add(output)

    def run(self, most: int = 5000) -> None:
        """Step until nobody needs a step."""
        for _ in range(most):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError(f"no end after {most} steps")

    def close(self) -> None:
        """Give back what is kept, and see that nothing else has anything."""
        self.run()
        for name in list(self.scheduler.kept._by_name):
            self.scheduler.kept.close(name)
        prefixes = self.scheduler.prefixes
        assert prefixes.stats.host_bytes == bytes_on_host(prefixes)
        prefixes.reset()
        assert prefixes.stats.host_bytes == 0
        assert_all_free(self.engine)


def bytes_on_host(prefixes: PrefixCache) -> int:
    """Bytes of all that the prefixes on the host have, copies that they share counted once."""
    rows = []
    for prefix in prefixes._on_host:
        assert prefix.offloaded is not None
        rows.append(prefix.offloaded.rows)
        for kept in prefix.offloaded.pages:
            copied = kept.full
            while copied is not None:
                rows.append(copied.rows)
                copied = copied.before
    return sum({id(one): one.nbytes for one in rows}.values())


def assert_all_free(engine: Engine) -> None:
    """See that nobody but the prefix cache has anything."""
    engine.reset_prefix_cache()
    settle(engine)
    capacity = engine.program.capacity
    assert engine.sessions.free == capacity.slots
    assert engine.sessions.free_snapshots == capacity.snapshots
    assert engine.sessions.free_pages_by_group == {group.name: group.pages for group in capacity.groups}


def alone(
    engine: Engine, request: Request, index: int = 0, history: Sequence[int] = (), bitmask: Any = None
) -> tuple[list[int], str, list[TokenLogprobs | None]]:
    """Tokens, finish_reason and log-probabilities of an answer by a session that steps alone, from its whole history."""
    params = request.sampling_params
    if params.seed is not None:
        params = replace(params, seed=(params.seed + index) % 2**64)
    ends = params.ends(() if request.ignore_eos else engine.eos_ids)
    tokens: list[int] = []
    logprobs = []
    with engine.open_session(params) as session:
        session.token_bitmask = bitmask
        session.prefill([*history, *request.tokens])
        room = engine.max_seq_len - session.position
        for _ in range(min(room, request.max_tokens)):
            tokens += engine.step([session])
            logprobs.append(session.logprobs)
            if tokens[-1] in ends:
                return tokens, "stop", logprobs
    return tokens, "length" if request.max_tokens <= room else "max_seq_len", logprobs


def prompt(first: int, length: int) -> list[int]:
    """A prompt that no other `first` has."""
    return [(first + 31 * place) % 1500 for place in range(length)]


PENALIZED = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.75)
SEEDED = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=11)
LATE = SamplingParams(presence_penalty=2.0, min_tokens=70, stop_token_ids=list(range(0, 90, 2)))
WAYS = (SamplingParams(), PENALIZED, SEEDED, LATE)
