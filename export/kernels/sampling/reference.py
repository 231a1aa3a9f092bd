"""Sampling on the device, in plain PyTorch: `ostinato.delegate.sampling` says what is drawn."""

from __future__ import annotations

from torch import Tensor

from ostinato.delegate.sampling import SamplingInputs, draw

# A kernel runs as at most PROGRAMS programs, which tell each other CANDIDATES numbers at a time.
PROGRAMS = 128
CANDIDATES = 16
# The counter of those that have arrived has a sector of its own, of 32 bytes.
HEADER = 4


def workspace_size() -> int:
    """Elements of the workspace: int64, zeros before its first use."""
    return HEADER + 2 * PROGRAMS * CANDIDATES


def sample_next(logits: Tensor, position: Tensor, token: Tensor, how: SamplingInputs, workspace: Tensor) -> Tensor:
    """Draw the token for the place after `position`, then step to it: `position` grows by one, `token` is the drawn one.

    Args:
        logits: [1, V] float32.
        position: [1] int64, written: the place of the token that gave the logits, from 0; -1 to draw the first token.
        token: [1, 1] int64, written.
        how: on the device of the logits.
        workspace: [workspace_size()] int64, not used here; the kernel leaves in it what its next launch needs.

    Returns:
        [1, 1] int64, the drawn token.
    """
    position.add_(1)
    drawn = draw(logits[0], position, how).unsqueeze(0)
    token.copy_(drawn)
    return drawn
