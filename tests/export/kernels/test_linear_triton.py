"""Configurations, formats, limits and traces of the Triton kernels of the linear layers."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
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
from ostinato.export.kernels.linear import (
    prefill_triton,
    reference,
    rows_direct_configs,
    rows_triton,
    step_triton,
)
from ostinato.export.kernels.linear.limits import check_weight
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.linear.rows_direct_configs import FloatsConfig
from ostinato.export.kernels.linear.step_triton import StepConfig, config_for, units_per_lane
from ostinato.export.kernels.operands import HeadSquares, Weight

from .conftest import run_compiled
from .linear_cases import PROMPT_SHAPES, Case, Shape, check, make
from .runs import SLOT, Run, checkered
from .test_linear import STEP, step_error
from .weights import BF16, EPS, F32, Random

each_dtype = pytest.mark.parametrize("dtype", (F32, BF16), ids=str)


@pytest.mark.parametrize(
    ("sizes", "layer", "operation"),
    checkered(
        [(1, 1, 1), (2, 8, 1), (8, 4, 2), (16, 2, 4), (32, 1, 2)],
        [
            (32, F32, False),
            (64, BF16, False),
            (64, BF16, True),
            (Int4Min(), BF16, True),
            (Int8(), BF16, True),
            (None, BF16, False),
            (None, F32, False),
        ],
        ("norm_linear_conv", "linear_add"),
    ),
    ids=str,
)
def test_configurations(
    sizes: tuple[int, int, int],
    layer: tuple[int | Format | None, torch.dtype, bool],
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `config_for` chooses for large weights, on small ones: several tiles per row, rows past the end."""
    (rows, warps, runs), (group, dtype, integer) = sizes, layer
    config = StepConfig(rows, warps, 1 if group else runs, integer, gate_rows=min(rows, 8))
    monkeypatch.setattr(step_triton, "config_for", lambda *_: config)
    shape = Shape(rows + 3, 1088, group, channels=rows // 2 + 3)
    for runs_of_x in ([Run(SLOT, 9)], [Run(SLOT, 9), Run(0, 2)])[: 1 + (rows <= 16)]:
        check(make(shape, runs_of_x, dtype), step_triton, operation, step_error)


@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), (100, 192), (2048, 4096), (4096, 4096), (12288, 2048), (248320, 2048), (5120, 17408)]
)
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize(("group", "dtype"), [(128, BF16), (32, BF16), (128, F32), (0, BF16), (0, F32)], ids=str)
def test_chosen_configuration(n: int, k: int, group: int, dtype: torch.dtype, inputs: int) -> None:
    config = config_for(n, k, group, dtype, inputs=inputs)
    assert config.rows * inputs <= 32
    if group and inputs == 2 and dtype == F32:
        assert config.rows == 2 if n <= 4096 else config.rows <= 4
        return
    units = 32 * config.warps * config.runs * units_per_lane(torch.uint8 if group else dtype)
    if group and n <= 4096:
        assert (config.rows, config.warps, config.runs) == (8, 8 if n <= 2048 else 4, 1)
        return
    assert config.rows == 1 or (n // config.rows * config.warps >= 768 if group else n // config.rows >= 320)
    assert config.rows * config.runs <= (32 if (group, dtype) == (128, BF16) else 16)
    assert config.warps == config.runs == 1 or units < 2 * (k // 8 if group else k), "warps that have nothing"


def product_of(case: Case) -> torch.Tensor:
    return case.run(rows_triton, "norm_linear", F32)["out"]


@pytest.mark.parametrize(("n", "k", "rows"), [(74, 512, 17), (136, 256, 33)])
def test_many_outputs(n: int, k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then has twice as many if there are more than 16 rows. This changes nothing for an output."""
    case = make(Shape(n, k, 128), [Run(SLOT, 0, rows)], BF16)
    fewer = product_of(case)
    monkeypatch.setattr(rows_triton, "MANY_OUTPUTS", n)
    assert torch.equal(product_of(case), fewer)


@pytest.mark.parametrize(("k", "rows"), [(1024, 4), (1024, 16), (640, 4)])
def test_many_outputs_in_bfloat16(k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp's turns are then a loop, not all under way at once. This changes nothing for an output."""
    case = make(Shape(40, k), [Run(SLOT, 0, rows)], BF16)
    at_once = product_of(case)
    monkeypatch.setattr(rows_direct_configs, "MANY_PROGRAMS", 1)
    assert FloatsConfig.of(k, 16, 3, added=False, divided=False) == FloatsConfig(4, 4, 4, 4)
    assert torch.equal(product_of(case), at_once)


@pytest.mark.parametrize(("k", "rows"), [(2176, 4), (4224, 9)])
def test_programs_of_four_warps_in_bfloat16(k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many turns are under way changes nothing for an output. The sums of four warps differ from those of eight in their
    last bits."""
    case = make(Shape(40, k), [Run(SLOT, 0, rows)], BF16)
    eight = product_of(case)
    monkeypatch.setattr(rows_direct_configs, "FEW_PROGRAMS", 1)
    assert FloatsConfig.of(k, 16, 3, added=False, divided=False) == FloatsConfig(4, 8, 4, 2)
    far_ahead = product_of(case)
    monkeypatch.setattr(rows_direct_configs, "SOME_PROGRAMS", 1)
    assert FloatsConfig.of(k, 16, 3, added=False, divided=False) == FloatsConfig(4, 4, 4, 4)
    assert torch.equal(product_of(case), far_ahead)
    assert torch.allclose(far_ahead, eight, rtol=0, atol=1e-5)


def test_tiles_of_both_sizes_agree() -> None:
    """In fixed point bit for bit: 9 rows give the same whether a call may have 16 rows at most, or more."""
    more = make(Shape(72, 512, 128), [Run(SLOT, 0, 17)], BF16)
    few = replace(more, x=more.x[:9])
    assert rows_triton.columns_for(few.x) != rows_triton.columns_for(more.x)
    assert torch.equal(product_of(more)[:9], product_of(few))


def test_one_row_is_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case, called = make(Shape(8, 64, channels=4), [Run(SLOT, 0)], BF16), []

    def called_as(name: str, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(name)
        return case.x, case.x

    for name in STEP:
        monkeypatch.setattr(step_triton, name, lambda *_, name=name: called_as(name))
        case.run(rows_triton, name)
    assert called == list(STEP)


@pytest.mark.parametrize(
    ("group", "k", "dtype", "normed", "added"),
    [
        (None, 512, BF16, True, False),
        (None, 4608, BF16, True, True),
        (None, 576, BF16, True, True),
        (Int4Min(), 512, BF16, False, False),
        (Int8(), 512, BF16, False, False),
        (128, 512, BF16, False, False),
        (128, 4608, BF16, True, True),
        (128, 384, BF16, False, False),
        (64, 512, BF16, False, False),
        (32, 512, BF16, False, False),
        (32, 576, BF16, True, True),
        (32, 512, F32, True, True),
    ],
    ids=str,
)
def test_two_rows_that_are_a_decode_step(
    group: int | Format | None, k: int, dtype: torch.dtype, normed: bool, added: bool
) -> None:
    """Whether two rows are one, behind a norm and where a residual is added. A single row always is, three never."""
    case = make(Shape(8, k, group), [Run(SLOT, 0, 3)], dtype)
    weight = case.operand.weight
    assert [rows_triton.takes_step(case.x[:2], weight, behind) for behind in (True, False)] == [normed, added]
    assert rows_triton.takes_step(case.x[:1], weight, True) and rows_triton.takes_step(case.x[:1], weight, False)
    assert not rows_triton.takes_step(case.x, weight, True) and not rows_triton.takes_step(case.x, weight, False)


def test_two_rows_of_a_large_weight() -> None:
    """Rows that are multiplied as they are have a direct product only with a small weight in fixed point."""
    case = make(Shape(2056, 512, 128), [Run(SLOT, 0, 2)], BF16)
    assert [rows_triton.takes_step(case.x, case.operand.weight, normed) for normed in (True, False)] == [False, True]


@each_dtype
@pytest.mark.parametrize("shape", [shape for shape in PROMPT_SHAPES if shape.group], ids=str)
def test_dequantised_bit_for_bit(shape: Shape, dtype: torch.dtype) -> None:
    weight = Random(1).weight(shape.n, shape.k, group=shape.group, dtype=dtype).weight
    values, scale, minimum, _, form = weight.arguments
    found = prefill_triton.dequantize(values, scale, minimum, form, dtype)
    assert torch.equal(found, weight.dequantized(dtype))


@pytest.mark.parametrize(
    ("sizes", "group", "dtype"),
    [
        ((16, 64), 32, F32),
        ((3, 32, 128), 64, F32),
        ((2, 48, 192), 64, F32),
        ((48, 24), None, F32),
        ((48, 24), None, BF16),
    ],
    ids=str,
)
def test_out_of_panels(sizes: tuple[int, ...], group: int | None, dtype: torch.dtype) -> None:
    weight = Random(1).weight(*sizes, group=group, dtype=dtype).weight
    values, scale, _ = pack_panels(weight.format, weight.values, weight.scale)
    found = prefill_triton.without_panels(replace(weight, values=values, scale=scale, in_panels=True))
    assert torch.equal(found.values, weight.values) and not found.in_panels
    if weight.scale is not None:
        assert found.scale is not None and torch.equal(found.scale, weight.scale)


@each_dtype
@pytest.mark.parametrize("tokens", (1, 3))
@pytest.mark.parametrize("n", (4, 5))
def test_weights_in_a_floating_dtype_are_torchs(n: int, tokens: int, dtype: torch.dtype) -> None:
    """With a bias and without."""
    case = make(Shape(n, 24), [Run(SLOT, 0, tokens)], dtype)
    weight = case.operand.weight
    for kernels in (prefill_triton, reference):
        assert torch.equal(kernels.linear(case.x, weight), F.linear(case.x, weight.values, weight.bias))


@pytest.mark.parametrize(
    ("k", "group", "dtype"), [(96, 32, torch.bfloat16), (192, 128, torch.bfloat16), (128, 128, torch.float16)]
)
def test_refusals(k: int, group: int, dtype: torch.dtype) -> None:
    values, scale = torch.zeros(16, k // 2, dtype=torch.uint8), torch.zeros(16, k // group, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match=r"(int4|linear) kernels take"):
        check_weight(Weight(values, scale, format=Int4(group)), dtype)


each_form = pytest.mark.parametrize(
    ("kernels", "rows", "operations"),
    [
        (step_triton, 1, STEP),
        (rows_triton, 2, STEP),
        (prefill_triton, 1, ("linear",)),
        (prefill_triton, 2, ("linear",)),
    ],
    ids=("step", "rows", "prompt of one", "prompt"),
)


@each_form
def test_float16_is_refused(kernels: ModuleType, rows: int, operations: tuple[str, ...]) -> None:
    case = make(Shape(4, 128, 64, channels=2), [Run(SLOT, 1, rows)], BF16)
    inputs = replace(case, x=case.x.half())
    weights = replace(case, operand=replace(case.operand, weight=Weight(case.operand.numbers.half())))
    for operation in operations:
        with pytest.raises(ExportError, match=r"inputs in bfloat16 or float32, got torch\.float16"):
            inputs.run(kernels, operation)
        # A prompt's floating weights are multiplied by torch.
        if operation != "linear":
            with pytest.raises(ExportError, match=r"format of integers, got torch\.float16"):
                weights.run(kernels, operation)


@each_form
def test_heads_that_do_not_divide_a_row_are_refused(
    kernels: ModuleType, rows: int, operations: tuple[str, ...]
) -> None:
    if "linear_add" not in operations:
        pytest.skip("a prompt has no heads")
    case = make(Shape(4, 128, 64), [Run(SLOT, 1, rows)], BF16)
    with pytest.raises(ExportError, match="3 heads"):
        replace(case, squares=HeadSquares(case.x.new_ones(3 * rows, 1).float(), EPS)).run(kernels, "linear_add")


# Prints the operators, with how many rows a program takes, for each number of rows that there may be at most.
TRACED = """
import torch
from ostinato.export.kernels.linear import rows_triton
from ostinato.export.kernels.operands import HeadSquares, Norm, Weight

class Layer(torch.nn.Module):
    def forward(self, x, sums, norm, values, scale):
        weight, norm = Weight.of(values, scale, None, None, "int4"), Norm(norm, 1e-6)
        normed = rows_triton.norm_linear(x, norm, weight, torch.float32)
        gated = rows_triton.norm_swiglu(x, norm, weight)
        both = rows_triton.norm_linear_gates(x, norm, weight, x.new_zeros(4, 256))
        squares = HeadSquares(sums.expand(x.shape[0], 4, 2).reshape(-1, 2), 1e-6)
        return normed, gated, *both, rows_triton.linear_add(x, weight, x, squares)

for group, dtype in ((128, torch.bfloat16), (32, torch.bfloat16), (32, torch.float32)):
    for most in (16, 17, None):
        weight = torch.zeros(256, 128, dtype=torch.uint8), torch.zeros(256, 256 // group, dtype=torch.bfloat16)
        inputs = torch.zeros(4, 256, dtype=dtype), torch.zeros(1, 4, 2), torch.zeros(256), *weight
        rows = torch.export.Dim("rows", min=2, max=most)
        program = torch.export.export(Layer(), inputs, dynamic_shapes=({0: rows}, *[None] * 4), strict=False)
        ours = [node for node in program.graph.nodes if "ostinato" in str(node.target)]
        (bounds,) = program.range_constraints.values()
        print(*{(str(node.target).split(".")[1], node.args[-1]): None for node in ours}, str(bounds).split()[-1])
"""


def test_any_number_of_rows_is_traced() -> None:
    """The number stays a symbol, and the most that it may be says how many of them a program takes."""
    names = "rows_norm_linear", "rows_norm_swiglu", "rows_norm_linear_gates", "rows_linear_add"
    expected = [
        " ".join(map(str, [*((name, columns) for name in kinds), most]))
        for kinds in (names, names, ("rows_scaled_product",))
        for columns, most in ((16, "16]"), (32, "17]"), (32, "int_oo]"))
    ]
    assert run_compiled(TRACED).splitlines() == expected


TRACED_PROMPT = """
import torch
from torch.export import Dim, export
from ostinato.export.kernels.linear.prefill_triton import linear
from ostinato.export.kernels.operands import Weight

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(24, 64, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(24, 1, dtype=torch.bfloat16))

    def forward(self, x):
        return linear(x, Weight.of(self.weight, self.scale, None, None, "int4"))

def operators(tokens, dims):
    program = export(Layer(), (torch.zeros(tokens, 128, dtype=torch.bfloat16),), dynamic_shapes=dims, strict=False)
    program = program.run_decompositions({})
    node = program.graph.output_node().args[0][0]
    print([str(n.target) for n in program.graph.nodes if "ostinato" in str(n.target)], node.meta["val"].shape)
    return program

print(list(operators(130, ({0: Dim("T", min=2, max=255)},)).range_constraints.values()))
operators(1, None)
"""


def test_any_number_of_tokens_is_traced() -> None:
    many, bounds, one = run_compiled(TRACED_PROMPT).splitlines()
    assert "ostinato.dequantize" in many and many.endswith(", 24])") and "130" not in many
    assert "[2, 255]" in bounds.replace("lower=", "[").replace("upper=", "") or "VR[2, 255]" in bounds
    assert "ostinato.dequantize" in one and one.endswith("torch.Size([1, 24])")
