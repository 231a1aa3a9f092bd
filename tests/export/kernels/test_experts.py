"""All forms of routing and the experts against one definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.experts import prefill_triton, reference, route_triton, rows_triton, step_triton
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight

from ...comparison import relative_error
from .experts_cases import (
    CPU_SHAPES,
    FIXED,
    FLAGSHIPS,
    FLOATS,
    PROMPT_SHAPES,
    ROWS_SHAPES,
    ROWS_SHAPES_F32,
    STEP_ROWS_SHAPES,
    STEP_SHAPES,
    Case,
    Error,
    Shape,
    check,
    make,
    route,
)
from .runs import DEVICE, checkered, contract, in_turn, same_bits
from .weights import BF16, F32, F64

STEP = ("route_logits", "experts_gate_up", "experts_down")
ALL = (*STEP, "experts", "sparse_moe")


@dataclass(frozen=True)
class Form:
    """One form of the experts, and what it is held to.

    Attributes:
        kernels: has the operations as attributes. None: the C++ kernels, which a fixture builds.
        thin: whether an operation takes each shape in every other dtype only.
        padded: operations that get padding among their rows.
    """

    kernels: Any
    operations: Sequence[str]
    shapes: Iterable[Shape]
    rows: Sequence[int]
    error: Error
    dtypes: Sequence[torch.dtype] = (F32, BF16)
    device: str = DEVICE
    thin: bool = True
    padded: Sequence[str] = ()

    def cases(self) -> Iterator[tuple[str, Shape, torch.dtype, int]]:
        """Yield operations, shapes, dtypes and numbers of rows. The C++ kernels, which are fast, and all forms on a GPU take
        all numbers of rows with each shape. Otherwise forms take them in turn, so that each occurs."""
        every = self.kernels is None or self.device == "cuda"
        layers = checkered(self.operations, self.shapes, self.dtypes, every=1 + self.thin, device=self.device)
        for turn, operation in enumerate(self.operations):
            ours = [layer for layer in layers if layer[0] == operation]
            numbers = dict.fromkeys(self.rows)
            for layer, rows in product(ours, numbers) if every else in_turn(ours, self.rows, turn):
                yield *layer, rows


def reference_error(operation: str, shape: Shape, dtype: torch.dtype) -> float:
    """Shares are float32. In bfloat16 all results are rounded."""
    return {F64: 2e-7, F32: 1e-5, BF16: 1e-2}[dtype]


def step_error(operation: str, shape: Shape, dtype: torch.dtype) -> float:
    """Rounded once. `sparse_moe` is three operations."""
    return {F32: 3e-6, BF16: 4e-3}[dtype] * (3 if operation == "sparse_moe" else 1)


def rows_error(operation: str, shape: Shape, dtype: torch.dtype) -> float:
    """In bfloat16 logits, each expert's part and, but for fixed point, normed rows and inner activations are rounded."""
    return {F32: 1e-5, BF16: 1e-2}[dtype]


def cpu_error(operation: str, shape: Shape, dtype: torch.dtype) -> float:
    """For weights in integers, inputs are bytes with a scale for each group. Three products may follow one another."""
    product = 1.2e-2 if shape.group is not None and operation != "route_logits" else {F32: 5e-6, BF16: 6e-3}[dtype]
    return product * {"experts_gate_up": 2, "experts": 3, "sparse_moe": 3}.get(operation, 1)


def sparse_moe_rows(*arguments: Any) -> Tensor:
    """The form for any number of rows, as in a trace: a call with few rows would take the step's."""
    with mock.patch.object(rows_triton, "FEW_ROWS", 0):
        return rows_triton.sparse_moe(*arguments)


ROWS = SimpleNamespace(sparse_moe=sparse_moe_rows)
PROMPT = SimpleNamespace(experts=prefill_triton.experts, route=route_triton.route)
PADDED = ("experts", "sparse_moe")
FORMS = {
    "reference": Form(
        reference, ALL, CPU_SHAPES, (2, 17, 3, 5), reference_error, (F32, BF16, F64), "cpu", padded=PADDED
    ),
    # It gathers this row's experts.
    "reference of one row": Form(
        reference, ("experts",), CPU_SHAPES, (1,), reference_error, (F32, BF16, F64), "cpu", False, PADDED
    ),
    "step": Form(step_triton, STEP, STEP_SHAPES, (1,), step_error),
    "step of several": Form(
        step_triton,
        (*STEP, "sparse_moe"),
        STEP_ROWS_SHAPES,
        (5, 2, 16),
        step_error,
        padded=("experts_down", "sparse_moe"),
    ),
    # Padding for rows has a test of its own.
    "rows": Form(ROWS, ("sparse_moe",), ROWS_SHAPES, [*ROWS_SHAPES.values()], rows_error, (BF16,), thin=False),
    "rows in float32": Form(
        ROWS, ("sparse_moe",), ROWS_SHAPES_F32, [*ROWS_SHAPES_F32.values()], rows_error, (F32,), thin=False
    ),
    "prompt": Form(
        PROMPT, ("experts",), PROMPT_SHAPES, (1, 17, 2, 64, 5, 130, 3), rows_error, thin=False, padded=PADDED
    ),
    "prompt of the flagship": Form(
        PROMPT, ("experts",), FLAGSHIPS, (1, 2, 512), rows_error, (BF16,), thin=False, padded=PADDED
    ),
    "C++": Form(
        None, ALL, CPU_SHAPES, (1, 2, 3, 5, 31, 33, 70, 150), cpu_error, device="cpu", thin=False, padded=PADDED
    ),
}


@pytest.fixture
def kernels_of(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Return the kernels of a form by its name."""
    return lambda name: FORMS[name].kernels or request.getfixturevalue("cpu_kernels")


def made(name: str, shape: Shape, rows: int, dtype: torch.dtype, padding: bool = False) -> Case:
    return make(shape, rows, dtype, padding=padding, device=FORMS[name].device, panels=name == "C++")


def reads_all(name: str, operation: str) -> bool:
    """The reference multiplies several rows by all experts."""
    return (name, operation) == ("reference", "experts")


@contract("name operation shape dtype rows", [(name, *case) for name, form in FORMS.items() for case in form.cases()])
def test_definition(
    kernels_of: Callable[[str], Any], name: str, operation: str, shape: Shape, dtype: torch.dtype, rows: int
) -> None:
    case = made(name, shape, rows, dtype, operation in FORMS[name].padded)
    if name == "reference" and dtype == BF16:
        # Where a CPU multiplies bfloat16 numbers in tiles, NaN reaches the next rows if K does not fill the tiles.
        case = replace(case, x=case.x.nan_to_num())
    limit = FORMS[name].error(operation, shape, dtype)
    check(case, kernels_of(name), operation, limit, reads_all(name, operation))
    if DEVICE == "cuda":
        # With large shapes too, which no other test makes.
        assert same_bits(case.run(kernels_of(name), operation), case.run(kernels_of(name), operation))


# Logits by their rows: random, with many equal ones and zeros of both signs, all equal, padding.
RANDOM, TIES, EQUAL, PADDING = [0, 1], [2, 3], [4], [5]
# Numbers of experts, and of those that a row takes: all of them, and more than a warp has lanes.
SIZES = [(8, 2), (5, 3), (1, 1), (16, 16), (72, 3)]
ROUTED = [
    ("reference", "route"),
    ("prompt", "route"),
    *product(("reference", "step", "C++"), ["experts_down"]),
    *product(("reference", "step", "rows", "C++"), ["sparse_moe"]),
]


def made_logits(experts: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(experts)
    logits = 3 * torch.randn(6, experts, generator=generator)
    values = torch.tensor([-9.0, -2.5, -1e-30, -0.0, 0.0, 1e-30, 7.0, 9.0])
    for row, count in zip(TIES, (5, len(values)), strict=True):
        logits[row] = values[torch.randint(0, count, (experts,), generator=generator)]
    logits[EQUAL], logits[PADDING] = -3.0, torch.nan
    return logits.to(device, dtype)


def weight(values: Tensor, name: str) -> Weight:
    return Weight(pack_panels(None, values, None)[0], in_panels=True) if name == "C++" else Weight(values)


def shares_of(kernels: Any, name: str, operation: str, logits: Tensor, top_k: int, slots: Tensor) -> Tensor:
    """Return the share of each row in each expert, [rows, E] float64, as an operation uses it: expert e adds its share to
    element e of the output."""
    rows, count = logits.shape
    if operation == "route":
        shares, chosen = kernels.route(logits, top_k, slots)
        assert shares.shape == chosen.shape == (rows, top_k) and shares.dtype == F32
        if name == "prompt":
            # Other forms do not promise the order.
            assert chosen.dtype == torch.int32 and torch.equal(chosen[slots >= 0], route(logits[slots >= 0], top_k)[1])
        found = torch.zeros(rows, count + 1, dtype=F64, device=logits.device)
        return found.scatter(1, chosen.long(), shares.double())[:, :count]
    size = count if operation == "experts_down" else 64 if count <= 64 else 256
    down = weight(torch.eye(size).to(logits)[:count, :, None].contiguous(), name)
    if operation == "experts_down":
        ones, zeros = logits.new_ones(rows, top_k), torch.zeros_like(logits)
        return kernels.experts_down(ones, logits, top_k, down, None, zeros).double()
    # A normed row has a single element, the root of its size. The gate multiplies it to the row's logits.
    root = size**0.5
    x = 2**-20 * torch.eye(size).to(logits)[:rows]
    gate = torch.zeros(count, size).to(logits)
    gate[:, :rows] = logits.masked_fill((slots < 0)[:, None], 0).t() / root
    x[slots < 0] = torch.nan
    # The inner activation is silu(128) / 128 = 1.
    gate_up = torch.tensor([[128 / root], [1 / 128 / root]]).to(logits).expand(count, 2, size).contiguous()
    norm, routed = Norm(torch.ones(size, device=logits.device), 0.0), ExpertWeights(weight(gate_up, name), down)
    out = kernels.sparse_moe(x, norm, weight(gate, name).values, None, top_k, routed, None, slots)
    return (out.double() - x.double())[:, :count]


@contract(
    "name operation size dtype",
    [
        *((*form, size, dtype) for form, size, dtype in checkered(ROUTED, SIZES, (F32, BF16))),
        *product(["prompt"], ["route"], [*SIZES, (256, 8), (20, 20), (33, 1)], (F32, BF16)),
    ],
)
def test_routing(
    kernels_of: Callable[[str], Any], name: str, operation: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    """The softmax over the k experts with the largest logits, of equal ones the first. Padding reaches no expert."""
    logits = made_logits(size[0], dtype, FORMS[name].device)
    slots = torch.tensor([3, 3, 3, 2, 2, -1], device=logits.device)
    if operation == "experts_down":
        logits, slots = logits[:5], slots[:5]
    found = shares_of(kernels_of(name), name, operation, logits, size[1], slots)
    if operation == "route":
        assert not found[PADDING].any()
        shares, chosen = kernels_of(name).route(logits[:1], size[1], slots[:1])
        assert torch.equal(found[:1].gather(1, chosen.long()), shares.double())
        if name == "prompt":
            # All logits of a row that is not padding are NaN.
            shares, chosen = kernels_of(name).route(logits[PADDING], size[1], slots[:1])
            assert shares.isnan().all() and torch.equal(chosen, torch.arange(size[1]).to(chosen)[None])
    # The reference takes any experts of equal logits.
    tokens = RANDOM if (name, operation) == ("reference", "route") else [*RANDOM, *TIES, *EQUAL]
    shares, chosen = route(logits[tokens], size[1])
    limit = 1e-5 if operation == "route" or dtype == F32 else 1e-2
    torch.testing.assert_close(
        found[tokens], torch.zeros_like(found[tokens]).scatter(1, chosen, shares), atol=limit / 10, rtol=limit
    )


@contract("name size dtype", checkered(("reference", "step", "C++"), SIZES, (F32, BF16)))
def test_order_of_inner_activations(
    kernels_of: Callable[[str], Any], name: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    """Experts stand in falling order of their logits, of equal ones the first one first. The inner activations of each are
    the bits of its index."""
    logits, (count, top_k) = made_logits(size[0], dtype, FORMS[name].device)[:5], size
    gate_up = torch.full((count, 16, 8), 16.0)
    gate_up[:, 8:] = (torch.arange(count)[:, None, None] >> torch.arange(8)[:, None] & 1) / 1024
    norm, routed = Norm(torch.ones(8, device=logits.device), 0.0), weight(gate_up.to(logits), name)
    found = kernels_of(name).experts_gate_up(logits.new_ones(5, 8), norm, logits, top_k, routed, None)
    chosen = (found.unflatten(1, (top_k, 8)) * 2 ** torch.arange(8, device=logits.device)).sum(2)
    assert torch.equal(chosen.long(), route(logits, top_k)[1])


@contract("name size", product(["reference", "prompt", "step", "C++"], [1e4, 3e38, torch.inf]))
def test_large_logits(kernels_of: Callable[[str], Any], name: str, size: float) -> None:
    logits = 100 * torch.linspace(-1, 1, 11, device=FORMS[name].device).expand(2, 11).clone()
    logits[:, 4] = -size
    logits[1, 7] = min(size, 3e38)
    shares, chosen = route(logits, 3)
    for operation in (
        ("route",) if name == "prompt" else ("experts_down",) if name != "reference" else ("route", "experts_down")
    ):
        slots = torch.zeros(2, dtype=torch.int64, device=logits.device)
        found = shares_of(kernels_of(name), name, operation, logits, 3, slots)
        torch.testing.assert_close(found, torch.zeros_like(found).scatter(1, chosen, shares), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", (route_triton, reference), ids=("prompt", "reference"))
def test_route_of_nan_stays_in_range(kernels: Any) -> None:
    """An index out of range would be an illegal address in the experts, and end the process."""
    weights, chosen = kernels.route(torch.full((2, 10), torch.nan, device=DEVICE), 4, torch.arange(2, device=DEVICE))
    assert weights.isnan().all()
    assert ((chosen >= 0) & (chosen < 10)).all()


# One row and several, in fixed point and in float32.
SEVERAL = (5, [(replace(FIXED, experts=4), BF16), (FLOATS, F32)])
# For inputs in float32 and weights in int4, the C++ kernels turn inputs into bytes.
SMALL = {
    "step": (1, [(Shape(hidden=64), BF16), (FLOATS, F32)]),
    "step of several": (5, [(Shape(experts=4, top_k=1, hidden=64, shared=None), BF16), (FLOATS, F32)]),
    "C++": (5, [*SEVERAL[1], (Shape(), F32)]),
}
EACH = [
    (name, operation, *layer)
    for name in ("reference", "step", "step of several", "rows", "prompt", "C++")
    for operation in FORMS[name].operations
    for layer in SMALL.get(name, SEVERAL)[1]
]


# The interpreter takes one program after the other: there all kernels but those in C++ have no choice.
@contract("name operation shape dtype", [case for case in EACH if DEVICE == "cuda" or case[0] == "C++"])
def test_repeated_bit_for_bit(
    kernels_of: Callable[[str], Any], name: str, operation: str, shape: Shape, dtype: torch.dtype
) -> None:
    rows = {"step": 1, "step of several": 8}.get(name, 33)
    case, kernels = made(name, shape, rows, dtype), kernels_of(name)
    assert same_bits(case.run(kernels, operation), case.run(kernels, operation))


@contract("name operation shape dtype", EACH)
def test_nan_shows_in_its_row_alone(
    kernels_of: Callable[[str], Any], name: str, operation: str, shape: Shape, dtype: torch.dtype
) -> None:
    for rows in (1, 7) if name == "C++" else (SMALL.get(name, SEVERAL)[0],):
        for operand in ("hidden", "logits") if operation == "experts_down" else ("x",):
            case, bad = made(name, shape, rows, dtype), rows // 2
            getattr(case, operand)[bad, 3] = torch.nan
            out = case.run(kernels_of(name), operation)
            assert out[bad].isnan().all() and out[torch.arange(rows) != bad].isfinite().all()


STEPS = [(shape, (BF16, F32)[turn % 2]) for turn, shape in enumerate(STEP_ROWS_SHAPES)]
MIXTURES = [(name, *layer) for name in ("reference", "rows", "C++") for layer in SEVERAL[1]]


@contract("name shape dtype", MIXTURES)
def test_a_row_does_not_depend_on_its_company(
    kernels_of: Callable[[str], Any], name: str, shape: Shape, dtype: torch.dtype
) -> None:
    """Rows beside others, NaN in one of them, and padding of NaN; experts that only padding would choose are NaN."""
    kernels, kept, bad, padding = kernels_of(name), [1, 4, 7], 3, [0, 8]
    case = made(name, shape, 9, dtype)
    alone = case.run(kernels, "sparse_moe", with_slots=False)
    others = replace(case, x=case.x.roll(4, dims=0), slots=case.slots.clone())
    others.x[kept], others.slots[[*padding, bad]] = case.x[kept], -1
    others = others.poisoned("sparse_moe")
    others.x[padding], others.x[bad, 5], others.slots[bad] = torch.nan, torch.nan, bad
    out = others.run(kernels, "sparse_moe")
    assert out[bad].isnan().all() and out[[1, 2, 4, 5, 6, 7]].isfinite().all()
    if name == "rows":
        torch.testing.assert_close(out[kept], alone[kept], rtol=0, atol=0)
    else:
        # Products may take other numbers of rows together.
        assert relative_error(out[kept], alone[kept]) < FORMS[name].error("sparse_moe", shape, dtype)
        assert torch.equal(case.run(kernels, "sparse_moe"), alone)


@contract("shape dtype", STEPS)
def test_a_row_of_a_step_has_the_same_bits_among_any_number(shape: Shape, dtype: torch.dtype) -> None:
    """One row, and the same row among others and padding, whose result is its residual. Experts that only padding would
    choose are NaN."""
    case, padding = made("step", shape, 8, dtype), [0, 3]
    every = case.run(rows_triton, "sparse_moe", with_slots=False)
    for rows in (1, 2, 5):
        some = replace(case, x=case.x[-rows:], slots=case.slots[-rows:].clone())
        if rows > max(padding):
            some.slots[padding] = -1
        out, tokens = some.poisoned("sparse_moe").run(rows_triton, "sparse_moe"), some.slots >= 0
        assert out.isfinite().all() and torch.equal(out[tokens], every[-rows:][tokens])
        assert torch.equal(out[~tokens], some.x[~tokens])


def test_a_program_takes_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is not room for all programs at once; the last one takes fewer. Padding's programs take several, too. A
    single token's take one."""
    case = made("step", Shape(experts=3, top_k=2, hidden=128, inner=128, shared=128, group=128), 2, BF16)
    case.slots[0] = -1
    cases = case, replace(case, x=case.x[1:], slots=case.slots[1:])
    expected = [one.run(rows_triton, "sparse_moe") for one in cases]
    monkeypatch.setattr(step_triton, "GATE_UP_ROOM", 40)
    monkeypatch.setattr(step_triton, "DOWN_ROOM", 5)
    for one, out in zip(cases, expected, strict=True):
        assert torch.equal(one.run(rows_triton, "sparse_moe"), out)


@contract("name shape dtype", MIXTURES)
def test_all_rows_take_the_first_experts(
    kernels_of: Callable[[str], Any], name: str, shape: Shape, dtype: torch.dtype
) -> None:
    """All logits are equal. More rows than fit one block."""
    case = made(name, shape, 17, dtype)
    zero = replace(case.gate.weight, values=torch.zeros_like(case.gate.weight.values))
    case = replace(case, gate=replace(case.gate, weight=zero, numbers=torch.zeros_like(case.gate.numbers)))
    check(case, kernels_of(name), "sparse_moe", FORMS[name].error("sparse_moe", shape, dtype))


CHOSEN = {"the first": [0], "the last": [7], "some": [1, 2, 4, 5]}


@contract("name experts", product(("reference", "prompt", "C++"), CHOSEN))
def test_experts_of_many_rows(kernels_of: Callable[[str], Any], name: str, experts: str) -> None:
    """The chosen experts have blocks that are full, the others have none. Indices may be int32 or int64."""
    some, kernels = torch.tensor(CHOSEN[experts]), kernels_of(name)
    case = made(name, Shape(top_k=min(2, len(some)), shared=None), 67, F32)
    chosen = some[(torch.arange(67)[:, None] + torch.arange(case.shape.top_k)) % len(some)].to(case.chosen)
    case = replace(case, chosen=chosen)
    check(case, kernels, "experts", FORMS[name].error("experts", case.shape, F32), reads_all(name, "experts"))
    wide = replace(case, chosen=chosen.long())
    assert torch.equal(wide.run(kernels, "experts"), case.run(kernels, "experts"))


@contract("name shape dtype", product(("prompt", "C++"), (Shape(shared=None), FLOATS), (F32, BF16)))
def test_one_row_may_have_few_experts_or_none(
    kernels_of: Callable[[str], Any], name: str, shape: Shape, dtype: torch.dtype
) -> None:
    kernels, case = kernels_of(name), made(name, shape, 1, dtype)
    for kept in ([0], [shape.top_k - 1], []):
        chosen = torch.full_like(case.chosen, shape.experts)
        chosen[:, kept] = case.chosen[:, kept]
        some = replace(case, chosen=chosen)
        if kept:
            check(some, kernels, "experts", FORMS[name].error("experts", shape, dtype))
        else:
            assert not some.poisoned("experts").run(kernels, "experts").any()
