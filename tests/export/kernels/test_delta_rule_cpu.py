"""What the C++ kernel of the gated delta rule does beyond what all forms do: slots that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.export.kernels import Kernels

from .delta_rule_cases import F32, make
from .runs import SLOTS, Run, same_bits


@pytest.mark.parametrize("slots", ([2, 2, 2, SLOTS], [2, 2, 2, 2**40], [2, 1, 1, 2]))
def test_slots_that_it_refuses(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    """Those that there are not, and one of two runs. Nothing is written."""
    case = make((2, 4, 32, 32), [Run(2, 10, 3), Run(1, 0)], F32, device="cpu", pending=0)
    before = case.state.stored.clone()
    case = replace(case, index=case.index._replace(slots=torch.tensor(slots)))
    with pytest.raises(AssertionError, match="delta_step failed"):
        cpu_kernels.delta_step(**vars(case))
    assert same_bits(case.state.stored, before)
