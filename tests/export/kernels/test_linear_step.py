"""The linear layers of a decode step: the plain functions against torch's own, the kernels against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.linear import reference, step_triton
from ostinato.export.kernels.linear.step_triton import StepConfig, config_for, units_per_lane
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, RowIndex, Weight

from ...comparison import relative_error
from .runs import SLOT, SLOTS, prompt_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
# Relative errors: of what is rounded to the dtype once; the convolution's outputs are rounded twice.
TOLERANCE = {F32: 5e-6, BF16: 4e-3}
# Of a product with bfloat16 inputs in fixed point, before it is rounded.
FIXED = {F32: 0.0, BF16: 1e-4}
TWICE = {F32: 5e-6, BF16: 8e-3}
EPS = 1e-6
# (N, K, group size, 0 for weights in the dtype of the inputs). Small weights have a row per program, of which the interpreter
# takes up to ten in a second: `test_configurations` has programs with several.
SHAPES = [(1, 64, 32), (3, 64, 64), (5, 320, 32), (7, 1088, 64), (5, 128, 128), (3, 2048, 128)]
SHAPES += [(1, 64, 0), (5, 97, 0), (4, 24, 0), (3, 1088, 0), (4, 2048, 0), (2, 9000, 0)]
if DEVICE == "cuda":
    SHAPES += [(9216, 2048, 128), (12288, 2048, 128), (2048, 4096, 128), (24831, 2048, 32), (5120, 17408, 64)]
    SHAPES += [(8192, 1024, 0), (1024, 3584, 0), (2048, 4096, 0), (24831, 1024, 0), (5120, 17408, 0), (1001, 3001, 0)]


@dataclass(frozen=True)
class Layer:
    """A random weight [n, k], its float64 numbers, an input and its norm; norm weights and inputs of both signs."""

    weight: Weight
    exact: Tensor
    x: Tensor
    norm: Norm

    def double(self) -> Layer:
        return replace(self, x=self.x.double(), norm=Norm(self.norm.weight.double(), EPS))


def draw(n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0, bias: bool = False) -> Layer:
    """With `bias`, one in the inputs' dtype, of the products' size; it is not in the exact numbers."""
    torch.manual_seed(seed)
    if group:
        q = torch.randint(-8, 8, (n, k))
        scale = (torch.randn(n, k // group) * 0.1).bfloat16()
        exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
        tensors = (pack_int4(q), scale)
    else:
        values = (torch.randn(n, k) * 0.5).to(dtype)
        exact, tensors = values.double(), (values, values)
    x, norm = torch.randn(1, k).to(dtype), torch.randn(k)
    added = (torch.randn(n) * k**0.5).to(DEVICE, dtype) if bias else None
    values, scale, exact, x, norm = (value.to(DEVICE) for value in (*tensors, exact, x, norm))
    return Layer(Weight(values, scale if group else None, added), exact, x, Norm(norm, EPS))


def near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.dtype == torch.float64 and out.shape == expected.shape
    assert relative_error(out, expected) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_norm_linear(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype, bias=n % 2 == 1)
    wide = layer.double()
    expected = reference.norm_linear(wide.x, wide.norm, wide.weight, torch.float64)
    for out_dtype in {dtype, F32}:
        arguments = (layer.x, layer.norm, layer.weight, out_dtype)
        for function, fixed in ((reference.norm_linear, 0.0), (step_triton.norm_linear, FIXED[dtype])):
            out = function(*arguments)
            assert out.dtype == out_dtype
            near(out, expected, max(TOLERANCE[out_dtype], fixed))
        if DEVICE == "cuda":
            assert torch.equal(out, step_triton.norm_linear(*arguments))


@pytest.mark.parametrize("group", (64, 0))
def test_norm_linear_is_the_norm_and_the_product(group: int) -> None:
    layer = draw(40, 320, group, torch.float64, bias=True)
    assert layer.weight.bias is not None
    normed = F.rms_norm(layer.x, (320,), 1 + layer.norm.weight.double(), EPS)
    out = reference.norm_linear(layer.x, layer.norm, layer.weight, torch.float64)
    near(out, normed @ layer.exact.t() + layer.weight.bias, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "bias"),
    [
        (2, 64, 64, False),
        (6, 320, 32, True),
        (8, 1088, 64, False),
        (4, 2048, 128, True),
        (10, 97, 0, False),
        (8, 1088, 0, True),
        *([(7168, 1024, 128, False), (7168, 1024, 0, False), (6002, 2048, 0, True)] if DEVICE == "cuda" else []),
    ],
)
def test_norm_swiglu(n: int, k: int, group: int, bias: bool, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype, bias=bias)
    # Else the products are in the hundreds, and a gate is all or nothing.
    layer = replace(layer, norm=Norm(layer.norm.weight / k - 1, EPS))
    wide = layer.double()
    expected = reference.norm_swiglu(wide.x, wide.norm, wide.weight)
    for function in (reference.norm_swiglu, step_triton.norm_swiglu):
        out = function(layer.x, layer.norm, layer.weight)
        assert out.dtype == dtype
        near(out, expected, TOLERANCE[dtype])
    if DEVICE == "cuda":
        assert torch.equal(out, step_triton.norm_swiglu(layer.x, layer.norm, layer.weight))


@pytest.mark.parametrize("group", (64, 0))
def test_norm_swiglu_is_the_halves_of_the_product(group: int) -> None:
    layer = draw(40, 320, group, torch.float64)
    gate, up = reference.norm_linear(layer.x, layer.norm, layer.weight, torch.float64).chunk(2, dim=1)
    near(reference.norm_swiglu(layer.x, layer.norm, layer.weight), F.silu(gate) * up, 1e-12)


@dataclass(frozen=True)
class Conv:
    """What `norm_linear_conv` takes besides a layer; the convolution's state of SLOT alone, [W - 1, C]."""

    gates: Tensor
    conv: Convolution
    index: RowIndex

    def double(self) -> Conv:
        return Conv(self.gates.double(), Convolution(self.conv.weight.double(), self.conv.state.double()), self.index)


def draw_conv(channels: int, gates: int, k: int, dtype: torch.dtype, taps: int, position: int) -> Conv:
    rows, weight = torch.randn(gates, k).to(dtype), torch.randn(channels, 1, taps).to(dtype)
    state = torch.randn(taps - 1, channels).to(dtype)
    rows, weight, state = (value.to(DEVICE) for value in (rows, weight, state))
    return Conv(rows, Convolution(weight, state), prompt_index(position, 1))


def run_conv(function: Callable[..., Any], layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    """(mixed, gates, the state afterwards)."""
    states = conv.conv.state.new_full((SLOTS, *conv.conv.state.shape), torch.nan)
    states[SLOT] = conv.conv.state
    convolution = replace(conv.conv, state=states)
    mixed, gates = function(layer.x, layer.norm, layer.weight, conv.gates, convolution, conv.index)
    assert all(state.isnan().all() for slot, state in enumerate(states) if slot != SLOT)
    return mixed, gates, states[SLOT]


def exact_conv(layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    return run_conv(reference.norm_linear_conv, layer.double(), conv.double())


@pytest.mark.parametrize("position", [0, 700])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "channels", "gate_count", "taps"),
    [
        (5, 64, 32, 2, 2, 4),
        (8, 320, 64, 6, 5, 4),
        (7, 128, 128, 7, 1, 2),
        (4, 2048, 128, 1, 6, 4),
        (9, 97, 0, 6, 3, 4),
        (6, 1088, 0, 4, 5, 4),
        *([(12288, 2048, 128, 8192, 64, 4), (8192, 1024, 0, 6144, 32, 4)] if DEVICE == "cuda" else []),
    ],
)
def test_norm_linear_conv(
    n: int, k: int, group: int, channels: int, gate_count: int, taps: int, dtype: torch.dtype, position: int
) -> None:
    layer = draw(n, k, group, dtype, bias=n % 2 == 1)
    conv = draw_conv(channels, gate_count, k, dtype, taps, position)
    expected = exact_conv(layer, conv)
    for function in (reference.norm_linear_conv, step_triton.norm_linear_conv):
        mixed, gates, state = run_conv(function, layer, conv)
        assert (mixed.dtype, gates.dtype, state.dtype) == (dtype, F32, dtype)
        near(mixed, expected[0], TWICE[dtype])
        near(gates, expected[1].double(), TOLERANCE[F32])
        near(state, expected[2], TOLERANCE[dtype])
        before = torch.zeros_like(state) if position == 0 else conv.conv.state
        assert torch.equal(state[:-1], before[1:])
    if DEVICE == "cuda":
        again = run_conv(step_triton.norm_linear_conv, layer, conv)
        assert all(map(torch.equal, (mixed, gates, state), again))


@pytest.mark.parametrize(
    "function", [step_triton.norm_linear_conv, reference.norm_linear_conv], ids=["kernel", "plain"]
)
def test_padding_leaves_no_trace(function: Callable[..., Any]) -> None:
    layer, conv = draw(6, 64, 32, F32), draw_conv(4, 2, 64, F32, 4, 5)
    padding = replace(conv, index=conv.index._replace(slots=torch.tensor([-1], device=DEVICE)))
    assert torch.equal(run_conv(function, layer, padding)[2], conv.conv.state)


def test_steps_follow_one_another() -> None:
    """Step after step from position 0, each step leaves the state that the next one needs: as if all came at once."""
    layer, conv = draw(6, 64, 32, F32), draw_conv(4, 2, 64, F32, 4, 0)
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    products = torch.cat([reference.norm_linear(x[None], layer.norm, layer.weight, F32) for x in inputs])
    padded = F.pad(products[:, :4].double().t(), (3, 0))
    expected = F.silu(F.conv1d(padded[None], conv.conv.weight.double(), groups=4)[0]).t()
    convolution = replace(conv.conv, state=torch.full_like(conv.conv.state, torch.nan).repeat(SLOTS, 1, 1))
    for position, x in enumerate(inputs):
        index = prompt_index(position, 1)
        mixed, _ = step_triton.norm_linear_conv(x[None], layer.norm, layer.weight, conv.gates, convolution, index)
        near(mixed[0, :4], expected[position], TOLERANCE[F32])
        near(mixed[0, 4:], products[position, 4:].double(), TOLERANCE[F32])
    near(convolution.state[SLOT], products[-3:, :4].double(), TOLERANCE[F32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "heads", "parts"),
    [
        (1, 64, 64, None, None),
        (5, 320, 32, 5, 1),
        (4, 1088, 64, 17, 3),
        (5, 384, 128, 3, 2),
        (4, 192, 32, 12, 1),
        (4, 192, 64, 64, 2),
        (3, 4096, 128, 32, 4),
        (7, 97, 0, None, None),
        (6, 24, 0, 2, 3),
        (5, 60, 0, 3, 2),
        (3, 4096, 0, 32, 4),
        *([(2048, 4096, 128, 32, 1), (2048, 4096, 128, None, None)] if DEVICE == "cuda" else []),
        *([(1024, 2048, 0, 16, 16), (1024, 3584, 0, None, None)] if DEVICE == "cuda" else []),
    ],
)
def test_linear_add(n: int, k: int, group: int, heads: int | None, parts: int | None, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype, bias=n % 2 == 1)
    residual = torch.randn(1, n).to(DEVICE, dtype)
    sums = None if heads is None or parts is None else (torch.rand(heads, parts) * 100).to(DEVICE)
    squares, wide = (None, None) if sums is None else (HeadSquares(sums, EPS), HeadSquares(sums.double(), EPS))
    expected = reference.linear_add(layer.x.double(), layer.weight, residual.double(), wide)
    for function in (reference.linear_add, step_triton.linear_add):
        out = function(layer.x, layer.weight, residual, squares)
        assert out.dtype == dtype
        near(out, expected, TOLERANCE[dtype])
    if DEVICE == "cuda":
        assert torch.equal(out, step_triton.linear_add(layer.x, layer.weight, residual, squares))


def test_heads_are_normed() -> None:
    """With the sums of each head's own squares, every head of x is divided by its root mean square."""
    layer = draw(8, 192, 64, torch.float64)
    heads = layer.x.view(3, 64)
    normed = F.rms_norm(heads, (64,), eps=EPS).view(1, -1)
    residual = torch.zeros(1, 8, dtype=torch.float64, device=DEVICE)
    squares = HeadSquares(heads.square().view(3, 4, 16).sum(2), EPS)
    out = reference.linear_add(layer.x, layer.weight, residual, squares)
    near(out, normed @ layer.exact.t(), 1e-12)


@pytest.mark.parametrize(("rows", "warps", "runs"), [(1, 1, 1), (2, 8, 1), (8, 4, 2), (16, 2, 4), (32, 1, 2)])
@pytest.mark.parametrize(
    ("group", "dtype", "integer"),
    [(32, F32, False), (64, BF16, False), (64, BF16, True), (0, BF16, False), (0, F32, False)],
    ids=str,
)
def test_configurations(
    rows: int, warps: int, runs: int, group: int, dtype: torch.dtype, integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `config_for` chooses for large weights, on small ones: several tiles per row, rows past the end."""
    n, k = rows + 3, 1088
    layer, conv = draw(n, k, group, dtype), draw_conv(n // 2, 3, k, dtype, 4, 9)
    residual = torch.randn(1, n).to(DEVICE, dtype)
    config = StepConfig(rows, warps, 1 if group else runs, integer, gate_rows=min(rows, 8))
    monkeypatch.setattr(step_triton, "config_for", lambda *_: config)
    for out, expected in zip(run_conv(step_triton.norm_linear_conv, layer, conv), exact_conv(layer, conv), strict=True):
        near(out, expected.double(), TWICE[dtype])
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    near(out, residual.double() + layer.x.double() @ layer.exact.t(), TOLERANCE[dtype])


@pytest.mark.parametrize(("n", "k"), [(1, 64), (100, 192), (2048, 4096), (12288, 2048), (248320, 2048), (5120, 17408)])
@pytest.mark.parametrize(("group", "dtype"), [(128, BF16), (32, BF16), (128, F32), (0, BF16), (0, F32)], ids=str)
def test_chosen_configuration(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    config = config_for(n, k, group, dtype)
    units = 32 * config.warps * config.runs * units_per_lane(torch.uint8 if group else dtype)
    if group and n <= 4096:
        assert (config.rows, config.warps, config.runs) == (8, 8, 1)
        return
    assert config.rows == 1 or (n // config.rows * config.warps >= 768 if group else n // config.rows >= 320)
    assert config.rows * config.runs <= (32 if (group, dtype) == (128, BF16) else 16)
    assert config.warps == config.runs == 1 or units < 2 * (k // 8 if group else k), "warps that have nothing"


@pytest.mark.parametrize(("dtype", "group"), [(F32, 32), (BF16, 128), (F32, 0), (BF16, 0)], ids=str)
def test_one_product_at_a_time(dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element of the input is multiplied by its own weights, and by no others."""
    monkeypatch.setattr(step_triton, "config_for", lambda *_: StepConfig(rows=1, warps=1))
    layer = draw(1, 128, group, dtype)
    residual = torch.zeros(1, 1, dtype=dtype, device=DEVICE)
    for element in range(0, 128, 1 if DEVICE == "cuda" else 5):
        x = torch.zeros(1, 128, dtype=dtype, device=DEVICE)
        x[0, element] = 1
        out = step_triton.linear_add(x, layer.weight, residual)
        assert torch.equal(out, layer.exact[None, :, element].to(dtype)), f"element {element}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6])
@pytest.mark.parametrize("group", (128, 0))
def test_small_and_large_inputs(group: int, size: float, dtype: torch.dtype) -> None:
    layer = draw(5, 1024, group, dtype)
    x = (layer.x * size).to(dtype)
    residual = torch.zeros(1, 5, dtype=dtype, device=DEVICE)
    out = step_triton.linear_add(x, layer.weight, residual)
    near(out, x.double() @ layer.exact.t(), TOLERANCE[dtype])
    out = step_triton.norm_linear(x, layer.norm, layer.weight, dtype)
    expected = reference.norm_linear(x.double(), layer.double().norm, layer.weight, torch.float64)
    near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("group", (64, 0))
def test_infinity_and_nan_show(group: int, value: float, dtype: torch.dtype) -> None:
    layer, conv = draw(4, 128, group, dtype), draw_conv(3, 2, 128, dtype, 4, 1)
    layer.x[0, 77] = value
    mixed, gates, state = run_conv(step_triton.norm_linear_conv, layer, conv)
    assert not (mixed.isfinite().any() or gates.isfinite().any() or state[-1].isfinite().any())
    residual = torch.zeros(1, 4, dtype=dtype, device=DEVICE)
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    # Infinity times a weight of zero is NaN.
    assert not out.isfinite().any()


def test_inputs_of_very_different_sizes() -> None:
    """One large input among small ones: what fixed point loses of the small ones is little compared with the result."""
    layer = draw(5, 1024, 128, BF16)
    layer.x[0, ::33] *= 1e4
    residual = torch.zeros(1, 5, dtype=BF16, device=DEVICE)
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    near(out, layer.x.double() @ layer.exact.t(), TOLERANCE[BF16])


def test_refusals() -> None:
    layer = draw(3, 128, 64, BF16)
    residual = torch.zeros(1, 3, dtype=BF16, device=DEVICE)
    with pytest.raises(ExportError, match="3 heads"):
        squares = HeadSquares(torch.ones(3, 1, device=DEVICE), EPS)
        step_triton.linear_add(layer.x, layer.weight, residual, squares)
    conv, half = draw_conv(2, 2, 128, BF16, 4, 1), Weight(layer.exact.half())
    for bad in (replace(layer, x=layer.x.half()), replace(layer, weight=half)):
        with pytest.raises(ExportError, match=r"float32.*got torch\.float16"):
            step_triton.norm_linear(bad.x, bad.norm, bad.weight, BF16)
        with pytest.raises(ExportError, match=r"float32.*got torch\.float16"):
            step_triton.norm_swiglu(bad.x, bad.norm, bad.weight)
        with pytest.raises(ExportError, match=r"float32.*got torch\.float16"):
            run_conv(step_triton.norm_linear_conv, bad, conv)
        with pytest.raises(ExportError, match=r"float32.*got torch\.float16"):
            step_triton.linear_add(bad.x, bad.weight, residual)
