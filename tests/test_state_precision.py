"""Tests scripts/state_precision.py, which measures what recurrent states in bfloat16 cost."""

from __future__ import annotations

import sys

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

from state_precision import HALF_LIVES, errors


def test_errors_of_a_short_session() -> None:
    found = errors(steps=300)
    exact, often, rarely = found.values()
    assert len(found) == 3 and all(len(error) == len(HALF_LIVES) for error in found.values())
    assert exact.max() < 1e-5
    # Rounding to eight bits; less where less is kept, and where a state is written less often.
    assert 1e-3 < often.max() < 3e-2 and often[0] < often[-1] / 5 and (rarely < often / 2).all()
