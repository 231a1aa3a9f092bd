"""Splits, tile sizes, limits and traces of the Triton kernels of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import launch
from ostinato.export.kernels.attention import prefill_triton, reference, rows_triton, step_triton
from ostinato.export.kernels.attention.limits import check_attention
from ostinato.export.kernels.operands import MAX_ROWS, STEP_ROWS, Norm

from .attention_cases import EPS, TOLERANCE, Attend, check, make
from .conftest import traced_layer
from .paged import held
from .runs import DEVICE, SLOT, Run

MAIN = (16, 2, 256, 64) if DEVICE == "cuda" else (4, 2, 32, 8)
PROMPT_MAIN = (16, 2, 256, 64) if DEVICE == "cuda" else (8, 1, 32, 12)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@each_dtype
@pytest.mark.parametrize("tokens", (0, 1, 3, 64))
def test_full_cache(tokens: int, dtype: torch.dtype) -> None:
    """The last position in use, at a tile's end and one to either side of it, by a step (0) and by prompts."""
    attend = prefill_triton.attend if tokens else step_triton.attend_step
    length = tokens or 1
    for capacity in (127, 128, 129) if tokens else (1, 127, 128, 129):
        check(make((4, 2, 32, 8), [Run(SLOT, capacity - length, length)], dtype, capacity=capacity), attend)


def set_splits(monkeypatch: pytest.MonkeyPatch, name: str, splits: int, least: int) -> None:
    """Give the step's configurations `name` so many splits, of at least so many positions."""
    monkeypatch.setattr(step_triton, "splits_for", lambda *sizes: splits)
    configs = {kept: replace(config, least=least) for kept, config in getattr(step_triton, name).items()}
    monkeypatch.setattr(step_triton, name, configs)


@each_dtype
@pytest.mark.parametrize(("splits", "least"), [(1, 64), (2, 16), (3, 32), (16, 16)])
def test_splits_of_a_step(splits: int, least: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits with several tiles, with one, with part of one, with nothing."""
    set_splits(monkeypatch, "SPLIT", splits, least)
    for position, window in ((0, None), (1, None), (16, 1), (17, None), (63, 2), (129, None), (300, None), (300, 90)):
        case = make(MAIN, [Run(SLOT, position)], dtype, page_size=32, capacity=301, window=window)
        check(case, step_triton.attend_step)


@each_dtype
@pytest.mark.parametrize(("splits", "least"), [(1, 64), (2, 16), (3, 32), (16, 16)])
def test_splits_of_several_rows(splits: int, least: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for rows beside each other, which have other numbers of splits. A run's splits end where it begins."""
    set_splits(monkeypatch, "SEVERAL_SPLIT", splits, least)
    for position, window in ((0, None), (16, 1), (17, 2), (63, None), (129, 4), (296, None), (296, 90)):
        runs = [Run(0, position // 2), Run(-1, 5), Run(SLOT, position, 5), Run(4, 290)]
        case = make(MAIN, runs, dtype, page_size=32, capacity=301, window=window)
        check(case, step_triton.attend_step)


@pytest.mark.parametrize(
    ("kv_heads", "positions", "least", "splits"),
    [
        (2, 4096, 64, 64),
        (2, 262144, 64, 64),
        (8, 4096, 64, 16),
        (3, 4096, 64, 42),
        (2, 5, 64, 1),
        (200, 64, 64, 1),
        (2, 200, 64, 4),
        (2, 200, 32, 7),
    ],
)
def test_number_of_splits_of_a_step(kv_heads: int, positions: int, least: int, splits: int) -> None:
    assert step_triton.splits_for(kv_heads, positions, 128, least) == splits


@each_dtype
@pytest.mark.parametrize("page_size", (16, 64))
@pytest.mark.parametrize(
    ("shape", "tokens"), [((4, 2, 32, 8), 3), ((8, 1, 32, 8), 20), ((3, 1, 16, 8), 50), ((16, 1, 128, 32), 5)]
)
def test_splits_of_a_prompt(
    shape: tuple[int, int, int, int], tokens: int, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries behind many keys: splits that some queries do not see, splits with part of a block, or with nothing.

    In the interpreter the two sizes of splits take turns over dtypes and page sizes.
    """
    turn = (page_size == 64) + (dtype is torch.bfloat16)
    for least in (64, 128) if DEVICE == "cuda" else ((64, 128)[turn % 2],):
        monkeypatch.setattr(prefill_triton, "MIN_SPLIT", least)
        for first, window in ((0, None), (60, None), (250, None), (411, None), (411, 170)):
            case = make(shape, [Run(SLOT, first, tokens)], dtype, page_size, capacity=480, window=window)
            check(case, prefill_triton.attend)


def test_more_splits_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of splits fit the memory that they have, whatever the number of tokens."""
    monkeypatch.setattr(prefill_triton, "PARTS", 16)
    monkeypatch.setattr(prefill_triton, "MAX_SPLITS", 4)
    monkeypatch.setattr(prefill_triton, "MIN_SPLIT", 32)
    for tokens in (1, 33, 64, 65, 129):
        check(make((8, 2, 16, 4), [Run(SLOT, 131, tokens)], torch.float32), prefill_triton.attend)


@each_dtype
@pytest.mark.parametrize("tokens", (1, 130))
@pytest.mark.parametrize("shared", (launch.MEDIUM, launch.SMALL))
def test_smaller_gpus(shared: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: shared)
    check(make(PROMPT_MAIN, [Run(SLOT, 37, tokens)], dtype, capacity=237), prefill_triton.attend)


TRUE_SHAPES = [
    (1, 4000, 4096),
    (1, 200000, 262144),
    (16, 30000, 32768),
    (130, 4000, 8192),
    (512, 0, 4096),
    (700, 3000, 4096),
]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow")
@each_dtype
@pytest.mark.parametrize("window", (None, 600, 4096))
@pytest.mark.parametrize(("tokens", "first", "capacity"), TRUE_SHAPES)
@pytest.mark.parametrize("attend", (prefill_triton.attend, rows_triton.attend_step), ids=("prompt", "rows"))
def test_true_shape(
    attend: Attend, tokens: int, first: int, capacity: int, window: int | None, dtype: torch.dtype
) -> None:
    if attend is rows_triton.attend_step and tokens > MAX_ROWS:
        pytest.skip("a step has fewer rows")
    # With a window, the sizes of Mistral 7B.
    shape = (16, 2, 256, 64) if window is None else (32, 8, 128, 128)
    check(make(shape, [Run(SLOT, first, tokens)], dtype, page_size=64, capacity=capacity, window=window), attend)


def test_the_reference_rotates_as_the_model_does() -> None:
    case = make((4, 2, 32, 8), [Run(SLOT, 0)], torch.float32, device="cpu")
    _, cache = case.run(reference.attend_step)
    key, norm = case.qkv[:, 256:320].view(1, 2, 32), case.heads.k_norm
    assert norm is not None
    normed = key * (key.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.weight
    rotated = reference.rotate(normed, case.index.cos, case.index.sin)
    torch.testing.assert_close(held(cache, SLOT, 0, 1)[0].transpose(0, 1), rotated)


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


each_form = pytest.mark.parametrize(
    "attend",
    (step_triton.attend_step, rows_triton.attend_step, prefill_triton.attend),
    ids=("step", "rows", "prompt"),
)


@each_form
def test_an_odd_number_to_rotate_is_refused(attend: Attend) -> None:
    case = make((4, 2, 16, 6), [Run(SLOT, 0)], torch.float32)
    index = case.index._replace(cos=case.index.cos[:, :3])
    with pytest.raises(ExportError, match="an even number of a head's 16 elements, got 3"):
        replace(case, index=index).run(attend)


@each_form
def test_norms_that_differ_in_eps_are_refused(attend: Attend) -> None:
    case = make((4, 2, 16, 6), [Run(SLOT, 0)], torch.float32)
    other = Norm(torch.ones(16), 0.5)
    with pytest.raises(ExportError, match=r"one eps for both norms, got 1e-06 and 0\.5"):
        replace(case, heads=replace(case.heads, k_norm=other)).run(attend)


@each_form
def test_one_norm_is_refused(attend: Attend) -> None:
    case = make((4, 2, 16, 6), [Run(SLOT, 0)], torch.float32)
    with pytest.raises(ExportError, match="one eps for both norms, got 1e-06 and None"):
        replace(case, heads=replace(case.heads, k_norm=None)).run(attend)


@each_form
def test_a_window_of_nothing_is_refused(attend: Attend) -> None:
    case = make((4, 2, 16, 6), [Run(SLOT, 0)], torch.float32)
    with pytest.raises(ExportError, match="a window of 1 position or more, got 0"):
        replace(case, cache=replace(case.cache, window=0)).run(attend)


LAYER = """
import torch
from ostinato.export.kernels.attention.{module} import {function}
from ostinato.export.kernels.operands import Heads, KVCache, Norm, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 2, 16, 64))
        self.register_buffer("values", torch.zeros(4, 2, 16, 64))
        self.register_buffer("table", torch.zeros(2, 16, dtype=torch.int32))

    def forward(self, qkv, weight, cos, positions):
        norm, cache = Norm(weight, 1e-6), KVCache(self.keys, self.values, self.table, {window})
        norms = (norm, norm) if {normed} else ()
        heads = Heads(4, *norms, gated={normed})
        return {function}(qkv, heads, RowIndex(positions, positions, cos, cos), cache)

tokens = {tokens}
shapes = ((tokens, 768 if {normed} else 512), (64,), (tokens, 16))
inputs = (*map(torch.zeros, shapes), torch.arange(tokens))
"""
DYNAMIC = """
rows = torch.export.Dim("T", min=2, max={most})
dynamic = ({{0: rows}}, None, {{0: rows}}, {{0: rows}})
"""


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("module", "function", "operators"),
    [
        ("step_triton", "attend_step", ("attend_step", "attend_step", None)),
        ("prefill_triton", "attend", ("attend", "attend", "attend")),
        ("rows_triton", "attend_step", ("attend_step", "attend_step", "attend_rows")),
    ],
)
def test_traced(module: str, function: str, operators: tuple[str | None, ...], normed: bool) -> None:
    """By one operator that writes the cache in place, for one row, up to 8 and, but for the step's, any number."""
    # Norms and a window do not meet in the kernels' choices.
    window = None if normed else 100
    for operator, tokens, most in zip(operators, (1, 5, 130), (1, STEP_ROWS, 255), strict=True):
        layer = LAYER.format(module=module, function=function, normed=normed, window=window, tokens=tokens)
        code, rows = (layer, 1) if most == 1 else (layer + DYNAMIC.format(most=most), "R")
        if operator is not None:
            assert traced_layer(code) == ([f"ostinato.{operator}.default"], ["keys", "values"], [(rows, 256)])
