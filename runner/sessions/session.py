"""A session as its user has it, its bookkeeping, and its snapshots."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ostinato.delegate import ClosedError, InputError
from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.errors import OptionError
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs
from ostinato.runner.model.model import MAX_LOGITS, token_ids
from ostinato.runner.model.steps import Pending, TokenBitmask

from .history import History

if TYPE_CHECKING:
    from .offloaded import Offloaded
    from .pages import PageList
    from .sessions import Sessions
    from .slots import CopiedSlot

_CLOSED = "the session is closed"


@dataclass(slots=True)
class SessionState:
    """Bookkeeping of a session: its tokens, and what the model has seen of them.

    Attributes:
        history: tokens from the caller, and sampled tokens that were taken.
        seen: number of tokens that the model has seen: first those of `history`, then those of `pending`.
        prompt_end: number of the tokens that are the prompt. Those after them are outputs, see `SamplingParams`.
        answer_begin: the most that `prompt_end` may become; None: outputs begin behind the last prompt. See
            `Session.begin_answer`.
        pending: sampled tokens that were not taken yet.
        logits: [vocab] after the last token, until a token that was sampled from them is taken.
        logprobs: log-probabilities of the last token, if it was sampled and they were asked for.
        sampling_params: parameters for sampling the next tokens.
        token_bitmask: see `Session.token_bitmask`.
        written_prompt_end: `prompt_end` with which the model's state has `sampling_params`; None: it does not have them.
        pages: the session's pages of the KV caches, by page group.
        writable: end of the positions that may be written before `Pages.reserve` is called again.
    """

    history: History = field(default_factory=History)
    seen: int = 0
    prompt_end: int = 0
    pending: list[Pending] = field(default_factory=list)
    logits: torch.Tensor | None = None
    logprobs: TokenLogprobs | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    token_bitmask: TokenBitmask | None = None
    written_prompt_end: int | None = None
    pages: list[PageList] = field(default_factory=list)
    writable: int = 0
    answer_begin: int | None = None

    def prompt_end_of(self, count: int) -> int:
        """`prompt_end` after a prompt with which the session has `count` tokens."""
        return count if self.answer_begin is None else min(count, self.answer_begin)

    def shared(self, pages: list[PageList]) -> SessionState:
        """Copy the state for one more session, or for a snapshot, which has these pages."""
        return SessionState(
            self.history.share(),
            self.seen,
            self.prompt_end,
            # A token that is not taken yet is sampled anew where there are logits for it.
            list(self.pending) if self.logits is None else [],
            self.logits,
            self.logprobs,
            self.sampling_params,
            self.token_bitmask,
            # Without a seed the copy samples other tokens, so its parameters must be written.
            written_prompt_end=None,
            pages=pages,
            answer_begin=self.answer_begin,
        )


class Session:
    """One conversation. Made by `Engine.open_session`; a context manager that closes the session on exit.

    >>> session = engine.open_session(SamplingParams(temperature=0.7))
    >>> session.prefill(engine.encode_prompt("What is the capital of France?"))
    >>> other = session.fork()
    >>> engine.step([session, other])
    """

    # A step of many sessions finds little of them in the processor's caches.
    __slots__ = ("_arrival", "_offloaded", "_owner", "_state", "slot")

    def __init__(self, owner: Sessions, slot: int, state: SessionState) -> None:
        self._owner = owner
        # -1 while the session is on the host.
        self.slot = slot
        self._state: SessionState | None = state
        self._offloaded: Offloaded | None = None
        # When the session's state has arrived from the host; None: it has.
        self._arrival: Mark | None = None

    @property
    def tokens(self) -> list[int]:
        """The session's history: tokens that it was given, and tokens that were sampled. Not a copy: do not change it."""
        return self._known.history.tokens

    @property
    def position(self) -> int:
        """Number of tokens in the history."""
        return len(self._known.history)

    @property
    def seen(self) -> int:
        """Number of the history's tokens that the model has seen: all, or all but the last."""
        state = self._known
        return min(state.seen, len(state.history))

    @property
    def sampling_params(self) -> SamplingParams:
        """Parameters for sampling. When they are set, they hold for all tokens that are computed later.

        Raises:
            OptionError: set to something else than `SamplingParams`.
        """
        return self._known.sampling_params

    @sampling_params.setter
    def sampling_params(self, params: SamplingParams) -> None:
        self._owner.set_sampling(self, checked_params(params), self._open.token_bitmask)

    @property
    def token_bitmask(self) -> TokenBitmask | None:
        """Function that says which tokens may come next, as a grammar does. None: all.

        It gets the history when the next token is sampled, and returns a bitmask, or None for any token: [ceil(vocab / 32)]
        int32 on the host, with token i as bit i % 32 of word i // 32. A step with `more=True` calls it while a GPU is at work
        already. What it raises, the session's next step raises; the session has not advanced, and asks again.
        """
        return self._open.token_bitmask

    @token_bitmask.setter
    def token_bitmask(self, function: TokenBitmask | None) -> None:
        self._owner.set_sampling(self, self._open.sampling_params, function)

    def begin_answer(self, sampling_params: SamplingParams | None, prompt_end: int | None) -> None:
        """Sample the next tokens by these parameters, for an answer to the first `prompt_end` tokens.

        Of tokens that `prefill` adds, those after the first `prompt_end` are outputs. So an answer goes on as it would have,
        if its session is made anew from its tokens. None: outputs begin behind the last prompt, as they do in a new session.

        Raises:
            OptionError: `sampling_params` are something else.
        """
        self._owner.set_sampling(self, checked_params(sampling_params), None)
        state = self._open
        state.answer_begin = prompt_end
        if prompt_end is not None:
            state.prompt_end = min(len(state.history), prompt_end)

    @property
    def is_ahead(self) -> bool:
        """Whether a step has gone ahead of the history: the next token is sampled, by the parameters before."""
        state = self._known
        return bool(state.pending) and state.logits is None

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """Log-probabilities of the history's last token, if a step has sampled it and the parameters ask for them."""
        return self._open.logprobs

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
        given = token_ids(tokens)
        for begin in range(0, len(given), MAX_LOGITS):
            yield self._owner.prefill_logits(self, given[begin : begin + MAX_LOGITS])

    def prompt_logprobs(self, tokens: Sequence[int], count: int = 0) -> list[TokenLogprobs | None]:
        """Run the model on `tokens`, as `prefill` does, and return the log-probability of each of them.

        Args:
            count: number of most likely tokens whose log-probabilities are given beside a token's own: 0 to 20.

        Returns:
            A record for each of the tokens; None for the first token of a history, before which there are no logits.

        Raises:
            OptionError: `count` out of range.
            InputError: as `prefill`, or a step with `more=True` has gone ahead of the history; nothing has changed.
            CapacityError: too few pages are free; nothing has changed.
        """
        SamplingParams(prompt_logprobs=count)
        given = token_ids(tokens)
        if not given:
            raise InputError("there is no token to prefill")
        return self._owner.prompt_logprobs(self, given, count)

    def hidden_states(self, tokens: Sequence[int] = (), layers: Sequence[int] = (-1,)) -> torch.Tensor:
        """Run the model on `tokens`, as `prefill` does, and return what its layers give for each of them.

        Tokens of the history that the model has not seen yet come first, such as the one that a step has sampled. So in an
        answer, `hidden_states()` after each step gives those of the new token.

        Args:
            layers: numbers in transformers' `output_hidden_states`: 0 is the embedding, n the output of layer n, but the last
                one is the final norm's output. -1 is the last one, and so on.

        Returns:
            [len(layers), number of tokens, hidden] float32 on the program's device.

        Raises:
            InputError: a layer out of range; there are no tokens, because the model has seen them all; the program gives no
                hidden states; or as `prefill`. Nothing has changed.
            CapacityError: too few pages are free; nothing has changed.
        """
        return self._owner.hidden_states(self, token_ids(tokens), [operator.index(layer) for layer in layers])

    @property
    def logits(self) -> torch.Tensor:
        """Logits after the history's last token, [vocab] float32 on the program's device. Not a copy: do not change them.

        The next step samples from them. If the model has not seen the last token yet, which a step has sampled, it is run.

        Raises:
            InputError: there is no token, or a step with `more=True` has gone ahead of the history.
            CapacityError: too few pages are free.
        """
        return self._owner.logits(self)

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
        """Return a snapshot for `restore`. It keeps the session's pages, and a copy of the slot.

        Raises:
            CapacityError: as many snapshots exist as the program was loaded for.
        """
        return self._owner.snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to the state in a snapshot, of this session or of another one of the same engine."""
        self._owner.restore(self, snapshot)

    @property
    def is_offloaded(self) -> bool:
        """Whether the session is on the host."""
        return self._offloaded is not None

    def offload(self) -> None:
        """Move the session's state and pages to the host's memory, pinned for a GPU; slot and pages are for others then.

        A GPU copies on a stream of its own, beside steps of other sessions. Until `onload`, the session has its tokens, and
        can be saved and closed; everything else is refused with InputError. Pages that it shares with forks and snapshots
        stay with these, and it comes back with copies. A session that is offloaded stays so.
        """
        self._owner.tier.offload(self)

    def onload(self) -> None:
        """Bring the session back from the host, beside steps of other sessions. It goes on as if it had not been away.

        Raises:
            CapacityError: no slot is free, or too few pages; the session stays on the host.
        """
        self._owner.tier.onload(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the session to a file, from which `Engine.load_session` makes one that goes on in the same way.

        Tokens that a step with `more=True` has begun are saved too. Without a seed, the other session samples by itself.

        Raises:
            SessionFileError: the file cannot be written.
        """
        self._owner.tier.save(self, Path(path))

    def close(self) -> None:
        """Give slot and pages back. Closing twice is fine."""
        if self._state is not None:
            self._owner.close(self)
            self._state = self._offloaded = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _keep_logits(self, logits: torch.Tensor) -> None:
        """See `Stepped`."""
        state = self._open
        state.logits = logits
        state.pending.clear()

    @property
    def _known(self) -> SessionState:
        """What is known of the session, wherever it is."""
        if self._state is None:
            raise ClosedError(_CLOSED)
        return self._state

    @property
    def _open(self) -> SessionState:
        """The same of a session on the device. What is queued from now on may use its slot and pages."""
        state = self._state
        if state is None or self._offloaded is not None:
            raise InputError("the session is on the host: onload it first") if state else ClosedError(_CLOSED)
        if self._arrival is not None:
            self._arrival.hold_back()
            self._arrival = None
        return state


class Snapshot:
    """The state of a session at one moment. It keeps pages and a row of state until it is closed or garbage-collected.

    Attributes:
        copied: its copy of the slot; None: it has pages alone.
    """

    def __init__(self, owner: Sessions, state: SessionState, copied: CopiedSlot | None) -> None:
        self._owner = owner
        self._state: SessionState | None = state
        self.copied = copied

    @property
    def _known(self) -> SessionState:
        """State of the session at that moment. Raises ClosedError."""
        if self._state is None:
            raise ClosedError("the snapshot is closed")
        return self._state

    def close(self) -> None:
        """Give pages and row back. Closing twice is fine."""
        if self._state is not None:
            # The garbage collector may call this anywhere, also in the middle of what `Sessions` does.
            self._owner.pages.release_later(self._state.pages)
            if self.copied is not None:
                self._owner.slots.forget_later(self.copied)
            self._state = None

    def __del__(self) -> None:
        self.close()


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Return `params`, or for None those of greedy sampling. Raises OptionError: something else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise OptionError(f"sampling_params must be SamplingParams, got {params!r}")
    return params


def check_max_new_tokens(value: int) -> None:
    """Raises OptionError: no whole number, or below 1."""
    if type(value) is not int or value < 1:
        raise OptionError(f"max_new_tokens must be 1 or more, got {value!r}")
