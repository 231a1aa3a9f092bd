"""Gated attention in C++ against its reference in float64, over caches that hold NaN wherever no token is."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.attention import reference
from ostinato.export.kernels.operands import KVCache, Place

from ...comparison import relative_error
from .cpu_cases import BF16, F32, ROWS, Draw, doubled
from .padding import padded, padded_place

TOLERANCE = {F32: 1e-5, BF16: 8e-3}
CACHED = {F32: 1e-5, BF16: 4e-3}
# (heads, key heads, D, R): groups of 1, 2, 3, 8, 16 and 40, sizes that fill no vector, all and few elements rotated.
SHAPES = [
    (2, 2, 16, 16),
    (4, 2, 64, 16),
    (6, 2, 24, 8),
    (8, 1, 40, 12),
    (16, 1, 16, 4),
    (4, 2, 256, 64),
    (40, 1, 16, 8),
]
DEPTHS = (0, 1, 31, 200, 1000)


class Case:
    """Random arguments at a depth; `slots` of the cache are behind the last token."""

    def __init__(
        self, shape: tuple[int, int, int, int], rows: int, depth: int, dtype: torch.dtype, slots: int = 3
    ) -> None:
        heads, kv_heads, size, rotated = shape
        draw = Draw(rows + depth)
        self.heads = heads
        self.qkv = draw.normal(rows, 2 * (heads + kv_heads) * size, dtype=dtype)
        self.q_norm, self.k_norm = draw.norm(size), draw.norm(size)
        angles = draw.normal(rows, rotated // 2).repeat(1, 2)
        self.place = Place(depth + torch.arange(rows), angles.cos(), angles.sin())
        self.cache = KVCache(*(draw.normal(kv_heads, depth + rows + slots, size, dtype=dtype) for _ in range(2)))
        for tensor in (self.cache.keys, self.cache.values):
            tensor[:, depth:] = torch.nan

    def check(self, kernels: type[Kernels]) -> None:
        dtype, last = self.qkv.dtype, int(self.place.positions[-1]) + 1
        exact = KVCache(*(x.double().nan_to_num() for x in (self.cache.keys, self.cache.values)))
        place = Place(self.place.positions, self.place.cos.double(), self.place.sin.double())
        expected = reference.attend_step(
            self.qkv.double(), doubled(self.q_norm), doubled(self.k_norm), place, exact, self.heads
        )
        out = kernels.attend_step(self.qkv, self.q_norm, self.k_norm, self.place, self.cache, self.heads)
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCE[dtype]
        for found, wanted in ((self.cache.keys, exact.keys), (self.cache.values, exact.values)):
            assert relative_error(found[:, :last], wanted[:, :last]) < CACHED[dtype]
            assert found[:, last:].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(
    cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], rows: int, depth: int, dtype: torch.dtype
) -> None:
    Case(shape, rows, depth, dtype).check(cpu_kernels)


def test_scores_far_apart(cpu_kernels: type[Kernels]) -> None:
    """Exponentials relative to the largest score so far, which grows from block to block."""
    case = Case((4, 2, 32, 8), 40, 300, F32)
    case.cache.keys[:, :300] *= torch.linspace(0.01, 30, 300)[:, None]
    case.check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", (6, 12))
@pytest.mark.parametrize("rows", (100, 150))
def test_more_queries_than_a_task_has(cpu_kernels: type[Kernels], heads: int, rows: int, dtype: torch.dtype) -> None:
    Case((heads, 2, 64, 16), rows, 70, dtype).check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", (1, 20))
def test_nan_shows(cpu_kernels: type[Kernels], rows: int, dtype: torch.dtype) -> None:
    """A key in the cache, for all queries of its heads; a query's own, for itself."""
    case = Case((4, 2, 32, 8), rows, 50, dtype)
    case.cache.keys[1, 20, 3] = math.nan
    case.qkv[rows - 1, 0] = math.nan
    out = cpu_kernels.attend_step(case.qkv, case.q_norm, case.k_norm, case.place, case.cache, 4).view(rows, 4, 32)
    assert out[:, 2:].isnan().all() and out[-1, 0].isnan().all()
    assert out[:-1, :2].isfinite().all() and out[-1, 1].isfinite().all()


@pytest.mark.parametrize("first", (-1, 14))
def test_a_position_that_the_cache_does_not_have(cpu_kernels: type[Kernels], first: int) -> None:
    case = Case((4, 2, 32, 8), 3, 10, F32)
    before = case.cache.keys.clone()
    place = case.place._replace(positions=first + torch.arange(3))
    with pytest.raises(AssertionError, match="attend_step failed"):
        cpu_kernels.attend_step(case.qkv, case.q_norm, case.k_norm, place, case.cache, 4)
    assert torch.equal(case.cache.keys.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernels", ("cpu", "reference"))
@pytest.mark.parametrize(("length", "rows"), [(1, 4), (3, 4), (17, 32), (40, 64)])
def test_padding(cpu_kernels: type[Kernels], kernels: str, length: int, rows: int, dtype: torch.dtype) -> None:
    """Rows of NaN after the last token, at its position: the tokens' own outputs and the cache are as without them."""
    of = cpu_kernels if kernels == "cpu" else Kernels
    case = Case((4, 2, 64, 16), length, 30, dtype)
    if of is Kernels:
        # Plain PyTorch multiplies the slots that nobody sees by zero.
        case.cache = KVCache(case.cache.keys.nan_to_num(), case.cache.values.nan_to_num())
    alone = KVCache(case.cache.keys.clone(), case.cache.values.clone())
    expected = of.attend_step(case.qkv, case.q_norm, case.k_norm, case.place, alone, case.heads)
    out = of.attend_step(
        padded(case.qkv, rows), case.q_norm, case.k_norm, padded_place(case.place, rows), case.cache, case.heads
    )
    assert out.shape[0] == rows and relative_error(out[:length], expected) < TOLERANCE[dtype]
    for found, wanted in ((case.cache.keys, alone.keys), (case.cache.values, alone.values)):
        assert torch.equal(found.nan_to_num(nan=7), wanted.nan_to_num(nan=7))
