"""Configurations, schedules, limits and traces of the Triton kernels of the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels import launch
from ostinato.export.kernels.experts import prefill_triton, rows_schedule_triton, rows_triton, step_triton
from ostinato.export.kernels.experts.limits import check_experts
from ostinato.export.kernels.operands import Weight

from .conftest import run_compiled
from .experts_cases import FIXED, FLOATS, ROWS_SHAPES, ROWS_SHAPES_F32, Case, Expert, Shape, check, make
from .linear_cases import F16
from .runs import DEVICE, checkered, padded
from .test_experts import ROWS, rows_error, step_error
from .weights import BF16, EPS, F32, Operand


@pytest.mark.parametrize(
    "config", [step_triton.Config(1 << 16, 16, 1), step_triton.Config(1 << 16, 4, 2)][: 1 + (DEVICE == "cuda")], ids=str
)
@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        ("experts_gate_up", Shape(2, 1, 1088, 64, None, 64)),
        ("experts_gate_up", Shape(2, 1, 330, 16, None, None)),
        ("experts_down", Shape(4, 3, 64, 320, 1088, 32)),
        ("experts_down", Shape(4, 3, 16, 70, 9, None)),
        ("experts_down", Shape(4, 3, 16, 70, 300, None)),
    ],
    ids=str,
)
def test_rows_in_several_tiles(
    operation: str, shape: Shape, config: step_triton.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the shared expert's: several rows per tile, in several tiles, or one row in several tiles."""
    for configs in (step_triton.GATE_UP, step_triton.DOWN):
        for dtype in configs:
            monkeypatch.setitem(configs, dtype, config)
    check(make(shape, 1, BF16), step_triton, operation, step_error(operation, shape, BF16))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_smaller_gpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: launch.SMALL)
    check_prompt(Shape(hidden=256, inner=128, shared=None, group=128), 17, dtype)


def check_prompt(shape: Shape, rows: int, dtype: torch.dtype) -> None:
    check(make(shape, rows, dtype), prefill_triton, "experts", rows_error("experts", shape, dtype))


@pytest.mark.parametrize("group", (None, 32))
@pytest.mark.parametrize("rows", (1, 70))
def test_several_steps_of_sorting(rows: int, group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 70 rows: choices that no block holds at once."""
    monkeypatch.setattr(prefill_triton, "BLOCK_SORT", 32)
    check_prompt(Shape(hidden=192, top_k=3, shared=None, group=group), rows, F32)


@pytest.mark.parametrize("form", (None, Int4(64), Int4(32, F16), Int4Min(32, F16), Int8(32, F16)), ids=str)
def test_weights_in_panels(form: Format | None) -> None:
    """As they come from the host: the same bits as in rows."""
    shape = Shape(shared=None, group=None, form=form)
    case, panels = (make(shape, 5, BF16, panels=panels) for panels in (False, True))
    assert torch.equal(panels.run(prefill_triton, "experts"), case.run(prefill_triton, "experts"))


@pytest.mark.parametrize(("lengths", "group"), checkered([(1, 16), (17, 32), (40, 64)], [None, 32]), ids=str)
def test_rows_of_no_expert(lengths: tuple[int, int], group: int | None) -> None:
    """Padding of NaN behind a prompt: the tokens' outputs are as without it, bit by bit, its own are zeros."""
    length, rows = lengths
    case = make(Shape(shared=None, group=group), length, BF16)
    chosen = F.pad(case.chosen, (0, 0, 0, rows - length), value=case.shape.experts)
    more = replace(case, x=padded(case.x, rows), shares=padded(case.shares, rows), chosen=chosen)
    out = more.run(prefill_triton, "experts")
    assert torch.equal(out[:length], case.run(prefill_triton, "experts")) and not out[length:].any()


@pytest.mark.parametrize("rows", (1, 9))
def test_strided_rows_and_int64_indices(rows: int) -> None:
    case = make(Shape(shared=None), rows, BF16)
    strided = torch.cat((torch.zeros_like(case.x), case.x), dim=1)[:, case.x.shape[1] :]
    other = replace(case, x=strided, chosen=case.chosen.long())
    assert torch.equal(other.run(prefill_triton, "experts"), case.run(prefill_triton, "experts"))


def test_which_form_rows_take() -> None:
    def in_fixed_point(shape: Shape, dtype: torch.dtype) -> bool:
        case = make(shape, 1, dtype)
        routed, shared = case.routed.weights, None if case.shared is None else case.shared.weights
        gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
        return rows_triton.takes_fixed_point((routed.gate_up, gate_up), (routed.down, down), dtype)

    fixed = [in_fixed_point(shape, BF16) for shape in ROWS_SHAPES]
    assert fixed == [True] * 7 + [False] * 10 + [True, False]
    assert not any(in_fixed_point(shape, F32) for shape in (FIXED, *ROWS_SHAPES_F32))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (replace(FIXED, experts=4, top_k=1, shared=None), 200),
        # Down projections by four warps, by two (768), and by four in two turns.
        (replace(FIXED, experts=3, inner=512, shared=512), 17),
        (replace(FIXED, experts=3, inner=768, shared=768), 17),
        (replace(FIXED, experts=3, inner=1024, shared=None), 17),
        (FIXED, 300),
        *([(Shape(256, 8, 2048, 512, 512, 128), 512), (replace(FLOATS, experts=6), 511)] if DEVICE == "cuda" else []),
    ],
    ids=str,
)
def test_many_rows(shape: Shape, rows: int) -> None:
    """A block has eight rows, so experts have some or many blocks. More than 256 rows take the kernels for prompts."""
    check(make(shape, rows, BF16), rows_triton, "sparse_moe", rows_error("sparse_moe", shape, BF16))


@pytest.mark.parametrize("rows", (1, 16))
def test_few_rows_are_computed_as_single_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = make(FLOATS, rows, F32), []

    def sparse_moe(*operands: Any) -> torch.Tensor:
        calls.append(operands)
        return case.hidden

    monkeypatch.setattr(step_triton, "sparse_moe", sparse_moe)
    assert case.run(rows_triton, "sparse_moe") is case.hidden
    case.run(step_triton, "sparse_moe")
    make(FLOATS, 17, F32).run(rows_triton, "sparse_moe")
    first, second = calls
    assert len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("count", "shared"), [*checkered((33, 15), (256, None)), (300, 256)])
def test_each_choice_has_one_place_in_the_schedule(count: int, shared: int | None) -> None:
    """Each choice of a row that is not padding stands in one block of its expert, and has a place of its own."""
    case = make(Shape(40, 3, 256, 256, shared, 128), count, BF16)
    slots = torch.arange(count, device=DEVICE) % 7 - 1
    gates = case.gate.weight.values, None if case.shared_gate is None else case.shared_gate.weight.values
    routed = rows_triton._route(case.x, case.norm.weight, EPS, *gates, 3, slots, True, False, False)
    schedule, places = rows_triton._schedule(routed[3], routed[4], 3, shared is not None)
    chosen = case.routing("sparse_moe")[1].tolist()
    expected = [(expert, row) for row in range(count) for expert in chosen[row] if slots[row] >= 0]
    expected += [(40, row) for row in range(count) if shared]
    block, rows_at, parts_at = (
        one.value
        for one in (rows_schedule_triton.BLOCK, rows_schedule_triton.RECORD_ROWS, rows_schedule_triton.RECORD_PARTS)
    )
    found: list[tuple[int, int]] = []
    known_parts: list[int] = []
    known_places: list[int] = []
    experts: list[int] = []
    for record in schedule.tolist():
        expert, place, rows, parts = record[0], record[1], record[rows_at:][:block], record[parts_at:][:block]
        if expert >= 0:
            filled = sum(row >= 0 for row in rows)
            assert rows[filled:] == parts[filled:] == [-1] * (block - filled)
            assert [part // (4 if shared else 3) for part in parts[:filled]] == rows[:filled]
            found += [(expert, row) for row in rows[:filled]]
            known_parts += parts[:filled]
            known_places += range(place, place + filled)
            experts.append(expert)
    assert sorted(found) == sorted(expected)
    assert len(set(known_parts)) == len(set(known_places)) == len(found)
    assert max(known_places) < places
    # No expert has more blocks than it needs, so its weights are read once for each eight of its rows.
    counts = torch.tensor([expert for expert, _ in expected]).bincount(minlength=41)
    assert torch.equal(torch.tensor(experts).bincount(minlength=41), (counts + block - 1) // block)


@pytest.mark.parametrize(
    ("sizes", "limit"),
    (
        ((2048, 512, 2000, 8, Int4(128)), "1 to 1024 experts"),
        ((2048, 512, 8, 9, Int4(128)), "1 to 8"),
        ((2048, 48, 256, 8, Int8(32)), "intermediate size must be a multiple of 32 for experts in int8 g32"),
        ((2048, 96, 256, 8, Int4(32)), "intermediate size must be a multiple of 64"),
        ((2048 + 32, 512, 256, 8, Int4Min()), "hidden size must be a multiple of 64 for experts in int4_min g32"),
        ((2048 + 64, 512, 256, 8, Int4(128)), "hidden size must be a multiple of 128"),
    ),
)
def test_refusals(sizes: tuple[int, int, int, int, Format | None], limit: str) -> None:
    check_experts(2048, 512, 256, 8, Int4(128))
    check_experts(2048 + 32, 96, 256, 8, Int8(32))
    check_experts(100, 36, 256, 8, None)
    with pytest.raises(ExportError, match=limit):
        check_experts(*sizes)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("routed", (True, False))
@pytest.mark.parametrize(
    ("kernels", "operation", "rows"),
    [(step_triton, "experts_gate_up", 1), (step_triton, "experts_down", 1), (ROWS, "sparse_moe", 5)],
    ids=("experts_gate_up", "experts_down", "sparse_moe"),
)
def test_only_some_weights_are_integers(
    kernels: Any, operation: str, rows: int, routed: bool, dtype: torch.dtype
) -> None:
    """The routed experts' or the shared expert's."""
    case, other = (
        make(replace(Shape(experts=4, hidden=64, shared=128), group=group, form=form), rows, dtype)
        for group, form in ((None, None), (64, Int4Min(32, F16)))
    )
    case = replace(case, **({"routed": other.routed} if routed else {"shared": other.shared}))
    error = step_error if rows == 1 else rows_error
    check(case, kernels, operation, error(operation, case.shape, dtype))


def with_weights(case: Case, gate_up: Weight, down: Weight) -> Case:
    nothing = torch.empty(0)
    return replace(case, routed=Expert(Operand(gate_up, nothing), Operand(down, nothing)))


def test_what_a_step_does_not_take() -> None:
    case = make(Shape(), 1, BF16)
    gate_up, down = case.routed.weights.gate_up, case.routed.weights.down
    assert gate_up.scale is not None
    fewer = replace(gate_up, values=gate_up.values[..., :16].contiguous(), scale=gate_up.scale[..., :1].contiguous())
    with pytest.raises(ExportError, match="K a multiple of 64 and of the group size"):
        with_weights(case, fewer, down).run(step_triton, "experts_gate_up")
    case = make(Shape(group=None), 1, BF16)
    values = case.routed.gate_up.weight.values, case.routed.down.weight.values
    half, biased = ([Weight(one.half()) for one in values], [Weight(one, bias=one[0, :, 0]) for one in values])
    for weights, message in ((half, r"format of integers, got torch\.float16"), (biased, "without a bias")):
        for operation in ("experts_gate_up", "experts_down"):
            with pytest.raises(ExportError, match=message):
                with_weights(case, *weights).run(step_triton, operation)


def test_more_rows_than_a_step_has_are_refused() -> None:
    case = make(FIXED, 2, BF16)
    with pytest.raises(ExportError, match="up to 512 rows, not 513"):
        replace(case, x=torch.zeros(513, FIXED.hidden, dtype=BF16, device=DEVICE)).run(rows_triton, "sparse_moe")


# Prints for a single row, for up to 8, 16 and 256, and for 257 to 512: our operators, the range of each dimension that is a
# symbol, the rows of the result.
TRACED = """
import torch
from tests.export.kernels.compiled_launches import BF16, INNER, ExpertsLayer

for max_rows in (1, 8, 16, 256, 512):
    rows = torch.export.Dim("rows", min=257 if max_rows == 512 else 2, max=max_rows) if max_rows > 1 else None
    with torch.device("meta"):
        layer, inputs = ExpertsLayer(BF16, 128, INNER), ExpertsLayer.inputs({1: 1, 512: 300}.get(max_rows, 7), BF16)
        dynamic = ({0: rows}, {0: rows}) if max_rows > 1 else None
        program = torch.export.export(layer, inputs, dynamic_shapes=dynamic, strict=False)
    *nodes, output = program.run_decompositions({}).graph.nodes
    operators = [str(node.target) for node in nodes if "ostinato" in str(node.target)]
    ranges = [(int(one.lower), int(one.upper)) for one in program.range_constraints.values()]
    print(operators, ranges, type(output.args[0][0].meta["val"].shape[0]).__name__)
"""


def test_traced() -> None:
    """Three operators for a single row, and for up to 16. One operator for several rows. Nothing in them depends on how many.
    Many rows have the operators of a prompt."""
    step = [f"ostinato.{name}.default" for name in ("route_logits", "experts_gate_up", "experts_down")]
    prompt = [f"ostinato.{name}.default" for name in ("route", "experts", "dequantize", "dequantize")]
    assert run_compiled(TRACED).splitlines() == [
        *(f"{step} [] int", f"{step} [(2, 8)] SymInt", f"{step} [(2, 16)] SymInt"),
        "['ostinato.sparse_moe_rows.default'] [(2, 256)] SymInt",
        f"{prompt} [(257, 512)] SymInt",
    ]


TRACED_PROMPT = """
import torch
from ostinato.export.kernels.experts.prefill_triton import experts
from ostinato.export.kernels.experts.route_triton import route
from ostinato.export.kernels.operands import ExpertWeights, Weight

class Moe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(128, 8, bias=False)
        self.register_buffer("gate_up", torch.zeros(8, 128, 64, dtype=torch.uint8))
        self.register_buffer("gate_up_scale", torch.zeros(8, 128, 4, dtype=torch.bfloat16))
        self.register_buffer("down", torch.zeros(8, 128, 32, dtype=torch.uint8))
        self.register_buffer("down_scale", torch.zeros(8, 128, 2, dtype=torch.bfloat16))

    def forward(self, x):
        weights, chosen = route(self.router(x), 2, torch.arange(x.shape[0]))
        gate_up = Weight.of(self.gate_up, self.gate_up_scale, None, None, "int4")
        down = Weight.of(self.down, self.down_scale, None, None, "int4")
        return experts(x, weights, chosen, ExpertWeights(gate_up, down))

def ops(program):
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("ostinato.")]

tokens = torch.export.Dim("tokens", min=2, max=255)
program = torch.export.export(Moe(), (torch.zeros(17, 128),), dynamic_shapes=({0: tokens},))
assert ops(program) == ["ostinato.route.default", "ostinato.experts.default"], ops(program)
(limits,) = program.range_constraints.values()
assert (limits.lower, limits.upper) == (2, 255), limits
(output,) = program.graph.output_node().args[0]
assert output.meta["val"].shape[0].node.expr.is_symbol, output.meta["val"].shape
program = torch.export.export(Moe(), (torch.zeros(1, 128),))
assert ops(program) == ["ostinato.route.default", "ostinato.experts.default"], ops(program)
"""


def test_export_keeps_the_number_of_tokens_open() -> None:
    run_compiled(TRACED_PROMPT)
