"""Triton's routed experts for any number of tokens against their reference, and against the same sums in float64.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels import launch
from ostinato.export.kernels.experts import prefill_triton, reference
from ostinato.export.kernels.experts.limits import check_experts
from ostinato.export.kernels.experts.prefill_triton import experts
from ostinato.export.kernels.operands import ExpertWeights, Weight

from ...comparison import relative_error
from .conftest import run_compiled
from .runs import padded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16 = torch.float32, torch.bfloat16
# Relative to float64 sums over the same weights. In bfloat16 weights, inner activations and the output are rounded.
TOLERANCE = {F32: 1e-5, BF16: 1e-2}


@dataclass(frozen=True)
class Shape:
    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    inner: int = 64
    group_size: int | None = None
    dtype: torch.dtype = F32


@dataclass(frozen=True)
class Case:
    """Arguments of `experts`, in its order."""

    x: Tensor
    weights: Tensor
    chosen: Tensor
    routed: ExpertWeights

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    def exact(self) -> Tensor:
        """The definition, token by token, in float64."""
        gate_up, down = (weight.dequantized(torch.float64) for weight in (self.routed.gate_up, self.routed.down))
        x = self.x.double()
        out = torch.zeros_like(x)
        for t, (shares, picked) in enumerate(zip(self.weights.double(), self.chosen.tolist(), strict=True)):
            for share, e in zip(shares, picked, strict=True):
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                out[t] += share * (down[e] @ (torch.nn.functional.silu(gate) * up))
        return out


def draw_weight(shape: Shape, rows: int, columns: int, generator: torch.Generator) -> Weight:
    size = (shape.experts, rows, columns)
    if shape.group_size is None:
        weight = torch.randn(size, generator=generator, device=DEVICE) * columns**-0.5
        return Weight(weight.to(shape.dtype))
    q = torch.randint(-8, 8, size, generator=generator, device=DEVICE)
    scale = torch.rand(*size[:2], columns // shape.group_size, generator=generator, device=DEVICE)
    return Weight(pack_int4(q), ((0.1 + scale) * 0.3 * columns**-0.5).to(BF16))


def draw(shape: Shape, tokens: int, seed: int = 0) -> Case:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device=DEVICE).to(shape.dtype)
    logits = torch.randn(tokens, shape.experts, generator=generator, device=DEVICE).to(shape.dtype)
    weights, chosen = reference.route(logits, shape.top_k, torch.arange(tokens, device=DEVICE))
    gate_up = draw_weight(shape, 2 * shape.inner, shape.hidden, generator)
    down = draw_weight(shape, shape.hidden, shape.inner, generator)
    return Case(x, weights, chosen.int(), ExpertWeights(gate_up, down))


def check(case: Case) -> None:
    found = experts(*case.arguments())
    assert (found.shape, found.dtype) == (case.x.shape, case.x.dtype)
    error = relative_error(found.double(), case.exact())
    assert error < TOLERANCE[case.x.dtype], f"relative error to float64 is {error:.1e}"
    error = relative_error(found.double(), reference.experts(*case.arguments()).double())
    assert error < 2 * TOLERANCE[case.x.dtype], f"relative error to the reference is {error:.1e}"


@pytest.mark.parametrize("tokens", (1, 2, 17))
@pytest.mark.parametrize("group_size", (None, 32, 64, 128))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_experts(tokens: int, group_size: int | None, dtype: torch.dtype) -> None:
    check(draw(Shape(hidden=128, inner=128, group_size=group_size, dtype=dtype), tokens, seed=tokens))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_smaller_gpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: launch.SMALL)
    check(draw(Shape(hidden=256, inner=128, group_size=128, dtype=dtype), 17))


@pytest.mark.parametrize("tokens", (3, 64, 130))
@pytest.mark.parametrize("group_size", (None, 32))
def test_experts_for_more_tokens(tokens: int, group_size: int | None) -> None:
    check(draw(Shape(group_size=group_size, dtype=BF16), tokens, seed=tokens))


@pytest.mark.parametrize("tokens", (1, 5))
@pytest.mark.parametrize(
    "shape",
    (
        Shape(hidden=192, inner=64, top_k=3, group_size=64),
        Shape(hidden=64, inner=192, top_k=3, group_size=32, dtype=BF16),
        Shape(hidden=48, inner=24, top_k=3),
        Shape(hidden=36, inner=100, dtype=BF16),
        Shape(experts=1, top_k=1),
        Shape(experts=5, top_k=1, group_size=64),
        Shape(experts=5, top_k=5, group_size=64),
    ),
    ids=str,
)
def test_awkward_shapes(shape: Shape, tokens: int) -> None:
    check(draw(shape, tokens))


@pytest.mark.parametrize("tokens", (1, 70))
@pytest.mark.parametrize("group_size", (None, 32))
def test_several_steps(monkeypatch: pytest.MonkeyPatch, tokens: int, group_size: int | None) -> None:
    """Rows and choices that no block holds at once."""
    monkeypatch.setattr(prefill_triton, "BLOCK_SORT", 32)
    check(draw(Shape(hidden=192, top_k=3, group_size=group_size), tokens))


@pytest.mark.parametrize("expert", (0, 7))
def test_one_expert_for_all_tokens(expert: int) -> None:
    """It has blocks that are full, and the others have none."""
    case = draw(Shape(top_k=1, group_size=64), 67)
    check(replace(case, chosen=torch.full_like(case.chosen, expert)))


def test_experts_that_no_token_chose() -> None:
    case = draw(Shape(group_size=64), 40)
    others = torch.tensor([1, 2, 4, 5], dtype=torch.int32, device=DEVICE)
    first = torch.arange(40, device=DEVICE) % 4
    check(replace(case, chosen=torch.stack((others[first], others[(first + 1) % 4]), dim=1)))


@pytest.mark.parametrize("tokens", (1, 9))
def test_int64_indices_and_strided_tokens(tokens: int) -> None:
    case = draw(Shape(group_size=64, dtype=BF16), tokens)
    found = experts(*case.arguments())
    wide = torch.cat((torch.zeros_like(case.x), case.x), dim=1)[:, case.x.shape[1] :]
    other = experts(*replace(case, x=wide, chosen=case.chosen.long()).arguments())
    assert torch.equal(found, other)


def test_runs_are_equal_bit_by_bit() -> None:
    case = draw(Shape(group_size=64, dtype=BF16), 33)
    assert torch.equal(experts(*case.arguments()), experts(*case.arguments()))


@pytest.mark.parametrize(
    ("sizes", "limit"),
    (
        ((2048, 512, 2000, 8, 128), "1 to 1024 experts"),
        ((2048, 512, 8, 9, 128), "1 to 8"),
        ((2048, 512, 256, 8, 48), r"one of \(32, 64, 128\)"),
        ((2048, 96, 256, 8, 32), "intermediate size must be a multiple of 64"),
        ((2048 + 64, 512, 256, 8, 128), "hidden size must be a multiple of 128"),
    ),
)
def test_refusals(sizes: tuple[int, int, int, int, int | None], limit: str) -> None:
    check_experts(2048, 512, 256, 8, 128)
    check_experts(100, 36, 256, 8, None)
    with pytest.raises(ExportError, match=limit):
        check_experts(*sizes)


TRACE = """
import torch
from ostinato.export.kernels.experts.prefill_triton import experts
from ostinato.export.kernels.experts.route_triton import route
from ostinato.export.kernels.operands import ExpertWeights, Weight

class Moe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(128, 8, bias=False)
        self.register_buffer("gate_up", torch.zeros(8, 128, 64, dtype=torch.uint8))
        self.register_buffer("gate_up_scale", torch.zeros(8, 128, 4, dtype=torch.bfloat16))
        self.register_buffer("down", torch.zeros(8, 128, 32, dtype=torch.uint8))
        self.register_buffer("down_scale", torch.zeros(8, 128, 2, dtype=torch.bfloat16))

    def forward(self, x):
        weights, chosen = route(self.router(x), 2, torch.arange(x.shape[0]))
        gate_up, down = Weight(self.gate_up, self.gate_up_scale), Weight(self.down, self.down_scale)
        return experts(x, weights, chosen, ExpertWeights(gate_up, down))

def ops(program):
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("ostinato.")]

tokens = torch.export.Dim("tokens", min=2, max=255)
program = torch.export.export(Moe(), (torch.zeros(17, 128),), dynamic_shapes=({0: tokens},))
assert ops(program) == ["ostinato.route.default", "ostinato.experts.default"], ops(program)
(limits,) = program.range_constraints.values()
assert (limits.lower, limits.upper) == (2, 255), limits
(output,) = program.graph.output_node().args[0]
assert output.meta["val"].shape[0].node.expr.is_symbol, output.meta["val"].shape
program = torch.export.export(Moe(), (torch.zeros(1, 128),))
assert ops(program) == ["ostinato.route.default", "ostinato.experts.default"], ops(program)
"""


@pytest.mark.parametrize("group_size", (None, 32))
@pytest.mark.parametrize(("length", "rows"), [(1, 16), (17, 32), (40, 64)])
def test_rows_of_no_expert(length: int, rows: int, group_size: int | None) -> None:
    """Padding of NaN, whose experts' index is E: the tokens' outputs are as without it, bit by bit, its own are zeros."""
    case = draw(Shape(group_size=group_size, dtype=BF16), length)
    count = case.routed.gate_up.values.shape[0]
    chosen = torch.nn.functional.pad(case.chosen, (0, 0, 0, rows - length), value=count)
    out = experts(padded(case.x, rows), padded(case.weights, rows), chosen, case.routed)
    assert torch.equal(out[:length], experts(*case.arguments())) and not out[length:].any()
    wide = reference.experts(padded(case.x, rows), padded(case.weights, rows), chosen, case.routed)
    assert relative_error(out[:length].double(), wide[:length].double()) < 2 * TOLERANCE[BF16]


def test_export_keeps_the_number_of_tokens_open() -> None:
    run_compiled(TRACE)


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter would take an hour")
@pytest.mark.parametrize("tokens", (1, 2, 512))
@pytest.mark.parametrize("group_size", (None, 32, 128))
def test_full_size(tokens: int, group_size: int | None) -> None:
    shape = Shape(experts=256, top_k=8, hidden=2048, inner=512, group_size=group_size, dtype=BF16)
    case = draw(shape, tokens)
    found = experts(*case.arguments())
    error = relative_error(found.double(), reference.experts(*case.arguments()).double())
    assert error < 2 * TOLERANCE[BF16], f"relative error to the reference is {error:.1e}"
