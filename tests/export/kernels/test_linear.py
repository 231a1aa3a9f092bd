"""All forms of the linear layers against one definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels.linear import prefill_triton, reference, rows_direct_configs, rows_triton, step_triton
from ostinato.export.kernels.linear.rows_direct_triton import takes_direct, takes_unprepared
from ostinato.export.kernels.operands import RowIndex, Weight

from ...comparison import relative_error
from .linear_cases import (
    CPU_SHAPES,
    FLOATS_SHAPES,
    INT4_SHAPES,
    INTEGERS_SHAPES,
    PROMPT_SHAPES,
    ROWS_SHAPES,
    STEP_SHAPES,
    UNPREPARED_SHAPES,
    Case,
    Error,
    Shape,
    check,
    make,
)
from .runs import (
    DEVICE,
    FOUR_ROWS_MIXTURES,
    LONG_MIXTURES,
    MIXTURES,
    SLOT,
    Run,
    checkered,
    contract,
    in_turn,
    rows_of,
    same_bits,
)
from .weights import BF16, F32, F64

# The forms of `rows` whose weights go directly into operands, and formats that they take.
FOUR_ROWS, EIGHT_ROWS, UNPREPARED = "four rows", "eight rows", "rows as they are"
INTEGERS, FLOATS = "rows of integers", "rows of floats"
DIRECT: dict[str, list[tuple[int | Format | None, torch.dtype]]] = {
    FOUR_ROWS: [(128, BF16)],
    EIGHT_ROWS: [(128, BF16)],
    UNPREPARED: [(128, BF16)],
    INTEGERS: [
        (64, BF16),
        (Int4(32, torch.float16), BF16),
        (Int4Min(), BF16),
        (Int8(32, torch.float16), BF16),
        (Int8(128), BF16),
    ],
    FLOATS: [(None, BF16)],
}
STEP = ("norm_linear", "norm_swiglu", "norm_linear_conv", "linear_add")


@dataclass(frozen=True)
class Form:
    """One form of the linear layers, and what it is held to.

    Attributes:
        kernels: has the operations as attributes. None: the C++ kernels, which a fixture builds.
        rows: numbers of rows of one session.
        mixtures: rows of several sessions, for the convolution.
        thin: whether an operation takes each shape in every other dtype only.
    """

    kernels: Any
    shapes: Sequence[Shape]
    rows: Sequence[int]
    error: Error
    operations: Sequence[str] = STEP
    mixtures: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    dtypes: Sequence[torch.dtype] = (F32, BF16)
    device: str = DEVICE
    thin: bool = True

    def runs(self, operation: str) -> dict[str, Sequence[Run]]:
        """Return the rows that an operation takes, by name."""
        inside: dict[str, Sequence[Run]] = {f"{count} rows": [Run(SLOT, 7, count)] for count in self.rows}
        return inside | dict(self.mixtures) if operation == "norm_linear_conv" else inside

    def cases(self) -> Iterator[tuple[str, Shape, torch.dtype, str]]:
        """Yield operations, shapes, dtypes and names of runs. The C++ kernels, which are fast, take all runs with each
        shape. Other forms take the runs in turn, so that each occurs."""
        layers = checkered(self.operations, self.shapes, self.dtypes, every=1 + self.thin, device=self.device)
        for turn, operation in enumerate(self.operations):
            ours = [layer for layer in layers if layer[0] == operation and fits(*layer[:2])]
            runs = list(self.runs(operation))
            for layer, name in product(ours, runs) if self.kernels is None else in_turn(ours, runs, turn):
                yield *layer, name


def fits(operation: str, shape: Shape) -> bool:
    return shape.channels > 0 if operation == "norm_linear_conv" else operation != "norm_swiglu" or shape.n % 2 == 0


def reference_error(weight: Weight, dtype: torch.dtype) -> float:
    return 1e-12 if dtype == F64 else 2.5e-6


def step_error(weight: Weight, dtype: torch.dtype) -> float:
    """In bfloat16 int4 weights are multiplied in fixed point."""
    return 1e-4 if dtype == BF16 and weight.scale is not None else 2.5e-6


def rows_error(weight: Weight, dtype: torch.dtype) -> float:
    """In bfloat16 some int4 weights are multiplied in fixed point; else inputs, and int4 weights, are rounded."""
    if dtype == F32:
        return 2.5e-6
    fixed = isinstance(weight.format, Int4) and weight.group_size == 128 and weight.columns % 256 == 0
    return 1e-4 if fixed else 4e-3


def direct_error(weight: Weight, dtype: torch.dtype) -> float:
    """Weights in bfloat16 meet inputs that are normed and rounded."""
    return 4e-3 if weight.scale is None else 1e-4


def prompt_error(weight: Weight, dtype: torch.dtype) -> float:
    """Int4 weights are rounded to the dtype."""
    return 2.5e-6 if dtype == F32 else 4e-3


def cpu_error(weight: Weight, dtype: torch.dtype) -> float:
    """For weights in integers, inputs are bytes with a scale for each group, or bfloat16. In bfloat16 some CPUs round all
    inputs."""
    if weight.scale is not None:
        return 1.2e-2
    return 2.5e-6 if dtype == F32 else 6e-3


def beginnings(*counts: int) -> dict[str, Sequence[Run]]:
    return {f"first {count} rows": [Run(SLOT, 0, count)] for count in counts}


FLOATS_MIXTURES = {name: runs for name, runs in MIXTURES.items() if rows_of(runs) <= 16}
EIGHT_MIXTURES = {name: runs for name, runs in MIXTURES.items() if rows_of(runs) <= 8} | beginnings(2, 8)
TWO_ROWS_MIXTURES = {
    "padding": [Run(-1, 9)],
    "two sessions": [Run(SLOT, 7), Run(0, 2)],
    "a new one and padding": [Run(SLOT, 0), Run(-1, 9)],
}
CPU_ROWS = (1, 2, 3, 5, 31, 33, 70)
FORMS = {
    "reference": Form(
        reference,
        STEP_SHAPES[:26],
        (1, 3),
        reference_error,
        mixtures=beginnings(1, 2) | MIXTURES,
        dtypes=(F32, BF16, F64),
        device="cpu",
    ),
    "reference of a prompt": Form(reference, PROMPT_SHAPES[:8], (1, 5), prompt_error, ("linear",), device="cpu"),
    "step": Form(step_triton, STEP_SHAPES, (1, 2), step_error, mixtures=beginnings(1, 2) | TWO_ROWS_MIXTURES),
    "rows": Form(rows_triton, ROWS_SHAPES, (3, 9, 15, 16, 17, 33), rows_error, mixtures=MIXTURES, thin=False),
    # Those with int4 in groups of 128.
    FOUR_ROWS: Form(
        rows_triton, INT4_SHAPES, (2, 3, 4), direct_error, mixtures=FOUR_ROWS_MIXTURES, dtypes=(BF16,), thin=False
    ),
    EIGHT_ROWS: Form(
        rows_triton, INT4_SHAPES, (5, 8), direct_error, mixtures=EIGHT_MIXTURES, dtypes=(BF16,), thin=False
    ),
    UNPREPARED: Form(
        rows_triton, UNPREPARED_SHAPES, (3, 8, 9, 16), direct_error, ("linear_add",), dtypes=(BF16,), thin=False
    ),
    # Those with other integers, for up to 4 rows and up to 8.
    INTEGERS: Form(
        rows_triton, INTEGERS_SHAPES, (3, 4, 5, 8), direct_error, mixtures=EIGHT_MIXTURES, dtypes=(BF16,), thin=False
    ),
    # Those with weights in bfloat16, for up to 8 rows and up to 16.
    FLOATS: Form(
        rows_triton, FLOATS_SHAPES, (3, 8, 9, 16), direct_error, mixtures=FLOATS_MIXTURES, dtypes=(BF16,), thin=False
    ),
    "prompt": Form(prefill_triton, PROMPT_SHAPES, (1, 2, 5), prompt_error, ("linear",), thin=False),
    "C++": Form(None, CPU_SHAPES, CPU_ROWS, cpu_error, mixtures=beginnings(*CPU_ROWS) | LONG_MIXTURES, device="cpu"),
}


@pytest.fixture
def kernels_of(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Return the kernels of a form by its name."""
    return lambda name: FORMS[name].kernels or request.getfixturevalue("cpu_kernels")


def made(name: str, shape: Shape, runs: Sequence[Run], dtype: torch.dtype) -> Case:
    case = make(shape, runs, dtype, device=FORMS[name].device, panels=name == "C++")
    if name == UNPREPARED:
        assert takes_unprepared(case.x, case.operand.weight, shape.heads)
    elif name in DIRECT:
        assert takes_direct(case.x, case.operand.weight)
    return case


@contract("name operation shape dtype runs", [(name, *case) for name, form in FORMS.items() for case in form.cases()])
def test_definition(
    kernels_of: Callable[[str], Any], name: str, operation: str, shape: Shape, dtype: torch.dtype, runs: str
) -> None:
    form = FORMS[name]
    case = made(name, shape, form.runs(operation)[runs], dtype)
    for out_dtype in {dtype, F32} if operation == "norm_linear" else {dtype}:
        check(case, kernels_of(name), operation, form.error, out_dtype)


@contract("group rows blocks", product([group for group, _ in DIRECT[INTEGERS]], (4, 8), (9, 18, 66)))
def test_a_loop_of_turns(group: int | Format, rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products with integers have a loop, in which not all turns are under way. Here it has three, of one block or of
    two, and the last one is not full; or five of one block; or, in long rows, five of two blocks or nine of one."""
    monkeypatch.setattr(rows_direct_configs, "H100_REGISTERS", 0)
    case = made(INTEGERS, Shape(40, 128 * blocks, group), [Run(SLOT, 7, rows)], BF16)
    check(case, rows_triton, "norm_swiglu", direct_error)


EACH = [(name, operation) for name, form in FORMS.items() for operation in form.operations]
# Operations whose result is a product, and perhaps a residual.
SUMS = [case for case in EACH if case[1] in ("linear", "norm_linear", "linear_add")]
FORMATS: list[tuple[int | Format | None, torch.dtype]] = [
    (32, F32),
    (128, BF16),
    (64, BF16),
    (None, F32),
    (None, BF16),
    (Int4(64, torch.float16), F32),
    (Int4(32, torch.float16), BF16),
    (Int4Min(), BF16),
    (Int4Min(32, torch.float16), F32),
    (Int8(), F32),
    (Int8(32, torch.float16), BF16),
    (Int8(128), BF16),
]


def in_formats(cases: Iterable[tuple[str, str]], *values: float) -> list[tuple[Any, ...]]:
    """Return forms and operations in all number formats, with the values in turn."""
    layers = [(*case, *layer) for case in cases for layer in FORMATS if layer in DIRECT.get(case[0], [layer])]
    return [(*layer, value) for layer, value in zip(layers, cycle(values), strict=False)] if values else layers


def several(name: str, rows: int) -> list[Run]:
    """Return rows of two sessions; a single one where a form takes no more."""
    if rows == 1:
        return [Run(SLOT, 7)]
    if name == "step":
        rows = 2
    elif name == FOUR_ROWS:
        rows = min(rows, 4)
    elif name == "rows":
        # More than the direct forms of integers take.
        rows = max(rows, 9)
    return [Run(SLOT, 7, rows // 2), Run(0, 2, rows - rows // 2)]


def small(name: str, k: int, group: int | Format | None, dtype: torch.dtype, bias: bool = False, rows: int = 5) -> Case:
    """Make a case with few outputs for `step_triton`, which has a program for each."""
    outputs, k = (4 if name == "step" else 20) + 2 * bias, max(k, 512 if name in DIRECT else 0)
    return made(name, Shape(outputs, k, group, channels=3), several(name, rows), dtype)


# The interpreter takes one program after the other: there all kernels but those in C++ have no choice.
@contract("name operation group dtype", in_formats(case for case in EACH if DEVICE == "cuda" or case[0] == "C++"))
def test_repeated_bit_for_bit(
    kernels_of: Callable[[str], Any], name: str, operation: str, group: int | Format | None, dtype: torch.dtype
) -> None:
    case, kernels = small(name, 512, group, dtype), kernels_of(name)
    first, second = (case.run(kernels, operation) for _ in range(2))
    assert all(same_bits(first[output], second[output]) for output in first)


@contract("name operation group dtype", in_formats(SUMS))
def test_rows_of_zeros_are_exact(
    kernels_of: Callable[[str], Any], name: str, operation: str, group: int | Format | None, dtype: torch.dtype
) -> None:
    case = small(name, 256, group, dtype, bias=True)
    out = replace(case, x=torch.zeros_like(case.x)).run(kernels_of(name), operation, F32)["out"]
    bias = case.operand.weight.bias
    assert bias is not None
    exact = case.residual.float() + bias.float() if operation == "linear_add" else bias.expand(out.shape)
    assert torch.equal(out, exact.to(out.dtype))


@contract("name operation group dtype value", in_formats(EACH, math.nan, math.inf, -math.inf))
def test_what_is_not_finite_shows_in_its_row_alone(
    kernels_of: Callable[[str], Any],
    name: str,
    operation: str,
    group: int | Format | None,
    dtype: torch.dtype,
    value: float,
) -> None:
    """A norm makes NaN of infinity. The row is the last of its session, whose next rows see it in the convolution."""
    for rows in (40, 3, 1) if name == "C++" else (5,):
        case, kernels = small(name, 256, group, dtype, rows=rows), kernels_of(name)
        without, bad = case.run(kernels, operation), several(name, rows)[0].length - 1
        case.x[bad, 100] = value
        for output, found in case.run(kernels, operation).items():
            place = (SLOT, -1) if output == "state" else bad
            shown = found[place].isnan() if operation.startswith("norm_") else ~found[place].isfinite()
            assert shown.all()
            found[place] = without[output][place]
            assert same_bits(found, without[output])


# References, and torch's product of a prompt, do not promise it. The convolution looks at a session's rows.
@contract(
    "name operation group dtype rows",
    in_formats(product(("rows", "C++"), ("norm_linear", "norm_swiglu", "linear_add")), 16, 17),
)
def test_a_row_does_not_depend_on_its_company(
    kernels_of: Callable[[str], Any],
    name: str,
    operation: str,
    group: int | Format | None,
    dtype: torch.dtype,
    rows: int,
) -> None:
    """Not by one bit, and not on its place: what a session generates does not depend on the sessions beside it."""
    case, kernels = made(name, Shape(76, 512, group), [Run(SLOT, 7, rows)], dtype), kernels_of(name)
    expected = case.run(kernels, operation)["out"][1]
    for place in (0, rows - 1):
        moved = replace(case, x=100 * case.x.flip(0), residual=case.residual.clone())
        moved.x[place], moved.residual[place] = case.x[1], case.residual[1]
        assert torch.equal(moved.run(kernels, operation)["out"][place], expected)


@contract("name operation", [(name, operation) for name in DIRECT for operation in FORMS[name].operations])
def test_few_rows_have_the_same_bits_in_any_number(kernels_of: Callable[[str], Any], name: str, operation: str) -> None:
    runs = [Run(SLOT, 7), Run(0, 2), Run(3, 9), Run(1, 4, 10 if name == UNPREPARED else 1)]
    case, kernels = made(name, Shape(76, 1024, DIRECT[name][0][0], channels=40), runs, BF16), kernels_of(name)
    expected = case.run(kernels, operation)
    for output, found in part_of(case, slice(3)).run(kernels, operation).items():
        assert output == "state" or torch.equal(found, expected[output][:3])


@contract("operation group dtype", ((operation, *layer) for operation in STEP for layer in FORMATS))
def test_two_rows_have_the_bits_of_one(operation: str, group: int | Format | None, dtype: torch.dtype) -> None:
    """Where both have equally many warps."""
    case = made("step", Shape(20, 512, group, channels=3), [Run(SLOT, 7), Run(0, 2)], dtype)
    expected = case.run(step_triton, operation)
    for row in range(2):
        for output, found in part_of(case, slice(row, row + 1)).run(step_triton, operation).items():
            assert output == "state" or same_bits(found, expected[output][row : row + 1])


def part_of(case: Case, rows: slice) -> Case:
    """The case of these rows alone."""
    index = RowIndex(*(values[rows] for values in case.index))
    return replace(case, x=case.x[rows], residual=case.residual[rows].clone(), index=index)


@contract(
    "name operation group dtype",
    in_formats(case for case in SUMS if case[1] != "norm_linear" and case[0] not in DIRECT),
)
def test_each_element_meets_its_own_weights(
    kernels_of: Callable[[str], Any], name: str, operation: str, group: int | Format | None, dtype: torch.dtype
) -> None:
    """An element is multiplied by its own weights, and by no others: inputs are rows of the identity."""
    case = made(name, Shape(4, 128, group), [Run(SLOT, 7, 128)], dtype)
    case = replace(case, x=torch.eye(128).to(case.x), residual=torch.zeros_like(case.residual))
    # In the interpreter one of each place in a word of eight weights.
    single = [slice(row, row + 1) for row in range(0, 128, 1 if DEVICE == "cuda" else 17)]
    for rows in single if name == "step" else [slice(None)]:
        part = replace(case, x=case.x[rows], residual=case.residual[rows].clone())
        out = part.run(kernels_of(name), operation)["out"]
        assert torch.equal(out, part.exact(operation)["out"].to(dtype)), f"elements {rows}"


@contract("name operation group dtype size", in_formats(SUMS, 1e-12, 1e6))
def test_small_and_large_inputs(
    kernels_of: Callable[[str], Any],
    name: str,
    operation: str,
    group: int | Format | None,
    dtype: torch.dtype,
    size: float,
) -> None:
    case = small(name, 1024, group, dtype)
    case = replace(case, x=(case.x * size).to(dtype), residual=torch.zeros_like(case.residual))
    check(case, kernels_of(name), operation, FORMS[name].error)


@contract("name operation group dtype", in_formats(SUMS))
def test_inputs_of_very_different_sizes(
    kernels_of: Callable[[str], Any], name: str, operation: str, group: int | Format | None, dtype: torch.dtype
) -> None:
    """Large inputs among small ones: what fixed point loses of the small ones is little compared with the result."""
    case = small(name, 1024, group, dtype)
    case.x[:, ::33] *= 1e4
    check(replace(case, residual=torch.zeros_like(case.residual)), kernels_of(name), operation, FORMS[name].error)


@contract("group largest", product((64, 128), (1.875, 1.8828125, 1.9921875)))
def test_the_largest_inputs_fit_their_integers(kernels_of: Callable[[str], Any], group: int, largest: float) -> None:
    """Inputs of high and of low nibbles have opposite signs: the factor of low ones is then the largest in fixed point."""
    case = small("step", 1024, group, BF16)
    signs = (torch.arange(1024) // 32 % 2 * 2 - 1).to(case.x)
    case = replace(case, x=(signs * largest).expand_as(case.x).contiguous(), residual=torch.zeros_like(case.residual))
    check(case, kernels_of("step"), "linear_add", FORMS["step"].error)


@contract("name lengths", [("reference", (1, 2, 3)), ("step", (1,) * 6), ("rows", (2, 4)), ("C++", (1, 2, 3))])
def test_calls_follow_one_another(kernels_of: Callable[[str], Any], name: str, lengths: Sequence[int]) -> None:
    """From position 0 each call leaves the state that the next one needs: as if all rows came at once."""
    case = made(name, Shape(8, 64, channels=5), [Run(SLOT, 0, 6)], F32)
    calls, state = [], case.conv.state
    for rows in torch.arange(6, device=case.x.device).split(lengths):
        index, conv = RowIndex(*(values[rows] for values in case.index)), replace(case.conv, state=state)
        calls.append(replace(case, x=case.x[rows], conv=conv, index=index).run(kernels_of(name), "norm_linear_conv"))
        state = calls[-1]["state"]
    limit = 2 * FORMS[name].error(case.operand.weight, F32)
    for output, expected in case.exact("norm_linear_conv").items():
        found = state[SLOT] if output == "state" else torch.cat([call[output] for call in calls])
        assert relative_error(found, expected[SLOT] if output == "state" else expected) < limit
