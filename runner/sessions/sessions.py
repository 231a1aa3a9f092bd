"""Sessions: conversations over one model, each with its own state, position, sampling and history.

A session has a slot of the state that does not grow, and pages of the KV caches. The tokens that a session generates do not
depend on the other sessions. Several threads may use the sessions of an engine: they take turns. A single session belongs to
one thread at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ostinato.delegate import ClosedError, InputError
from ostinato.delegate.artifact.records import Growth, StateKind
from ostinato.delegate.errors import CapacityError, OptionError
from ostinato.delegate.sampling import SamplingParams
from ostinato.runner.model.model import MAX_LOGITS, Model, token_ids
from ostinato.runner.model.steps import PendingTokens, steps_of

from .pages import Pages

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@dataclass
class SessionState:
    """Bookkeeping of a session: its tokens, and what the model has seen of them.

    Attributes:
        tokens: tokens from the caller, and sampled tokens that were taken.
        seen: number of tokens that the model has seen: first those of `tokens`, then those of `pending`.
        pending: sampled tokens that were not taken yet: the tokens of a step, and the index of this session's token in them.
        logits: [vocab] after the last token, if no token was sampled from them yet.
        sampling_params: parameters for sampling the next tokens.
        params_written: whether the model's state has `sampling_params`.
        pages: numbers of the session's pages of the KV caches.
        writable: end of the positions that may be written in these pages.
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
    """One conversation. Made by `Engine.open_session`; a context manager that closes the session on exit.

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
        """The session's history: tokens that it was given, and tokens that were sampled. Not a copy: do not change it."""
        return self._open.tokens

    @property
    def position(self) -> int:
        """Number of tokens in the history."""
        return len(self._open.tokens)

    @property
    def sampling_params(self) -> SamplingParams:
        """Parameters for sampling. When they are set, they hold for all tokens that are computed later.

        Raises:
            OptionError: set to something else than `SamplingParams`.
        """
        return self._open.sampling_params

    @sampling_params.setter
    def sampling_params(self, params: SamplingParams) -> None:
        self._open.sampling_params = checked_params(params)
        self._open.params_written = False

    def prefill(self, tokens: Sequence[int]) -> None:
        """Run the model on `tokens`, which follow the session's history.

        Raises:
            InputError: no tokens, no token ids, a token out of range, or more than max_seq_len tokens; nothing has changed.
            CapacityError: too few pages are free; nothing has changed.
        """
        self._owner.prefill(self, tokens)

    def prefill_logits(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """Run the model on `tokens`, as `prefill` does, and yield the logits after each of them.

        Yields:
            [n, vocab] float32 on the program's device, for 64 tokens at most. When one is yielded, the session has seen its
            tokens, and no later ones.

        Raises:
            InputError, CapacityError: as `prefill`, for the tokens that were not yielded yet.
        """
        tokens = token_ids(tokens)
        for begin in range(0, len(tokens), MAX_LOGITS):
            yield self._owner.prefill_logits(self, tokens[begin : begin + MAX_LOGITS])

    def append(self, token: int) -> None:
        """Make the next step take `token`, as if it had been sampled. The model must have seen all tokens before it.

        Raises:
            InputError: a token out of range, or the model has not seen the session's last token.
        """
        self._owner.append(self, token)

    def generate(
        self, max_new_tokens: int | None = None, eos_ids: Iterable[int] | None = None
    ) -> Generator[int, None, None]:
        """Yield the next tokens, one by one.

        Args:
            max_new_tokens: largest number of tokens. None: only an end-of-sequence token or max_seq_len ends the answer.
            eos_ids: tokens that end the answer, and are not yielded. None: the model's.

        Raises:
            OptionError: `max_new_tokens` below 1.
            CapacityError: too few pages are free. Tokens that were yielded stay in the history.
        """
        return self._owner.generate(self, max_new_tokens, eos_ids)

    def fork(self) -> Session:
        """Open another session that goes on from here. It gets a copy of the state.

        Both share the pages until one of them writes to a page.

        Raises:
            CapacityError: no slot is free.
        """
        return self._owner.fork(self)

    def snapshot(self) -> Snapshot:
        """Return a snapshot for `restore`. It keeps the session's pages, and a copy of the other state on the device."""
        return self._owner.snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to the state in a snapshot, of this session or of another one of the same engine."""
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
    """The state of a session at one moment. It keeps pages until it is closed or garbage-collected."""

    def __init__(self, owner: Sessions, state: SessionState, rows: dict[str, torch.Tensor]) -> None:
        self._owner = owner
        self._state: SessionState | None = state
        self._slot_state = rows

    def close(self) -> None:
        """Give the pages back. Closing twice is fine."""
        if self._state is not None:
            # The garbage collector may call this anywhere, also in the middle of what `Sessions` does.
            self._owner.pages.release_later(self._state.pages)
            self._state, self._slot_state = None, {}

    def __del__(self) -> None:
        self.close()


def _in_turn(
    operation: Callable[Concatenate[Sessions, Parameters], Returned],
) -> Callable[Concatenate[Sessions, Parameters], Returned]:
    """Let one thread at a time into such methods of the same sessions."""

    @wraps(operation)
    def run(sessions: Sessions, *arguments: Parameters.args, **named: Parameters.kwargs) -> Returned:
        with sessions._lock:
            return operation(sessions, *arguments, **named)

    return run


class Sessions:
    """All sessions of a model.

    Attributes:
        pages: the program's pages of the KV caches.
        steps: runs the steps of the sessions.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.pages = Pages(model.program)
        self.steps = steps_of(model)
        self._free = list(reversed(range(model.program.capacity.slots)))
        self._host_ns = 0
        self._lock = RLock()

    @property
    def free(self) -> int:
        """Number of sessions that can still be opened."""
        return len(self._free)

    @property
    @_in_turn
    def free_pages(self) -> int:
        """Number of pages of the KV caches that no session has."""
        return self.pages.free

    @property
    def host_seconds(self) -> float | None:
        """Seconds that `step` has taken so far, without waits for the GPU; None if the two cannot be told apart."""
        return self._host_ns / 1e9 if self.steps.goes_ahead else None

    @_in_turn
    def open(self, sampling_params: SamplingParams | None = None) -> Session:
        """Open a new session.

        Raises:
            CapacityError: no slot is free.
            OptionError: `sampling_params` are something else.
            ClosedError: the program is closed.
        """
        params = checked_params(sampling_params)
        if self._model.program.closed:
            raise ClosedError("the program is closed")
        return Session(self, self._take_slot(), SessionState(sampling_params=params))

    @_in_turn
    def step(self, sessions: Sequence[Session], more: bool = False) -> list[int]:
        """Return the next token of each session, in their order, and add it to the session's history.

        Args:
            sessions: sessions of this model, each listed once and with at least one token.
            more: whether the same sessions will step again. A GPU then begins the next step before the tokens of this step
                are on the host.

        Raises:
            InputError: a session is listed twice, is of another engine, has no token, or has max_seq_len tokens.
            CapacityError: too few pages are free; no session has advanced.
        """
        begin = time.perf_counter_ns()
        if isinstance(sessions, Session) or any(getattr(session, "_owner", None) is not self for session in sessions):
            raise InputError("a step takes a list of sessions of this engine")
        if len(sessions) > 1 and len({session.slot for session in sessions}) < len(sessions):
            raise InputError("a session stands in the step twice")
        states = [session._open for session in sessions]
        self._sample(sessions, 1)
        if more and self.steps.goes_ahead:
            longest = self._model.max_seq_len
            # If too few pages are free for that step, only the next call fails.
            with suppress(CapacityError):
                self._sample([s for s, state in zip(sessions, states, strict=True) if state.seen < longest], 2)
        taken = [state.pending.popleft() for state in states]
        self._host_ns += time.perf_counter_ns() - begin
        tokens = [pending.tokens()[number] for pending, number in taken]
        for state, token in zip(states, tokens, strict=True):
            state.tokens.append(token)
        return tokens

    @_in_turn
    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """See `Session.prefill`."""
        tokens = token_ids(tokens)
        state = session._open
        first, fed = self._fed(session, state, tokens)
        logits = self._model.prefill(fed, first, session.slot)
        # The next graph overwrites the outputs of this one.
        self._saw(state, tokens, logits.clone())

    @_in_turn
    def prefill_logits(self, session: Session, tokens: list[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each token; see `Session.prefill_logits`."""
        state = session._open
        if state.seen < len(state.tokens):
            # The last token was sampled, or appended, and no step has followed.
            self.prefill(session, [])
        first, fed = self._fed(session, state, tokens)
        logits = self._model.prefill_logits(fed, first, session.slot)
        self._saw(state, tokens, logits[-1].clone())
        return logits

    def _fed(self, session: Session, state: SessionState, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Reserve pages for more tokens. Returns the position of the first token that the model has not seen, and all these
        tokens."""
        first = state.seen if self._model.has_state else 0
        fed = [*state.tokens[first:], *tokens]
        end = first + len(fed)
        if not fed:
            raise InputError("there is no token to prefill")
        if end > self._model.max_seq_len:
            raise InputError(f"the session would have {end} tokens, max_seq_len is {self._model.max_seq_len}")
        self._reserve(session, state, end)
        return first, fed

    def _saw(self, state: SessionState, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Note that the model has seen all of the session's tokens, and these behind them."""
        state.logits = logits
        state.pending.clear()
        state.tokens += tokens
        state.seen = len(state.tokens)

    @_in_turn
    def append(self, session: Session, token: int) -> None:
        """See `Session.append`."""
        (token,) = token_ids([token])
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
        if max_new_tokens is not None:
            check_max_new_tokens(max_new_tokens)
        ends = self._model.eos_ids if eos_ids is None else frozenset(eos_ids)
        return self._generate(session, room if max_new_tokens is None else min(room, max_new_tokens), ends)

    @_in_turn
    def fork(self, session: Session) -> Session:
        """See `Session.fork`."""
        state, slot = session._open, self._take_slot()
        other = Session(self, slot, self._shared(state))
        self._write_state(other, self._slot_state(session.slot))
        return other

    @_in_turn
    def snapshot(self, session: Session) -> Snapshot:
        """See `Session.snapshot`."""
        state = session._open
        rows = {key: row.clone() for key, row in self._slot_state(session.slot).items()}
        return Snapshot(self, self._shared(state), rows)

    @_in_turn
    def restore(self, session: Session, snapshot: Snapshot) -> None:
        """See `Session.restore`."""
        state = session._open
        if not isinstance(snapshot, Snapshot) or snapshot._state is None or snapshot._owner is not self:
            raise ClosedError("restore takes a snapshot of this engine that is not closed")
        self.pages.release(state.pages)
        session._state = self._shared(snapshot._state)
        self._write_state(session, snapshot._slot_state)

    @_in_turn
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
        """Sample until each session has `count` tokens that were not taken yet."""
        rest: list[tuple[Session, SessionState]] = []
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
            rest.append((session, state))
        for session, state in rest:
            self._reserve(session, state, state.seen + 1)
            if not state.params_written:
                self.steps.write_sampling_params(session)
                state.params_written = True
        max_rows = self._model.max_rows
        for first in range(0, len(rest), max_rows):
            together = rest[first : first + max_rows]
            pending = self.steps.launch([session for session, _ in together])
            for number, (_, state) in enumerate(together):
                state.seen += 1
                state.pending.append((pending, number))

    def _reserve(self, session: Session, state: SessionState, end: int) -> None:
        if end > state.writable:
            state.writable = self.pages.reserve(session.slot, state.pages, state.seen, end)

    def _shared(self, state: SessionState) -> SessionState:
        """Copy the state for one more session, or for a snapshot. Neither may write the pages before copying them."""
        state.writable = 0
        return SessionState(
            list(state.tokens),
            state.seen,
            deque(state.pending),
            state.logits,
            state.sampling_params,
            # Without a seed the copy samples other tokens, so its parameters must be written.
            params_written=False,
            pages=self.pages.share(state.pages),
        )

    def _write_state(self, session: Session, rows: Mapping[str, torch.Tensor]) -> None:
        """Copy these rows of state into the session's slot, and write its pages into the block table."""
        for key, row in self._slot_state(session.slot).items():
            row.copy_(rows[key])
        self.pages.write_block_table(session.slot, session._open.pages)

    def _slot_state(self, slot: int) -> dict[str, torch.Tensor]:
        """One session's state in the buffers, without the block table. If the state does not grow: all mutable buffers."""
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
                f"all {count} sessions are open (an answer of generate() that has not ended is one): close one, or load the "
                f"program with more, as in sessions={count + 1}"
            )
        return self._free.pop()


def check_max_new_tokens(value: int) -> None:
    """Raises OptionError: no whole number, or below 1."""
    if type(value) is not int or value < 1:
        raise OptionError(f"max_new_tokens must be 1 or more, got {value!r}")


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Return `params`, or for None those of greedy sampling. Raises OptionError: something else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise OptionError(f"sampling_params must be SamplingParams, got {params!r}")
    return params
