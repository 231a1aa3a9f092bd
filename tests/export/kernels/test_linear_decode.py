"""The matrix-vector kernel of a linear layer with one token, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.kernels.linear import decode_triton
from ostinato.export.kernels.linear.prefill_triton import linear

from ...comparison import relative_error
from .linear_cases import DEVICE, TOLERANCE, draw, inputs


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_small_and_large_inputs(size: float, dtype: torch.dtype) -> None:
    """The matrix-vector kernel's scaling by powers of two neither overflows nor loses digits."""
    weight, exact = draw(64, 1024, 128)
    x = inputs(1, 1024, torch.float32).mul(size).to(dtype)
    assert relative_error(linear(x, weight), x.double() @ exact.t()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_product_at_a_time(dtype: torch.dtype) -> None:
    """Each element of the input is multiplied by its own weights, and by no others."""
    weight, exact = draw(1, 128, 32)
    for element in range(128):
        x = torch.zeros(1, 128, dtype=dtype, device=DEVICE)
        x[0, element] = 1
        out = linear(x, weight)
        assert torch.equal(out, exact[:, element : element + 1].to(dtype)), f"element {element}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("n", [1, 33])
def test_rows_of_a_program(n: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config_for` chooses for large weights, on small ones; the last program has rows past the end."""
    weight, exact = draw(n, 320, 64)
    x = inputs(1, 320, dtype)
    expected = x.double() @ exact.t()
    for per_lane in (1, 2, 4):
        config = decode_triton.MatvecConfig(rows, per_lane, unroll=2)
        monkeypatch.setattr(decode_triton, "config_for", lambda n, k, config=config: config)
        assert relative_error(linear(x, weight), expected) < TOLERANCE[dtype], config


@pytest.mark.parametrize(("n", "k"), [(1, 64), (1024, 2048), (2048, 512), (12288, 2048), (248320, 2048), (5120, 17408)])
def test_configurations(n: int, k: int) -> None:
    config = decode_triton.config_for(n, k)
    assert config.rows == 1 or n // config.rows >= 1024
    assert config.unroll * config.words < 2 * max(64, k // 8), "tiles that hold nothing"


def test_nan_shows() -> None:
    weight, _ = draw(3, 128, 32)
    x = inputs(1, 128, torch.bfloat16)
    x[0, 77] = torch.nan
    assert linear(x, weight).isnan().all()
