"""Sessions: conversations over one model, each with its own state, position, sampling and history.

A session has a slot of the state that does not grow, and pages of the KV caches. The tokens that a session generates do not
depend on the other sessions. Several threads may use the sessions of an engine: they take turns. A single session belongs to
one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import RLock

import torch

from ostinato.delegate import ClosedError, InputError
from ostinato.delegate.errors import CapacityError
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs
from ostinato.runner.model.batch import Run
from ostinato.runner.model.model import Model, token_ids
from ostinato.runner.model.steps import TokenBitmask, steps_of

from .host_tier import HostTier
from .in_turn import in_turn
from .pages import Pages
from .parts import Opened, Part, packed
from .prompt_logprobs import prompt_logprobs
from .session import Session, SessionState, Snapshot, check_max_new_tokens, checked_params
from .slots import Slots


class Sessions:
    """All sessions of a model.

    Attributes:
        slots: the program's slots.
        pages: the program's pages of the KV caches.
        tier: moves sessions to the host and back.
        steps: runs the steps of the sessions.
        lock: lets one thread at a time change them.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.slots = Slots(model.program)
        self.pages = Pages(model.program)
        self.steps = steps_of(model)
        self._host_ns = self._wait_ns = 0
        self.lock = RLock()
        self.tier = HostTier(model.program, self.slots, self.pages, self.lock, lambda: self.steps)

    @property
    @in_turn
    def free(self) -> int:
        """Number of sessions that can still be opened."""
        self.tier.settle()
        return self.slots.free

    @property
    def free_snapshots(self) -> int:
        """Number of snapshots that can still be made; 0 too if the state does not grow, where their number has no limit."""
        return self.slots.free_snapshots

    @property
    @in_turn
    def free_pages(self) -> int:
        """Number of pages of the KV caches that no session has, in the page group that has fewest."""
        self.tier.settle()
        return self.pages.free

    @property
    @in_turn
    def free_pages_by_group(self) -> dict[str, int]:
        """Number of pages of the KV caches that no session has, by the name of their page group."""
        self.tier.settle()
        return self.pages.free_by_group

    @property
    def host_seconds(self) -> float | None:
        """Seconds that `step` has taken so far, without waits for the GPU; None if the two cannot be told apart."""
        return self._host_ns / 1e9 if self.steps.goes_ahead else None

    @property
    def wait_seconds(self) -> float | None:
        """Seconds that `step` has waited for the GPU so far; None as for `host_seconds`."""
        return self._wait_ns / 1e9 if self.steps.goes_ahead else None

    @in_turn
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
        slot = self.tier.take_slot()
        return Session(self, slot, SessionState(sampling_params=params, pages=self.pages.none()))

    @in_turn
    def step(
        self, sessions: Sequence[Session], more: bool = False, prefill: Mapping[Session, Sequence[int]] | None = None
    ) -> list[int]:
        """Return the next token of each session, in their order, and add it to the session's history.

        Args:
            sessions: sessions of this model, each listed once and with at least one token.
            more: whether the same sessions will step again. A GPU then begins the next step before the tokens of this step
                are on the host.
            prefill: session -> tokens, which are run as `Session.prefill` does, in the same step of the model as far as it
                has room. A session may be one of `sessions`: then its token is the one after these tokens. With `more`, it
                had better be one from the next call on, whose step has then gone ahead for all of them together.

        Raises:
            InputError: a session is listed twice, is of another engine, has no token, or has max_seq_len tokens.
            CapacityError: too few pages are free; no session has advanced.
        """
        begin = time.perf_counter_ns()
        opened = self._opened(sessions)
        if len(opened) > 1 and len({session.slot for session in sessions}) < len(opened):
            raise InputError("a session stands in the step twice")
        if prefill:
            self._opened(prefill)
        self.steps.settle()
        going_ahead = more and self.steps.goes_ahead
        if prefill:
            prompts = [self._prompt(session, token_ids(tokens)) for session, tokens in prefill.items()]
            self._run(prompts, opened, going_ahead)
        self._sample(opened, 1)
        if going_ahead:
            ahead = self._not_full(opened)
            if len(ahead) > self._model.max_rows:
                # Only the logits of one call of the model can wait for bitmasks.
                ahead = [one for one in ahead if one[1].token_bitmask is None]
            # If too few pages are free for that step, only the next call fails.
            with suppress(CapacityError):
                self._sample(ahead, 2)
        taken = [state.pending.pop(0) for _, state in opened]
        launched = time.perf_counter_ns()
        self._host_ns += launched - begin
        tokens = [pending.tokens()[number] for pending, number in taken]
        self._wait_ns += time.perf_counter_ns() - launched
        for (_, state), token, (pending, number) in zip(opened, tokens, taken, strict=True):
            state.history.tokens.append(token)
            state.logits = None
            if state.sampling_params.logprobs is not None:
                state.logprobs = pending.logprobs(number)
        return tokens

    @in_turn
    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """See `Session.prefill`."""
        self.steps.settle()
        self._run([self._prompt(session, token_ids(tokens))])

    @in_turn
    def prefill_logits(self, session: Session, tokens: list[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each token; see `Session.prefill_logits`."""
        self.steps.settle()
        state = session._open
        if state.seen < len(state.history):
            # The last token was sampled, or appended, and no step has followed.
            self.prefill(session, [])
        first, fed = self._fed(session, state, tokens)
        logits = self._model.step([Run(session.slot, fed, first, len(tokens))]).logits
        self._saw(state, tokens, logits[-1].clone())
        return logits

    @in_turn
    def prompt_logprobs(self, session: Session, tokens: list[int], count: int) -> list[TokenLogprobs | None]:
        """See `Session.prompt_logprobs`. Pages are reserved for all tokens before anything changes."""
        self.steps.settle()
        self._fed(session, session._open, tokens)
        self._model.check_tokens(tokens)
        before = self.logits(session) if session.tokens else None
        return prompt_logprobs(self._model, tokens, count, before, lambda part: self.prefill_logits(session, [*part]))

    @in_turn
    def hidden_states(self, session: Session, tokens: list[int], layers: list[int]) -> torch.Tensor:
        """See `Session.hidden_states`."""
        self.steps.settle()
        state = session._open
        first, fed = self._fed(session, state, tokens)
        logits, states = self._model.hidden_states(fed, first, session.slot, layers)
        self._saw(state, tokens, logits.clone())
        return states

    @in_turn
    def logits(self, session: Session) -> torch.Tensor:
        """See `Session.logits`."""
        state = session._open
        if state.pending and state.logits is None:
            raise InputError("a step with more=True has gone ahead: its logits are not kept. Step without it first")
        if state.logits is None:
            self.prefill(session, [])
        assert state.logits is not None
        return state.logits

    def _opened(self, sessions: Iterable[Session]) -> list[Opened]:
        """The sessions with their states. Raises InputError: what is given is no list of sessions of this engine."""
        opened = []
        for session in [None] if isinstance(sessions, Session) else sessions:
            if session is None or getattr(session, "_owner", None) is not self:
                raise InputError("a step takes a list of sessions of this engine")
            opened.append((session, session._open))
        return opened

    def _prompt(self, session: Session, tokens: Sequence[int]) -> Part:
        """Reserve pages for the tokens of a prompt."""
        state = session._open
        if tokens and state.sampling_params.processes:
            # They are written as the prompt's before the model runs.
            self._model.check_tokens(tokens)
        first, fed = self._fed(session, state, tokens)
        return Part(session, state, Run(session.slot, fed, first), tokens)

    def _run(self, prompts: Sequence[Part], beside: Sequence[Opened] = (), going_ahead: bool = False) -> None:
        """Run prompts, and beside them a step of the sessions that need one, in as few steps of the model as have room.

        `going_ahead`: sessions whose token was sampled, and not taken yet, have the step after it here too.
        """
        known = {part.session for part in prompts}
        others = [one for one in beside if one[0] not in known]
        waiting = self._waiting(others, 1)
        if going_ahead:
            # A bitmask depends on the token that was not taken.
            ahead = [one for one in self._not_full(others) if one[1].pending and one[1].token_bitmask is None]
            with suppress(CapacityError):
                waiting += self._waiting(ahead, 2)
        parts = [Part(session, state, Run(session.slot), None) for session, state in waiting]
        for part in prompts:
            self._write_params(part.session, part.state, part.tokens or ())
        for together in packed([*parts, *prompts], self._model.max_rows):
            if all(part.tokens is None for part in together):
                self._launch([(part.session, part.state) for part in together], ahead=False)
                continue
            logits, tokens = self.steps.prompt([part.session for part in together], [part.run for part in together])
            # The next graph overwrites the outputs of this one. Without graphs there is no copy: on a CPU it would start
            # OpenMP's threads, which go on looking for work.
            alone = not self._model.cuda_graph and logits.untyped_storage().nbytes() == logits[0].nbytes
            for number, part in enumerate(together):
                if part.tokens is None:
                    part.state.seen += 1
                else:
                    self._saw(part.state, part.tokens, logits[number] if alone else logits[number].clone())
                if (pending := tokens[number]) is not None:
                    part.state.pending.append(pending)

    def _fed(self, session: Session, state: SessionState, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Reserve pages for more tokens. Returns the position of the first token that the model has not seen, and all these
        tokens."""
        first = state.seen if self._model.has_state else 0
        fed = [*state.history.since(first), *tokens]
        end = first + len(fed)
        if not fed:
            raise InputError("there is no token to prefill")
        if end > self._model.max_seq_len:
            raise InputError(f"the session would have {end} tokens, max_seq_len is {self._model.max_seq_len}")
        self._reserve(session, state, end)
        return first, fed

    def _saw(self, state: SessionState, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Note that the model has seen all of the session's tokens, and these behind them, which end the prompt."""
        state.logits = logits
        state.pending.clear()
        state.history.add(tokens)
        state.seen = len(state.history)
        if tokens:
            state.logprobs, state.prompt_end = None, state.prompt_end_of(state.seen)
        self.pages.leave(state.pages, state.seen)

    @in_turn
    def append(self, session: Session, token: int) -> None:
        """See `Session.append`."""
        self.steps.settle()
        (token,) = token_ids([token])
        state = session._open
        if state.seen < len(state.history):
            raise InputError("the model has not seen the session's last token: step, or prefill both")
        self._model.check_tokens([token])
        state.logits = state.logprobs = None
        state.pending.clear()
        state.history.add([token])
        # The token is an output that no step has counted.
        state.written_prompt_end = None
        self.steps.write_last_token(session)

    @in_turn
    def set_sampling(self, session: Session, params: SamplingParams, token_bitmask: TokenBitmask | None) -> None:
        """Set `Session.sampling_params` and `Session.token_bitmask`."""
        self.steps.settle()
        state = session._open
        state.sampling_params, state.token_bitmask = params, token_bitmask
        state.written_prompt_end = None
        if state.logits is not None:
            # The token after the prompt was sampled with it, by the parameters before.
            state.pending.clear()

    def generate(
        self, session: Session, max_new_tokens: int | None, eos_ids: Iterable[int] | None
    ) -> Generator[int, None, None]:
        """See `Session.generate`."""
        room = self._model.max_seq_len - session.position
        if max_new_tokens is not None:
            check_max_new_tokens(max_new_tokens)
        ends = session.sampling_params.ends(self._model.eos_ids if eos_ids is None else eos_ids)
        return self._generate(session, room if max_new_tokens is None else min(room, max_new_tokens), ends)

    @in_turn
    def fork(self, session: Session) -> Session:
        """See `Session.fork`."""
        self.steps.settle()
        state, slot = session._open, self.tier.take_slot()
        self.slots.copy(session.slot, slot)
        return Session(self, slot, self.shared(state))

    @in_turn
    def snapshot(self, session: Session) -> Snapshot:
        """See `Session.snapshot`."""
        self.steps.settle()
        state, copied = session._open, self.tier.with_room(lambda: self.slots.keep(session.slot))
        return Snapshot(self, self.shared(state), copied)

    @in_turn
    def restore(self, session: Session, snapshot: Snapshot) -> None:
        """See `Session.restore`."""
        self.steps.settle()
        state = session._open
        copied = snapshot.copied if isinstance(snapshot, Snapshot) else None
        if copied is None or snapshot._state is None or snapshot._owner is not self:
            raise ClosedError("restore takes a snapshot of this engine that is not closed")
        self.slots.write(copied, session.slot)
        self.pages.release(state.pages)
        session._state = self.shared(snapshot._state)

    @in_turn
    def close(self, session: Session) -> None:
        """See `Session.close`."""
        self.steps.forget(session)
        if not session.is_offloaded:
            self.pages.release(session._open.pages)
            self.slots.give(session.slot)

    def _generate(self, session: Session, max_new_tokens: int, ends: frozenset[int]) -> Generator[int, None, None]:
        for count in range(1, max_new_tokens + 1):
            (token,) = self.step([session], more=count < max_new_tokens)
            if token in ends:
                return
            yield token

    def _sample(self, sessions: Sequence[Opened], count: int) -> None:
        """Sample until each session has `count` tokens that were not taken yet."""
        rest = self._waiting(sessions, count)
        max_rows = self._model.max_rows
        for first in range(0, len(rest), max_rows):
            self._launch(rest[first : first + max_rows], ahead=count > 1)

    def _not_full(self, sessions: Sequence[Opened]) -> list[Opened]:
        """Return those sessions that have fewer than max_seq_len tokens, so that the model can run them."""
        longest = self._model.max_seq_len
        return [one for one in sessions if one[1].seen < longest]

    def _waiting(self, sessions: Sequence[Opened], count: int) -> list[Opened]:
        """Return those sessions that need a step to have `count` tokens that were not taken. They have pages for it.

        A session with the logits of its last token needs none: its token is sampled here.
        """
        rest: list[Opened] = []
        max_seq_len = self._model.max_seq_len
        for one in sessions:
            session, state = one
            if len(state.pending) >= count:
                continue
            if state.logits is not None and not state.pending:
                self._write_params(session, state)
                state.pending.append(self.steps.first(session, state.logits))
                continue
            if not state.seen and not len(state.history):
                raise InputError("the session has no token: prefill first")
            if state.seen >= max_seq_len:
                raise InputError(f"the session has {state.seen} tokens, max_seq_len is {max_seq_len}")
            rest.append(one)
        for session, state in rest:
            if state.seen >= state.writable:
                self._reserve(session, state, state.seen + 1)
        for session, state in rest:
            if state.written_prompt_end != state.prompt_end:
                self._write_params(session, state)
        return rest

    def _launch(self, together: Sequence[Opened], ahead: bool) -> None:
        pending = self.steps.launch([session for session, _ in together], ahead)
        for (_, state), token in zip(together, pending, strict=True):
            state.seen += 1
            state.pending.append(token)

    def _write_params(self, session: Session, state: SessionState, prompt: Sequence[int] = ()) -> None:
        """Write the session's parameters, if they changed, or if what they count changes with the tokens of a prompt."""
        if not prompt and state.written_prompt_end == state.prompt_end:
            return
        end = state.prompt_end_of(len(state.history) + len(prompt)) if prompt else state.prompt_end
        if state.sampling_params.processes:
            # Tokens that were not taken yet count, too; a prompt takes their place.
            rest = [] if prompt else [pending.tokens()[number] for pending, number in state.pending]
            self.steps.write_sampling_params(session, [*state.history.tokens, *rest, *prompt], end)
        elif state.written_prompt_end is None:
            self.steps.write_sampling_params(session, (), end)
        state.written_prompt_end = end

    def _reserve(self, session: Session, state: SessionState, end: int) -> None:
        if end > state.writable:
            state.writable = self.tier.with_room(lambda: self.pages.reserve(session.slot, state.pages, state.seen, end))

    def shared(self, state: SessionState) -> SessionState:
        """Copy the state for one more session, or for a snapshot. Neither may write the pages before copying them."""
        state.writable = 0
        self.pages.leave(state.pages, state.seen)
        return state.shared(self.pages.share(state.pages, state.seen))
