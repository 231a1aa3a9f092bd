"""The linear layers of a decode step: the plain functions against the modules they stand for, the kernels against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import int4, step_linear, step_linear_triton
from ostinato.export.kernels.step_linear_triton import StepConfig, config_for
from ostinato.export.models.delta_net import CausalConv
from ostinato.export.models.norms import RMSNorm

from ...conftest import ROOT
from ..references import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
# Relative errors: of what is rounded to the dtype once; what follows the convolution is rounded twice.
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
    """A random weight [n, k], its float64 values, and what goes in; norm weights and inputs of both signs."""

    weight: Tensor
    scale: Tensor
    exact: Tensor
    x: Tensor
    norm: Tensor


def draw(n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    q = torch.randint(-8, 8, (n, k))
    scale = (torch.randn(n, k // group) * 0.1).bfloat16()
    exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
    x, norm = torch.randn(1, k).to(dtype), torch.randn(k)
    return Layer(*(value.to(DEVICE) for value in (int4.pack_int4(q), scale, exact, x, norm)))


def near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.dtype == torch.float64 and out.shape == expected.shape
    assert relative_error(out, expected) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_norm_linear(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    layer = draw(n, k, group, dtype)
    expected = step_linear.norm_linear(
        layer.x.double(), layer.norm.double(), EPS, layer.weight, layer.scale, torch.float64
    )
    for out_dtype in {dtype, F32}:
        arguments = (layer.x, layer.norm, EPS, layer.weight, layer.scale, out_dtype)
        for module in (step_linear, step_linear_triton):
            out = module.norm_linear(*arguments)
            assert out.dtype == out_dtype
            near(
                out,
                expected,
                TOLERANCE[out_dtype] if module is step_linear else max(TOLERANCE[out_dtype], FIXED[dtype]),
            )
        assert torch.equal(out, step_linear_triton.norm_linear(*arguments))


def test_norm_linear_is_the_norm_and_the_product() -> None:
    layer = draw(40, 320, 64, torch.float64)
    norm = RMSNorm(320, EPS)
    norm.weight.data = layer.norm.cpu()
    normed = norm(layer.x.float().cpu()).double()
    expected = normed @ layer.exact.cpu().t()
    out = step_linear.norm_linear(layer.x, layer.norm, EPS, layer.weight, layer.scale, torch.float64)
    near(out.cpu(), expected, 1e-6)


@dataclass(frozen=True)
class Conv:
    """What `norm_linear_conv` takes besides a layer."""

    extra: Tensor
    weight: Tensor
    state: Tensor
    positions: Tensor


def draw_conv(
    channels: int, extras: int, k: int, dtype: torch.dtype, taps: int, position: int, device: str = DEVICE
) -> Conv:
    extra, weight = torch.randn(extras, k).to(dtype), torch.randn(channels, 1, taps).to(dtype)
    state = torch.randn(taps - 1, channels).to(dtype)
    return Conv(*(value.to(device) for value in (extra, weight, state, torch.tensor([position]))))


def run_conv(module: Any, layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    """(mixed, gates, the state afterwards)."""
    state = conv.state.clone()
    mixed, gates = module.norm_linear_conv(
        layer.x, layer.norm, EPS, layer.weight, layer.scale, conv.extra, conv.weight, state, conv.positions
    )
    return mixed, gates, state


def exact_conv(layer: Layer, conv: Conv) -> tuple[Tensor, Tensor, Tensor]:
    wide = replace(layer, x=layer.x.double(), norm=layer.norm.double())
    return run_conv(
        step_linear, wide, Conv(conv.extra.double(), conv.weight.double(), conv.state.double(), conv.positions)
    )


@pytest.mark.parametrize("position", [0, 700])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group", "channels", "extras", "taps"),
    [
        (24, 64, 32, 8, 2, 4),
        (40, 320, 64, 27, 5, 4),
        (67, 128, 128, 67, 1, 2),
        (19, 2048, 128, 1, 6, 4),
        *([(12288, 2048, 128, 8192, 64, 4)] if DEVICE == "cuda" else []),
    ],
)
def test_norm_linear_conv(
    n: int, k: int, group: int, channels: int, extras: int, taps: int, dtype: torch.dtype, position: int
) -> None:
    layer, conv = draw(n, k, group, dtype), draw_conv(channels, extras, k, dtype, taps, position)
    expected = exact_conv(layer, conv)
    for module in (step_linear, step_linear_triton):
        mixed, gates, state = run_conv(module, layer, conv)
        assert (mixed.dtype, gates.dtype, state.dtype) == (dtype, F32, dtype)
        near(mixed, expected[0], TWICE[dtype])
        near(gates, expected[1].double(), TOLERANCE[F32])
        near(state, expected[2], TOLERANCE[dtype])
        before = torch.zeros_like(conv.state) if position == 0 else conv.state
        assert torch.equal(state[:-1], before[1:])
    for first, again in zip((mixed, gates, state), run_conv(step_linear_triton, layer, conv), strict=True):
        assert torch.equal(first, again)


def test_steps_follow_one_another() -> None:
    """Step after step from position 0, the state that a kernel leaves is what the next one needs: as if all came at once."""
    layer, conv = draw(24, 64, 32, F32), draw_conv(16, 2, 64, F32, 4, 0)
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    products = torch.cat(
        [step_linear.norm_linear(x[None], layer.norm, EPS, layer.weight, layer.scale, F32) for x in inputs]
    )
    whole = CausalConv(16, 4, F32).to(DEVICE)
    whole.weight.data = conv.weight
    expected, last = whole(products[:, :16], torch.zeros(3, 16, device=DEVICE))
    state = torch.full_like(conv.state, torch.nan)
    for position, x in enumerate(inputs):
        mixed, _ = step_linear_triton.norm_linear_conv(
            x[None],
            layer.norm,
            EPS,
            layer.weight,
            layer.scale,
            conv.extra,
            conv.weight,
            state,
            torch.tensor([position], device=DEVICE),
        )
        near(mixed[0, :16], expected[position].double(), TOLERANCE[F32])
        near(mixed[0, 16:], products[position, 16:].double(), TOLERANCE[F32])
    near(state, last.double(), TOLERANCE[F32])


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
    squares = None if heads is None or parts is None else (torch.rand(heads, parts) * 100).to(DEVICE)
    wide = None if squares is None else squares.double()
    arguments = (layer.weight, layer.scale)
    expected = step_linear.linear_add(layer.x.double(), *arguments, residual.double(), wide, EPS)
    for module in (step_linear, step_linear_triton):
        out = module.linear_add(layer.x, *arguments, residual, squares, EPS)
        assert out.dtype == dtype
        near(out, expected, TOLERANCE[dtype])
    assert torch.equal(out, step_linear_triton.linear_add(layer.x, *arguments, residual, squares, EPS))


def test_heads_are_normed() -> None:
    """With the sums of each head's own squares, x goes in with every head's root mean square one."""
    layer = draw(8, 192, 64, torch.float64)
    heads = layer.x.view(3, 64)
    normed = F.rms_norm(heads, (64,), eps=EPS).view(1, -1)
    residual = torch.zeros(1, 8, dtype=torch.float64, device=DEVICE)
    squares = heads.square().view(3, 4, 16).sum(2)
    out = step_linear.linear_add(layer.x, layer.weight, layer.scale, residual, squares, EPS)
    near(out, normed @ layer.exact.t(), 1e-12)


@pytest.mark.parametrize(("rows", "warps"), [(1, 1), (2, 8), (8, 4), (16, 2), (32, 1)])
@pytest.mark.parametrize(
    ("group", "dtype", "integer"), [(32, F32, False), (64, BF16, False), (64, BF16, True)], ids=str
)
def test_configurations(
    rows: int, warps: int, group: int, dtype: torch.dtype, integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `config_for` chooses for large weights, on small ones: several tiles of a row, rows that are not there."""
    k = 1088
    layer, conv = draw(35, k, group, dtype), draw_conv(20, 3, k, dtype, 4, 9)
    residual = torch.randn(1, 35).to(DEVICE, dtype)
    config = StepConfig(rows, warps, integer, extra_rows=min(rows, 8))
    monkeypatch.setattr(step_linear_triton, "config_for", lambda *_: config)
    for out, expected in zip(run_conv(step_linear_triton, layer, conv), exact_conv(layer, conv), strict=True):
        near(out, expected.double(), TWICE[dtype])
    out = step_linear_triton.linear_add(layer.x, layer.weight, layer.scale, residual, None, EPS)
    near(out, residual.double() + layer.x.double() @ layer.exact.t(), TOLERANCE[dtype])


@pytest.mark.parametrize(("n", "k"), [(1, 64), (100, 192), (2048, 4096), (12288, 2048), (248320, 2048), (5120, 17408)])
@pytest.mark.parametrize(("group", "dtype"), [(128, BF16), (32, BF16), (128, F32)], ids=str)
def test_chosen_configuration(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    config = config_for(n, k, group, dtype)
    assert config.rows == 1 or n // config.rows * config.warps >= 768
    assert config.rows <= (32 if (group, dtype) == (128, BF16) else 16)
    assert config.warps == 1 or config.words < 2 * (k // 8), "warps that have nothing"


@pytest.mark.parametrize(("dtype", "group"), [(F32, 32), (BF16, 128)], ids=str)
def test_one_product_at_a_time(dtype: torch.dtype, group: int) -> None:
    """Each element of the input meets its own weights, and its own only."""
    layer = draw(3, 128, group, dtype)
    residual = torch.zeros(1, 3, dtype=dtype, device=DEVICE)
    for element in range(0, 128, 1 if DEVICE == "cuda" else 3):
        x = torch.zeros(1, 128, dtype=dtype, device=DEVICE)
        x[0, element] = 1
        out = step_linear_triton.linear_add(x, layer.weight, layer.scale, residual, None, EPS)
        assert torch.equal(out, layer.exact[None, :, element].to(dtype)), f"element {element}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_small_and_large_inputs(size: float, dtype: torch.dtype) -> None:
    layer = draw(20, 1024, 128, dtype)
    x = (layer.x * size).to(dtype)
    residual = torch.zeros(1, 20, dtype=dtype, device=DEVICE)
    out = step_linear_triton.linear_add(x, layer.weight, layer.scale, residual, None, EPS)
    near(out, x.double() @ layer.exact.t(), TOLERANCE[dtype])
    out = step_linear_triton.norm_linear(x, layer.norm, EPS, layer.weight, layer.scale, dtype)
    expected = step_linear.norm_linear(x.double(), layer.norm.double(), EPS, layer.weight, layer.scale, torch.float64)
    near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(value: float, dtype: torch.dtype) -> None:
    layer, conv = draw(24, 128, 64, dtype), draw_conv(8, 2, 128, dtype, 4, 1)
    layer.x[0, 77] = value
    mixed, gates, state = run_conv(step_linear_triton, layer, conv)
    assert not (mixed.isfinite().any() or gates.isfinite().any() or state[-1].isfinite().any())
    residual = torch.zeros(1, 24, dtype=dtype, device=DEVICE)
    out = step_linear_triton.linear_add(layer.x, layer.weight, layer.scale, residual, None, EPS)
    # Infinity times a weight that is zero is not a number.
    assert not out.isfinite().any()


def test_inputs_of_very_different_sizes() -> None:
    """One large input among small ones: what fixed point loses of these is small against the result."""
    layer = draw(20, 1024, 128, BF16)
    layer.x[0, ::33] *= 1e4
    residual = torch.zeros(1, 20, dtype=BF16, device=DEVICE)
    out = step_linear_triton.linear_add(layer.x, layer.weight, layer.scale, residual, None, EPS)
    near(out, layer.x.double() @ layer.exact.t(), TOLERANCE[BF16])


def test_refusals() -> None:
    layer = draw(3, 128, 64, BF16)
    residual = torch.zeros(1, 3, dtype=BF16, device=DEVICE)
    with pytest.raises(ExportError, match="3 heads"):
        squares = torch.ones(3, 1, device=DEVICE)
        step_linear_triton.linear_add(layer.x, layer.weight, layer.scale, residual, squares, EPS)
    with pytest.raises(ExportError, match="int4 kernels take"):
        step_linear_triton.norm_linear(layer.x.half(), layer.norm, EPS, layer.weight, layer.scale, BF16)


def test_nothing_spills() -> None:
    """Compiled for compute capability 9.0 with kernels starting early, at the flagship's shapes and at small ones."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.compiling_step_linear"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    assert {entry["kernel"] for entry in compiled} == {
        "norm_linear_early",
        "norm_linear_conv_early",
        "linear_add_early",
    }
    assert all(entry["constants"]["EARLY"] for entry in compiled)
    assert [entry for entry in compiled if entry["spilled"]] == []
