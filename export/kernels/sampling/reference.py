"""Sampling and log-probabilities on the device, in plain PyTorch: `ostinato.delegate` defines what is sampled, from which
logits, and what log-probabilities are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.logits_processing import Processing, ProcessingTensors, logprob_tensors, processed
from ostinato.delegate.sampling import sample
from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing


def sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    last: LastTokens,
    params: SamplingTensors,
    processing: LogitsProcessing,
    late: bool = False,
) -> Tensor:
    """Sample the token that follows each row, and store it as the last token of the row's slot.

    A row whose slot is `Processing.IN_STEP` is sampled from processed logits. If its token is stored, the token is counted.

    Args:
        logits: [T, V] float32.
        positions: [T] int64, positions of the rows that gave the logits, from 0; -1 to sample a first token. The sampled
            token stands at the next position.
        slots: [T] int64, as in `RowIndex`. If a slot has several rows, the token of its last row is stored. All of them are
            processed by the counts before the call.
        last: written in place for slots that have rows.
        params: [slots] each, on the device of the logits.
        processing: the counts of output tokens are written in place.
        late: whether rows with `Processing.LATER` are sampled as those with `Processing.IN_STEP`. Else they give the most
            likely token of the logits as they are, which is not counted.

    Returns:
        [T] int64, the sampled tokens.
    """
    sampled, counted = [], []
    for row in range(logits.shape[0]):
        slot, position = slots[row : row + 1], positions[row : row + 1] + 1
        kept = slot.clamp(min=0)
        when = processing.processed.index_select(0, kept)
        changes = when != Processing.OFF if late else when == Processing.IN_STEP
        given = ProcessingTensors(*(values.index_select(0, kept) for values in processing.given))
        x = torch.where(changes, processed(logits[row : row + 1], position, given)[0], logits[row])
        mine = SamplingTensors(*(values.index_select(0, kept) for values in params))
        waits = (when == Processing.LATER) & ~changes
        sampled.append(sample(x, position, mine._replace(temperature=mine.temperature.masked_fill(waits, 0))))
        later = (slots[row + 1 :] == slot).any()
        counted.append(changes & (slot >= 0) & ~later)
    tokens = torch.cat(sampled)
    counts = processing.given.output_counts
    counts.index_put_((slots.clamp(min=0), tokens), torch.cat(counted).to(counts.dtype), accumulate=True)
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
