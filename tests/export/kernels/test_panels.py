"""Weights in panels: the same numbers in another order, and where each of them is."""

from __future__ import annotations

import pytest
import torch

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels.linear.panels import LANES, pack_panels, rows_of_panels, rows_of_scale, unpack_panels
from ostinato.export.kernels.operands import Weight

FLOATING = (torch.float32, torch.bfloat16)
INTEGERS = (*map(Int4, Int4.group_sizes), Int4Min(32, torch.float16), Int8(32, torch.float16), Int8(64))


@pytest.mark.parametrize("experts", ((), (3,)))
@pytest.mark.parametrize("n", (1, 16, 37, 64))
@pytest.mark.parametrize("k", (1, 24, 64, 97))
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_floating_weights_come_back(n: int, k: int, dtype: torch.dtype, experts: tuple[int, ...]) -> None:
    weight = torch.randn(*experts, n, k).to(dtype)
    packed, scale, _ = pack_panels(None, weight, None)
    assert scale is None and packed.shape == weight.shape and packed.dtype == dtype and packed.is_contiguous()
    assert torch.equal(unpack_panels(None, packed, None)[0], weight)
    assert torch.equal(Weight(packed, in_panels=True).dequantized(dtype), weight)


@pytest.mark.parametrize("form", INTEGERS, ids=str)
@pytest.mark.parametrize("n", (1, 16, 37))
def test_integers_come_back(n: int, form: Format) -> None:
    q, groups = torch.randint(form.lowest, form.highest + 1, (2, n, 384)), (2, n, 384 // form.group_size)
    minimum = torch.randn(groups).to(form.scale_dtype) if form.has_minimum else None
    stored = form.pack(q), torch.randn(groups).to(form.scale_dtype), minimum
    packed = pack_panels(form, *stored)
    for one, in_rows, back in zip(packed, stored, unpack_panels(form, *packed), strict=True):
        if in_rows is None:
            assert one is back is None
        else:
            assert one is not None and back is not None and one.shape == in_rows.shape and torch.equal(back, in_rows)
    weight = Weight(*packed, format=form, in_panels=True)
    assert torch.equal(weight.dequantized(torch.float32), form.dequantize(*stored, torch.float32))
    chosen = torch.tensor([1, 0])
    assert torch.equal(weight.of_experts(chosen).dequantized(torch.float32)[0], weight.dequantized(torch.float32)[1])


def test_where_elements_are() -> None:
    row, column, k = 21, 11, 64
    panel, lane = row // LANES * LANES * k, row % LANES
    weight = torch.arange(32 * k).view(32, k)
    for dtype, together in ((torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 4)):
        packed = pack_panels(None, torch.where(weight == row * k + column, 1.0, 0.0).to(dtype), None)[0]
        place = panel + (column // together * LANES + lane) * together + column % together
        assert packed.flatten().nonzero().tolist() == [[place]]
    q = torch.zeros(32, k, dtype=torch.int8)
    q[row, column] = 5
    packed, scale, _ = pack_panels(Int4(32), Int4.pack(q), torch.arange(64).view(32, 2).bfloat16())
    # Zero is stored as 8.
    (place,) = (packed.flatten() != 0x88).nonzero().flatten().tolist()
    assert place == panel // 2 + column // 8 * 64 + lane * 4 + column % 4 and packed.flatten()[place] == 0x8D
    assert scale is not None and scale.flatten()[32 + LANES + lane] == row * 2 + 1


@pytest.mark.parametrize("n", (5, 16, 50))
@pytest.mark.parametrize("k", (24, 97))
@pytest.mark.parametrize("dtype", (*FLOATING, torch.int8), ids=str)
def test_rows(n: int, k: int, dtype: torch.dtype) -> None:
    weight, rows = (50 * torch.randn(n, k)).to(dtype), torch.randint(n, (40,))
    assert torch.equal(rows_of_panels(pack_panels(None, weight, None)[0], rows), weight[rows])


@pytest.mark.parametrize("n", (5, 16, 50))
def test_rows_of_scales(n: int) -> None:
    scale, rows = torch.randn(n, 3).bfloat16(), torch.randint(n, (40,))
    packed = pack_panels(Int8(32), torch.zeros(n, 96, dtype=torch.int8), scale)[1]
    assert packed is not None and torch.equal(rows_of_scale(packed, rows), scale[rows])
