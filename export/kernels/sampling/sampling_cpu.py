"""Sampling and log-probabilities for CPUs: the functions of `reference.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.sampling_params import MAX_LOGPROBS, SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing
from ostinato.export.kernels.operators_cpu import LIBRARY


def sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    last: LastTokens,
    params: SamplingTensors,
    processing: LogitsProcessing,
    late: bool = False,
) -> Tensor:
    """See `reference.sample_next`."""
    rest = *params, processing.processed, *processing.given
    return _sample_next(logits, positions, slots, last.token, last.position, *rest, late)


@LIBRARY.operator(
    "sample_next(Tensor logits, Tensor positions, Tensor slots, Tensor(a!) token, Tensor(b!) position, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor seed, Tensor min_p, Tensor processed, Tensor repetition_penalty, "
    "Tensor presence_penalty, Tensor frequency_penalty, Tensor prompt_tokens, Tensor(c!) output_counts, Tensor bias_tokens, "
    "Tensor bias_values, Tensor bias_ends, Tensor allowed_tokens, bool late) -> Tensor"
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
    processed: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    prompt_tokens: Tensor,
    output_counts: Tensor,
    bias_tokens: Tensor,
    bias_values: Tensor,
    bias_ends: Tensor,
    allowed_tokens: Tensor,
    late: bool,
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
