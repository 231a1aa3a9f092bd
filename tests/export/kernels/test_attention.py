"""All forms of attention against one definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.kernels.attention import prefill_triton, reference, rows_triton, step_triton
from ostinato.export.kernels.operands import RowIndex, runs_of

from ...comparison import relative_error
from .attention_cases import TOLERANCE, Attend, Case, as_padding, check, make
from .paged import assert_same_elsewhere, held, put
from .runs import CROWDS, DEVICE, LONG_MIXTURES, MIXTURES, SLOT, Run, checkered, same_bits

Shape = tuple[int, int, int, int]
F32, BF16 = torch.float32, torch.bfloat16

SINGLE_ROWS = {f"row {first}": [Run(SLOT, first)] for first in (0, 1, 63, 64, 65, 200)}
# Windows shorter than a page and than a tile, no multiple of either, and longer than most contexts.
WINDOWS = (1, 7, 40, 100, 600)
# Runs of one session far beyond them, for forms that take one row and for others.
DEEP = {True: {"row 1000": [Run(SLOT, 1000)]}, False: {"5 from 700": [Run(SLOT, 700, 5)]}}
LENGTHS = (1, 2, 3, 63, 64, 65, 130)
FIRST = (0, 1, 5, 100)


def prompts() -> Iterator[tuple[str, list[Run]]]:
    """In the interpreter every other first position, in turn, and few before the longest prompts."""
    for turn, length in enumerate(LENGTHS):
        firsts = FIRST if length < 100 else FIRST[::3]
        for first in firsts if DEVICE == "cuda" else firsts[turn % 2 :: 2]:
            yield f"{length} from {first}", [Run(SLOT, first, length)]


PROMPTS = dict(prompts())
PADDED_PROMPTS = {
    f"{length} from {first}, padded to {rows}": [Run(SLOT, first, length), Run(-1, first + length - 1, rows - length)]
    for length, rows, first in ((1, 16, 0), (17, 32, 100), (63, 64, 0), (64, 256, 0), (130, 256, 100))
}
# From one row to more than a task of C++ has at a time.
DEEP_PROMPTS = {
    f"{length} from {first}": [Run(2, first, length)]
    for length in (1, 2, 3, 5, 31, 33, 70)
    for first in (0, 1, 31, 200, 1000)
}


@dataclass(frozen=True)
class Form:
    """One form of attention, and what it is held to.

    Attributes:
        attend: takes the arguments of a `Case`. None: the C++ kernel, which a fixture builds.
        runs: the rows that it takes, by name.
        shapes: heads, kv_heads, D, R.
        settings: attributes of modules that are changed for it: short contexts are split as long ones are.
        finite: whether its output is finite for padding too.
        slack: factor on the tolerance.
    """

    attend: Attend | None
    runs: Mapping[str, Sequence[Run]]
    shapes: Sequence[Shape]
    device: str = DEVICE
    settings: Sequence[tuple[Any, str, Any]] = ()
    finite: bool = False
    slack: float = 1.0

    @property
    def takes_one_row(self) -> bool:
        """Whether it takes one row of a session, and no prompt."""
        return "row 200" in self.runs

    @property
    def is_triton(self) -> bool:
        return self.attend is not None and self.attend.__module__.endswith("_triton")


# Groups of 1, 2, 3, 8 and 16 heads for each key head.
STEP_SHAPES: list[Shape] = [(2, 2, 16, 16), (4, 2, 64, 16), (6, 2, 32, 8), (8, 1, 32, 12), (16, 1, 16, 4)]
PROMPT_SHAPES: list[Shape] = [(2, 2, 16, 8), (4, 2, 64, 16), (8, 1, 32, 12)]
ROWS_SHAPES: list[Shape] = [(4, 2, 32, 16), (6, 2, 16, 8), (2, 2, 64, 32)]
if DEVICE == "cuda":
    true_shapes = [(16, 2, 256, 64), (6, 2, 128, 32), (16, 1, 256, 64)]
    STEP_SHAPES += [*true_shapes, (32, 4, 128, 128)]
    PROMPT_SHAPES += true_shapes
# Sizes that fill no vector; a group of 40.
ODD_SHAPES: list[Shape] = [
    *STEP_SHAPES[:2],
    (6, 2, 24, 8),
    (8, 1, 40, 12),
    (16, 1, 16, 4),
    (4, 2, 256, 64),
    (40, 1, 16, 8),
]
# Heads of 32, 64, 128 and 256.
FEW_SHAPES: list[Shape] = [(4, 2, 32, 16), (2, 1, 256, 64), (6, 2, 64, 64), (16, 1, 128, 32)]
# Few rows take the kernels of several too.
THREE_KERNELS = [(rows_triton, "STEP_ROWS", 0)]
SPLIT_ROWS = [(rows_triton, "MIN_SPLIT", dict.fromkeys(rows_triton.MIN_SPLIT, 16)), *THREE_KERNELS]

# Up to 8 rows.
FEW_RUNS = {
    **{name: MIXTURES[name] for name in ("single rows", "two rows", "padding behind", "only padding")},
    "8 single rows": [Run(slot, first) for slot, first in enumerate((200, 0, 64, 1, 63, 16, 130, 5))],
    **{
        f"{length} from {first}": [Run(SLOT, first, length)]
        for first, length in ((0, 2), (0, 8), (9, 3), (61, 8), (190, 5))
    },
    "runs and rows": [Run(3, 40, 3), Run(0, 0), Run(2, 64, 2), Run(4, 5), Run(1, 99)],
    "padding first": [Run(-1, 0, 2), Run(1, 16, 5), Run(0, 70)],
    "padding in the middle": [Run(0, 0, 2), Run(-1, 4, 2), Run(2, 130, 3), Run(-1, 9)],
    "padding last": [Run(0, 33), Run(4, 2, 3), Run(-1, 7, 4)],
}
SPLIT_RUNS = {name: MIXTURES[name] for name in ("single rows", "padding between", "short runs", "only padding")} | {
    "behind many": [Run(0, 93, 5), Run(1, 5), Run(3, 70, 2)]
}

# In bfloat16 the references round scores too.
FORMS = {
    "reference": Form(reference.attend_step, SINGLE_ROWS | MIXTURES, STEP_SHAPES[1:3], "cpu", finite=True, slack=1.5),
    "reference of a prompt": Form(reference.attend, PROMPTS | PADDED_PROMPTS, PROMPT_SHAPES[1:2], "cpu", slack=1.5),
    "step": Form(step_triton.attend_step, SINGLE_ROWS, STEP_SHAPES),
    "prompt": Form(prefill_triton.attend, PROMPTS | PADDED_PROMPTS, PROMPT_SHAPES),
    "step of several": Form(step_triton.attend_step, FEW_RUNS, FEW_SHAPES, finite=True),
    "rows": Form(rows_triton.attend_step, MIXTURES, ROWS_SHAPES, settings=THREE_KERNELS, finite=True),
    "rows in splits": Form(rows_triton.attend_step, SPLIT_RUNS, ROWS_SHAPES, settings=SPLIT_ROWS, finite=True),
    "C++": Form(None, DEEP_PROMPTS | LONG_MIXTURES | MIXTURES, ODD_SHAPES, "cpu"),
}
# Sizes of pages, with norms or not, with gates or not.
KINDS = tuple(
    (page_size, normed, gated)
    for page_size, (normed, gated) in zip(
        (16, 32, 64) * 4, ((True, True), (False, False), (True, False), (False, True)) * 3, strict=True
    )
)


def contract() -> list[Any]:
    """Every form with its rows, shapes and dtypes, beside the kinds in turn."""
    found = []
    for name, form in FORMS.items():
        axes = form.runs, form.shapes, TOLERANCE
        cases = checkered(*axes) if form.is_triton else product(*axes)
        found += [(name, *case, *kind) for case, kind in zip(cases, cycle(KINDS), strict=False)]
    return [pytest.param(*one, id="-".join(map(str, one))) for one in found]


@pytest.fixture
def attend_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Attend]:
    """Return the function of a form by its name, with the form's settings in force."""

    def get(name: str) -> Attend:
        form = FORMS[name]
        for module, attribute, value in form.settings:
            monkeypatch.setattr(module, attribute, value)
        if form.attend is not None:
            return form.attend
        found: Attend = request.getfixturevalue("cpu_kernels").attend_step
        return found

    return get


@pytest.mark.parametrize(("name", "runs", "shape", "dtype", "page_size", "normed", "gated"), contract())
def test_definition(
    attend_of: Callable[[str], Attend],
    name: str,
    runs: str,
    shape: Shape,
    dtype: torch.dtype,
    page_size: int,
    normed: bool,
    gated: bool,
) -> None:
    form = FORMS[name]
    case = make(shape, form.runs[runs], dtype, page_size, normed=normed, gated=gated, device=form.device)
    check_form(name, attend_of(name), case)


def windowed() -> list[Any]:
    """Every form with its rows and each of WINDOWS, beside shapes, dtypes and kinds in turn."""
    found = []
    for name, form in FORMS.items():
        cases = checkered(form.runs, WINDOWS, every=4) if form.is_triton else product(form.runs, WINDOWS)
        cases = [*cases, *product(DEEP[form.takes_one_row], WINDOWS[1:])]
        turns = cycle(product(form.shapes, TOLERANCE)), cycle(KINDS)
        found += [(name, *case, *shape, *kind) for case, shape, kind in zip(cases, *turns, strict=False)]
    return [pytest.param(*one, id="-".join(map(str, one))) for one in found]


@pytest.mark.parametrize(("name", "runs", "window", "shape", "dtype", "page_size", "normed", "gated"), windowed())
def test_window(
    attend_of: Callable[[str], Attend],
    name: str,
    runs: str,
    window: int,
    shape: Shape,
    dtype: torch.dtype,
    page_size: int,
    normed: bool,
    gated: bool,
) -> None:
    """Every row sees the last positions alone. What no row sees is NaN, and pages that no row sees are not looked up."""
    form = FORMS[name]
    of_name = {**form.runs, **DEEP[form.takes_one_row]}[runs]
    case = make(shape, of_name, dtype, page_size, normed=normed, gated=gated, window=window, device=form.device)
    check_form(name, attend_of(name), case)


def check_form(name: str, attend: Attend, case: Case) -> None:
    """Check what a form makes of a case, and that it is finite where the form promises that."""
    form = FORMS[name]
    if name == "C++":
        case = without_unused_pages(case)
    check(case, attend, form.slack)
    if form.finite:
        assert case.run(attend)[0].isfinite().all()


def without_unused_pages(case: Case) -> Case:
    """The same case, but the table has -1 behind each slot's last page, and before the first page that a row sees."""
    table, page_size, window = torch.full_like(case.cache.table, -1), case.cache.page_size, case.cache.window
    for slot, rows in runs_of(case.index.slots):
        first, last = (int(case.index.positions[row]) for row in (rows.start, rows.stop - 1))
        used = slice(0 if window is None else max(0, first - window + 1) // page_size, last // page_size + 1)
        table[slot, used] = case.cache.table[slot, used]
    return replace(case, cache=replace(case.cache, table=table))


# One row, a prompt, and a mixture, for each form that takes them.
ONE_OF_EACH = [
    ("reference", [Run(SLOT, 20)]),
    ("reference of a prompt", [Run(SLOT, 30, 9)]),
    ("step", [Run(SLOT, 90)]),
    ("prompt", [Run(SLOT, 90, 5)]),
    ("step of several", [Run(SLOT, 90, 5), Run(0, 33)]),
    ("rows", [Run(SLOT, 90, 5), Run(0, 33)]),
    ("rows in splits", [Run(SLOT, 90, 5), Run(0, 33)]),
    ("C++", [Run(SLOT, 90, 5), Run(0, 33)]),
]
each_form = pytest.mark.parametrize(("name", "runs"), ONE_OF_EACH, ids=[name for name, _ in ONE_OF_EACH])


@each_form
def test_projection_in_float32_and_caches_in_bfloat16(
    attend_of: Callable[[str], Attend], name: str, runs: list[Run]
) -> None:
    if name == "C++":
        pytest.skip("the C++ kernel takes one dtype for both")
    for first in (0, 70):
        moved = [replace(run, first=first + run.slot) for run in runs]
        case = make((4, 2, 32, 8), moved, BF16, qkv_dtype=F32, device=FORMS[name].device)
        check(case, attend_of(name), FORMS[name].slack)


@each_form
def test_large_scores(attend_of: Callable[[str], Attend], name: str, runs: list[Run]) -> None:
    """Scores in the thousands, of both signs: the largest so far is subtracted before an exponential overflows. Two scores
    that are nearly equal differ by as much as their rounding error, so the outputs may differ by a thousand times more."""
    check(make((4, 2, 32, 8), runs, F32, size=1000.0, device=FORMS[name].device), attend_of(name), slack=1000)


@each_form
def test_scores_far_apart(attend_of: Callable[[str], Attend], name: str, runs: list[Run]) -> None:
    """Exponentials are relative to the largest score so far, which grows from position to position."""
    deeper = [Run(runs[0].slot, 300, runs[0].length), *runs[1:]]
    case = make((4, 2, 32, 8), deeper, F32, device=FORMS[name].device)
    keys, values = held(case.cache, SLOT, 0, 300)
    put(case.cache, SLOT, 0, keys * torch.linspace(0.01, 30, 300, device=keys.device)[:, None], values)
    check(case, attend_of(name))


@each_form
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_repeated_bit_for_bit(
    attend_of: Callable[[str], Attend], name: str, runs: list[Run], dtype: torch.dtype
) -> None:
    case, attend = make((4, 2, 32, 8), runs, dtype, device=FORMS[name].device), attend_of(name)
    (first, first_cache), (second, second_cache) = case.run(attend), case.run(attend)
    assert same_bits(first, second)
    assert_same_elsewhere(first_cache, second_cache, {})


@each_form
def test_padding_leaves_no_trace(attend_of: Callable[[str], Attend], name: str, runs: list[Run]) -> None:
    """All rows are padding; a prompt has one token at least, so that its forms are not asked."""
    if name in ("prompt", "reference of a prompt"):
        pytest.skip("a prompt has a token")
    case = as_padding(make((4, 2, 32, 8), runs, F32, device=FORMS[name].device))
    assert_same_elsewhere(case.cache, case.run(attend_of(name))[1], {})


@each_form
def test_nan_shows(attend_of: Callable[[str], Attend], name: str, runs: list[Run]) -> None:
    """NaN of a key in the cache for all rows and heads that see it, of a query for itself, and for nobody else."""
    case, attend = make((4, 2, 32, 8), runs, F32, device=FORMS[name].device), attend_of(name)
    last = runs[0].length - 1
    key, value = held(case.cache, SLOT, 19, 1)
    key[1, 0, 3] = math.nan
    put(case.cache, SLOT, 19, key, value)
    case.qkv[last, 0] = math.nan
    out = case.run(attend)[0].unflatten(1, (4, 32))
    assert out[: last + 1, 2:].isnan().all() and out[last, 0].isnan().all()
    assert out[:last, :2].isfinite().all() and out[last, 1].isfinite().all()
    assert out[last + 1 :].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("runs", CROWDS)
def test_many_rows(runs: str, dtype: torch.dtype) -> None:
    check(make((16, 2, 256, 64) if DEVICE == "cuda" else (1, 1, 16, 8), CROWDS[runs], dtype), rows_triton.attend_step)


@pytest.mark.parametrize("name", ("reference", "rows", "C++"))
def test_a_row_does_not_depend_on_other_sessions(attend_of: Callable[[str], Attend], name: str) -> None:
    """Among others, and however many splits its positions are cut into, it is the same but for rounding."""
    attend = attend_of(name)
    spans = [Run(0, 300 if FORMS[name].is_triton else 900), Run(1, 40), Run(-1, 0), Run(5, 0, 20)]
    case = make((4, 2, 64, 16), spans, F32, device=FORMS[name].device)
    together, _ = case.run(attend)
    for row in (0, 1):
        index = RowIndex(*(values[row : row + 1] for values in case.index))
        alone, _ = replace(case, qkv=case.qkv[row : row + 1], index=index).run(attend)
        assert relative_error(together[row : row + 1], alone) < 1e-6


def test_a_row_has_the_same_bits_beside_others() -> None:
    """A run of one row, by the kernels of a step: the number of rows, their runs and padding change nothing."""
    spans = [Run(0, 300), Run(1, 40), Run(-1, 0), Run(5, 0, 4)]
    case = make((4, 2, 64, 16), spans, F32)
    together, _ = case.run(step_triton.attend_step)
    fewer = replace(case, qkv=case.qkv[:2], index=RowIndex(*(values[:2] for values in case.index)))
    alone, _ = fewer.run(step_triton.attend_step)
    assert same_bits(together[:2], alone)
