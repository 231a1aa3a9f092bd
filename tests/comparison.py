"""How far numbers are from those that are expected."""

from __future__ import annotations

import math

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; infinite if `found` is not finite."""
    if not found.isfinite().all():
        return math.inf
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
