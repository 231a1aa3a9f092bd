"""Routing and the experts in C++ against the references in float64."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.experts import reference
from ostinato.export.kernels.operands import ExpertWeights, Weight

from ...comparison import relative_error
from .cpu_cases import BF16, F32, ROWS, TOLERANCE, Draw, Operand, doubled


@dataclass(frozen=True)
class Shape:
    """`shared` is the shared expert's inner size, None without one; `group` is None for weights in the inputs' dtype."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    inner: int = 64
    shared: int | None = 64
    group: int | None = 64


SHAPES = (
    Shape(),
    Shape(top_k=1, hidden=64, shared=128, group=32),
    Shape(experts=40, top_k=3, hidden=192, shared=None),
    Shape(experts=1, top_k=1, inner=192, shared=None, group=32),
    Shape(experts=4, top_k=4, hidden=256, inner=128, shared=256, group=128),
    Shape(group=None),
    Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None),
    Shape(experts=3, top_k=1, hidden=97, inner=5, shared=None, group=None),
)


class Layer:
    def __init__(self, shape: Shape, dtype: torch.dtype, rows: int) -> None:
        draw = Draw(rows + shape.experts)
        self.shape, self.dtype = shape, dtype
        self.x, self.norm = draw.normal(rows, shape.hidden, dtype=dtype), draw.norm(shape.hidden)
        self.gate = draw.rows(shape.experts, shape.hidden, dtype=dtype)
        self.shared_gate = None if shape.shared is None else draw.rows(1, shape.hidden, dtype=dtype)
        self.gate_up = draw.operand(shape.experts, 2 * shape.inner, shape.hidden, group=shape.group, dtype=dtype)
        self.down = draw.operand(shape.experts, shape.hidden, shape.inner, group=shape.group, dtype=dtype)
        self.shared_up: Operand | None = None
        self.shared_down: Operand | None = None
        if shape.shared is not None:
            self.shared_up = draw.operand(2 * shape.shared, shape.hidden, group=shape.group, dtype=dtype)
            self.shared_down = draw.operand(shape.hidden, shape.shared, group=shape.group, dtype=dtype)
        width = shape.top_k * shape.inner + (shape.shared or 0)
        self.logits = draw.normal(rows, shape.experts + (shape.shared is not None), dtype=dtype)
        self.hidden = draw.normal(rows, width, dtype=dtype)

    def route_logits(self, kernels: type[Kernels]) -> Tensor:
        shared_gate = None if self.shared_gate is None else self.shared_gate.packed.values
        return kernels.route_logits(self.x, self.norm, self.gate.packed.values, shared_gate)

    def sparse_moe(self, kernels: type[Kernels], slots: Tensor | None) -> Tensor:
        """The whole layer."""
        shared, shared_gate = None, None
        if self.shared_gate is not None and self.shared_up is not None and self.shared_down is not None:
            shared = ExpertWeights(self.shared_up.packed, self.shared_down.packed)
            shared_gate = self.shared_gate.packed.values
        routed = ExpertWeights(self.gate_up.packed, self.down.packed)
        gate = self.gate.packed.values
        return kernels.sparse_moe(self.x, self.norm, gate, shared_gate, self.shape.top_k, routed, shared, slots)

    def expected(self, logits: Tensor) -> Tensor:
        """What the layer gives for x where the router says this, exactly."""
        x, top_k = self.x.double(), self.shape.top_k
        up, down = exact(self.shared_up), exact(self.shared_down)
        hidden = reference.experts_gate_up(x, doubled(self.norm), logits, top_k, self.gate_up.exact, up)
        return reference.experts_down(hidden, logits.double(), top_k, self.down.exact, down, x)

    @property
    def tolerance(self) -> float:
        return self.gate_up.tolerance(self.dtype)


def packed(operand: Operand | None) -> Weight | None:
    return None if operand is None else operand.packed


def exact(operand: Operand | None) -> Weight | None:
    return None if operand is None else operand.exact


Types = pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
Rows = pytest.mark.parametrize("rows", (*ROWS, 150))
Shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@Types
@Rows
@pytest.mark.parametrize("shape", (SHAPES[0], SHAPES[2], SHAPES[6]), ids=str)
def test_route_logits(cpu_kernels: type[Kernels], shape: Shape, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, rows)
    shared = layer.shared_gate
    values = (None, None) if shared is None else (shared.packed.values, shared.exact.values)
    out = cpu_kernels.route_logits(layer.x, layer.norm, layer.gate.packed.values, values[0])
    expected = reference.route_logits(layer.x.double(), doubled(layer.norm), layer.gate.exact.values, values[1])
    assert out.dtype == dtype and relative_error(out, expected) < TOLERANCE[dtype]


@Types
@Rows
@Shapes
def test_gate_up(cpu_kernels: type[Kernels], shape: Shape, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, rows)
    up = layer.shared_up
    out = cpu_kernels.experts_gate_up(layer.x, layer.norm, layer.logits, shape.top_k, layer.gate_up.packed, packed(up))
    expected = reference.experts_gate_up(
        layer.x.double(), doubled(layer.norm), layer.logits, shape.top_k, layer.gate_up.exact, exact(up)
    )
    assert out.dtype == dtype and relative_error(out, expected) < 2 * layer.tolerance


@Types
@Rows
@Shapes
def test_down(cpu_kernels: type[Kernels], shape: Shape, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, rows)
    down = layer.shared_down
    out = cpu_kernels.experts_down(layer.hidden, layer.logits, shape.top_k, layer.down.packed, packed(down), layer.x)
    expected = reference.experts_down(
        layer.hidden.double(),
        layer.logits.double(),
        shape.top_k,
        layer.down.exact,
        exact(down),
        layer.x.double(),
    )
    assert out.dtype == dtype and relative_error(out, expected) < layer.tolerance


@Types
@Rows
@Shapes
def test_experts(cpu_kernels: type[Kernels], shape: Shape, rows: int, dtype: torch.dtype) -> None:
    """Some choices are nobody's, and with a single row perhaps all."""
    layer = Layer(shape, dtype, rows)
    weights, chosen = reference.route(layer.logits[:, : shape.experts], shape.top_k, torch.arange(rows))
    chosen = chosen.masked_fill(
        torch.rand(chosen.shape, generator=torch.Generator().manual_seed(rows)) < 0.3, shape.experts
    )
    out = cpu_kernels.experts(layer.x, weights, chosen, ExpertWeights(layer.gate_up.packed, layer.down.packed))
    exact_weights = ExpertWeights(layer.gate_up.exact, layer.down.exact)
    expected = by_hand(layer.x.double(), weights.double(), chosen, exact_weights)
    assert out.dtype == dtype
    if expected.abs().max() == 0:
        assert out.abs().max() == 0
    else:
        assert relative_error(out, expected) < 3 * layer.tolerance


def by_hand(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    out = torch.zeros_like(x)
    for token, row in enumerate(chosen.tolist()):
        for choice, expert in enumerate(row):
            if 0 <= expert < routed.gate_up.values.shape[0]:
                one = torch.tensor([expert])
                gate, up = (routed.gate_up.of_experts(one).dequantized(x.dtype)[0] @ x[token]).chunk(2)
                down = routed.down.of_experts(one).dequantized(x.dtype)[0] @ (torch.nn.functional.silu(gate) * up)
                out[token] += weights[token, choice] * down
    return out


@Types
@pytest.mark.parametrize("rows", (1, 2, 9, 70))
@Shapes
def test_sparse_moe(cpu_kernels: type[Kernels], shape: Shape, rows: int, dtype: torch.dtype) -> None:
    """Rows of padding, here of NaN, reach no routed expert: those of whom no other row is may be NaN."""
    layer = Layer(shape, dtype, rows)
    draw = Draw(rows)
    slots = torch.arange(rows).masked_fill(draw.normal(rows) < -0.3, -1)
    tokens = slots >= 0
    layer.x[~tokens] = torch.nan
    logits = layer.route_logits(cpu_kernels)
    chosen = logits[tokens, : shape.experts].float().topk(shape.top_k).indices
    unread = sorted(set(range(shape.experts)) - set(chosen.flatten().tolist()))
    expected = layer.expected(logits)[tokens]
    for operand in (layer.gate_up, layer.down):
        some = operand.packed.values if operand.packed.scale is None else operand.packed.scale
        some[unread] = torch.nan
    out = layer.sparse_moe(cpu_kernels, slots)
    assert out.dtype == dtype and out.shape == layer.x.shape
    if tokens.any():
        assert relative_error(out[tokens], expected) < 3 * layer.tolerance
    if tokens.all():
        assert torch.equal(out, layer.sparse_moe(cpu_kernels, None))


@pytest.mark.parametrize("rows", (1, 5))
def test_padding_alone_reads_no_routed_expert(cpu_kernels: type[Kernels], rows: int) -> None:
    layer, slots = Layer(Shape(group=None), F32, rows), torch.full((rows,), -1)
    for operand in (layer.gate_up, layer.down):
        operand.packed.values.fill_(torch.nan)
    out = layer.sparse_moe(cpu_kernels, slots)
    assert out.isfinite().all() and not torch.equal(out, layer.x)


@pytest.mark.parametrize("rows", (1, 7))
def test_equal_logits_take_the_first_experts(cpu_kernels: type[Kernels], rows: int) -> None:
    layer = Layer(Shape(), F32, rows)
    layer.logits[:] = 0

    def hidden(chosen: slice) -> Tensor:
        logits = layer.logits.clone()
        logits[:, chosen] = torch.arange(2, 0, -1).float()
        return cpu_kernels.experts_gate_up(layer.x, layer.norm, logits, 2, layer.gate_up.packed, None)

    out = cpu_kernels.experts_gate_up(layer.x, layer.norm, layer.logits, 2, layer.gate_up.packed, None)
    assert torch.equal(out, hidden(slice(0, 2))) and not torch.equal(out, hidden(slice(3, 5)))


@pytest.mark.parametrize("rows", (1, 7))
def test_nan_shows(cpu_kernels: type[Kernels], rows: int) -> None:
    """In inputs and in logits, in their own row."""
    layer, bad = Layer(Shape(), F32, rows), rows // 2
    others = [row for row in range(rows) if row != bad]
    layer.x[bad, 5] = torch.nan
    up = layer.shared_up
    assert up is not None
    out = cpu_kernels.experts_gate_up(layer.x, layer.norm, layer.logits, 2, layer.gate_up.packed, up.packed)
    assert out[bad].isnan().all() and out[others].isfinite().all()
    layer = Layer(Shape(), F32, rows)
    layer.logits[bad, 3] = torch.nan
    out = cpu_kernels.experts_down(layer.hidden, layer.logits, 2, layer.down.packed, None, layer.x)
    assert out[bad].isnan().all() and out[others].isfinite().all()


def test_only_chosen_experts_are_read(cpu_kernels: type[Kernels]) -> None:
    """The others' weights may be NaN."""
    layer = Layer(Shape(experts=8, group=None), F32, 5)
    layer.logits[:, 4:] = -100
    for weight in (layer.gate_up.packed, layer.down.packed):
        weight.values[4:] = torch.nan
    hidden = cpu_kernels.experts_gate_up(layer.x, layer.norm, layer.logits, 2, layer.gate_up.packed, None)
    out = cpu_kernels.experts_down(hidden, layer.logits, 2, layer.down.packed, None, layer.x)
    assert out.isfinite().all()


def test_memory_of_a_long_prompt_is_kept(cpu_kernels: type[Kernels]) -> None:
    """The system would give it anew page by page: 8,000 of them each time."""
    rows = 4096
    layer = Layer(Shape(experts=4, top_k=4, hidden=1024, inner=512, shared=None), BF16, rows)
    weights, chosen = reference.route(layer.logits, 4, torch.arange(rows))
    routed = ExpertWeights(layer.gate_up.packed, layer.down.packed)
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu_kernels.experts(layer.x, weights, chosen, routed)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # The result itself is torch's.
    assert min(faults[1:]) < 3_000
