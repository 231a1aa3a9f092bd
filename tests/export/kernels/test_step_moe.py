"""A step's mixture of experts: the Triton kernels against their references in float64, and what is compiled of them.

Without a GPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import step_moe as reference
from ostinato.export.kernels import step_moe_triton as fast
from ostinato.export.kernels.int4 import pack_int4

from ..references import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# Relative to the reference in float64: the kernels compute in float32 and round to the dtype once.
TOLERANCE = {F32: 3e-6, BF16: 4e-3}


@dataclass(frozen=True)
class Shape:
    """`shared` is the shared expert's inner size, None without one."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    inner: int = 64
    shared: int | None = 64
    group: int = 64
    dtype: torch.dtype = BF16


SHAPES = (
    Shape(),
    Shape(dtype=F32),
    Shape(hidden=64, shared=128, group=32),
    Shape(hidden=192, inner=192, shared=None, group=32, dtype=F32),
    Shape(experts=40, top_k=3, hidden=320, group=64),
    Shape(experts=33, top_k=5, hidden=384, inner=128, shared=256, group=128),
    Shape(experts=1, top_k=1, shared=None),
    Shape(experts=5, top_k=5, hidden=1024, dtype=F32),
)
if DEVICE == "cuda":
    FLAGSHIP = Shape(256, 8, 2048, 512, 512, 128)
    SHAPES += (FLAGSHIP, *(replace(FLAGSHIP, group=group) for group in (32, 64)), replace(FLAGSHIP, dtype=F32))
    SHAPES += (Shape(512, 10, 2048, 512, 512, 128), Shape(128, 8, 4096, 1536, None, 128), Shape(60, 4, 5120, 768, 3072))
IDS = [f"{s.experts}-{s.top_k}-{s.hidden}-{s.inner}-{s.shared}-{s.group}-{str(s.dtype)[6:]}" for s in SHAPES]


class Layer:
    """Random arguments of the three operators."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        experts, size, inner = shape.experts, shape.hidden, shape.inner
        self.h = self.normal(1, size).to(shape.dtype)
        self.norm_weight = self.normal(size) * 0.3
        self.gate = (self.normal(experts, size) * size**-0.5).to(shape.dtype)
        self.gate_up = self.int4(experts, 2 * inner, size)
        self.down = self.int4(experts, size, inner)
        self.shared_gate: Tensor | None = None
        self.shared_gate_up: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        self.shared_down: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if shape.shared is not None:
            self.shared_gate = (self.normal(1, size) * size**-0.5).to(shape.dtype)
            self.shared_gate_up = self.int4(2 * shape.shared, size)
            self.shared_down = self.int4(size, shape.shared)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE)

    def int4(self, *size: int) -> tuple[Tensor, Tensor]:
        q = torch.randint(-8, 8, size, generator=self.generator)
        scale = self.normal(*size[:-1], size[-1] // self.shape.group) * size[-1] ** -0.5 / 4
        return pack_int4(q).to(DEVICE), scale.bfloat16()

    def logits(self) -> Tensor:
        return self.normal(1, self.shape.experts + (self.shared_gate is not None)).to(self.shape.dtype)

    def routed(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arguments = self.shape.top_k, *self.gate_up, *self.shared_gate_up
        return fast.experts_gate_up(self.h, self.norm_weight, EPS, logits, *arguments)

    def exact_routed(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arguments = self.shape.top_k, *self.gate_up, *self.shared_gate_up
        return reference.experts_gate_up(self.h.double(), self.norm_weight.double(), EPS, logits.double(), *arguments)


@pytest.fixture(params=SHAPES, ids=IDS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def test_logits(layer: Layer) -> None:
    arguments = layer.h, layer.norm_weight, EPS, layer.gate, layer.shared_gate
    logits = fast.route_logits(*arguments)
    exact = reference.route_logits(
        layer.h.double(), layer.norm_weight.double(), EPS, layer.gate.double(), double(layer.shared_gate)
    )
    assert logits.dtype == layer.shape.dtype and logits.shape == exact.shape
    assert relative_error(logits, exact) < TOLERANCE[layer.shape.dtype]
    assert torch.equal(logits, fast.route_logits(*arguments))


def test_gate_up(layer: Layer) -> None:
    logits = layer.logits()
    hidden, weights, chosen = layer.routed(logits)
    exact_hidden, exact_weights, exact_chosen = layer.exact_routed(logits)
    assert chosen.dtype == torch.int32 and torch.equal(chosen, exact_chosen)
    assert weights.dtype == F32 and relative_error(weights, exact_weights.double()) < 1e-6
    assert hidden.dtype == layer.shape.dtype and hidden.shape == exact_hidden.shape
    assert relative_error(hidden, exact_hidden) < TOLERANCE[layer.shape.dtype]
    for first, second in zip((hidden, weights, chosen), layer.routed(logits), strict=True):
        assert torch.equal(first, second)


def test_down(layer: Layer) -> None:
    shape = layer.shape
    hidden = layer.normal(1, shape.top_k * shape.inner + (shape.shared or 0)).to(shape.dtype)
    weights = layer.normal(shape.top_k + (shape.shared is not None)).abs()
    chosen = torch.randperm(shape.experts, generator=layer.generator)[: shape.top_k].int().to(DEVICE)
    arguments = hidden, weights, chosen, *layer.down, *layer.shared_down
    out = fast.experts_down(*arguments, layer.h)
    exact = reference.experts_down(
        hidden.double(), weights.double(), chosen, *layer.down, *layer.shared_down, layer.h.double()
    )
    assert out.dtype == shape.dtype and out.shape == layer.h.shape
    assert relative_error(out, exact) < TOLERANCE[shape.dtype]
    assert torch.equal(out, fast.experts_down(*arguments, layer.h))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("experts", [3, 32, 70])
def test_equal_logits(experts: int, dtype: torch.dtype) -> None:
    """The lower index first; zeros of both signs are equal."""
    layer = Layer(Shape(experts, 3, 64, 64, None, 32, dtype))
    values = torch.tensor([-9.0, -2.5, -1e-30, -0.0, 0.0, 1e-30, 7.0, 9.0])
    for top in (3, 5, 8):
        picks = torch.randint(0, top, (1, experts), generator=layer.generator)
        logits = values[picks].to(DEVICE, dtype)
        chosen = layer.routed(logits)[2]
        assert chosen.tolist() == logits[0].sort(descending=True, stable=True)[1][:3].tolist()


def test_not_a_number_shows() -> None:
    layer = Layer(Shape())
    logits = layer.logits()
    layer.h[0, 77] = torch.nan
    assert fast.route_logits(layer.h, layer.norm_weight, EPS, layer.gate, layer.shared_gate).isnan().all()
    assert layer.routed(logits)[0].isnan().all()


def test_refusals() -> None:
    layer = Layer(Shape())
    layer.shared_gate_up = Layer(Shape(group=32)).shared_gate_up
    with pytest.raises(ExportError, match="shared expert's int4 weights"):
        layer.routed(layer.logits())
    layer = Layer(Shape())
    weight, scale = layer.gate_up
    layer.gate_up = weight[:, :64].contiguous(), scale[:, :64].contiguous()
    with pytest.raises(ExportError, match="intermediate size must be a multiple"):
        layer.routed(layer.logits())
