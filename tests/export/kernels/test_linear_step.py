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
from ostinato.export.formats import pack_int4
from ostinato.export.kernels.linear import reference, step_triton
from ostinato.export.kernels.linear.step_triton import StepConfig, config_for
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, Weight

from ...comparison import relative_error
from .conftest import report_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
# Relative errors: of what is rounded to the dtype once; the convolution's outputs are rounded twice.
TOLERANCE = {F32: 5e-6, BF16: 4e-3}
# Of a product with bfloat16 inputs in fixed point, before it is rounded.
FIXED = {F32: 0.0, BF16: 1e-4}
TWICE = {F32: 5e-6, BF16: 8e-3}
EPS = 1e-6
# (N, K, group size)
SHAPES = [(1, 64, 32), (3, 64, 64), (19, 320, 32), (40, 1088, 64), (33, 128, 128), (16, 2048, 128)]
if DEVICE == "cuda":
    SHAPES += [(9216, 2048, 128), (12288, 2048, 128), (2048, 4096, 128), (24831, 2048, 32), (5120, 17408, 64)]


@dataclass(frozen=True)
class Layer:
    """A random weight [n, k], its float64 numbers, an input and its norm; norm weights and inputs of both signs."""

    weight: Weight
    exact: Tensor
    x: Tensor
    norm: Norm

    def double(self) -> Layer:
        return replace(self, x=self.x.double(), norm=Norm(self.norm.weight.double(), EPS))


def draw(n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    q = torch.randint(-8, 8, (n, k))
    scale = (torch.randn(n, k // group) * 0.1).bfloat16()
    exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
    x, norm = torch.randn(1, k).to(dtype), torch.randn(k)
    values, scale, exact, x, norm = (value.to(DEVICE) for value in (pack_int4(q), scale, exact, x, norm))
    return Layer(Weight(values, scale), exact, x, Norm(norm, EPS))


def near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.dtype == torch.float64 and out.shape == expected.shape
    assert relative_error(out, expected) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_norm_linear(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype)
    wide = layer.double()
    expected = reference.norm_linear(wide.x, wide.norm, wide.weight, torch.float64)
    for out_dtype in {dtype, F32}:
        arguments = (layer.x, layer.norm, layer.weight, out_dtype)
        for function, fixed in ((reference.norm_linear, 0.0), (step_triton.norm_linear, FIXED[dtype])):
            out = function(*arguments)
            assert out.dtype == out_dtype
            near(out, expected, max(TOLERANCE[out_dtype], fixed))
        assert torch.equal(out, step_triton.norm_linear(*arguments))


def test_norm_linear_is_the_norm_and_the_product() -> None:
    layer = draw(40, 320, 64, torch.float64)
    normed = F.rms_norm(layer.x, (320,), 1 + layer.norm.weight.double(), EPS)
    out = reference.norm_linear(layer.x, layer.norm, layer.weight, torch.float64)
    near(out, normed @ layer.exact.t(), 1e-6)


@dataclass(frozen=True)
class Conv:
    """What `norm_linear_conv` takes besides a layer."""

    gates: Tensor
    conv: Convolution
    positions: Tensor

    def double(self) -> Conv:
        return Conv(
            self.gates.double(), Convolution(self.conv.weight.double(), self.conv.state.double()), self.positions
        )


def draw_conv(channels: int, gates: int, k: int, dtype: torch.dtype, taps: int, position: int) -> Conv:
    rows, weight = torch.randn(gates, k).to(dtype), torch.randn(channels, 1, taps).to(dtype)
    state = torch.randn(taps - 1, channels).to(dtype)
    rows, weight, state, positions = (value.to(DEVICE) for value in (rows, weight, state, torch.tensor([position])))
    return Conv(rows, Convolution(weight, state), positions)


def run_conv(function: Callable[..., Any], layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    """(mixed, gates, the state afterwards)."""
    convolution = replace(conv.conv, state=conv.conv.state.clone())
    mixed, gates = function(layer.x, layer.norm, layer.weight, conv.gates, convolution, conv.positions)
    return mixed, gates, convolution.state


def exact_conv(layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    return run_conv(reference.norm_linear_conv, layer.double(), conv.double())


@pytest.mark.parametrize("position", [0, 700])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "channels", "gate_count", "taps"),
    [
        (24, 64, 32, 8, 2, 4),
        (40, 320, 64, 27, 5, 4),
        (67, 128, 128, 67, 1, 2),
        (19, 2048, 128, 1, 6, 4),
        *([(12288, 2048, 128, 8192, 64, 4)] if DEVICE == "cuda" else []),
    ],
)
def test_norm_linear_conv(
    n: int, k: int, group: int, channels: int, gate_count: int, taps: int, dtype: torch.dtype, position: int
) -> None:
    layer, conv = draw(n, k, group, dtype), draw_conv(channels, gate_count, k, dtype, taps, position)
    expected = exact_conv(layer, conv)
    for function in (reference.norm_linear_conv, step_triton.norm_linear_conv):
        mixed, gates, state = run_conv(function, layer, conv)
        assert (mixed.dtype, gates.dtype, state.dtype) == (dtype, F32, dtype)
        near(mixed, expected[0], TWICE[dtype])
        near(gates, expected[1].double(), TOLERANCE[F32])
        near(state, expected[2], TOLERANCE[dtype])
        before = torch.zeros_like(state) if position == 0 else conv.conv.state
        assert torch.equal(state[:-1], before[1:])
    for first, again in zip((mixed, gates, state), run_conv(step_triton.norm_linear_conv, layer, conv), strict=True):
        assert torch.equal(first, again)


def test_steps_follow_one_another() -> None:
    """Step after step from position 0, each step leaves the state that the next one needs: as if all came at once."""
    layer, conv = draw(24, 64, 32, F32), draw_conv(16, 2, 64, F32, 4, 0)
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    products = torch.cat([reference.norm_linear(x[None], layer.norm, layer.weight, F32) for x in inputs])
    padded = F.pad(products[:, :16].double().t(), (3, 0))
    expected = F.silu(F.conv1d(padded[None], conv.conv.weight.double(), groups=16)[0]).t()
    convolution = replace(conv.conv, state=torch.full_like(conv.conv.state, torch.nan))
    for position, x in enumerate(inputs):
        place = torch.tensor([position], device=DEVICE)
        mixed, _ = step_triton.norm_linear_conv(x[None], layer.norm, layer.weight, conv.gates, convolution, place)
        near(mixed[0, :16], expected[position], TOLERANCE[F32])
        near(mixed[0, 16:], products[position, 16:].double(), TOLERANCE[F32])
    near(convolution.state, products[-3:, :16].double(), TOLERANCE[F32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "heads", "parts"),
    [
        (1, 64, 64, None, None),
        (19, 320, 32, 5, 1),
        (40, 1088, 64, 17, 3),
        (33, 384, 128, 3, 2),
        (16, 192, 32, 12, 1),
        (16, 192, 64, 64, 2),
        (9, 4096, 128, 32, 4),
        *([(2048, 4096, 128, 32, 1), (2048, 4096, 128, None, None)] if DEVICE == "cuda" else []),
    ],
)
def test_linear_add(n: int, k: int, group: int, heads: int | None, parts: int | None, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype)
    residual = torch.randn(1, n).to(DEVICE, dtype)
    sums = None if heads is None or parts is None else (torch.rand(heads, parts) * 100).to(DEVICE)
    squares, wide = (None, None) if sums is None else (HeadSquares(sums, EPS), HeadSquares(sums.double(), EPS))
    expected = reference.linear_add(layer.x.double(), layer.weight, residual.double(), wide)
    for function in (reference.linear_add, step_triton.linear_add):
        out = function(layer.x, layer.weight, residual, squares)
        assert out.dtype == dtype
        near(out, expected, TOLERANCE[dtype])
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


@pytest.mark.parametrize(("rows", "warps"), [(1, 1), (2, 8), (8, 4), (16, 2), (32, 1)])
@pytest.mark.parametrize(
    ("group", "dtype", "integer"), [(32, F32, False), (64, BF16, False), (64, BF16, True)], ids=str
)
def test_configurations(
    rows: int, warps: int, group: int, dtype: torch.dtype, integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `config_for` chooses for large weights, on small ones: several tiles per row, rows past the end."""
    k = 1088
    layer, conv = draw(35, k, group, dtype), draw_conv(20, 3, k, dtype, 4, 9)
    residual = torch.randn(1, 35).to(DEVICE, dtype)
    config = StepConfig(rows, warps, integer, gate_rows=min(rows, 8))
    monkeypatch.setattr(step_triton, "config_for", lambda *_: config)
    for out, expected in zip(run_conv(step_triton.norm_linear_conv, layer, conv), exact_conv(layer, conv), strict=True):
        near(out, expected.double(), TWICE[dtype])
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    near(out, residual.double() + layer.x.double() @ layer.exact.t(), TOLERANCE[dtype])


@pytest.mark.parametrize(("n", "k"), [(1, 64), (100, 192), (2048, 4096), (12288, 2048), (248320, 2048), (5120, 17408)])
@pytest.mark.parametrize(("group", "dtype"), [(128, BF16), (32, BF16), (128, F32)], ids=str)
def test_chosen_configuration(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    config = config_for(n, k, group, dtype)
    assert config.rows == 1 or n // config.rows * config.warps >= 768
    assert config.rows <= (32 if (group, dtype) == (128, BF16) else 16)
    assert config.warps == 1 or config.words < 2 * (k // 8), "warps that have no words"


@pytest.mark.parametrize(("dtype", "group"), [(F32, 32), (BF16, 128)], ids=str)
def test_one_product_at_a_time(dtype: torch.dtype, group: int) -> None:
    """Each element of the input is multiplied by its own weights, and by no others."""
    layer = draw(3, 128, group, dtype)
    residual = torch.zeros(1, 3, dtype=dtype, device=DEVICE)
    for element in range(0, 128, 1 if DEVICE == "cuda" else 3):
        x = torch.zeros(1, 128, dtype=dtype, device=DEVICE)
        x[0, element] = 1
        out = step_triton.linear_add(x, layer.weight, residual)
        assert torch.equal(out, layer.exact[None, :, element].to(dtype)), f"element {element}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_small_and_large_inputs(size: float, dtype: torch.dtype) -> None:
    layer = draw(20, 1024, 128, dtype)
    x = (layer.x * size).to(dtype)
    residual = torch.zeros(1, 20, dtype=dtype, device=DEVICE)
    out = step_triton.linear_add(x, layer.weight, residual)
    near(out, x.double() @ layer.exact.t(), TOLERANCE[dtype])
    out = step_triton.norm_linear(x, layer.norm, layer.weight, dtype)
    expected = reference.norm_linear(x.double(), layer.double().norm, layer.weight, torch.float64)
    near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinity_and_nan_show(value: float, dtype: torch.dtype) -> None:
    layer, conv = draw(24, 128, 64, dtype), draw_conv(8, 2, 128, dtype, 4, 1)
    layer.x[0, 77] = value
    mixed, gates, state = run_conv(step_triton.norm_linear_conv, layer, conv)
    assert not (mixed.isfinite().any() or gates.isfinite().any() or state[-1].isfinite().any())
    residual = torch.zeros(1, 24, dtype=dtype, device=DEVICE)
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    # Infinity times a weight of zero is NaN.
    assert not out.isfinite().any()


def test_inputs_of_very_different_sizes() -> None:
    """One large input among small ones: what fixed point loses of the small ones is little compared with the result."""
    layer = draw(20, 1024, 128, BF16)
    layer.x[0, ::33] *= 1e4
    residual = torch.zeros(1, 20, dtype=BF16, device=DEVICE)
    out = step_triton.linear_add(layer.x, layer.weight, residual)
    near(out, layer.x.double() @ layer.exact.t(), TOLERANCE[BF16])


def test_refusals() -> None:
    layer = draw(3, 128, 64, BF16)
    residual = torch.zeros(1, 3, dtype=BF16, device=DEVICE)
    with pytest.raises(ExportError, match="3 heads"):
        squares = HeadSquares(torch.ones(3, 1, device=DEVICE), EPS)
        step_triton.linear_add(layer.x, layer.weight, residual, squares)
    with pytest.raises(ExportError, match="int4 kernels take"):
        step_triton.norm_linear(layer.x.half(), layer.norm, layer.weight, BF16)


def test_a_weight_in_a_floating_dtype_is_refused() -> None:
    layer, conv = draw(24, 64, 32, BF16), draw_conv(8, 2, 64, BF16, 4, 1)
    weight, residual = Weight(layer.exact.bfloat16()), torch.zeros(1, 24, dtype=BF16, device=DEVICE)
    with pytest.raises(ExportError, match=r"take int4 weights, got one in torch\.bfloat16"):
        step_triton.norm_linear(layer.x, layer.norm, weight, BF16)
    with pytest.raises(ExportError, match="take int4 weights"):
        run_conv(step_triton.norm_linear_conv, replace(layer, weight=weight), conv)
    with pytest.raises(ExportError, match="take int4 weights"):
        step_triton.linear_add(layer.x, weight, residual)


def test_nothing_spills() -> None:
    """Compiled for compute capability 9.0 with kernels starting early, at the flagship's shapes and at small ones."""
    compiled = report_of("linear_step")
    assert {entry["kernel"] for entry in compiled} == {
        "norm_linear_early",
        "norm_linear_conv_early",
        "linear_add_early",
    }
    assert all(entry["constants"]["EARLY"] for entry in compiled)
    assert [entry for entry in compiled if entry["spilled"]] == []
