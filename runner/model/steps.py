"""Steps: from one token of each session to the next, sampled on the device if the program can, else on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from ostinato.delegate import InputError
from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.logits_processing import (
    Processing,
    ProcessingTensors,
    logprob_tensors,
    processed,
    processing_tensors,
    token_logprobs,
    words_of,
)
from ostinato.delegate.sampling import most_likely, sample
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors, TokenLogprobs

from .batch import LastTokens, Outputs, Run
from .model import Model

# Gives the tokens that may follow a session's, as a bitmask (see `ProcessingTensors.allowed_tokens`); None: any token.
TokenBitmask = Callable[[Sequence[int]], "torch.Tensor | None"]


class Stepped(Protocol):
    """A session, as steps see it."""

    @property
    def slot(self) -> int:
        """Slot that holds the session's state."""

    @property
    def tokens(self) -> list[int]:
        """Tokens so far. Before a step, the model has not seen the last one."""

    @property
    def sampling_params(self) -> SamplingParams:
        """Parameters for sampling the next tokens."""

    @property
    def token_bitmask(self) -> TokenBitmask | None:
        """Function that says which tokens may come next. None: all."""

    def _keep_logits(self, logits: torch.Tensor) -> None:
        """Forget the token that a step has begun, and sample it from these logits [vocab] in the session's next step."""


class PendingTokens(Protocol):
    """The tokens that a step has sampled, perhaps still on their way to the host."""

    def tokens(self) -> Sequence[int]:
        """Wait for the tokens, and return one for each session of the step, in their order."""

    def logprobs(self, number: int) -> TokenLogprobs | None:
        """Wait for the tokens, and return the log-probabilities of session `number` of the step; None: nobody asked."""


# A token that a session will get: the tokens of a step, and the session's number in them.
Pending = tuple[PendingTokens, int]


class Steps(Protocol):
    """Runs one step after the other, for one session or several.

    Attributes:
        goes_ahead: whether a step may be launched before the tokens of the step before it are known.
    """

    goes_ahead: bool

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        """Run the model on a batch, in which some of the sessions' runs have tokens that are no answers yet."""

    def first(self, session: Stepped, logits: torch.Tensor) -> Pending:
        """Sample the token after a prompt, from its logits [vocab]."""

    def launch(self, sessions: Sequence[Stepped], ahead: bool) -> list[Pending]:
        """Run the model on each session's last token, and sample the next token.

        `ahead`: whether that last token is not in the session's history yet. Then a session with a bitmask is sampled later,
        in `settle`.
        """

    def settle(self) -> None:
        """Sample what was left for later. To be called before the model runs again, and before a session changes."""

    def forget(self, session: Stepped) -> None:
        """Leave unsampled what was left for later of a session, which is about to leave its slot."""

    def write_sampling_params(self, session: Stepped, history: Sequence[int], prompt_end: int) -> None:
        """Sample the session's tokens by its `sampling_params` from the next step on.

        `history`: all tokens so far, of which the first `prompt_end` are the prompt; needed only if the parameters process
        logits.
        """

    def write_last_token(self, session: Stepped) -> None:
        """Make the next step take the session's last token, which no step has sampled."""


class Launched(NamedTuple):
    """Result of `Steps.prompt`: logits [runs, vocab] after each run, and the tokens sampled from them. None: not sampled."""

    logits: torch.Tensor
    tokens: list[Pending | None]


def steps_of(model: Model) -> Steps:
    """Return steps that sample on the device if the model can, else on the host."""
    return DeviceSteps(model) if model.samples else HostSteps(model)


def _logprobs_asked(sessions: Sequence[Stepped]) -> int | None:
    """The most log-probabilities that one of the sessions asks for; None: no session asks."""
    asked = [one.sampling_params.logprobs for one in sessions if one.sampling_params.logprobs is not None]
    return max(asked, default=None)


def asked_bitmask(function: TokenBitmask, tokens: Sequence[int], vocab: int) -> torch.Tensor | None:
    """Ask for the bitmask after these tokens. Raises InputError: it has another shape or dtype, or allows no token."""
    words = function(tokens)
    if words is None:
        return None
    if not isinstance(words, torch.Tensor) or words.dtype != torch.int32 or words.shape != (words_of(vocab),):
        raise InputError(f"a token bitmask is an int32 tensor of {words_of(vocab)} words, got {words!r:.80}")
    if not words.any():
        raise InputError(f"the token bitmask after {len(tokens)} tokens allows no token")
    return words


def _bitmask_of(session: Stepped, vocab: int) -> torch.Tensor | None:
    function = session.token_bitmask
    return None if function is None else asked_bitmask(function, session.tokens, vocab)


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, perhaps still on the device.

    Attributes:
        tensors: what `logprob_tensors` gives.
        asked: number of most likely tokens that were asked for.
    """

    tensors: Sequence[torch.Tensor]
    asked: int

    def copied(self) -> Logprobs:
        """Begin a copy to the host's memory, which is pinned."""
        return Logprobs([tensor.to("cpu", non_blocking=True) for tensor in self.tensors], self.asked)


class _HostTokens:
    """Tokens that need no copy in the background."""

    def __init__(self, tokens: torch.Tensor, count: int, logprobs: Logprobs | None) -> None:
        self._tokens = tokens[:count].tolist()
        self._logprobs = None if logprobs is None else token_logprobs(self._tokens, *logprobs)

    def tokens(self) -> Sequence[int]:
        return self._tokens

    def logprobs(self, number: int) -> TokenLogprobs | None:
        return self._logprobs[number] if self._logprobs is not None else None


class HostSteps:
    """Steps of programs that give logits: each token is sampled between two calls, and is an input of the second.

    Equal seeds and logits give the same tokens as in `DeviceSteps`: both sample by `delegate/sampling.py`, from logits that
    `delegate/logits_processing.py` has changed.
    """

    goes_ahead = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._params: dict[int, SamplingTensors] = {}
        self._prompt_ends: dict[int, int] = {}

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        return Launched(self._model.step(runs).logits, [None] * len(runs))

    def first(self, session: Stepped, logits: torch.Tensor) -> Pending:
        return self._sample(session, logits), 0

    def launch(self, sessions: Sequence[Stepped], ahead: bool) -> list[Pending]:
        tokens: list[Pending] = []
        for session in sessions:
            last = len(session.tokens) - 1 if self._model.has_state else 0
            run = Run(session.slot, session.tokens[last:], last)
            tokens.append((self._sample(session, self._model.step([run]).logits[-1]), 0))
        return tokens

    def settle(self) -> None:
        pass

    def forget(self, session: Stepped) -> None:
        pass

    def write_sampling_params(self, session: Stepped, history: Sequence[int], prompt_end: int) -> None:
        values = (value.to(self._model.program.device) for value in session.sampling_params.tensors())
        self._params[session.slot] = SamplingTensors(*values)
        self._prompt_ends[session.slot] = prompt_end

    def write_last_token(self, session: Stepped) -> None:
        pass

    def _sample(self, session: Stepped, logits: torch.Tensor) -> PendingTokens:
        params, raw = session.sampling_params, logits.float()
        position = torch.tensor([len(session.tokens)], device=raw.device)
        logits = self._processed(session, raw, position)
        greedy = params.temperature == 0
        token = most_likely(logits)[None] if greedy else sample(logits, position, self._params[session.slot])
        logprobs = None
        if params.logprobs is not None:
            logprobs = Logprobs(logprob_tensors(raw[None], token), params.logprobs)
        return _HostTokens(token, 1, logprobs)

    def _processed(self, session: Stepped, logits: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        vocab = logits.shape[0]
        allowed = _bitmask_of(session, vocab)
        if allowed is None and not session.sampling_params.processes:
            return logits
        given = processing_tensors(
            session.sampling_params,
            session.tokens,
            self._prompt_ends[session.slot],
            vocab,
            self._model.eos_ids,
            allowed,
        )
        on_device = ProcessingTensors(*(value.to(logits.device) for value in given))
        return processed(logits[None], position, on_device)[0]


class _CopiedTokens:
    """Tokens that a GPU copies to pinned memory. The memory goes back to its owner when the tokens have been read."""

    def __init__(self, owner: DeviceSteps, token: torch.Tensor, count: int, logprobs: Logprobs | None) -> None:
        self._owner = owner
        self._count = count
        spare = owner._spare[count]
        self._buffer, self._arrived = spare.pop() if spare else owner._more_room(count)
        self._buffer.copy_(token if token.numel() == count else token[:count], non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.copied()
        self._arrived.record()
        self._tokens: Sequence[int] | None = None
        self._records: list[TokenLogprobs] | None = None

    def tokens(self) -> Sequence[int]:
        if self._tokens is None:
            self._arrived.wait()
            self._tokens = self._buffer.tolist()
            self._owner._spare[self._count].append((self._buffer, self._arrived))
        return self._tokens

    def logprobs(self, number: int) -> TokenLogprobs | None:
        if self._logprobs is None:
            return None
        if self._records is None:
            self._records = token_logprobs(self.tokens(), *self._logprobs)
        return self._records[number]


class _LaterTokens:
    """The tokens of sessions whose bitmasks depend on tokens that are not known yet.

    Attributes:
        outputs: logits of a step, and the tokens that it has sampled for its other sessions.
        positions, slots: as `Model.sample` takes them, with slot -1 for those other sessions.
        sessions: the step's sessions.
    """

    def __init__(self, outputs: Outputs, sessions: Sequence[Stepped], rows: set[int]) -> None:
        self.outputs, self.sessions = outputs, sessions
        # The step has run a token that comes behind the history.
        self.positions = [len(session.tokens) for session in sessions]
        self.slots = [session.slot if number in rows else -1 for number, session in enumerate(sessions)]
        # Asked now: sessions of the step may be closed before these tokens are sampled.
        self.asked = _logprobs_asked(sessions)
        self.sampled: PendingTokens | None = None

    def tokens(self) -> Sequence[int]:
        assert self.sampled is not None
        return self.sampled.tokens()

    def logprobs(self, number: int) -> TokenLogprobs | None:
        assert self.sampled is not None
        return self.sampled.logprobs(number)


class DeviceSteps:
    """Steps of programs with the methods `sample` and `decode_sample`, which need nothing from the host.

    On a GPU the next step may be launched before a token is waited for, so that the GPU never waits for Python. A step
    samples by itself. Only sessions whose bitmask depends on a token that is waited for are sampled later, by `sample`, and
    so is the first token after a prompt if no step has sampled it.

    Raises:
        ArtifactError: the program has no buffers for the token, its position and the sampling parameters.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        # Programs that lack the state for it are refused here.
        model.check_sampling_state()
        model.write_default_sampling()
        self.goes_ahead = model.program.device.type == "cuda"
        # By number of tokens.
        self._spare: defaultdict[int, list[tuple[torch.Tensor, Mark]]] = defaultdict(list)
        self._later: _LaterTokens | None = None
        self._vocab = model.vocab
        # Slots of sessions that have a bitmask, or ask for log-probabilities, with what their state `processed` is.
        self._special: dict[int, Processing] = {}

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        # A bitmask depends on a prompt's last tokens, which are not in the history yet.
        first = {number for number, run in enumerate(runs) if run.tokens is not None and sessions[number].token_bitmask}
        self._write_bitmasks(sessions, first)
        outputs = self._model.step(runs)
        if outputs.tokens is None:
            return Launched(outputs.logits, [None] * len(runs))
        tokens = self._tokens(outputs, sessions)
        return Launched(outputs.logits, [None if number in first else one for number, one in enumerate(tokens)])

    def first(self, session: Stepped, logits: torch.Tensor) -> Pending:
        outputs = Outputs(logits.reshape(1, -1), None)
        if session.token_bitmask:
            self._model.write_allowed_tokens(session.slot, _bitmask_of(session, self._vocab))
        return self._sampled(outputs, [len(session.tokens) - 1], [session.slot], _logprobs_asked([session])), 0

    def launch(self, sessions: Sequence[Stepped], ahead: bool) -> list[Pending]:
        later = (
            {number for number, one in enumerate(sessions) if one.token_bitmask} if ahead and self._special else set()
        )
        self._write_bitmasks(sessions, later)
        outputs = self._model.step(LastTokens([session.slot for session in sessions]))
        tokens = self._tokens(outputs, sessions)
        if later:
            self._later = _LaterTokens(outputs, sessions, later)
            tokens = [(self._later, number) if number in later else one for number, one in enumerate(tokens)]
        return tokens

    def settle(self) -> None:
        later = self._later
        if later is not None:
            for number, session in enumerate(later.sessions):
                if later.slots[number] < 0:
                    continue
                try:
                    self._model.write_allowed_tokens(session.slot, _bitmask_of(session, self._vocab))
                except Exception:
                    # Another session's step may be what runs now. The session's own asks again, and raises.
                    later.slots[number] = -1
                    session._keep_logits(later.outputs.logits[number].clone())
            if max(later.slots) >= 0:
                later.sampled = self._sampled(later.outputs, later.positions, later.slots, later.asked)
            self._later = None

    def forget(self, session: Stepped) -> None:
        self._special.pop(session.slot, None)
        if self._later is not None and session in self._later.sessions:
            self._later.slots[self._later.sessions.index(session)] = -1

    def write_sampling_params(self, session: Stepped, history: Sequence[int], prompt_end: int) -> None:
        params, masked = session.sampling_params, session.token_bitmask is not None
        processed = Processing.LATER if masked else Processing.IN_STEP if params.processes else Processing.OFF
        self._model.write_sampling(session.slot, **params.numbers(), processed=processed)
        if processed:
            self._model.write_processing(session.slot, params, history, prompt_end)
        if masked or params.logprobs is not None:
            self._special[session.slot] = processed
        else:
            self._special.pop(session.slot, None)

    def write_last_token(self, session: Stepped) -> None:
        self._model.write_last_token(session.slot, session.tokens[-1], len(session.tokens) - 1)

    def _write_bitmasks(self, sessions: Sequence[Stepped], later: Collection[int]) -> None:
        """Prepare a step of these sessions. Bitmasks of those with the numbers `later` are not known before it."""
        if not self._special:
            return
        masked = [number for number, one in enumerate(sessions) if one.token_bitmask]
        # All are asked before any is written: one may raise.
        known = {number: _bitmask_of(sessions[number], self._vocab) for number in masked if number not in later}
        for number in masked:
            slot, processed = sessions[number].slot, Processing.IN_STEP if number in known else Processing.LATER
            if number in known:
                self._model.write_allowed_tokens(slot, known[number])
            if self._special[slot] is not processed:
                self._model.write_sampling(slot, processed=processed)
                self._special[slot] = processed

    def _tokens(self, outputs: Outputs, sessions: Sequence[Stepped]) -> list[Pending]:
        """The tokens that a step has sampled. Those of sessions that it has left for later have no meaning yet."""
        sampled = self._found(outputs, len(sessions), _logprobs_asked(sessions) if self._special else None)
        return [(sampled, number) for number in range(len(sessions))]

    def _sampled(
        self, outputs: Outputs, positions: Sequence[int], slots: Sequence[int], asked: int | None
    ) -> PendingTokens:
        """Sample by the method `sample` for the rows that have a slot here, and find `asked` log-probabilities of all."""
        logits = outputs.logits
        if asked is not None and self._model.cuda_graph:
            # All graphs share their memory.
            logits = logits.clone()
        return self._found(Outputs(logits, self._model.sample(outputs, positions, slots)), len(slots), asked)

    def _found(self, outputs: Outputs, count: int, asked: int | None) -> PendingTokens:
        """The tokens of the first `count` outputs, and `asked` log-probabilities of each."""
        logits, tokens = outputs
        assert tokens is not None
        logprobs = None if asked is None else Logprobs(self._model.logprobs(logits[:count], tokens[:count]), asked)
        return self._pending(tokens, count, logprobs)

    def _pending(self, tokens: torch.Tensor, count: int, logprobs: Logprobs | None) -> PendingTokens:
        return _CopiedTokens(self, tokens, count, logprobs) if self.goes_ahead else _HostTokens(tokens, count, logprobs)

    def _more_room(self, count: int) -> tuple[torch.Tensor, Mark]:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True), Mark(self._model.program.device)
