"""Sampling and log-probabilities for CPUs: the functions of `reference.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.sampling_params import MAX_LOGPROBS, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.operators_cpu import LIBRARY


def sample_next(logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors) -> Tensor:
    """See `reference.sample_next`."""
    return _sample_next(logits, positions, slots, last.token, last.position, *params)


@LIBRARY.operator(
    "sample_next(Tensor logits, Tensor positions, Tensor slots, Tensor(a!) token, Tensor(b!) position, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor seed, Tensor min_p) -> Tensor"
)
def _sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    token: Tensor,
    position: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    min_p: Tensor,
) -> Tensor:
    return torch.empty_like(slots)


def logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.logprobs`."""
    numbers, values = _logprobs(logits, tokens, min(MAX_LOGPROBS, logits.shape[1]))
    return numbers, values


@LIBRARY.operator("logprobs(Tensor logits, Tensor tokens, int count) -> (Tensor, Tensor)")
def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], 1 + count
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
