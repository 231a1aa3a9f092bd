"""Steps: from one token of each session to the next, sampled on the device if the program can, else on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.sampling import most_likely, sample
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors

from .batch import Run
from .model import Model


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


class PendingTokens(Protocol):
    """The tokens that a step has sampled, perhaps still on their way to the host."""

    def tokens(self) -> Sequence[int]:
        """Wait for the tokens, and return one for each session of the step, in their order."""


class Steps(Protocol):
    """Runs one step after the other, for one session or several.

    Attributes:
        goes_ahead: whether a step may be launched before the tokens of the step before it are known.
    """

    goes_ahead: bool

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        """Run the model on a batch, in which some of the sessions' runs have tokens that are no answers yet."""

    def first(self, session: Stepped, logits: torch.Tensor) -> PendingTokens:
        """Sample the token after a prompt, from its logits [vocab]."""

    def launch(self, sessions: Sequence[Stepped]) -> PendingTokens:
        """Run the model on each session's last token, and sample the next token."""

    def write_sampling_params(self, session: Stepped) -> None:
        """Sample the session's tokens by its `sampling_params` from the next step on."""

    def write_last_token(self, session: Stepped) -> None:
        """Make the next step take the session's last token, which no step has sampled."""


class Launched(NamedTuple):
    """What `Steps.prompt` gives: logits [runs, vocab] after each run, and the tokens sampled from them. None: not sampled."""

    logits: torch.Tensor
    tokens: PendingTokens | None


def steps_of(model: Model) -> Steps:
    """Return steps that sample on the device if the model can, else on the host."""
    return DeviceSteps(model) if model.samples else HostSteps(model)


class _HostTokens:
    """Tokens that are on the host."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> Sequence[int]:
        return self._tokens


class HostSteps:
    """Steps of programs that give logits: each token is sampled between two calls, and is an input of the second.

    Equal seeds and logits give the same tokens as in `DeviceSteps`: both sample by `delegate/sampling.py`.
    """

    goes_ahead = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._params: dict[int, SamplingTensors] = {}

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        return Launched(self._model.step(runs).logits, None)

    def first(self, session: Stepped, logits: torch.Tensor) -> PendingTokens:
        self.write_sampling_params(session)
        return self._sample(session, logits)

    def launch(self, sessions: Sequence[Stepped]) -> PendingTokens:
        tokens: list[int] = []
        for session in sessions:
            last = len(session.tokens) - 1 if self._model.has_state else 0
            run = Run(session.slot, session.tokens[last:], last)
            tokens += self._sample(session, self._model.step([run]).logits[-1]).tokens()
        return _HostTokens(tokens)

    def write_sampling_params(self, session: Stepped) -> None:
        values = (value.to(self._model.program.device) for value in session.sampling_params.tensors())
        self._params[session.slot] = SamplingTensors(*values)

    def write_last_token(self, session: Stepped) -> None:
        pass

    def _sample(self, session: Stepped, logits: torch.Tensor) -> PendingTokens:
        logits = logits.float()
        if session.sampling_params.temperature == 0:
            return _HostTokens([int(most_likely(logits))])
        position = torch.tensor([len(session.tokens)], device=logits.device)
        return _HostTokens([int(sample(logits, position, self._params[session.slot]))])


class _CopiedTokens:
    """Tokens that a GPU copies to pinned memory. The memory goes back to its owner when the tokens have been read."""

    def __init__(self, owner: DeviceSteps, token: torch.Tensor, count: int) -> None:
        self._owner = owner
        self._count = count
        spare = owner._spare[count]
        self._buffer, self._arrived = spare.pop() if spare else owner._more_room(count)
        self._buffer.copy_(token if token.numel() == count else token[:count], non_blocking=True)
        self._arrived.record()
        self._tokens: Sequence[int] | None = None

    def tokens(self) -> Sequence[int]:
        if self._tokens is None:
            self._arrived.wait()
            self._tokens = self._buffer.tolist()
            self._owner._spare[self._count].append((self._buffer, self._arrived))
        return self._tokens


class DeviceSteps:
    """Steps of programs with the methods `sample` and `decode_sample`, which need nothing from the host.

    On a GPU the next step may be launched before a token is waited for, so that the GPU never waits for Python.

    Raises:
        ArtifactError: the program has no buffers for the token, its position and the sampling parameters.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        # Programs that lack the state for it are refused here.
        model.write_sampling(0)
        self.goes_ahead = model.program.device.type == "cuda"
        # By number of tokens.
        self._spare: defaultdict[int, list[tuple[torch.Tensor, Mark]]] = defaultdict(list)

    def prompt(self, sessions: Sequence[Stepped], runs: Sequence[Run]) -> Launched:
        logits, tokens = self._model.step(runs)
        return Launched(logits, None if tokens is None else self._pending(tokens, len(runs)))

    def first(self, session: Stepped, logits: torch.Tensor) -> PendingTokens:
        position, params = len(session.tokens), session.sampling_params.tensors()
        return self._pending(self._model.sample(logits, position, session.slot, params), 1)

    def launch(self, sessions: Sequence[Stepped]) -> PendingTokens:
        tokens = self._model.step([Run(session.slot) for session in sessions]).tokens
        assert tokens is not None
        return self._pending(tokens, len(sessions))

    def write_sampling_params(self, session: Stepped) -> None:
        self._model.write_sampling(session.slot, **session.sampling_params.tensors()._asdict())

    def write_last_token(self, session: Stepped) -> None:
        count = len(session.tokens)
        self._model.write_sampling(
            session.slot, token=torch.tensor(session.tokens[-1:]), position=torch.tensor([count - 1])
        )

    def _pending(self, token: torch.Tensor, count: int) -> PendingTokens:
        return _CopiedTokens(self, token, count) if self.goes_ahead else _HostTokens(token[:count].tolist())

    def _more_room(self, count: int) -> tuple[torch.Tensor, Mark]:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True), Mark(self._model.program.device)
