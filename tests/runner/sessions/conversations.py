"""Random conversations with an engine, as a state machine of hypothesis: an engine must bear any order of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.delegate import CapacityError, InputError, StateKind
from ostinato.delegate.logits_processing import bitmask
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.sessions.session import Session, Snapshot

from ...conftest import CAPITALS_LENGTH

# Four sessions of at most 251 tokens would need 16 pages of 64. There are fewer, so that pages run out.
SESSIONS, KV_TOKENS = 4, 9 * 64
SNAPSHOTS = 3

Logits = Callable[[list[int]], torch.Tensor]
PLAIN = SamplingParams()
CHANGED = (
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.75),
    SamplingParams(frequency_penalty=-2.0, logit_bias={3: 100.0, 5: 100.0, 7: -100.0}),
    SamplingParams(presence_penalty=2.0, min_tokens=4, stop_token_ids=list(range(0, 90, 2))),
    SamplingParams(logprobs=2),
    # One token is left, so the most likely one.
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=3.0, top_k=1, min_p=0.5, seed=7),
)


def close(*sessions: Session | Snapshot) -> None:
    for session in sessions:
        session.close()


def settle(engine: Engine) -> None:
    """Wait for sessions that are on their way to the host."""
    while engine.sessions.tier.settle(wait=True):
        pass


@dataclass
class Known:
    """A session or a snapshot, the tokens that its history must have, and what its next token depends on beside them."""

    it: Any
    tokens: list[int]
    prompt_end: int = 0
    params: SamplingParams = PLAIN
    masked: bool = False

    def next(self, logits: torch.Tensor, eos_ids: frozenset[int]) -> int:
        """The most likely token after the history, from the model's logits after it, [vocab] float32."""
        params, outputs = self.params, self.tokens[self.prompt_end :]
        x = logits.clone()
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        if len(outputs) < params.min_tokens:
            x[[*eos_ids, *(params.stop_token_ids or ())]] = -torch.inf
        if self.masked:
            x[[token for token in range(len(x)) if not allowed(token, len(self.tokens))]] = -torch.inf
        for token in set(self.tokens):
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        for token in set(outputs):
            x[token] -= params.presence_penalty + params.frequency_penalty * outputs.count(token)
        return int(x.argmax())


def allowed(token: int, position: int) -> bool:
    """The grammar of sessions with a bitmask."""
    return token % 5 == position % 5


def mask_of(vocab: int) -> Callable[[list[int]], torch.Tensor]:
    return lambda tokens: bitmask([token for token in range(vocab) if allowed(token, len(tokens))], vocab)


class Conversations(RuleBasedStateMachine):
    """Sessions join, leave, fork, make snapshots, go to the host and to files, and step in any order: each session's tokens
    are transformers' own.

    Attributes:
        engine: with SESSIONS slots and SNAPSHOTS rows for snapshots.
        logits: transformers' logits [vocab] after a sequence.
        vocab: number of tokens that prompts are made of.
        max_seq_len: the engine's.
        longest: the most tokens that a prompt adds.
    """

    engine: Engine
    logits: Logits
    vocab = 1500
    max_seq_len = CAPITALS_LENGTH
    longest = 70

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Known] = []
        self.snapshots: list[Known] = []

    def teardown(self) -> None:
        close(*(known.it for known in [*self.sessions, *self.snapshots]))

    @rule(length=st.integers(1, 40), first=st.integers(0, 1499))
    def join(self, length: int, first: int) -> None:
        settle(self.engine)
        if not self.engine.sessions.free:
            with pytest.raises(CapacityError, match=f"all {SESSIONS} sessions are open"):
                self.engine.open_session()
            return
        session = Known(self.engine.open_session(), [])
        self.sessions.append(session)
        self._prefill(session, [(first + 31 * place) % self.vocab for place in range(length)])

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0), length=st.integers(1, 1000), first=st.integers(0, 1499))
    def go_on(self, which: int, length: int, first: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if not self._here(session):
            return
        tokens = [(first + 17 * place) % self.vocab for place in range(1 + length % self.longest)]
        if len(session.tokens) + len(tokens) > self.max_seq_len - 1:
            return
        self._prefill(session, tokens)

    @precondition(lambda self: self.sessions)
    @rule(chosen=st.sets(st.integers(0, SESSIONS - 1), min_size=1), more=st.booleans(), count=st.integers(1, 5))
    def step(self, chosen: set[int], more: bool, count: int) -> None:
        some = [session for place, session in enumerate(self.sessions) if place in chosen and session.tokens]
        some = [session for session in some if len(session.tokens) + count < self.max_seq_len and self._here(session)]
        if not some:
            return
        for _ in range(count):
            try:
                found = self.engine.step([session.it for session in some], more)
            except CapacityError:
                break
            expected = [self._next(session) for session in some]
            assert found == expected
            for session, token in zip(some, found, strict=True):
                session.tokens.append(token)

    @precondition(lambda self: self.sessions)
    @rule(
        chosen=st.sets(st.integers(0, SESSIONS - 1)),
        lengths=st.dictionaries(st.integers(0, SESSIONS - 1), st.integers(1, 70), min_size=1),
        first=st.integers(0, 1499),
        more=st.booleans(),
    )
    def step_beside_prompts(self, chosen: set[int], lengths: dict[int, int], first: int, more: bool) -> None:
        """Some sessions step, some get tokens, and some both, in one step of the model."""
        prompts = {place: [(first + 13 * n) % self.vocab for n in range(count)] for place, count in lengths.items()}
        prompts = {
            place: tokens
            for place, tokens in prompts.items()
            if place < len(self.sessions) and len(self.sessions[place].tokens) + len(tokens) < self.max_seq_len - 1
            if self._here(self.sessions[place])
        }
        stepping = [
            session
            for place, session in enumerate(self.sessions)
            if place in chosen and (place in prompts or session.tokens) and len(session.tokens) + 1 < self.max_seq_len
            if self._here(session)
        ]
        given = {self.sessions[place].it: tokens for place, tokens in prompts.items()}
        try:
            found = self.engine.step([session.it for session in stepping], more, given)
        except CapacityError:
            return
        for place, tokens in prompts.items():
            self.sessions[place].tokens += tokens
            self.sessions[place].prompt_end = len(self.sessions[place].tokens)
        assert found == [self._next(session) for session in stepping]
        for session, token in zip(stepping, found, strict=True):
            session.tokens.append(token)

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0), params=st.sampled_from([PLAIN, *CHANGED]), masked=st.booleans())
    def sample_otherwise(self, which: int, params: SamplingParams, masked: bool) -> None:
        session = self.sessions[which % len(self.sessions)]
        if not self._here(session):
            return
        if session.it._open.pending and session.it._open.logits is None:
            # A step has gone ahead, by the parameters before.
            return
        session.params, session.it.sampling_params = params, params
        session.masked = masked
        session.it.token_bitmask = mask_of(self.engine.model.vocab) if masked else None

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if self._here(session) and self.engine.sessions.free:
            self.sessions.append(replace(session, it=session.it.fork(), tokens=list(session.tokens)))

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0))
    def keep(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if not self._here(session):
            return
        if len(self.snapshots) == SNAPSHOTS:
            with pytest.raises(CapacityError, match=rf"all {SNAPSHOTS} snapshots .* as in snapshots={SNAPSHOTS + 1}"):
                session.it.snapshot()
            return
        self.snapshots.append(replace(session, it=session.it.snapshot(), tokens=list(session.tokens)))

    @precondition(lambda self: self.sessions and self.snapshots)
    @rule(which=st.integers(0), kept=st.integers(0))
    def go_back(self, which: int, kept: int) -> None:
        session, snapshot = self.sessions[which % len(self.sessions)], self.snapshots[kept % len(self.snapshots)]
        if self._here(session):
            session.it.restore(snapshot.it)
            place = self.sessions.index(session)
            self.sessions[place] = replace(snapshot, it=session.it, tokens=list(snapshot.tokens))

    @precondition(lambda self: self.snapshots)
    @rule(kept=st.integers(0))
    def forget(self, kept: int) -> None:
        close(self.snapshots.pop(kept % len(self.snapshots)).it)

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0))
    def offload(self, which: int) -> None:
        self.sessions[which % len(self.sessions)].it.offload()

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0))
    def save_and_load(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        with TemporaryDirectory() as folder:
            path = Path(folder, "session")
            session.it.save(path)
            try:
                loaded = replace(session, it=self.engine.load_session(path), tokens=list(session.tokens))
                self.sessions.append(loaded)
                # A bitmask is a function, which no file has. But a token that was begun with it is in the file.
                loaded.it.token_bitmask = mask_of(self.engine.model.vocab) if loaded.masked else None
            except CapacityError as error:
                assert re.search(r"sessions are open|are free: close a session", str(error))

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0))
    def leave(self, which: int) -> None:
        close(self.sessions.pop(which % len(self.sessions)).it)

    @invariant()
    def histories_are_theirs(self) -> None:
        for session in self.sessions:
            assert session.it.tokens == session.tokens

    @invariant()
    def known_numbers_are_on_the_device(self) -> None:
        """What is not written again, because the host knows that a row has it, the row has."""
        numbers = self.engine.program.numbers_of(StateKind.SAMPLING)
        for row in range(SESSIONS + SNAPSHOTS):
            for name, value in numbers._known_of(row).items():
                buffer = numbers._buffers[name]
                assert buffer[row].item() == torch.tensor(value, dtype=buffer.dtype).item()

    def _here(self, session: Known) -> bool:
        """Bring the session back if it is on the host. False: there is no room."""
        if session.it.is_offloaded:
            with pytest.raises(InputError, match="the session is on the host: onload it first"):
                self.engine.step([session.it])
            try:
                session.it.onload()
            except CapacityError as error:
                assert re.search(r"sessions are open|are free: close a session", str(error))
                return False
        return True

    def _prefill(self, session: Known, tokens: list[int]) -> None:
        try:
            session.it.prefill(tokens)
        except CapacityError as error:
            assert "are free: close a session, or load the program with more kv_tokens" in str(error)
        else:
            session.tokens += tokens
            session.prompt_end = len(session.tokens)

    def _next(self, session: Known) -> int:
        logits = self.logits(session.tokens)
        if session.params.logprobs is not None and not session.masked:
            given = session.it.logprobs
            best = logits.log_softmax(0).topk(2)
            assert given.token == session.it.tokens[len(session.tokens)] and given.rank == 1
            assert [token for token, _ in given.top] == best.indices.tolist()
            assert [given.logprob, given.top[1][1]] == pytest.approx(best.values.tolist(), abs=1e-3)
        return session.next(logits, self.engine.eos_ids)
