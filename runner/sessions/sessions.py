"""Sessions: conversations over one model, each with its own state, position, sampling and history.

A session is a slot of the state that does not grow, and pages of the KV caches. What a session generates does not depend on
which others there are. None of this is for several threads at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ostinato.delegate import ClosedError, InputError
from ostinato.delegate.artifact.records import Growth, StateKind
from ostinato.delegate.errors import CapacityError, OptionError
from ostinato.delegate.sampling import SamplingParams
from ostinato.runner.model.model import Model
from ostinato.runner.model.steps import PendingTokens, steps_of

from .pages import Pages


@dataclass
class SessionState:
    """Where a session stands.

    Attributes:
        tokens: the caller's, and those sampled and taken.
        seen: how many tokens the state has seen: of `tokens`, and then of `pending`.
        pending: tokens that steps have sampled and nobody has taken: those of a step, and which of them is this session's.
        logits: [vocab] after the last token, where no token was sampled from them yet.
        sampling_params: of its next tokens.
        params_written: whether the model's state has `sampling_params`.
        pages: of the KV caches.
        writable: the position up to which the last of them may be written.
    """

    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    pending: deque[tuple[PendingTokens, int]] = field(default_factory=deque)
    logits: torch.Tensor | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    params_written: bool = False
    pages: list[int] = field(default_factory=list)
    writable: int = 0


class Session:
    """One conversation. Made by `Engine.open_session`; a context manager that closes it on exit.

    >>> session = engine.open_session(SamplingParams(temperature=0.7))
    >>> session.prefill(engine.encode_prompt("What is the capital of France?"))
    >>> other = session.fork()
    >>> engine.step([session, other])
    """

    def __init__(self, owner: Sessions, slot: int, state: SessionState) -> None:
        self._owner = owner
        self.slot = slot
        self._state: SessionState | None = state

    @property
    def tokens(self) -> list[int]:
        """Its history: what it was given, and what was sampled."""
        return self._open.tokens

    @property
    def position(self) -> int:
        """How many tokens it has."""
        return len(self._open.tokens)

    @property
    def sampling_params(self) -> SamplingParams:
        """May be set, and then holds for the tokens that are computed after that."""
        return self._open.sampling_params

    @sampling_params.setter
    def sampling_params(self, params: SamplingParams) -> None:
        self._open.sampling_params = params
        self._open.params_written = False

    def prefill(self, tokens: Sequence[int]) -> None:
        """Have the model see `tokens` behind those that it has.

        Raises:
            InputError: no tokens, one out of range, or more than max_seq_len; nothing has changed.
            CapacityError: there are no pages left for them; nothing has changed.
        """
        self._owner.prefill(self, tokens)

    def append(self, token: int) -> None:
        """Have the next step take `token`, as if it had been sampled. The model must have seen all tokens before it.

        Raises:
            InputError: a token out of range, or the model has not seen the last one.
        """
        self._owner.append(self, token)

    def generate(
        self, max_new_tokens: int | None = None, eos_ids: Iterable[int] | None = None
    ) -> Generator[int, None, None]:
        """Yield the next tokens, one by one.

        Args:
            max_new_tokens: ends it; by default only an end-of-sequence token does, or max_seq_len.
            eos_ids: tokens that end it, and are not yielded; None: the model's.

        Raises:
            OptionError: less than one token.
            CapacityError: there are no pages left; what was yielded stays.
        """
        return self._owner.generate(self, max_new_tokens, eos_ids)

    def fork(self) -> Session:
        """Another session that goes on from here: a copy of the state, and pages shared until one of the two writes to them.

        Raises:
            CapacityError: no slot is free.
        """
        return self._owner.fork(self)

    def snapshot(self) -> Snapshot:
        """Where it stands, to go back to with `restore`. It keeps its pages, and a copy of the rest on the device."""
        return self._owner.snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to where a session of this engine stood: this one, or another."""
        self._owner.restore(self, snapshot)

    def close(self) -> None:
        """Give slot and pages back. Closing twice is fine."""
        if self._state is not None:
            self._owner.close(self)
            self._state = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _open(self) -> SessionState:
        if self._state is None:
            raise ClosedError("the session is closed")
        return self._state


class Snapshot:
    """Where a session stood. It keeps pages until it is closed or forgotten."""

    def __init__(self, owner: Sessions, state: SessionState, rows: dict[str, torch.Tensor]) -> None:
        self._owner = owner
        self._state: SessionState | None = state
        self._rows = rows

    def close(self) -> None:
        """Give the pages back. Closing twice is fine."""
        if self._state is not None:
            self._owner.pages.release(self._state.pages)
            self._state, self._rows = None, {}

    def __del__(self) -> None:
        self.close()


class Sessions:
    """All sessions of a model.

    Attributes:
        pages: of the KV caches.
        steps: what takes sessions from one token to the next.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.pages = Pages(model.program)
        self.steps = steps_of(model)
        self._free = list(reversed(range(model.program.capacity.slots)))
        self._host_ns = 0

    @property
    def free(self) -> int:
        """Sessions that can still be opened."""
        return len(self._free)

    @property
    def host_seconds(self) -> float | None:
        """Time that `step` has taken so far, not counting waits for the GPU; None where the two cannot be told apart."""
        return self._host_ns / 1e9 if self.steps.goes_ahead else None

    def open(self, sampling_params: SamplingParams | None = None) -> Session:
        """A new session. Raises CapacityError: no slot is free."""
        return Session(self, self._take_slot(), SessionState(sampling_params=sampling_params or SamplingParams()))

    def step(self, sessions: Sequence[Session], more: bool = False) -> list[int]:
        """The next token of each session, in their order; it is in its history then.

        Args:
            sessions: of this model, each once; each has at least one token.
            more: the same sessions will step again. A GPU begins with that step before the tokens of this one are here.

        Raises:
            InputError: a session twice, one of another engine, one without a token, or one that has max_seq_len tokens.
            CapacityError: no pages are left; no session has moved.
        """
        begin = time.perf_counter_ns()
        if any(session._owner is not self for session in sessions):
            raise InputError("a session of another engine")
        if len({session.slot for session in sessions}) < len(sessions):
            raise InputError("a session stands in the step twice")
        self._sample(sessions, 1)
        if more and self.steps.goes_ahead:
            longest = self._model.max_seq_len
            # Without pages for it, it is the next call that fails.
            with suppress(CapacityError):
                self._sample([session for session in sessions if session._open.seen < longest], 2)
        taken = [session._open.pending.popleft() for session in sessions]
        self._host_ns += time.perf_counter_ns() - begin
        tokens = []
        for session, (pending, number) in zip(sessions, taken, strict=True):
            tokens.append(pending.tokens()[number])
            session.tokens.append(tokens[-1])
        return tokens

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """See `Session.prefill`."""
        state = session._open
        first = state.seen if self._model.has_state else 0
        fed = [*state.tokens[first:], *tokens]
        end = first + len(fed)
        if not fed:
            raise InputError("there is no token to prefill")
        if end > self._model.max_seq_len:
            raise InputError(f"the session would have {end} tokens, max_seq_len is {self._model.max_seq_len}")
        self._reserve(session, end)
        logits = self._model.prefill(fed, first, session.slot)
        # What a graph gives is overwritten by the next one.
        state.logits = logits.clone()
        state.pending.clear()
        state.tokens += tokens
        state.seen = end

    def append(self, session: Session, token: int) -> None:
        """See `Session.append`."""
        state = session._open
        if state.seen < len(state.tokens):
            raise InputError("the model has not seen the session's last token: step, or prefill both")
        self._model.check_tokens([token])
        state.logits = None
        state.pending.clear()
        state.tokens.append(token)
        self.steps.write_last_token(session)

    def generate(
        self, session: Session, max_new_tokens: int | None, eos_ids: Iterable[int] | None
    ) -> Generator[int, None, None]:
        """See `Session.generate`."""
        room = self._model.max_seq_len - session.position
        if max_new_tokens is not None and max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
        ends = self._model.eos_ids if eos_ids is None else frozenset(eos_ids)
        return self._generate(session, room if max_new_tokens is None else min(room, max_new_tokens), ends)

    def fork(self, session: Session) -> Session:
        """See `Session.fork`."""
        state, slot = session._open, self._take_slot()
        other = Session(self, slot, self._shared(state))
        self._write_state(other, self._rows(session.slot))
        return other

    def snapshot(self, session: Session) -> Snapshot:
        """See `Session.snapshot`."""
        state = session._open
        rows = {key: row.clone() for key, row in self._rows(session.slot).items()}
        return Snapshot(self, self._shared(state), rows)

    def restore(self, session: Session, snapshot: Snapshot) -> None:
        """See `Session.restore`."""
        state = session._open
        if snapshot._state is None or snapshot._owner is not self:
            raise ClosedError("the snapshot is closed, or of another engine")
        self.pages.release(state.pages)
        session._state = self._shared(snapshot._state)
        self._write_state(session, snapshot._rows)

    def close(self, session: Session) -> None:
        """See `Session.close`."""
        self.pages.release(session._open.pages)
        self._free.append(session.slot)

    def _generate(self, session: Session, max_new_tokens: int, ends: frozenset[int]) -> Generator[int, None, None]:
        for count in range(1, max_new_tokens + 1):
            (token,) = self.step([session], more=count < max_new_tokens)
            if token in ends:
                return
            yield token

    def _sample(self, sessions: Sequence[Session], count: int) -> None:
        """Have `count` tokens sampled for each session that nobody has taken yet."""
        rest = []
        for session in sessions:
            state = session._open
            if len(state.pending) >= count:
                continue
            if state.logits is not None:
                state.pending.append((self.steps.first(session, state.logits), 0))
                state.logits, state.params_written = None, True
                continue
            if not state.tokens:
                raise InputError("the session has no token: prefill first")
            if state.seen >= self._model.max_seq_len:
                raise InputError(f"the session has {state.seen} tokens, max_seq_len is {self._model.max_seq_len}")
            rest.append(session)
        for session in rest:
            self._reserve(session, session._open.seen + 1)
            if not session._open.params_written:
                self.steps.write_sampling_params(session)
                session._open.params_written = True
        max_rows = self._model.max_rows
        for first in range(0, len(rest), max_rows):
            together = rest[first : first + max_rows]
            pending = self.steps.launch(together)
            for number, session in enumerate(together):
                session._open.seen += 1
                session._open.pending.append((pending, number))

    def _reserve(self, session: Session, end: int) -> None:
        state = session._open
        if end > state.writable:
            state.writable = self.pages.reserve(session.slot, state.pages, state.seen, end)

    def _shared(self, state: SessionState) -> SessionState:
        """The same state for one more session, or to go back to. Neither may write the pages as they are now."""
        state.writable = 0
        return SessionState(
            list(state.tokens),
            state.seen,
            deque(state.pending),
            state.logits,
            state.sampling_params,
            # Without a seed it samples others.
            params_written=False,
            pages=self.pages.share(state.pages),
        )

    def _write_state(self, session: Session, rows: Mapping[str, torch.Tensor]) -> None:
        """Give a session's slot these rows of the state, and its pages."""
        for key, row in self._rows(session.slot).items():
            row.copy_(rows[key])
        self.pages.write_block_table(session.slot, session._open.pages)

    def _rows(self, slot: int) -> dict[str, torch.Tensor]:
        """What buffers hold of one session, but for where its pages are; all that they hold where state does not grow."""
        program = self._model.program
        if not program.capacity.slot_bytes:
            return program.mutable_buffers
        tables = program.buffers_of(StateKind.BLOCK_TABLE)
        rows = program.buffers_that_grow(Growth.SLOTS)
        return {key: buffer[slot] for key, buffer in rows.items() if key not in tables}

    def _take_slot(self) -> int:
        if not self._free:
            count = self._model.program.capacity.slots
            raise CapacityError(
                f"all {count} sessions are open: close one, or load the program with more, as in sessions={count + 1}"
            )
        return self._free.pop()
