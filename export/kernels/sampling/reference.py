"""Sampling and log-probabilities on the device, in plain PyTorch.

`ostinato.delegate.sampling` defines what is sampled, `ostinato.delegate.logits_processing` what log-probabilities are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.logits_processing import logprob_tensors
from ostinato.delegate.sampling import sample
from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.kernels.operands import LastTokens


def sample_next(logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors) -> Tensor:
    """Sample the token that follows each row, and store it as the last token of the row's slot.

    Args:
        logits: [T, V] float32.
        positions: [T] int64, positions of the rows that gave the logits, from 0; -1 to sample a first token. The sampled
            token stands at the next position.
        slots: [T] int64, as in `RowIndex`. If a slot has several rows, the token of its last row is stored.
        last: written in place for slots that have rows.
        params: [slots] each, on the device of the logits.

    Returns:
        [T] int64, the sampled tokens.
    """
    sampled = []
    for row in range(logits.shape[0]):
        slot, position = slots[row : row + 1], positions[row : row + 1] + 1
        mine = SamplingTensors(*(values.index_select(0, slot.clamp(min=0)) for values in params))
        sampled.append(sample(logits[row], position, mine))
    tokens = torch.cat(sampled)
    for row in range(logits.shape[0]):
        slot = slots[row : row + 1]
        # Padding writes the value that is already there.
        kept = slot.clamp(min=0)
        for values, value in ((last.token, tokens[row : row + 1]), (last.position, positions[row : row + 1] + 1)):
            values.index_copy_(0, kept, torch.where(slot < 0, values.index_select(0, kept), value))
    return tokens


def logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a token for each row, and of the most likely tokens: see `logprob_tensors`.

    Args:
        logits: [T, V] float32.
        tokens: [T] int64.

    Returns:
        [T, 1 + C] int32 and [T, 1 + C] float32.
    """
    return logprob_tensors(logits, tokens)
