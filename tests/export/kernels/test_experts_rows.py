"""A step's mixture of experts for several rows: the Triton kernels against their reference in float64, and the export.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.experts import reference, rows_schedule_triton, rows_triton, step_triton
from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight

from ...comparison import relative_error
from .conftest import run_compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# Relative to the reference in float64. In bfloat16 logits, each expert's part and, but for fixed point, normed rows and
# inner activations are rounded.
TOLERANCE = {F32: 1e-5, BF16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """`shared` is the shared expert's inner size, None without one; `group` is None for weights in `dtype`."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    inner: int = 256
    shared: int | None = 256
    group: int | None = 128
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        sizes = f"{self.experts}-{self.top_k}-{self.hidden}-{self.inner}-{self.shared}"
        return f"{sizes}-{self.group}-{str(self.dtype)[6:]}"

    @property
    def in_fixed_point(self) -> bool:
        return rows_triton.takes_fixed_point(self.hidden, self.inner, self.shared or 0, self.group or 0, self.dtype)


FIXED = Shape()
FEW = Shape(experts=4)
FLOATS = Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None, dtype=F32)
CASES = (
    (FIXED, 2),
    (FIXED, 17),
    (FIXED, 33),
    (Shape(experts=40, top_k=3, hidden=512, shared=None), 3),
    (Shape(top_k=1), 16),
    (Shape(shared=128), 7),
    (Shape(hidden=128, inner=128, shared=128), 17),
    (Shape(hidden=192, inner=64, shared=128, group=64), 7),
    (Shape(hidden=64, inner=192, shared=None, group=32), 16),
    (Shape(hidden=128, inner=128, shared=128, dtype=F32), 16),
    (Shape(hidden=64, inner=64, shared=64, group=32, dtype=F32), 2),
    (FLOATS, 33),
    (Shape(experts=33, top_k=3, hidden=96, inner=40, shared=None, group=None), 7),
)


class Layer:
    """Random arguments of the operator."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        experts, size, inner = shape.experts, shape.hidden, shape.inner
        self.norm = Norm(self.normal(size) * 0.3, EPS)
        self.gate = (self.normal(experts, size) * size**-0.5 * 2).to(shape.dtype)
        self.routed = ExpertWeights(self.weight(experts, 2 * inner, size), self.weight(experts, size, inner))
        self.shared: ExpertWeights | None = None
        self.shared_gate: Tensor | None = None
        if shape.shared is not None:
            self.shared_gate = (self.normal(1, size) * size**-0.5).to(shape.dtype)
            self.shared = ExpertWeights(self.weight(2 * shape.shared, size), self.weight(size, shape.shared))

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE)

    def weight(self, *size: int) -> Weight:
        if self.shape.group is None:
            return Weight((self.normal(*size) * size[-1] ** -0.5).to(self.shape.dtype))
        q = torch.randint(-8, 8, size, generator=self.generator)
        scale = self.normal(*size[:-1], size[-1] // self.shape.group) * size[-1] ** -0.5 / 4
        return Weight(pack_int4(q).to(DEVICE), scale.bfloat16())

    def rows(self, count: int) -> Tensor:
        """Rows that choose the same experts if their logits are rounded."""
        x = self.normal(8 * count, self.shape.hidden).to(self.shape.dtype)
        values = self.logits(x).sort(descending=True).values
        apart = values[:, self.shape.top_k - 1] - values[:, self.shape.top_k] > 0.1
        assert apart.sum() >= count
        return x[apart][:count].contiguous()

    def logits(self, x: Tensor) -> Tensor:
        norm = Norm(self.norm.weight.double(), EPS)
        return reference.route_logits(x.double(), norm, self.gate.double(), None)

    def out(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        arguments = x, self.norm, self.gate, self.shared_gate, self.shape.top_k, self.routed, self.shared, slots
        out = rows_triton.sparse_moe(*arguments)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        return out

    def exact(self, x: Tensor) -> Tensor:
        """What the experts give, without the residual stream."""
        gate = None if self.shared_gate is None else self.shared_gate.double()
        norm = Norm(self.norm.weight.double(), EPS)
        arguments = x.double(), norm, self.gate.double(), gate, self.shape.top_k, self.routed, self.shared
        return reference.sparse_moe(*arguments, None) - x.double()

    def check(self, x: Tensor) -> None:
        found = self.out(x).double() - x.double()
        assert relative_error(found, self.exact(x)) < TOLERANCE[self.shape.dtype]


@pytest.mark.parametrize(("shape", "rows"), CASES, ids=[f"{shape}-{rows}" for shape, rows in CASES])
def test_rows(shape: Shape, rows: int) -> None:
    layer = Layer(shape, rows)
    layer.check(layer.rows(rows))


def test_which_form_is_taken() -> None:
    assert [shape.in_fixed_point for shape, _ in CASES] == [True] * 5 + [False] * 8


def test_equal_logits() -> None:
    """Then all rows choose the experts with the lowest indices, which have several blocks."""
    layer = Layer(FIXED)
    layer.gate.zero_()
    layer.check(layer.normal(17, FIXED.hidden).to(BF16))


def test_one_row_is_computed_as_a_single_token() -> None:
    layer = Layer(FLOATS)
    x = layer.rows(1)
    arguments = x, layer.norm, layer.gate, layer.shared_gate, FLOATS.top_k, layer.routed, layer.shared, None
    assert torch.equal(layer.out(x), step_triton.sparse_moe(*arguments))


@pytest.mark.parametrize("shape", (FEW, FLOATS), ids=str)
def test_a_row_does_not_depend_on_the_others(shape: Shape) -> None:
    """Nor does anything on the order in which programs run: the same bits in each run. NaN stays in its row."""
    layer = Layer(shape)
    x = layer.rows(9)
    out = layer.out(x)
    assert torch.equal(layer.out(x), out)
    others = layer.rows(9)
    others[7] = x[7]
    others[3, 5] = torch.nan
    found = layer.out(others)
    assert torch.equal(found[7], out[7])
    assert found[3].isnan().all()
    assert found.isnan().all(1).sum() == found.isnan().any(1).sum() == 1


@pytest.mark.parametrize("shape", (FEW, FLOATS), ids=str)
def test_padding_changes_nothing(shape: Shape) -> None:
    layer = Layer(shape)
    x = layer.rows(9)
    out = layer.out(x)
    slots = torch.arange(9, device=DEVICE) % 4 - 1
    x[slots < 0] = torch.nan
    assert torch.equal(layer.out(x, slots)[slots >= 0], out[slots >= 0])


@pytest.mark.parametrize("shared", (0, 256))
@pytest.mark.parametrize("count", (33, 15))
def test_plan(count: int, shared: int) -> None:
    """Each choice of a row that is not padding stands in one block of its expert, and has a place of its own."""
    layer = Layer(Shape(experts=40, top_k=3, shared=shared or None))
    x = layer.rows(count)
    slots = torch.arange(count, device=DEVICE) % 7 - 1
    routed = rows_triton._route(x, layer.norm.weight, EPS, layer.gate, layer.shared_gate, 3, slots, True)
    schedule, places = rows_triton._schedule(routed[2], routed[3], 3, shared > 0)
    chosen = layer.logits(x).topk(3).indices.tolist()
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


def test_refusals() -> None:
    layer = Layer(FIXED)
    with pytest.raises(ExportError, match="up to 256 rows, not 257"):
        layer.out(torch.zeros(257, FIXED.hidden, dtype=BF16, device=DEVICE))
    layer.shared = Layer(Shape(group=64)).shared
    with pytest.raises(ExportError, match=r"int4 in groups of 128.* got int4 in groups of 64"):
        layer.out(layer.rows(2))


# Prints for 16 and for 256 rows at most: our operators, the range of each dimension that is a symbol, the rows of the result.
TRACED = """
import torch
from tests.export.kernels.compiled_launches import BF16, INNER, ExpertsLayer

for max_rows in (16, 256):
    rows = torch.export.Dim("rows", min=2, max=max_rows)
    with torch.device("meta"):
        layer, inputs = ExpertsLayer(BF16, 128, INNER), ExpertsLayer.inputs(15, BF16)
        program = torch.export.export(layer, inputs, dynamic_shapes=({0: rows}, {0: rows}), strict=False)
    *nodes, output = program.run_decompositions({}).graph.nodes
    operators = [str(node.target) for node in nodes if "ostinato" in str(node.target)]
    ranges = [(int(one.lower), int(one.upper)) for one in program.range_constraints.values()]
    print(operators, ranges, type(output.args[0][0].meta["val"].shape[0]).__name__)
"""


def test_traced() -> None:
    """One operator for any number of rows: nothing in it depends on how many."""
    assert run_compiled(TRACED).splitlines() == [
        f"['ostinato.sparse_moe_rows.default'] [(2, {max_rows})] SymInt" for max_rows in (16, 256)
    ]
