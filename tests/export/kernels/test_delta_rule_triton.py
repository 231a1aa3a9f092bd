"""Configurations, limits and traces of the Triton kernels of the gated delta rule."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import launch
from ostinato.export.kernels.delta_rule import prefill_triton, reference, rows_triton, step_triton
from ostinato.export.kernels.delta_rule.limits import check_delta_rule

from ...comparison import relative_error
from .conftest import run_compiled, traced_layer
from .delta_rule_cases import BF16, F32, Rule, Shape, check, make, of_prompt
from .runs import SLOT, Run
from .test_delta_rule import FORMS, MAIN, PROMPT_LIMITS, STEP_SHAPES

each_dtype = pytest.mark.parametrize("dtype", (F32, BF16), ids=str)


@each_dtype
@pytest.mark.parametrize("values", (8, 16))
@pytest.mark.parametrize("warps", (1, 2, 4))
def test_configurations_of_a_step(warps: int, values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_triton, "CONFIG", step_triton.DeltaConfig(values, warps))
    check(make(STEP_SHAPES[-1], [Run(SLOT, 7)], dtype), step_triton.delta_step)


@each_dtype
@pytest.mark.parametrize("shared", (launch.MEDIUM, launch.SMALL))
def test_smaller_gpus(shared: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: shared)
    case = FORMS["prompt"].make(MAIN, [Run(SLOT, 7, 150)], dtype)
    check(case, of_prompt(prefill_triton.gated_delta_rule), PROMPT_LIMITS)


@each_dtype
@pytest.mark.parametrize("tokens", (1, 70))
def test_packed_rows(tokens: int, dtype: torch.dtype) -> None:
    """The contract's prompts are slices."""
    case = FORMS["prompt"].make(MAIN, [Run(SLOT, 7, tokens)], dtype)
    check(case, of_prompt(prefill_triton.gated_delta_rule, packed=True), PROMPT_LIMITS)


@pytest.mark.parametrize("tokens", (1, 70))
def test_a_prompt_agrees_with_the_reference(tokens: int) -> None:
    """More nearly than both agree with the definition: they add up decays of the same chunks."""
    case = FORMS["prompt"].make(MAIN, [Run(SLOT, 7, tokens)], F32)
    found, expected = (
        case.run(of_prompt(form.gated_delta_rule))  # type: ignore[attr-defined]
        for form in (prefill_triton, reference)
    )
    assert relative_error(found["o"], expected["o"]) < 1e-5
    assert relative_error(found["state"][SLOT], expected["state"][SLOT]) < 1e-5


@pytest.mark.parametrize("bad", ((2, 3, 32, 32), (0, 4, 32, 32), (2, 4, 8, 32), (2, 4, 32, 24), (2, 4, 256, 32)))
def test_other_shapes_are_refused(bad: Shape) -> None:
    with pytest.raises(ExportError, match="kernels"):
        check_delta_rule(*bad)


@pytest.mark.parametrize(
    "rule",
    (step_triton.delta_step, rows_triton.delta_rows, of_prompt(prefill_triton.gated_delta_rule)),
    ids=("step", "rows", "prompt"),
)
def test_refusal_names_the_limit(rule: Rule) -> None:
    case = make((1, 2, 16, 24), [Run(SLOT, 7)], F32)
    with pytest.raises(ExportError, match="powers of two from 16 to 128, got a value head size of 24"):
        case.run(rule)


LAYER = """
import torch
from ostinato.export.kernels.delta_rule.rows_conv_triton import conv_rows
from ostinato.export.kernels.delta_rule.{module} import delta_step
from ostinato.export.kernels.operands import Convolution, Decay, RecurrentState, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in vars(RecurrentState.zeros(2, (2, 4), (32, 32), 7, torch.float32)).items():
            self.register_buffer(name, value)
        self.register_buffer("conv", torch.zeros(2, 3, 256))

    def forward(self, product, gates, head, norm, taps, positions):
        index = RowIndex(positions, positions, product, product)
        mixed = conv_rows(product, Convolution(taps, self.conv), index)
        state = RecurrentState(self.stored, self.keys, self.updates)
        return delta_step(mixed, gates, Decay(head, head), state, index, norm, 2)

rows = {rows}
shapes = ((rows, 384), (rows, 8), (4,), (32,), (256, 1, 4))
inputs = (*map(torch.zeros, shapes), torch.arange(rows))
"""
DYNAMIC = """
rows = {0: torch.export.Dim("R", min=1, max=256)}
dynamic = (rows, rows, None, None, None, rows)
"""


def test_traced_for_any_number_of_rows() -> None:
    operators, buffers, shapes = traced_layer(LAYER.format(module="rows_triton", rows=7) + DYNAMIC)
    assert operators == ["ostinato.conv_rows.default", "ostinato.delta_rows.default"]
    assert buffers == ["conv", "keys", "stored", "updates"]
    assert shapes == [("R", 128), ("4*R", 2)]


@pytest.mark.parametrize("module", ("step_triton", "rows_triton"))
def test_traced_for_one_row(module: str) -> None:
    """Both modules take the step's kernel then."""
    operators, buffers, shapes = traced_layer(LAYER.format(module=module, rows=1))
    assert operators == ["ostinato.conv_rows.default", "ostinato.delta_step.default"]
    assert buffers == ["conv", "stored", "updates"]
    assert shapes == [(1, 128), (4, 4)]


PROMPT = """
import torch
from ostinato.export.kernels.delta_rule.prefill_triton import gated_delta_rule
from ostinato.export.kernels.operands import Decay, RecurrentState, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in vars(RecurrentState.zeros(2, (2, 4), (32, 32), 7, torch.float32)).items():
            self.register_buffer(name, value)

    def forward(self, rows, gates, positions):
        a, b = rows[:, 256:].chunk(2, dim=1)
        index = RowIndex(positions, positions, rows, rows)
        state = RecurrentState(self.stored, self.keys, self.updates)
        return gated_delta_rule(rows[:, :256], a, b, Decay(gates, gates), state, index, 2, 255)

for tokens in (130, 1):
    arguments = (torch.zeros(tokens, 264), torch.zeros(4), torch.arange(tokens))
    count = torch.export.Dim("T", min=2, max=255)
    dynamic = ({0: count}, None, {0: count}) if tokens > 1 else None
    program = torch.export.export(Layer(), arguments, dynamic_shapes=dynamic)
    assert "ostinato.gated_delta_rule" in str(program.graph), program.graph
    program = program.run_decompositions({})
    ranges = [(r.lower, r.upper) for r in program.range_constraints.values()]
    assert ranges == ([(2, 255)] if tokens > 1 else []), ranges
    assert sorted(program.graph_signature.buffers_to_mutate.values()) == ["stored", "updates"]
"""


def test_export_keeps_the_number_of_tokens_symbolic() -> None:
    run_compiled(PROMPT)
