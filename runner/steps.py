"""From one token to the next: on the device where the program samples there, else on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from ostinato.delegate import ArtifactError, StateKind
from ostinato.delegate.sampling import Sampling, SamplingInputs, draw, most_likely

from .model import Model, Samplers

# Tokens that may be on their way to the host: the one that is waited for, and the one after it.
_SLOTS = 2


class Steps(Protocol):
    """One answer after the other, token by token."""

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Prefill the prompt; the first token of its answer."""

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        """Continue after `token`; the model's state must be the one after `seen`."""

    def next(self, more: bool) -> int:
        """The token after the last one. `more`: another one will be asked for, unless this one ends the answer."""

    @property
    def host_seconds(self) -> float | None:
        """Time that `next` has taken so far, not counting waits for the GPU; None where the two cannot be told apart."""


def steps_of(model: Model) -> Steps:
    """Steps that sample where the model does."""
    return HostSteps(model) if model.samplers is None else DeviceSteps(model, model.samplers)


class HostSteps:
    """For programs that give logits: a token is drawn here, and is an input of the next call.

    The same seed and logits give the same tokens as `DeviceSteps` gives: both draw by `delegate/sampling.py`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sampling = Sampling()
        self._inputs = self._sampling.inputs()
        self._tokens: list[int] = []
        self.host_seconds = None

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        self._start(prompt, sampling)
        return self._append(self._model.prefill(prompt))

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        self._start([*seen, token], sampling)

    def next(self, more: bool) -> int:
        return self._append(self._model.decode_one_token(self._tokens))

    def _start(self, tokens: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        self._inputs = SamplingInputs(*(value.to(self._model.program.device) for value in sampling.inputs()))
        self._tokens = list(tokens)

    def _append(self, logits: torch.Tensor) -> int:
        """Draw the token after the last one from logits [vocab]."""
        logits = logits.float()
        if self._sampling.temperature == 0:
            token = most_likely(logits)
        else:
            token = draw(logits, torch.tensor([len(self._tokens)], device=logits.device), self._inputs)
        self._tokens.append(int(token))
        return self._tokens[-1]


class DeviceSteps:
    """For programs with the methods `sample` and `decode_sample`, whose steps need nothing from the host.

    On a GPU the step after is launched before a token is waited for, so that the GPU never waits for Python. When an answer
    ends before its limit, the state has then moved by the token that ended it.

    Raises:
        ArtifactError: the program has no buffers for the token, its position and how to draw.
    """

    def __init__(self, model: Model, samplers: Samplers) -> None:
        self._model = model
        self._samplers = samplers
        _sampling_buffers(model)
        cuda = model.program.device.type == "cuda"
        self._slots = [torch.zeros(1, 1, dtype=torch.int64, pin_memory=cuda) for _ in range(_SLOTS)]
        self._numbers = [slot.numpy() for slot in self._slots]
        self._events = [torch.cuda.Event() for _ in range(_SLOTS)] if cuda else []
        self._launched = self._taken = 0
        self._host_ns = 0

    @property
    def host_seconds(self) -> float | None:
        return self._host_ns / 1e9 if self._events else None

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        logits = self._model.prefill(prompt)
        position = torch.tensor([len(prompt)])
        self._launched = self._taken = 0
        return int(self._samplers.sample.execute((logits.reshape(1, -1), position, *sampling.inputs()))[0])

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        values = {"token": torch.tensor([[token]]), "position": torch.tensor([len(seen)])}
        # Those that the program is bound to now.
        buffers = _sampling_buffers(self._model)
        for name, value in (values | sampling.inputs()._asdict()).items():
            buffers[name].copy_(value)
        self._launched = self._taken = 0

    def next(self, more: bool) -> int:
        begin = time.perf_counter_ns()
        if self._launched == self._taken:
            self._launch()
        if more and self._events:
            self._launch()
        slot = self._taken % _SLOTS
        self._taken += 1
        if self._events:
            self._host_ns += time.perf_counter_ns() - begin
            self._events[slot].synchronize()
        return int(self._numbers[slot][0, 0])

    def _launch(self) -> None:
        slot = self._launched % _SLOTS
        token = self._samplers.decode_sample.execute(())[0]
        self._slots[slot].copy_(token, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self._launched += 1


def _sampling_buffers(model: Model) -> dict[str, torch.Tensor]:
    """The program's buffers of `StateKind.SAMPLING`, by the last part of their names."""
    buffers = {key.rpartition(".")[2]: tensor for key, tensor in model.program.buffers_of(StateKind.SAMPLING).items()}
    missing = {"token", "position", *SamplingInputs._fields} - buffers.keys()
    if missing:
        raise ArtifactError(
            f"the program samples on the device, and lacks the state for it: {', '.join(sorted(missing))}. Export it again"
        )
    return buffers
