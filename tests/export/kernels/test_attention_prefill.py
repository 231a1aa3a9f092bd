"""Triton's attention for any number of tokens against a definition in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import launch
from ostinato.export.kernels.attention import prefill_triton, reference
from ostinato.export.kernels.attention.limits import check_attention
from ostinato.export.kernels.attention.prefill_triton import attend

from ...comparison import relative_error
from .attention_cases import DEVICE, TOLERANCE, Case, check, draw, prompt_index
from .conftest import run_compiled
from .padding import padded
from .paged import PAGE_SIZES

LENGTHS = (1, 2, 3, 63, 64, 65, 130)
FIRST = (0, 1, 5, 100)
# (heads, key heads, D): groups of 1, 2 and 8.
SHAPES = [(2, 2, 16), (4, 2, 64), (8, 1, 32)]
if DEVICE == "cuda":
    SHAPES += [(16, 2, 256), (6, 2, 128), (16, 1, 256)]


def some(values: tuple[int, ...], *turns: int | bool) -> tuple[int, ...]:
    """In the interpreter every other one, by the sum of `turns`: over both dtypes all have their turn, a second each."""
    return values if DEVICE == "cuda" else values[sum(turns) % 2 :: 2]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_definition(shape: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> None:
    turns = SHAPES.index(shape), LENGTHS.index(tokens), dtype is torch.bfloat16
    for first in some(FIRST if tokens < 100 else FIRST[::3], *turns):
        check(draw(shape, tokens, first, capacity=237, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", (1, 3, 64))
def test_full_cache(tokens: int, dtype: torch.dtype) -> None:
    """The last position in use, at a block's end and one to either side of it."""
    for capacity in (127, 128, 129):
        check(draw((4, 2, 32), tokens, capacity - tokens, capacity, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", (1, 130))
@pytest.mark.parametrize("shared", (launch.MEDIUM, launch.SMALL))
def test_smaller_gpus(shared: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: shared)
    check(draw(SHAPES[-1], tokens, 37, capacity=237, dtype=dtype))


@pytest.mark.parametrize("tokens", (1, 70))
def test_the_reference_agrees(tokens: int) -> None:
    case = draw((4, 2, 16), tokens, 30, capacity=35 + tokens, dtype=torch.float32)
    out = reference.attend(case.query, case.cache, case.index)
    assert relative_error(out, case.expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", (1, 5))
def test_large_scores(tokens: int) -> None:
    """Scores in the thousands, of both signs: the running maximum is subtracted before anything overflows."""
    case = draw((4, 2, 16), tokens, 90, capacity=100, dtype=torch.float32)
    check(Case(1000 * case.query, case.cache, case.index))


def test_query_that_is_not_contiguous() -> None:
    case = draw((4, 2, 16), 6, 9, capacity=40, dtype=torch.float32)
    apart = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(Case(apart, case.cache, case.index))
    check(Case(apart[:1], case.cache, prompt_index(9, 1)))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "first", "capacity"),
    [(1, 4000, 4096), (1, 200000, 262144), (16, 30000, 32768), (130, 4000, 8192), (512, 0, 4096), (700, 3000, 4096)],
)
def test_true_shape(tokens: int, first: int, capacity: int, dtype: torch.dtype) -> None:
    check(draw((16, 2, 256), tokens, first, capacity, dtype, page_size=64))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 2, 48), torch.bfloat16, "head sizes of 16, 32, 64, 128, 256, got 48"),
        ((4, 2, 512), torch.bfloat16, "got 512"),
        ((4, 3, 64), torch.bfloat16, "got 4 heads and 3 key heads"),
        ((34, 2, 64), torch.bfloat16, "1 to 16 times"),
        ((4, 2, 64), torch.float16, "bfloat16 or float32, got torch.float16"),
    ],
)
def test_refusals(shape: tuple[int, int, int], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_attention(*shape, dtype)


TRACE = """
import torch
from torch.export import Dim, export
from ostinato.export.kernels.attention.prefill_triton import attend
from ostinato.export.kernels.operands import KVCache, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2, 16, 64))
        self.register_buffer("table", torch.zeros(2, 20, dtype=torch.int32))

    def forward(self, query, positions):
        return attend(query, KVCache(self.cache, self.cache, self.table), RowIndex(positions, positions, query, query))

def show(tokens, dims):
    program = export(Layer(), (torch.zeros(tokens, 4, 64), torch.arange(tokens)), dynamic_shapes=dims, strict=False)
    program = program.run_decompositions({})
    (output,) = program.graph.output_node().args[0]
    print([str(n.target) for n in program.graph.nodes if "ostinato" in str(n.target)], list(output.meta["val"].shape[1:]))
    bounds = [(int(r.lower), int(r.upper)) for r in program.range_constraints.values()]
    print(bounds, type(output.meta["val"].shape[0]).__name__)

tokens = Dim("T", min=2, max=255)
show(130, ({0: tokens}, {0: tokens}))
show(1, None)
"""


def test_traced_for_any_number_of_tokens() -> None:
    assert run_compiled(TRACE).splitlines() == [
        "['ostinato.attend.default'] [4, 64]",
        "[(2, 255)] SymInt",
        "['ostinato.attend.default'] [4, 64]",
        "[] int",
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "rows"), [(1, 16), (17, 32), (63, 64), (64, 256), (130, 256)])
def test_padding(length: int, rows: int, dtype: torch.dtype) -> None:
    """Rows of NaN after the last token, at its position, over a cache that holds NaN from there on."""
    for first in some(FIRST[::3], length, dtype is torch.bfloat16):
        case = draw((4, 2, 64), length, first, capacity=first + length, dtype=dtype)
        out = attend(padded(case.query, rows), case.cache, prompt_index(first, length, rows))
        assert torch.equal(out[:length], attend(case.query, case.cache, case.index))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("shape", "tokens"), [((4, 2, 32), 3), ((8, 1, 32), 20), ((3, 1, 16), 50), ((16, 1, 128), 5)])
def test_splits(
    shape: tuple[int, int, int], tokens: int, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries behind many keys: splits that some queries do not see, splits with part of a block, or with nothing."""
    for least in some((64, 128), PAGE_SIZES.index(page_size), dtype is torch.bfloat16):
        monkeypatch.setattr(prefill_triton, "MIN_SPLIT", least)
        for first in (0, 60, 250, 411):
            check(draw(shape, tokens, first, 480, dtype, page_size))


def test_more_splits_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of splits fit the memory that they have, whatever the number of tokens."""
    monkeypatch.setattr(prefill_triton, "PARTS", 16)
    monkeypatch.setattr(prefill_triton, "MAX_SPLITS", 4)
    monkeypatch.setattr(prefill_triton, "MIN_SPLIT", 32)
    for tokens in (1, 33, 64, 65, 129):
        check(draw((8, 2, 16), tokens, 131, 280, torch.float32))
