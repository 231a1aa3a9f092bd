"""A step's mixture of experts: the Triton kernels against their references in float64, and the operators of an export.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.experts import reference, step_triton
from ostinato.export.kernels.operands import Norm, Weight

from ...comparison import relative_error
from .conftest import run_compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# Relative to the reference in float64: the kernels compute in float32 and round to the dtype once.
TOLERANCE = {F32: 3e-6, BF16: 4e-3}


@dataclass(frozen=True)
class Shape:
    """`shared` is the shared expert's inner size, None without one; `group` is None for weights in `dtype`."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    inner: int = 64
    shared: int | None = 64
    group: int | None = 64
    dtype: torch.dtype = BF16


# The interpreter takes half a second per program: few programs there, all sizes on a GPU.
SHAPES: tuple[Shape, ...] = (
    Shape(top_k=1, hidden=192),
    Shape(hidden=64, dtype=F32),
    Shape(top_k=1, hidden=64, shared=128, group=32),
    Shape(experts=40, top_k=2, hidden=64, shared=None),
    Shape(experts=1, top_k=1, inner=192, shared=None, group=32, dtype=F32),
    Shape(group=None),
    Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None, dtype=F32),
    Shape(experts=3, top_k=1, hidden=97, inner=5, shared=None, group=None),
)
if DEVICE == "cuda":
    FLAGSHIP = Shape(256, 8, 2048, 512, 512, 128)
    SHAPES += (
        Shape(),
        Shape(dtype=F32),
        Shape(hidden=192, inner=192, shared=None, group=32, dtype=F32),
        Shape(experts=40, top_k=3, hidden=320, group=64),
        Shape(experts=33, top_k=5, hidden=384, inner=128, shared=256, group=128),
        Shape(experts=1, top_k=1, shared=None),
        Shape(experts=5, top_k=5, hidden=1024, dtype=F32),
        FLAGSHIP,
        *(replace(FLAGSHIP, group=group) for group in (32, 64, None)),
        replace(FLAGSHIP, dtype=F32),
        replace(FLAGSHIP, group=None, dtype=F32),
        Shape(60, 4, 2560, 1408, 5632, None),
        Shape(512, 10, 2048, 512, 512, 128),
        Shape(128, 8, 4096, 1536, None, 128),
        Shape(60, 4, 5120, 768, 3072),
    )
IDS = [f"{s.experts}-{s.top_k}-{s.hidden}-{s.inner}-{s.shared}-{s.group}-{str(s.dtype)[6:]}" for s in SHAPES]


class Layer:
    """Random arguments of the three operators."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        experts, size, inner = shape.experts, shape.hidden, shape.inner
        self.h = self.normal(1, size).to(shape.dtype)
        self.norm = Norm(self.normal(size) * 0.3, EPS)
        self.gate = (self.normal(experts, size) * size**-0.5).to(shape.dtype)
        self.gate_up = self.weight(experts, 2 * inner, size)
        self.down = self.weight(experts, size, inner)
        self.shared_gate: Tensor | None = None
        self.shared_gate_up: Weight | None = None
        self.shared_down: Weight | None = None
        if shape.shared is not None:
            self.shared_gate = (self.normal(1, size) * size**-0.5).to(shape.dtype)
            self.shared_gate_up = self.weight(2 * shape.shared, size)
            self.shared_down = self.weight(size, shape.shared)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE)

    def weight(self, *size: int) -> Weight:
        if self.shape.group is None:
            return Weight((self.normal(*size) * size[-1] ** -0.5).to(self.shape.dtype))
        q = torch.randint(-8, 8, size, generator=self.generator)
        scale = self.normal(*size[:-1], size[-1] // self.shape.group) * size[-1] ** -0.5 / 4
        return Weight(pack_int4(q).to(DEVICE), scale.bfloat16())

    def logits(self) -> Tensor:
        return self.normal(1, self.shape.experts + (self.shared_gate is not None)).to(self.shape.dtype)

    @property
    def exact_norm(self) -> Norm:
        return Norm(self.norm.weight.double(), EPS)

    def inner(self, logits: Tensor) -> Tensor:
        arguments = self.shape.top_k, self.gate_up, self.shared_gate_up
        return step_triton.experts_gate_up(self.h, self.norm, logits, *arguments)

    def exact_inner(self, logits: Tensor) -> Tensor:
        arguments = self.shape.top_k, self.gate_up, self.shared_gate_up
        return reference.experts_gate_up(self.h.double(), self.exact_norm, logits.double(), *arguments)

    def hidden(self) -> Tensor:
        return self.normal(1, self.shape.top_k * self.shape.inner + (self.shape.shared or 0)).to(self.shape.dtype)

    def out(self, hidden: Tensor, logits: Tensor) -> Tensor:
        return step_triton.experts_down(hidden, logits, self.shape.top_k, self.down, self.shared_down, self.h)

    def exact_out(self, hidden: Tensor, logits: Tensor) -> Tensor:
        arguments = self.shape.top_k, self.down, self.shared_down, self.h.double()
        return reference.experts_down(hidden.double(), logits.double(), *arguments)


@pytest.fixture(params=SHAPES, ids=IDS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def test_logits(layer: Layer) -> None:
    arguments = layer.h, layer.norm, layer.gate, layer.shared_gate
    logits = step_triton.route_logits(*arguments)
    exact = reference.route_logits(layer.h.double(), layer.exact_norm, layer.gate.double(), double(layer.shared_gate))
    assert logits.dtype == layer.shape.dtype and logits.shape == exact.shape
    assert relative_error(logits, exact) < TOLERANCE[layer.shape.dtype]
    if DEVICE == "cuda":
        assert torch.equal(logits, step_triton.route_logits(*arguments))


def test_gate_up(layer: Layer) -> None:
    logits = layer.logits()
    hidden, exact = layer.inner(logits), layer.exact_inner(logits)
    assert hidden.dtype == layer.shape.dtype and hidden.shape == exact.shape
    assert relative_error(hidden, exact) < TOLERANCE[layer.shape.dtype]
    if DEVICE == "cuda":
        assert torch.equal(hidden, layer.inner(logits))


def test_down(layer: Layer) -> None:
    hidden, logits = layer.hidden(), layer.logits()
    out, exact = layer.out(hidden, logits), layer.exact_out(hidden, logits)
    assert out.dtype == layer.shape.dtype and out.shape == layer.h.shape
    assert relative_error(out, exact) < TOLERANCE[layer.shape.dtype]
    if DEVICE == "cuda":
        assert torch.equal(out, layer.out(hidden, logits))


@pytest.mark.parametrize(("experts", "dtype", "group"), [(3, F32, 32), (70, BF16, None)], ids=str)
def test_equal_logits(experts: int, dtype: torch.dtype, group: int | None) -> None:
    """The lower index first; zeros of both signs are equal. Another expert would give a very different result."""
    layer = Layer(Shape(experts, 3, 64, 64, None, group, dtype))
    values = torch.tensor([-9.0, -2.5, -1e-30, -0.0, 0.0, 1e-30, 7.0, 9.0])
    hidden = layer.hidden()
    for top in (3, 5, 8) if DEVICE == "cuda" else (5,):
        picks = torch.randint(0, top, (1, experts), generator=layer.generator)
        logits = values[picks].to(DEVICE, dtype)
        assert relative_error(layer.inner(logits), layer.exact_inner(logits)) < TOLERANCE[dtype]
        assert relative_error(layer.out(hidden, logits), layer.exact_out(hidden, logits)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "config", [step_triton.Config(1 << 16, 16, 1), step_triton.Config(1 << 16, 4, 2)][: 1 + (DEVICE == "cuda")], ids=str
)
def test_rows_in_several_tiles(config: step_triton.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the shared expert's: several rows per tile, in several tiles, or one row in several tiles."""
    for configs in (step_triton.GATE_UP, step_triton.DOWN):
        for dtype in configs:
            monkeypatch.setitem(configs, dtype, config)
    for size, inner, group in ((1088, 64, 64), (330, 16, None)):
        layer = Layer(Shape(2, 1, size, inner, None, group))
        logits = layer.logits()
        assert relative_error(layer.inner(logits), layer.exact_inner(logits)) < TOLERANCE[BF16]
    for inner, shared, group in ((320, 1088, 32), (70, 9, None), (70, 300, None)):
        layer = Layer(Shape(4, 3, 16 if group is None else 64, inner, shared, group))
        hidden, logits = layer.hidden(), layer.logits()
        assert relative_error(layer.out(hidden, logits), layer.exact_out(hidden, logits)) < TOLERANCE[BF16]


@pytest.mark.parametrize("group", (64, None))
def test_nan_shows(group: int | None) -> None:
    layer = Layer(Shape(top_k=1, hidden=64, group=group))
    logits = layer.logits()
    layer.h[0, 7] = torch.nan
    assert step_triton.route_logits(layer.h, layer.norm, layer.gate, layer.shared_gate).isnan().all()
    hidden = layer.inner(logits)
    assert hidden.isnan().all()
    assert layer.out(hidden, logits).isnan().all()


def test_refusals() -> None:
    layer = Layer(Shape())
    for group, got in ((32, "int4 in groups of 32"), (None, r"torch\.bfloat16")):
        layer.shared_gate_up = Layer(Shape(group=group)).shared_gate_up
        with pytest.raises(ExportError, match=f"shared expert's weights .* int4 in groups of 64.* got {got}"):
            layer.inner(layer.logits())
    layer = Layer(Shape())
    assert layer.gate_up.scale is not None
    values, scale = (tensor[:, :64].contiguous() for tensor in (layer.gate_up.values, layer.gate_up.scale))
    layer.gate_up = Weight(values, scale)
    with pytest.raises(ExportError, match="intermediate size must be a multiple"):
        layer.inner(layer.logits())


def test_what_weights_may_not_be() -> None:
    layer = Layer(Shape(group=None))
    gate_up, down = layer.gate_up.values, layer.down.values
    logits, hidden = layer.logits(), layer.hidden()
    layer.gate_up, layer.down = Weight(gate_up.half()), Weight(down.half())
    with pytest.raises(ExportError, match=r"bfloat16, float32 or int4, got torch\.float16"):
        layer.inner(logits)
    with pytest.raises(ExportError, match=r"bfloat16, float32 or int4, got torch\.float16"):
        layer.out(hidden, logits)
    layer.gate_up, layer.down = Weight(gate_up, None, gate_up[0, :, 0]), Weight(down, None, down[0, :, 0])
    with pytest.raises(ExportError, match="without a bias"):
        layer.inner(logits)
    with pytest.raises(ExportError, match="without a bias"):
        layer.out(hidden, logits)


# Prints our operators, one a line.
TRACED = """
import torch
from tests.export.kernels.compiled_launches import BF16, INNER, ExpertsLayer

with torch.device("meta"):
    layer, inputs = ExpertsLayer(BF16, 128, INNER), ExpertsLayer.inputs(1, BF16)
    program = torch.export.export(layer, inputs, strict=False)
targets = [str(node.target) for node in program.run_decompositions({}).graph.nodes]
print(*(target for target in targets if "ostinato" in target), sep="\\n")
"""


def test_traced() -> None:
    expected = [f"ostinato.{name}.default" for name in ("route_logits", "experts_gate_up", "experts_down")]
    assert run_compiled(TRACED).splitlines() == expected
