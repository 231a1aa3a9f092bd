"""What every form of the linear layers is held to: their definitions in float64, with NaN in all that is not to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, RowIndex, Weight, runs_of

from ...comparison import relative_error
from .runs import DEVICE, SLOTS, Run, real_rows, rows_index, rows_of, same_bits
from .weights import BF16, EPS, F32, F64, Operand, Random

# Relative error of one rounding.
ROUNDING = {F64: 1e-15, F32: 1e-7, BF16: 4e-3}
# Relative error of a product with a weight, for inputs of a dtype, before it is rounded to the dtype of the output.
Error = Callable[[Weight, torch.dtype], float]


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer with all its operands. It has a bias unless N is a multiple of four.

    Attributes:
        group: weights that share a scale, in int4; or a number format; None for weights in the dtype of the inputs.
        heads, parts: the heads that `linear_add` norms, 0 for none, and how many sums of squares each has.
        channels, taps: of the convolution; no channels: no convolution.
        gates: rows of the weight for the gates.
    """

    n: int
    k: int
    group: int | Format | None = None
    heads: int = 0
    parts: int = 1
    channels: int = 0
    taps: int = 4
    gates: int = 3

    def __str__(self) -> str:
        group = f"-{named(self.group)}" if self.group else ""
        heads = f"-{self.heads}x{self.parts}" if self.heads else ""
        return f"{self.n}x{self.k}{group}{heads}" + (f"-{self.channels}c{self.taps}t" if self.channels else "")


def named(group: int | Format | None) -> str:
    """A name of a number format, as in `Shape.group`."""
    if not isinstance(group, Format):
        return f"g{group}"
    return f"{group.name}-g{group.group_size}" + ("-f16" if group.scale_dtype == torch.float16 else "")


@dataclass(frozen=True)
class Case:
    """Operands of all linear layers."""

    x: Tensor
    norm: Norm
    operand: Operand
    gates: Operand
    residual: Tensor
    squares: HeadSquares | None
    conv: Convolution
    index: RowIndex

    def run(self, kernels: Any, operation: str, out_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the outputs by name, and the convolution's state after the call. The case can be used again."""
        function, x, norm, weight = getattr(kernels, operation), self.x, self.norm, self.operand.weight
        if operation == "linear":
            return {"out": function(x, weight)}
        if operation == "norm_linear":
            return {"out": function(x, norm, weight, out_dtype or x.dtype)}
        if operation == "norm_swiglu":
            return {"out": function(x, norm, weight)}
        if operation == "linear_add":
            return {"out": function(x, weight, self.residual, self.squares)}
        conv, channels = replace(self.conv, state=self.conv.state.clone()), self.conv.state.shape[2]
        mixed, gates = function(x, norm, weight, self.gates.weight.values, conv, self.index)
        return {"mixed": mixed[:, :channels], "out": mixed[:, channels:], "gates": gates, "state": conv.state}

    def exact(self, operation: str) -> dict[str, Tensor]:
        """Return the same in float64."""
        x = self.x.double()
        if operation == "linear_add" and self.squares is not None:
            heads = x.view(len(self.squares.sums), -1)
            mean = self.squares.sums.double().sum(1, keepdim=True) / heads.shape[1]
            x = (heads / (mean + self.squares.eps).sqrt()).view(x.shape)
        elif operation.startswith("norm_"):
            x = x / (x.square().mean(1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight.double()
        bias = self.operand.weight.bias
        product = x @ self.operand.numbers.double().t() + (0 if bias is None else bias.double())
        if operation == "norm_swiglu":
            gate, up = product.chunk(2, dim=1)
            return {"out": gate * gate.sigmoid() * up}
        if operation == "linear_add":
            return {"out": self.residual.double() + product}
        if operation != "norm_linear_conv":
            return {"out": product}
        channels = self.conv.state.shape[2]
        mixed, states = self.convolved(product[:, :channels])
        return {
            "mixed": mixed,
            "out": product[:, channels:],
            "gates": x @ self.gates.numbers.double().t(),
            "state": states,
        }

    def convolved(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolution of a product [rows, C] with SiLU, and the states after it, float64."""
        mixed, states = torch.full_like(product, torch.nan), self.conv.state.to(F64, copy=True)
        weight = self.conv.weight.double().squeeze(1)
        for slot, rows in runs_of(self.index.slots):
            past = states[slot] if self.index.positions[rows.start] else torch.zeros_like(states[slot])
            inputs = torch.cat((past, product[rows]))
            sums = (inputs.unfold(0, weight.shape[1], 1) * weight).sum(-1)
            mixed[rows], states[slot] = sums * sums.sigmoid(), inputs[-len(past) :]
        return mixed, states


def make(shape: Shape, runs: Sequence[Run], dtype: torch.dtype, *, device: str = DEVICE, panels: bool = False) -> Case:
    """Make random operands: NaN in rows of padding, in states of slots without rows, and in those of runs from position 0 on.

    Args:
        panels: whether weights and gates are stored in panels.
    """
    n, k, rows = shape.n, shape.k, rows_of(runs)
    # In a few numbers errors do not average out. With this seed, those of inputs in bytes stay 15 % below the limits.
    random = Random(56 * n + k + rows, device, panels)
    index = rows_index(runs, device=device)
    operand = random.weight(n, k, group=shape.group, dtype=dtype)
    gates = random.weight(shape.gates, k, group=None, dtype=dtype)
    if n % 4:
        operand = replace(operand, weight=replace(operand.weight, bias=random.normal(n, dtype=dtype)))
    x, residual = random.normal(rows, k, dtype=dtype), random.normal(rows, n, dtype=dtype)
    x[index.slots < 0] = torch.nan
    squares = None
    if shape.heads:
        sums = (0.5 + random.normal(rows * shape.heads, shape.parts).square()) * (k / shape.heads / shape.parts)
        squares = HeadSquares(sums, EPS)
    state = torch.full((SLOTS, shape.taps - 1, shape.channels), torch.nan, dtype=dtype, device=device)
    for run in runs:
        if run.slot >= 0 and run.first:
            state[run.slot] = random.normal(*state.shape[1:], dtype=dtype)
    conv = Convolution(random.normal(shape.channels, 1, shape.taps, dtype=dtype), state)
    return Case(x, random.norm(k, dtype), operand, gates, residual, squares, conv, index)


def check(case: Case, kernels: Any, operation: str, error: Error, out_dtype: torch.dtype | None = None) -> None:
    """Hold a form to the definition in all rows that are tokens, and in the states; no other state is written."""
    found, expected, dtype = case.run(kernels, operation, out_dtype), case.exact(operation), case.x.dtype
    dtypes, tokens = {"out": out_dtype or dtype, "gates": F32}, real_rows(case.index)
    for name, ours in found.items():
        theirs = expected[name]
        assert ours.dtype == dtypes.get(name, dtype) and ours.shape == theirs.shape
        ours, theirs = new_states(case, ours, theirs) if name == "state" else (ours[tokens], theirs[tokens])
        if not theirs.numel():
            continue
        wide, rounding = error((case.gates if name == "gates" else case.operand).weight, dtype), ROUNDING[ours.dtype]
        if name == "mixed":
            # Rounded before the convolution and after it.
            wide, rounding = 2 * wide, 2 * rounding
        elif operation == "norm_swiglu":
            # Two products are multiplied.
            wide = 2 * wide
        error_found = relative_error(ours, theirs)
        assert error_found < max(wide, rounding), f"relative error of {name} is {error_found:.1e}"


def new_states(case: Case, after: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the rows wrote to the states and what they had to write, [numbers, C]. The rest must have its old bits:
    states without rows, and older inputs, which move up."""
    kept, written = case.conv.state.clone(), torch.zeros(after.shape[:2], dtype=torch.bool)
    for slot, rows in runs_of(case.index.slots):
        count = min(rows.stop - rows.start, after.shape[1])
        if not case.index.positions[rows.start]:
            kept[slot] = 0
        kept[slot] = kept[slot].roll(-count, dims=0)
        written[slot, after.shape[1] - count :] = True
    assert same_bits(after[~written], kept[~written])
    return after[written], expected[written]


F16 = torch.float16
# Small weights have a program per output, of which the interpreter takes up to ten in a second.
STEP_SHAPES = [
    Shape(1, 64, 32),
    Shape(2, 64, 64, channels=2),
    Shape(6, 320, 32, 5, 1, channels=2, gates=2),
    Shape(8, 1088, 64, 17, 3, channels=6, gates=5),
    Shape(5, 128, 128, channels=3),
    Shape(7, 384, 128, 3, 2, channels=7, taps=2, gates=1),
    Shape(4, 2048, 128, channels=1, gates=6),
    Shape(4, 192, 32, 12, 1),
    Shape(4, 192, 64, 64, 2),
    Shape(3, 4096, 128, 32, 4),
    Shape(6, 320, Int4(32, F16), 5, 1, channels=2, gates=2),
    Shape(8, 256, Int4(128, F16), channels=3),
    Shape(2, 64, Int4Min(), channels=2),
    Shape(6, 1088, Int4Min(32, F16), 17, 3, channels=6, gates=5),
    Shape(4, 192, Int4Min(), 12, 1, channels=1),
    Shape(2, 32, Int8(), channels=2),
    Shape(6, 1120, Int8(32, F16), 35, 3, channels=6, gates=5),
    Shape(4, 192, Int8(64), 24, 1, channels=1),
    Shape(5, 4224, Int8(128), 3, 2, channels=3),
    Shape(1, 64),
    Shape(6, 24, None, 2, 3),
    Shape(5, 60, None, 3, 2, channels=4, taps=2),
    Shape(10, 97, channels=6),
    Shape(8, 1088, channels=4, gates=5),
    Shape(3, 4096, None, 32, 4),
    Shape(3, 9000),
]
# A multiple of 64 outputs, and a few more. K in one, two, three and four parts, the last of which is longer.
# For rows_direct_triton: fewer stretches or turns of K than warps too, and tiles of 16 and of 32 weight rows.
FLOATS_SHAPES = [
    Shape(72, 512, None, 4, 3, channels=40, gates=20),
    Shape(74, 384, None, 3, 2, channels=30, gates=5),
    Shape(40, 1024, None, 8, 4, channels=8, taps=2),
    Shape(36, 3584, None, 14, 1, channels=36),
    Shape(24, 4096, None, 16, 2, channels=8, gates=3),
]
# Rests of turns and of programs; a row of 33 blocks has its own configuration.
INTEGERS_SHAPES = [
    Shape(72, 512, 64, 4, 3, channels=40, gates=20),
    Shape(74, 640, Int4(32, F16), 5, 2, channels=30, gates=5),
    Shape(40, 384, 128, 3, 1, channels=8, taps=2),
    Shape(72, 1152, Int4Min(), 9, 3, channels=72, gates=20),
    Shape(18, 4224, Int4Min(32, F16), 33, 1, channels=4),
    Shape(74, 640, Int8(32, F16), 5, 2, channels=30, gates=5),
    Shape(40, 1024, Int8(64), 4, 1, channels=8),
    Shape(20, 4224, Int8(128), 33, 2, channels=4),
]
# Those whose heads are a part of a block, or that have many outputs, are prepared in `linear_add` too.
INT4_SHAPES = [
    Shape(72, 512, 128, 8, 3, channels=40, gates=20),
    Shape(72, 1536, Int4(128, F16), 24, 1, channels=72, taps=2),
    Shape(74, 2048, 128, 16, 2, channels=30, gates=5),
    Shape(40, 2560, 128, 10, 4, channels=8),
    Shape(4130, 512, 128, 4, 2, channels=4128),
]
UNPREPARED_SHAPES = [
    Shape(72, 512, 128, 4, 3),
    Shape(74, 1536, Int4(128, F16), 12, 1),
    Shape(72, 1024, 128),
    Shape(40, 2560, 128, 10, 8),
    Shape(18, 4096, 128, 32, 4),
]
ROWS_SHAPES = [
    Shape(72, 512, 128, 8, 3, channels=40, gates=20),
    Shape(64, 256, 128, channels=64, taps=2),
    Shape(74, 768, 128, 1, 3),
    Shape(72, 1280, 128, 2, 3),
    Shape(136, 256, 128),
    Shape(74, 384, 128, channels=30, gates=20),
    Shape(72, 192, 64, 2, 3),
    Shape(130, 64, 32),
    Shape(64, 192, 32, 8, 3),
    Shape(72, 512, Int4(128, F16), channels=40, gates=20),
    Shape(72, 640, 32, 4, 3, channels=40, gates=20),
    Shape(74, 576, Int4(32, F16), 2, 3, channels=30),
    Shape(136, 256, Int4Min(32, F16), channels=64, taps=2),
    Shape(74, 704, Int4Min(), 1, 3, channels=30, gates=20),
    Shape(64, 1536, Int4Min(), 8, 1),
    Shape(136, 256, Int8(), channels=64, taps=2),
    Shape(74, 704, Int8(32, F16), 2, 3, channels=30, gates=20),
    Shape(72, 384, Int8(64), 3, 2),
    Shape(72, 640, Int8(128), channels=8),
    Shape(66, 96, Int8()),
    Shape(74, 64, channels=70, gates=17),
    Shape(73, 192, None, 1, 3),
]
# Panels of 16 outputs, with and without a rest; K that no vector divides, and odd K.
CPU_SHAPES = [
    Shape(1, 64, 32),
    Shape(16, 192, 64),
    Shape(37, 320, 32, 5, 1),
    Shape(48, 1088, 64, channels=20, taps=3, gates=18),
    Shape(21, 384, 128, 3, 2),
    Shape(64, 2048, 128, channels=16, taps=7, gates=18),
    Shape(64, 64, 32, channels=48, gates=18),
    Shape(42, 320, 64),
    Shape(50, 576, Int4(32, F16), channels=34, gates=18),
    Shape(37, 256, Int4(128, F16), 4, 2),
    Shape(34, 64, Int4Min(), channels=18, gates=18),
    Shape(48, 576, Int4Min(32, F16), 9, 2),
    Shape(37, 1088, Int4Min(), 17, 1, channels=20, gates=18),
    Shape(34, 32, Int8(), channels=18, gates=18),
    Shape(48, 576, Int8(32, F16), 9, 2),
    Shape(37, 1120, Int8(), 5, 1, channels=20, gates=18),
    Shape(42, 576, Int8(64, F16), 3, 1),
    Shape(50, 1152, Int8(128), channels=34, gates=18),
    Shape(1, 64),
    Shape(34, 97),
    Shape(36, 97, channels=36, taps=2, gates=18),
    Shape(37, 24),
    Shape(48, 1090, None, 10, 3),
    Shape(80, 128, channels=72, gates=18),
    Shape(100, 512, channels=24, taps=19, gates=18),
    Shape(16, 5),
]
GROUPS = (32, 64, 128)
PROMPT_SHAPES = [
    *(Shape(n, k, group) for n, k in ((3, 64), (3, 320), (3, 1024), (5, 1088)) for group in GROUPS if k % group == 0),
    Shape(1, 64, 32),
    Shape(64, 128, 128),
    Shape(130, 64, 32),
    Shape(5, 320, Int4(32, F16)),
    Shape(3, 192, Int4Min()),
    Shape(5, 320, Int4Min(32, F16)),
    Shape(3, 32, Int8()),
    Shape(5, 96, Int8(32, F16)),
    Shape(130, 128, Int8(128)),
    Shape(5, 24),
]
if DEVICE == "cuda":
    STEP_SHAPES += [
        Shape(9216, 2048, 128),
        Shape(12288, 2048, 128, channels=8192, gates=64),
        Shape(2048, 4096, 128, 32, 1),
        Shape(2048, 4096, 128),
        Shape(24831, 2048, 32),
        Shape(5120, 17408, 64),
        Shape(7168, 1024, 128),
        Shape(8192, 1024, channels=6144, gates=32),
        Shape(1024, 2048, None, 16, 16),
        Shape(1024, 3584),
        Shape(2048, 4096),
        Shape(6002, 2048),
        Shape(24831, 1024),
        Shape(5120, 17408),
        Shape(1001, 3001),
    ]
    LARGE = [(1024, 2048), (2048, 4096), (2048, 512), (12288, 2048), (24831, 2048), (5120, 17408)]
    PROMPT_SHAPES += [Shape(n, k, group) for n, k in LARGE for group in GROUPS]
