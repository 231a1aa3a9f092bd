"""The linear layers of a step of several rows against the plain functions in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.linear import reference, rows_triton, step_triton
from ostinato.export.kernels.operands import HeadSquares, Norm, Weight

from ...comparison import relative_error
from .conftest import run_compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
# Relative errors before rounding to bfloat16: in fixed point; of float32 inputs; of rounded inputs and weights.
FIXED, WIDE, ROUNDED = 2e-4, 5e-6, 8e-3
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    rows: int
    n: int
    k: int
    group: int
    dtype: torch.dtype
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.rows}-{self.n}x{self.k}-g{self.group}-{str(self.dtype)[6:]}{'-bias' if self.bias else ''}"

    @property
    def tolerance(self) -> float:
        if self.group == 128 and self.dtype == BF16 and self.k % 256 == 0:
            return FIXED
        return WIDE if self.dtype == F32 else ROUNDED


# In fixed point up to the last but one part of K, by tiles of 16 or 32 rows; the plain kernel; torch's product.
CASES = (
    Case(2, 72, 512, 128, BF16),
    Case(3, 64, 256, 128, BF16, bias=True),
    Case(15, 200, 768, 128, BF16, bias=True),
    Case(16, 72, 1280, 128, BF16),
    Case(17, 72, 512, 128, BF16, bias=True),
    Case(33, 136, 256, 128, BF16),
    Case(3, 72, 384, 128, BF16, bias=True),
    Case(17, 72, 192, 64, BF16),
    Case(2, 130, 64, 32, BF16, bias=True),
    Case(16, 72, 64, 64, F32, bias=True),
    Case(33, 64, 192, 32, F32),
    Case(2, 72, 256, 128, F32),
    Case(3, 72, 64, 0, BF16, bias=True),
    Case(17, 72, 192, 0, F32, bias=True),
)
each = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass(frozen=True)
class Layer:
    """A random weight, inputs and their norm; weights and inputs of both signs."""

    weight: Weight
    x: Tensor
    norm: Norm

    def double(self) -> Layer:
        return replace(self, x=self.x.double(), norm=Norm(self.norm.weight.double(), EPS))

    def product(self) -> Tensor:
        return rows_triton.norm_linear(self.x, self.norm, self.weight, F32)


def draw(case: Case) -> Layer:
    torch.manual_seed(case.rows + case.n + case.k)
    scale = None
    if case.group:
        values = pack_int4(torch.randint(-8, 8, (case.n, case.k)))
        scale = (torch.randn(case.n, case.k // case.group) * 0.1).bfloat16().to(DEVICE)
    else:
        values = (torch.randn(case.n, case.k) * 0.5).to(case.dtype)
    bias = (torch.randn(case.n) * case.k**0.5).to(DEVICE, case.dtype) if case.bias else None
    x = torch.randn(case.rows, case.k).to(DEVICE, case.dtype)
    return Layer(Weight(values.to(DEVICE), scale, bias), x, Norm(torch.randn(case.k).to(DEVICE), EPS))


def near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """With one more rounding where out is bfloat16."""
    assert expected.dtype == torch.float64 and out.shape == expected.shape
    assert relative_error(out, expected) < max(tolerance, 4e-3 if out.dtype == BF16 else 0.0)


@each
def test_norm_linear(case: Case) -> None:
    layer = draw(case)
    wide = layer.double()
    expected = reference.norm_linear(wide.x, wide.norm, wide.weight, torch.float64)
    near(layer.product(), expected, case.tolerance)


@each
def test_many_outputs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then has twice as many where there are more than 16 rows; to an output that is nothing."""
    layer = draw(case)
    fewer = layer.product()
    monkeypatch.setattr(rows_triton, "MANY_OUTPUTS", case.n)
    assert torch.equal(layer.product(), fewer)


@pytest.mark.parametrize("case", CASES[1::2], ids=str)
def test_norm_swiglu(case: Case) -> None:
    layer = draw(case)
    layer = replace(layer, norm=Norm(layer.norm.weight / 256 - 1, EPS))
    out = rows_triton.norm_swiglu(layer.x, layer.norm, layer.weight)
    assert out.dtype == case.dtype
    near(out, reference.norm_swiglu(layer.double().x, layer.double().norm, layer.weight), case.tolerance)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_norm_linear_gates(case: Case) -> None:
    layer = draw(case)
    wide, gates = layer.double(), torch.randn(20, case.k).to(DEVICE, case.dtype)
    out, gated = rows_triton.norm_linear_gates(layer.x, layer.norm, layer.weight, gates)
    assert (out.dtype, gated.dtype) == (case.dtype, F32)
    near(out, reference.norm_linear(wide.x, wide.norm, wide.weight, torch.float64), case.tolerance)
    near(gated, wide.norm(wide.x) @ gates.double().t(), max(case.tolerance, 4e-3 if case.dtype == BF16 else 0.0))


@pytest.mark.parametrize("heads", (0, 1, 2, 8))
@pytest.mark.parametrize("case", (CASES[0], CASES[4], CASES[7], CASES[10], CASES[13]), ids=str)
def test_linear_add(case: Case, heads: int) -> None:
    layer = draw(case)
    residual = torch.randn(case.rows, case.n).to(DEVICE, case.dtype)
    squares = None
    if heads:
        of_heads = layer.x.float().view(case.rows * heads, -1)
        sums = of_heads.square().sum(1, keepdim=True) * torch.tensor([0.5, 0.2, 0.3], device=DEVICE)
        squares = HeadSquares(sums, EPS)
    out = rows_triton.linear_add(layer.x, layer.weight, residual, squares)
    assert out.dtype == case.dtype
    expected = reference.linear_add(layer.double().x, layer.weight, residual.double(), squares)
    near(out, expected, case.tolerance)


ALONE = (CASES[3], CASES[4], CASES[7], CASES[9])


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_row_does_not_depend_on_its_company(case: Case) -> None:
    """Not by one bit, and not on its place: what a session generates does not depend on the sessions beside it."""
    layer = draw(case)
    alone = layer.product()[1]
    others = torch.randn(case.rows, case.k).to(layer.x) * 100
    for place in (0, case.rows - 1):
        x = others.clone()
        x[place] = layer.x[1]
        assert torch.equal(replace(layer, x=x).product()[place], alone)


@pytest.mark.parametrize("case", ALONE, ids=str)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_shows_in_its_row_alone(case: Case, value: float) -> None:
    layer = draw(case)
    without, x = layer.product(), layer.x.clone()
    x[1, 7] = value
    out = replace(layer, x=x).product()
    assert out[1].isnan().all()
    out[1] = without[1]
    assert torch.equal(out, without)


@pytest.mark.parametrize("case", (CASES[1], CASES[8], CASES[9]), ids=str)
def test_rows_of_zeros_are_exact(case: Case) -> None:
    layer = draw(case)
    assert layer.weight.bias is not None
    x, residual = torch.zeros_like(layer.x), torch.randn(case.rows, case.n).to(layer.x)
    assert torch.equal(replace(layer, x=x).product(), layer.weight.bias.float().expand(case.rows, -1))
    expected = (residual.float() + layer.weight.bias.float()).to(case.dtype)
    assert torch.equal(rows_triton.linear_add(x, layer.weight, residual), expected)


def test_tiles_of_both_sizes_agree() -> None:
    """In fixed point bit for bit: 2 rows give the same whether a call may have 16 rows at most, or more."""
    layer = draw(CASES[0])
    more = torch.cat((layer.x, torch.randn(15, CASES[0].k).to(layer.x)))
    assert rows_triton.columns_for(layer.x) != rows_triton.columns_for(more)
    assert torch.equal(replace(layer, x=more).product()[:2], layer.product())


def test_one_row_is_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = draw(replace(CASES[0], rows=1))
    called: list[str] = []
    for name in ("norm_linear", "norm_swiglu", "linear_add"):
        monkeypatch.setattr(step_triton, name, lambda *_, name=name: called.append(name))
    rows_triton.norm_linear(layer.x, layer.norm, layer.weight, F32)
    rows_triton.norm_swiglu(layer.x, layer.norm, layer.weight)
    rows_triton.linear_add(layer.x, layer.weight, layer.x)
    assert called == ["norm_linear", "norm_swiglu", "linear_add"]


# Prints the operators, with how many rows a program takes, for each number of rows that there may be at most.
TRACED = """
import torch
from ostinato.export.kernels.linear import rows_triton
from ostinato.export.kernels.operands import HeadSquares, Norm, Weight

class Layer(torch.nn.Module):
    def forward(self, x, sums, norm, values, scale):
        weight, norm = Weight(values, scale), Norm(norm, 1e-6)
        normed = rows_triton.norm_linear(x, norm, weight, torch.float32)
        gated = rows_triton.norm_swiglu(x, norm, weight)
        both = rows_triton.norm_linear_gates(x, norm, weight, x.new_zeros(4, 256))
        squares = HeadSquares(sums.expand(x.shape[0], 4, 2).reshape(-1, 2), 1e-6)
        return normed, gated, *both, rows_triton.linear_add(x, weight, x, squares)

for group in (128, 32):
    for most in (16, 17, None):
        weight = torch.zeros(256, 128, dtype=torch.uint8), torch.zeros(256, 256 // group, dtype=torch.bfloat16)
        inputs = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(1, 4, 2), torch.zeros(256), *weight
        rows = torch.export.Dim("rows", min=2, max=most)
        program = torch.export.export(Layer(), inputs, dynamic_shapes=({0: rows}, *[None] * 4), strict=False)
        ours = [node for node in program.graph.nodes if "ostinato" in str(node.target)]
        (bounds,) = program.range_constraints.values()
        print(*{(str(node.target).split(".")[1], node.args[-1]): None for node in ours}, str(bounds).split()[-1])
"""


def test_any_number_of_rows_is_traced() -> None:
    """The number stays a symbol, and the most that it may be says how many of them a program takes."""
    names = "rows_norm_linear", "rows_norm_swiglu", "rows_norm_linear_gates", "rows_linear_add"
    expected = [
        " ".join(map(str, [*((name, columns) for name in kinds), most]))
        for kinds in (names, ("rows_scaled_product",))
        for columns, most in ((16, "16]"), (32, "17]"), (32, "int_oo]"))
    ]
    assert run_compiled(TRACED).splitlines() == expected
