"""Measures of how far numbers are from the expected ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; infinite if `found` is not finite."""
    if not found.isfinite().all():
        return math.inf
    found, expected = found.double(), expected.to(found.device, torch.float64)
    return ((found - expected).norm() / expected.norm()).item()
