"""Random requests through few slots and very few pages: every answer is the one of a session alone, and nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ostinato.delegate import InputError
from ostinato.runner import Engine, Request, SamplingParams

from ...conftest import CAPITALS, CAPITALS_LENGTH
from ...export.memory import MIB
from ..sessions.soak import Memory, Standing
from .driving import GPU_MODES, PAGE, SEEDED, WAYS, Driven, alone, assert_all_free, loaded, prompt

# Requests of the soak; a hundred of them are some 200 steps.
REQUESTS = {device: int(os.environ.get("OSTINATO_REQUESTS", count)) for device, count in (("cpu", 400), ("cuda", 5000))}
SLOTS = 32
# Three sessions of 251 tokens would need 12 pages. The longest has just enough.
FEW_SLOTS, FEW_PAGES = 3, 4
LENGTHS = (1, 5, 17, 63, 64, 65, 100, 140)

Expected = tuple[list[int], str]


@dataclass
class Asked:
    """A request, the tokens before it, and whether it was cancelled."""

    request: Request
    history: list[int]
    cancelled: bool = False


class Requests(RuleBasedStateMachine):
    """Requests come, go on from kept sessions and are cancelled in any order, between any two steps."""

    make: Callable[[], Driven]
    known: dict[tuple[object, ...], Expected]

    def __init__(self) -> None:
        super().__init__()
        self.driven = type(self).make()
        self.asked: list[Asked] = []
        # Tokens of kept sessions; None while an answer goes on with it.
        self.kept: dict[str, list[int] | None] = {}
        self.names = 0

    @rule(
        first=st.integers(0, 9),
        length=st.sampled_from(LENGTHS),
        most=st.sampled_from((1, 3, 20, 70, 120)),
        way=st.sampled_from(WAYS),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        keep=st.booleans(),
    )
    def ask(self, first: int, length: int, most: int, way: SamplingParams, n: int, keep: bool) -> None:
        name = self._new_session() if keep else None
        request = self.driven.add(prompt(first, length), most, sampling_params=way, n=n, keep=name)
        self._asked(request, [])

    @precondition(lambda self: self._idle_names())
    @rule(
        which=st.integers(0),
        first=st.integers(0, 9),
        length=st.sampled_from((0, *LENGTHS)),
        most=st.sampled_from((1, 3, 20)),
        way=st.sampled_from(WAYS),
        n=st.sampled_from((1, 1, 2)),
        keep=st.sampled_from(("itself", "fork", "nothing")),
    )
    def go_on(self, which: int, first: int, length: int, most: int, way: SamplingParams, n: int, keep: str) -> None:
        name = self._idle(which)
        history = self.kept[name]
        assert history is not None
        new = {"itself": name, "fork": self._new_session(), "nothing": None}[keep]
        options = {"sampling_params": way, "n": n, "session": name, "keep": new}
        if len(history) + length >= CAPITALS_LENGTH:
            with pytest.raises(InputError, match="leaves no room for an answer"):
                self.driven.add(prompt(first, length), most, **options)
            return
        self._asked(self.driven.add(prompt(first, length), most, **options), history)

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        self.driven.step(count)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0))
    def cancel(self, which: int) -> None:
        asked = self.asked[which % len(self.asked)]
        asked.cancelled = True
        self.driven.scheduler.cancel(asked.request.id)
        self.driven.step()

    @precondition(lambda self: self._idle_names())
    @rule(which=st.integers(0), share=st.sampled_from((0.0, 0.3, 0.9, 1.0)), to_begin=st.booleans())
    def rewind(self, which: int, share: float, to_begin: bool) -> None:
        name = self._idle(which)
        history = self.kept[name]
        assert history is not None
        kept = self.driven.scheduler.kept
        begin = kept._by_name[name].begin
        position = begin[0] if to_begin and begin is not None else int(share * len(history))
        kept.rewind(name, position)
        self.kept[name] = history[:position]

    @precondition(lambda self: self._idle_names())
    @rule(which=st.integers(0))
    def close(self, which: int) -> None:
        name = self._idle(which)
        self.driven.scheduler.kept.close(name)
        del self.kept[name]

    @invariant()
    def answers_are_those_of_sessions_alone(self) -> None:
        for asked in list(self.asked):
            found = [self.driven.of(asked.request, index) for index in range(asked.request.n)]
            if all(one.reason for one in found):
                self.asked.remove(asked)
                self._check(asked)

    def teardown(self) -> None:
        try:
            self.driven.run()
            self.answers_are_those_of_sessions_alone()
            assert not self.asked
            assert set(self.driven.scheduler.kept._by_name) == set(self.kept)
        finally:
            for asked in self.asked:
                self.driven.scheduler.cancel(asked.request.id)
            self.driven.close()

    def _new_session(self) -> str:
        self.names += 1
        return f"session {self.names}"

    def _idle(self, which: int) -> str:
        names = self._idle_names()
        return names[which % len(names)]

    def _idle_names(self) -> list[str]:
        """Kept sessions with tokens that no answer goes on with, and of which no fork waits for its turn."""
        held = self.driven.scheduler.kept._by_name
        return [name for name, tokens in self.kept.items() if tokens and not held[name].busy]

    def _asked(self, request: Request, history: list[int]) -> None:
        self.asked.append(Asked(request, history))
        if request.keep is not None:
            self.kept[request.keep] = None

    def _check(self, asked: Asked) -> None:
        request = asked.request
        for index in range(request.n):
            found = self.driven.of(request, index)
            tokens, reason = self._alone(asked, index)
            if found.reason == "cancelled":
                assert asked.cancelled and found.tokens == tokens[: len(found.tokens)]
            else:
                assert (found.tokens, found.reason, found.error) == (tokens, reason, None)
        if request.keep is None:
            return
        first = self.driven.of(request)
        every = [*asked.history, *request.tokens, *first.tokens]
        held = self.driven.scheduler.kept._by_name.get(request.keep)
        if first.reason == "cancelled":
            # In the middle of its prompt it keeps what has run, and nothing if it never began.
            if held is None:
                assert request.keep != request.session and not first.tokens
                del self.kept[request.keep]
                return
            assert held.tokens == every[: len(held.tokens)]
            assert len(held.tokens) == len(every) or not first.tokens
            every = held.tokens
        assert held is not None and held.tokens == every and not held.busy
        self.kept[request.keep] = list(every)

    def _alone(self, asked: Asked, index: int) -> Expected:
        request = asked.request
        way = WAYS.index(request.sampling_params)
        key = (*asked.history, -1, *request.tokens, -1, request.max_tokens, way, index if way == 2 else 0)
        if key not in self.known:
            self.known[key] = alone(self.driven.reference, request, index, asked.history)[:2]
        return self.known[key]


@pytest.mark.parametrize("host_cache_bytes", (None, 0, 4 * MIB))
def test_in_any_order(
    request: pytest.FixtureRequest, mode: str, reference: Engine, host_cache_bytes: int | None
) -> None:
    """`host_cache_bytes`: None: without a prefix cache."""
    with loaded(request, mode, sessions=FEW_SLOTS, kv_tokens=FEW_PAGES * PAGE, snapshots=4) as engine:
        caching = {"prefix_caching": host_cache_bytes is not None, "host_cache_bytes": host_cache_bytes or 0}

        def make() -> Driven:
            driven = Driven(engine, mode, rows=24, **caching)
            driven.reference = reference
            return driven

        machine = type("Machine", (Requests,), {"make": staticmethod(make), "known": {}})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=20,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@dataclass
class Soak:
    """Questions about capitals, as fast as a scheduler takes them: to their end, beyond it, and several answers at a time.
    Some are cancelled."""

    driven: Driven
    random: Random
    known: dict[tuple[int, int, int], Expected]
    questions: list[tuple[list[int], str]]
    steps: int = 0
    tokens: int = 0
    ended: int = 0
    cancelled: int = 0

    def run(self, requests: int) -> None:
        """Add so many requests as there is room for them, and step to their end."""
        driven, open_requests, added = self.driven, dict[str, tuple[Request, int, int]](), 0
        driven.steps.clear()
        while added < requests or driven.scheduler.busy:
            while added < requests and driven.scheduler.has_few_waiting:
                number, kind = self.random.randrange(len(self.questions)), self.random.choice((0, 0, 0, 1, 2))
                request = self._add(number, kind)
                open_requests[request.id] = request, number, kind
                added += 1
            driven.step()
            self.steps += len(driven.steps)
            self.tokens += sum(count for count, _ in driven.steps)
            driven.steps.clear()
            if open_requests and self.random.random() < 0.02:
                driven.scheduler.cancel(self.random.choice(list(open_requests)))
            for request, number, kind in list(open_requests.values()):
                if all(driven.of(request, index).reason for index in range(request.n)):
                    self._check(request, number, kind)
                    del open_requests[request.id]
        assert not open_requests and not driven.found
        assert_all_free(driven.engine)

    def _add(self, number: int, kind: int) -> Request:
        tokens = self.questions[number][0]
        if kind == 1:
            return self.driven.add(tokens, 130, ignore_eos=True)
        if kind == 2:
            return self.driven.add(tokens, 12, n=2, sampling_params=SEEDED)
        return self.driven.add(tokens, 20)

    def _check(self, request: Request, number: int, kind: int) -> None:
        for index in range(request.n):
            found = self.driven.found.pop((request.id, index))
            key = number, kind, index
            if key not in self.known:
                self.known[key] = alone(self.driven.reference, request, index)[:2]
            tokens, reason = self.known[key]
            self.ended += 1
            if found.reason == "cancelled":
                self.cancelled += 1
                assert found.tokens == tokens[: len(found.tokens)]
            else:
                assert (found.tokens, found.reason) == (tokens, reason)


def questions(engine: Engine, count: int) -> list[tuple[list[int], str]]:
    """Token ids of questions, and the capitals."""
    records = Random(0).sample(json.loads((CAPITALS / "heldout.json").read_text(encoding="utf-8")), count)
    return [(engine.encode_prompt(record["prompt"]), record["answer"]) for record in records]


@pytest.mark.parametrize("soak_mode", ["in turn", "ahead", *GPU_MODES])
def test_a_soak(request: pytest.FixtureRequest, soak_mode: str) -> None:
    """After the first hundred requests nothing grows any more. Answers to questions are the capitals."""
    gpu = soak_mode == "GPU"
    # Answers of 130 tokens want three pages each.
    options = {"sessions": SLOTS, "kv_tokens": SLOTS * PAGE, "row_buckets": (2, 4, 8, 16, 24, 32) if gpu else None}
    with loaded(request, soak_mode, **options) as engine, loaded(request, "GPU" if gpu else "in turn") as reference:
        if gpu:
            engine.warm_up(beside_sessions=True)
        driven = Driven(engine, soak_mode, rows=48)
        driven.reference = reference
        soak = Soak(driven, Random(1), {}, questions(engine, 30))
        soak.run(100)
        for number in range(len(soak.questions)):
            for kind in range(3):
                soak._check(*_finished(soak, number, kind))
        device = engine.program.device
        standing, memory = Standing.of(engine).described, Memory.now(device)
        soak.steps = soak.tokens = 0
        soak.run(REQUESTS[device.type])
        after = Memory.now(device)
        stats = driven.scheduler.stats
        print(f"{soak.steps} steps, {soak.ended} answers, {soak.cancelled} cancelled; {stats}, {memory}, {after}")
        assert stats.put_back and soak.cancelled
        assert Standing.of(engine).described == standing
        assert after.host - memory.host < 8 * MIB
        # A step that is rare may need a small tensor of its own: 64 KB in 3,000 requests on an H100.
        assert after.tensors - memory.tensors < MIB
        assert after.reserved - memory.reserved <= 4 * MIB
        # Sessions step together, most of the time as many as there is room for.
        assert soak.tokens / soak.steps > SLOTS / 3
        tokenizer = engine.tokenizer
        right = [
            tokenizer.decode(soak.known[number, 0, 0][0][:-1]).strip() == answer
            for number, (_, answer) in enumerate(soak.questions)
        ]
        assert sum(right) / len(right) > 0.9


def _finished(soak: Soak, number: int, kind: int) -> tuple[Request, int, int]:
    request = soak._add(number, kind)
    soak.driven.run()
    return request, number, kind
