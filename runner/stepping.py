"""From one token to the next: on the device where the program samples there, else on the host."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from ..delegate import Method
from .sampling import Sampler, Sampling

# Tokens that may be on their way to the host: the one that is waited for, and the one after it.
_SLOTS = 2


class Model(Protocol):
    """What `Engine` offers."""

    def prefill(self, tokens: Sequence[int], position: int = 0) -> torch.Tensor: ...

    def decode_one_token(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor: ...


class Steps(Protocol):
    """One answer after the other, token by token."""

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Prefill the prompt; the first token of its answer."""

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        """Go on behind `token`, where the model's state is that after `seen`."""

    def next(self, more: bool) -> int:
        """The token after the last one. `more`: the one after it will be asked for too, unless this one ends the answer."""

    @property
    def host_seconds(self) -> float | None:
        """Time that `next` has taken so far but for waiting for the GPU; None where the two are not told apart."""


class HostSteps:
    """For programs that give logits: a token is drawn by `Sampler`, and handed back with the next call."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._sampler = Sampler(Sampling(), device)
        self._prompt: Sequence[int] = ()
        self._answer: list[int] = []
        self.host_seconds = None

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        self._sampler = Sampler(sampling, self._device)
        self._prompt, self._answer = prompt, [self._sampler(self._model.prefill(prompt))]
        return self._answer[0]

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        self._sampler = Sampler(sampling, self._device)
        self._prompt, self._answer = seen, [token]

    def next(self, more: bool) -> int:
        self._answer.append(self._sampler(self._model.decode_one_token(self._prompt, self._answer)))
        return self._answer[-1]


class DeviceSteps:
    """For programs with the methods `sample` and `decode_sample`, whose steps need nothing from the host.

    On a GPU the step after is launched before a token is waited for, so that the GPU never waits for Python. When an answer
    ends before its limit, the state has then moved by the token that ended it.
    """

    def __init__(self, model: Model, sample: Method, step: Method, buffers: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._sample = sample
        self._step = step
        self._buffers = buffers
        cuda = buffers["sampling.token"].is_cuda
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
        values = _parameters(sampling)
        position = torch.tensor([len(prompt)])
        self._launched = self._taken = 0
        return int(self._sample.execute((logits.reshape(1, -1), position, *values.values()))[0])

    def resume(self, seen: Sequence[int], token: int, sampling: Sampling) -> None:
        values = {"token": torch.tensor([[token]]), "position": torch.tensor([len(seen)]), **_parameters(sampling)}
        for name, value in values.items():
            self._buffers[f"sampling.{name}"].copy_(value)
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
        token = self._step.execute(())[0]
        self._slots[slot].copy_(token, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self._launched += 1


def _parameters(sampling: Sampling) -> dict[str, torch.Tensor]:
    """The inputs of `sample` that say how to draw, in its order. Without a seed, a fresh one."""
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return {
        "temperature": torch.tensor([sampling.temperature], dtype=torch.float32),
        "top_k": torch.tensor([sampling.top_k]),
        "top_p": torch.tensor([sampling.top_p], dtype=torch.float32),
        # The same 64 bits as a signed number.
        "seed": torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed]),
    }
