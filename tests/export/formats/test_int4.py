"""The layout of packed four-bit integers, and the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.quantization import Quantization


@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 5, 320)])
def test_packing_round_trip(shape: tuple[int, ...]) -> None:
    q = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0))
    packed = Int4.pack(q)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(Int4.unpack(packed).long(), q)


def test_layout() -> None:
    """Byte j of a span holds element j in its low half and element j + 32 in its high half, each with 8 added."""
    q = torch.arange(128) % 16 - 8
    packed = Int4.pack(q)
    for byte in range(64):
        first = byte // 32 * 64 + byte % 32
        assert packed[byte] == (q[first] + 8) + 16 * (q[first + 32] + 8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("group", Int4.group_sizes)
def test_dequantised_numbers(group: int, dtype: torch.dtype) -> None:
    """Every q has the right value at scales of both signs. The product is rounded once."""
    q = torch.arange(256).view(2, 128) % 16 - 8
    scale = torch.tensor([0.3, -1.7, 5e-3, 2.0, 0.11, -0.9, 7.0, 1.0])[: 256 // group].view(2, -1).bfloat16()
    expected = (q.float() * scale.float().repeat_interleave(group, 1)).to(dtype)
    assert torch.equal(Int4(group).dequantize(Int4.pack(q), scale, None, dtype), expected)


@pytest.mark.parametrize("group", (0, 16, 48, 256))
def test_other_group_sizes_are_refused(group: int) -> None:
    with pytest.raises(ExportError, match=f"unsupported group size {group} for int4; supported are: 32, 64, 128"):
        Quantization(group)


def test_quantization_in_words() -> None:
    assert (str(Quantization()), str(Quantization(32, hqq=True))) == ("int4 g128", "int4 g32 hqq")
