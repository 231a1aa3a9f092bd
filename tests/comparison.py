"""Measures of how far numbers are from the expected ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runner.model.batch import Run
from ostinato.runner.model.model import Model


def logits_of(model: Model, tokens: Sequence[int], position: int = 0, slot: int = 0) -> Tensor:
    """Run a slot's tokens from `position` on. Return the logits [vocab] after the last one; the next step may overwrite
    them."""
    return model.step([Run(slot, tokens, position)]).logits[-1]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; infinite if `found` is not finite."""
    if not found.isfinite().all():
        return math.inf
    found, expected = found.double(), expected.to(found.device, torch.float64)
    return ((found - expected).norm() / expected.norm()).item()
