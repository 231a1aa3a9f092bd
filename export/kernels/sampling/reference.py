"""Sampling on the device, in plain PyTorch: `ostinato.delegate.sampling` says what is sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.sampling import SamplingTensors, sample
from ostinato.export.kernels.operands import LastTokens

# A kernel runs as at most PROGRAMS programs, which tell each other CANDIDATES numbers at a time.
PROGRAMS = 128
CANDIDATES = 16
# The counter of those that have arrived has a sector of its own, of 32 bytes.
HEADER = 4


def workspace_size() -> int:
    """Elements of the workspace: int64, zeros before its first use."""
    return HEADER + 2 * PROGRAMS * CANDIDATES


def sample_next(
    logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors, workspace: Tensor
) -> Tensor:
    """Sample the token behind each row, and keep it as its slot's last one.

    Args:
        logits: [T, V] float32.
        positions: [T] int64, of the rows that gave the logits, from 0; -1 to sample a first token. The sampled token stands
            at the position after that.
        slots: [T] int64, as in `RowIndex`. Of a slot with several rows the last one's token is kept.
        last: written in place where the slots have rows.
        params: [slots] each, on the device of the logits.
        workspace: [workspace_size()] int64, not used here; the kernel leaves in it what its next launch needs.

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
        # Padding writes what is there.
        kept = slot.clamp(min=0)
        for values, value in ((last.token, tokens[row : row + 1]), (last.position, positions[row : row + 1] + 1)):
            values.index_copy_(0, kept, torch.where(slot < 0, values.index_select(0, kept), value))
    return tokens
