"""Weights in panels: the same numbers in another order, and where each of them is."""

from __future__ import annotations

import pytest
import torch

from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.linear.panels import LANES, pack_panels, rows_of_panels, unpack_panels
from ostinato.export.kernels.operands import Weight

FLOATING = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("experts", ((), (3,)))
@pytest.mark.parametrize("n", (1, 16, 37, 64))
@pytest.mark.parametrize("k", (1, 24, 64, 97))
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_floating_weights_come_back(n: int, k: int, dtype: torch.dtype, experts: tuple[int, ...]) -> None:
    weight = torch.randn(*experts, n, k).to(dtype)
    packed, scale = pack_panels(weight, None)
    assert scale is None and packed.shape == weight.shape and packed.dtype == dtype and packed.is_contiguous()
    assert torch.equal(unpack_panels(packed, None)[0], weight)
    assert torch.equal(Weight(packed, in_panels=True).dequantized(dtype), weight)


@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("n", (1, 16, 37))
def test_four_bits_come_back(n: int, group: int) -> None:
    values, scale = pack_int4(torch.randint(-8, 8, (2, n, 384))), torch.randn(2, n, 384 // group).bfloat16()
    packed, packed_scale = pack_panels(values, scale)
    assert packed_scale is not None and (packed.shape, packed_scale.shape) == (values.shape, scale.shape)
    unpacked, unpacked_scale = unpack_panels(packed, packed_scale)
    assert unpacked_scale is not None and torch.equal(unpacked, values) and torch.equal(unpacked_scale, scale)
    weight = Weight(packed, packed_scale, in_panels=True)
    assert torch.equal(weight.dequantized(torch.float32), Weight(values, scale).dequantized(torch.float32))
    chosen = torch.tensor([1, 0])
    assert torch.equal(weight.of_experts(chosen).dequantized(torch.float32)[0], weight.dequantized(torch.float32)[1])


def test_where_elements_are() -> None:
    row, column, k = 21, 11, 64
    panel, lane = row // LANES * LANES * k, row % LANES
    weight = torch.arange(32 * k).view(32, k)
    for dtype, together in ((torch.float32, 1), (torch.bfloat16, 2)):
        packed = pack_panels(torch.where(weight == row * k + column, 1.0, 0.0).to(dtype), None)[0]
        place = panel + (column // together * LANES + lane) * together + column % together
        assert packed.flatten().nonzero().tolist() == [[place]]
    q = torch.zeros(32, k, dtype=torch.int8)
    q[row, column] = 5
    packed, scale = pack_panels(pack_int4(q), torch.arange(64).view(32, 2).bfloat16())
    # Zero is stored as 8.
    (place,) = (packed.flatten() != 0x88).nonzero().flatten().tolist()
    assert place == panel // 2 + column // 8 * 64 + lane * 4 + column % 4 and packed.flatten()[place] == 0x8D
    assert scale is not None and scale.flatten()[32 + LANES + lane] == row * 2 + 1


@pytest.mark.parametrize("n", (5, 16, 50))
@pytest.mark.parametrize("k", (24, 97))
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_rows(n: int, k: int, dtype: torch.dtype) -> None:
    weight, rows = torch.randn(n, k).to(dtype), torch.randint(n, (40,))
    assert torch.equal(rows_of_panels(pack_panels(weight, None)[0], rows), weight[rows])
