"""Gated attention in C++ against its reference in float64, over pages that hold NaN where no token is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.attention import reference
from ostinato.export.kernels.operands import KVCache, RowIndex

from ...comparison import relative_error
from .cpu_cases import BF16, F32, MIXES, ROWS, SLOTS, Draw, Span, doubled, padding, rows_index, same_bits

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
PAGE_SIZES = (16, 32, 64)


class Case:
    """Random arguments. The pages are in no order, some are nobody's, and all slots have some.

    Attributes:
        written: [pages, P] bool, where the rows' keys and values belong.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], spans: Sequence[Span], dtype: torch.dtype, page_size: int = 64
    ) -> None:
        heads, kv_heads, size, rotated = shape
        index = rows_index(spans, rotated)
        rows = len(index.slots)
        draw = Draw(rows + size)
        self.heads, self.index = heads, index
        self.qkv = draw.normal(rows, 2 * (heads + kv_heads) * size, dtype=dtype)
        self.qkv[index.slots < 0] = torch.nan
        self.q_norm, self.k_norm = draw.norm(size), draw.norm(size)
        tokens = {span.slot: span.position + span.rows for span in spans if span.slot >= 0}
        needed = [-(-tokens.get(slot, 1) // page_size) for slot in range(SLOTS)]
        pages = sum(needed) + 3
        order = iter(torch.randperm(pages, generator=draw.generator).tolist())
        table = torch.full((SLOTS, max(needed) + 1), -1, dtype=torch.int32)
        for slot, count in enumerate(needed):
            table[slot, :count] = torch.tensor([next(order) for _ in range(count)])
        empty = torch.full((pages, kv_heads, page_size, size), torch.nan, dtype=dtype)
        self.cache = KVCache(empty, empty.clone(), table)
        self.written = torch.zeros(pages, page_size, dtype=torch.bool)
        for span in spans:
            if span.slot < 0:
                continue
            before, own = (self.at(span.slot, *of) for of in ((0, span.position), (span.position, tokens[span.slot])))
            for pool in (self.cache.keys, self.cache.values):
                pool[before[0], :, before[1]] = draw.normal(span.position, kv_heads, size, dtype=dtype)
            self.written[own] = True

    def at(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Pages of a slot's positions, and where in them they are."""
        positions = torch.arange(begin, end)
        return self.cache.table[slot, positions // self.cache.page_size].long(), positions % self.cache.page_size

    @property
    def tokens(self) -> Tensor:
        """Which rows are tokens."""
        return self.index.slots >= 0

    def exact(self) -> tuple[Tensor, KVCache]:
        """What the reference gives in float64, and its cache afterwards."""
        # It takes whole rows of the table, and heeds nothing behind the last position.
        table = self.cache.table.clamp(min=0)
        cache = KVCache(self.cache.keys.double(), self.cache.values.double(), table)
        index = self.index._replace(cos=self.index.cos.double(), sin=self.index.sin.double())
        norms = doubled(self.q_norm), doubled(self.k_norm)
        return reference.attend_step(self.qkv.double(), *norms, index, cache, self.heads), cache

    def run(self, kernels: type[Kernels]) -> Tensor:
        return kernels.attend_step(self.qkv, self.q_norm, self.k_norm, self.index, self.cache, self.heads)

    def check(self, kernels: type[Kernels]) -> None:
        expected, exact = self.exact()
        before = KVCache(self.cache.keys.clone(), self.cache.values.clone(), self.cache.table.clone())
        out = self.run(kernels)
        assert out.dtype == self.qkv.dtype and out.shape == expected.shape
        assert torch.equal(self.cache.table, before.table)
        pools = ((self.cache.keys, exact.keys, before.keys), (self.cache.values, exact.values, before.values))
        for found, wanted, old in pools:
            assert same_bits(found.transpose(1, 2)[~self.written], old.transpose(1, 2)[~self.written])
            if self.written.any():
                mine = (x.transpose(1, 2)[self.written] for x in (found, wanted))
                assert relative_error(*mine) < CACHED[self.qkv.dtype]
        if self.written.any():
            assert relative_error(out[self.tokens], expected[self.tokens]) < TOLERANCE[self.qkv.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompt(
    cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], rows: int, depth: int, dtype: torch.dtype
) -> None:
    page_size = PAGE_SIZES[(rows + depth) % 3]
    Case(shape, [Span(2, depth, rows)], dtype, page_size).check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[5], SHAPES[6]], ids=str)
def test_mix(
    cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], mix: str, page_size: int, dtype: torch.dtype
) -> None:
    Case(shape, MIXES[mix], dtype, page_size).check(cpu_kernels)


def test_scores_far_apart(cpu_kernels: type[Kernels]) -> None:
    """Exponentials relative to the largest score so far, which grows from block to block."""
    case = Case((4, 2, 32, 8), [Span(1, 300, 40)], F32)
    page, at = case.at(1, 0, 300)
    case.cache.keys[page, :, at] *= torch.linspace(0.01, 30, 300)[:, None, None]
    case.check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", (6, 12))
@pytest.mark.parametrize("rows", (100, 150))
def test_more_queries_than_a_task_has(cpu_kernels: type[Kernels], heads: int, rows: int, dtype: torch.dtype) -> None:
    Case((heads, 2, 64, 16), [Span(0, 70, rows)], dtype).check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", (1, 20))
def test_nan_shows(cpu_kernels: type[Kernels], rows: int, dtype: torch.dtype) -> None:
    """A key in the cache, for all queries of its heads; a query's own, for itself; another session's, for nobody here."""
    case = Case((4, 2, 32, 8), [Span(3, 50, rows), Span(4, 60, 2)], dtype)
    page, at = case.at(3, 20, 21)
    case.cache.keys[page, 1, at, 3] = math.nan
    case.qkv[rows - 1, 0] = math.nan
    out = case.run(cpu_kernels).view(rows + 2, 4, 32)
    assert out[:rows, 2:].isnan().all() and out[rows - 1, 0].isnan().all()
    assert out[: rows - 1, :2].isfinite().all() and out[rows - 1, 1].isfinite().all()
    assert out[rows:].isfinite().all()


def test_a_row_does_not_depend_on_other_sessions(cpu_kernels: type[Kernels]) -> None:
    """Among others, and however many stretches its positions are cut into, it is the same but for rounding."""
    spans = [Span(0, 900, 1), Span(1, 40, 1), padding(1), Span(5, 0, 20)]
    case = Case((4, 2, 64, 16), spans, F32)
    copy = KVCache(case.cache.keys.clone(), case.cache.values.clone(), case.cache.table)
    together = case.run(cpu_kernels)
    for row in (0, 1):
        index = RowIndex(*(values[row : row + 1] for values in case.index))
        alone = cpu_kernels.attend_step(case.qkv[row : row + 1], case.q_norm, case.k_norm, index, copy, case.heads)
        assert relative_error(together[row : row + 1], alone) < 1e-6


def refused(kernels: type[Kernels], case: Case, **index: Tensor) -> None:
    """The call fails, and has written nothing."""
    before = case.cache.keys.clone(), case.cache.values.clone()
    case.index = case.index._replace(**index)
    with pytest.raises(AssertionError, match="attend_step failed"):
        case.run(kernels)
    assert all(same_bits(*pair) for pair in zip((case.cache.keys, case.cache.values), before, strict=True))


@pytest.mark.parametrize("first", (-1, 63, 2**40))
def test_a_position_that_the_table_does_not_have(cpu_kernels: type[Kernels], first: int) -> None:
    case = Case((4, 2, 32, 8), [Span(2, 10, 3)], F32, 32)
    assert case.cache.table.shape[1] * 32 == 64
    refused(cpu_kernels, case, positions=first + torch.arange(3))


@pytest.mark.parametrize("slot", (SLOTS, 2**40))
def test_a_slot_that_the_table_does_not_have(cpu_kernels: type[Kernels], slot: int) -> None:
    case = Case((4, 2, 32, 8), [Span(2, 10, 3), Span(1, 0, 1)], F32)
    refused(cpu_kernels, case, slots=torch.tensor([2, 2, 2, slot]))


@pytest.mark.parametrize("page", (-1, 10_000))
@pytest.mark.parametrize("index", (0, 1, 2))
def test_a_page_that_the_cache_does_not_have(cpu_kernels: type[Kernels], page: int, index: int) -> None:
    case = Case((4, 2, 32, 8), [Span(2, 40, 3), Span(1, 0, 1)], F32, 16)
    case.cache.table[2, index] = page
    refused(cpu_kernels, case)


@pytest.mark.parametrize("slots", ([2, 1, 2], [1, 2, 1]))
def test_a_slot_with_two_runs(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    case = Case((4, 2, 32, 8), [Span(2, 10, 1), Span(1, 10, 1), Span(0, 11, 1)], F32)
    refused(cpu_kernels, case, slots=torch.tensor(slots))


def test_a_run_of_positions_with_a_gap(cpu_kernels: type[Kernels]) -> None:
    case = Case((4, 2, 32, 8), [Span(2, 10, 3)], F32)
    refused(cpu_kernels, case, positions=torch.tensor([10, 12, 13]))


@pytest.mark.parametrize("page_size", (8, 48))
def test_pages_of_a_size_that_it_does_not_take(cpu_kernels: type[Kernels], page_size: int) -> None:
    refused(cpu_kernels, Case((4, 2, 32, 8), [Span(2, 10, 3)], F32, page_size))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "rows"), [(1, 4), (3, 4), (17, 32), (40, 64)])
def test_reference_with_padding(length: int, rows: int, dtype: torch.dtype) -> None:
    """Rows of NaN after the last token: the tokens' own outputs and the cache are as without them."""
    alone, case = (Case((4, 2, 64, 16), [Span(5, 30, length)], dtype) for _ in range(2))
    case.qkv = torch.cat((case.qkv, case.qkv.new_full((rows - length, case.qkv.shape[1]), torch.nan)))
    case.index = rows_index([Span(5, 30, length), padding(rows - length)], 16)
    case.index.cos[:length], case.index.sin[:length] = alone.index.cos, alone.index.sin
    for each in (alone, case):
        each.cache = KVCache(each.cache.keys, each.cache.values, each.cache.table.clamp(min=0))
    expected, out = alone.run(Kernels), case.run(Kernels)
    assert relative_error(out[:length], expected) < TOLERANCE[dtype]
    assert same_bits(case.cache.keys, alone.cache.keys) and same_bits(case.cache.values, alone.cache.values)
