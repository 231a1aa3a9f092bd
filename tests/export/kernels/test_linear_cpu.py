"""What the C++ kernels of the linear layers do beyond what all forms do: inputs in bytes, and slots that they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.export.kernels import Kernels

from ...comparison import relative_error
from .linear_cases import Case, Shape, make
from .runs import SLOTS, Run, same_bits
from .weights import F32


def case_of(shape: Shape, *runs: Run) -> Case:
    return make(shape, runs, F32, device="cpu", panels=True)


@pytest.mark.parametrize("group", (32, 64, 128))
def test_error_of_bytes(cpu_kernels: type[Kernels], group: int) -> None:
    """Inputs as bytes with a scale per group cost less than a hundredth: a tenth of what four bits cost the weights."""
    case = case_of(Shape(512, 2048, group), Run(1, 0))
    found, expected = case.run(cpu_kernels, "norm_linear"), case.exact("norm_linear")
    assert 1e-4 < relative_error(found["out"], expected["out"]) < 1e-2


@pytest.mark.parametrize("group", (32, None))
def test_a_row_is_the_same_alone(cpu_kernels: type[Kernels], group: int | None) -> None:
    """As far as the arithmetic of more rows is the same: in float32, and for int4 weights in groups of 32 up to 23 rows."""
    case = case_of(Shape(64, 256, group), Run(1, 0, 20))
    together = case.run(cpu_kernels, "norm_linear")["out"]
    alone = [replace(case, x=row[None]).run(cpu_kernels, "norm_linear")["out"] for row in case.x]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("slots", ([2, 2, 2, SLOTS], [2, 2, 2, 2**40], [2, 1, 1, 2]))
def test_slots_that_a_convolution_refuses(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    """Slots that the state does not have, and a slot with two runs."""
    case = case_of(Shape(80, 128, channels=72, gates=18), Run(2, 10, 3), Run(1, 0))
    before, index = case.conv.state.clone(), case.index._replace(slots=torch.tensor(slots))
    gates = case.gates.weight.values
    with pytest.raises(AssertionError, match="norm_linear_conv failed"):
        cpu_kernels.norm_linear_conv(case.x, case.norm, case.operand.weight, gates, case.conv, index)
    assert same_bits(case.conv.state, before)
