"""What the C++ kernels of the linear layers do beyond what all forms do: inputs in bytes, many rows, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels import Kernels

from ...comparison import relative_error
from .linear_cases import F16, Case, Shape, check, make
from .runs import SLOTS, Run, same_bits
from .weights import BF16, F32


def case_of(shape: Shape, *runs: Run) -> Case:
    return make(shape, runs, F32, device="cpu", panels=True)


INTEGERS = (Int4(32, F16), Int4(64), Int4(128), Int4Min(), Int4Min(32, F16), Int8(), Int8(64, F16), Int8(128))


@pytest.mark.parametrize("group", (32, *INTEGERS), ids=str)
def test_error_of_bytes(cpu_kernels: type[Kernels], group: int | Format) -> None:
    """Inputs as bytes with a scale per group cost less than a hundredth: a tenth of what four bits cost the weights."""
    case = case_of(Shape(512, 2048, group), Run(1, 0))
    found, expected = case.run(cpu_kernels, "norm_linear"), case.exact("norm_linear")
    assert 1e-4 < relative_error(found["out"], expected["out"]) < 1e-2


@pytest.mark.parametrize("rows", (16, 40, 300))
@pytest.mark.parametrize("form", INTEGERS, ids=str)
def test_many_rows(cpu_kernels: type[Kernels], form: Format, rows: int) -> None:
    """Rows that are multiplied in several pieces, by panels and by rows behind them."""
    case = make(Shape(50, 640, form, 5, 1), [Run(1, 0, rows)], BF16, device="cpu", panels=True)
    for operation in ("norm_linear", "norm_swiglu", "linear_add"):
        check(case, cpu_kernels, operation, lambda weight, dtype: 1.2e-2, F32 if operation == "norm_linear" else None)


@pytest.mark.parametrize("rows", (1, 5, 40))
@pytest.mark.parametrize("form", INTEGERS, ids=str)
def test_a_scale_that_is_not_finite_shows_in_its_output_alone(
    cpu_kernels: type[Kernels], form: Format, rows: int
) -> None:
    """In a panel, and in a row behind the panels; so does a minimum."""
    case = case_of(Shape(34, 256, form), Run(1, 0, rows))
    weight, without = case.operand.weight, case.run(cpu_kernels, "norm_linear")["out"]
    for name in ("scale", "minimum") if form.has_minimum else ("scale",):
        numbers = getattr(weight, name).clone()
        # In a panel the scales of a group's 16 rows are neighbours.
        numbers.view(-1)[16 + 3] = numbers[33, 1] = torch.inf
        operand = replace(case.operand, weight=replace(weight, **{name: numbers}))
        out = replace(case, operand=operand).run(cpu_kernels, "norm_linear")["out"]
        assert not out[:, [3, 33]].isfinite().any()
        others = [column for column in range(34) if column not in (3, 33)]
        assert same_bits(out[:, others], without[:, others])


@pytest.mark.parametrize("form", (Int4Min(), Int8()), ids=str)
def test_weights_that_are_refused(cpu_kernels: type[Kernels], form: Format) -> None:
    """A minimum that is missing or one too many, and scales in float32."""
    case = case_of(Shape(32, 64, form), Run(1, 0))
    weight = case.operand.weight
    assert weight.scale is not None
    other = None if form.has_minimum else weight.scale
    for wrong in (replace(weight, minimum=other), replace(weight, scale=weight.scale.float())):
        with pytest.raises(AssertionError, match="norm_linear failed"):
            replace(case, operand=replace(case.operand, weight=wrong)).run(cpu_kernels, "norm_linear")


@pytest.mark.parametrize("group", (32, Int4Min(), Int8(), None), ids=str)
def test_a_row_is_the_same_alone(cpu_kernels: type[Kernels], group: int | Format | None) -> None:
    """As far as the arithmetic of more rows is the same: in float32, and for integers in groups of 32 up to 23 rows."""
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
