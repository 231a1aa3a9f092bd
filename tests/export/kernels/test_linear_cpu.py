"""Linear layers in C++ against the references in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.linear import reference
from ostinato.export.kernels.operands import Convolution, HeadSquares, runs_of

from ...comparison import relative_error
from .cpu_cases import (
    BF16,
    EPS,
    F32,
    MIXES,
    ROWS,
    SLOTS,
    TOLERANCE,
    Draw,
    Span,
    doubled,
    rows_index,
    same_bits,
)

# (N, K, group): panels with and without rows that fill none, K that no vector divides, odd K.
SHAPES = [
    (1, 64, 32),
    (16, 64, 64),
    (37, 320, 32),
    (48, 1088, 64),
    (21, 384, 128),
    (64, 2048, 128),
    (1, 64, None),
    (32, 97, None),
    (37, 24, None),
    (48, 1090, None),
    (100, 512, None),
    (16, 5, None),
]
Types = pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
Rows = pytest.mark.parametrize("rows", ROWS)
Shapes = pytest.mark.parametrize(("n", "k", "group"), SHAPES)


@Types
@Rows
@Shapes
def test_norm_linear(
    cpu_kernels: type[Kernels], n: int, k: int, group: int | None, rows: int, dtype: torch.dtype
) -> None:
    draw = Draw(n + k + rows)
    x, norm = draw.normal(rows, k, dtype=dtype), draw.norm(k)
    weight = draw.operand(n, k, group=group, dtype=dtype, bias=n % 2 == 1)
    expected = reference.norm_linear(x.double(), doubled(norm), weight.exact, torch.float64)
    for out_dtype in {dtype, F32}:
        out = cpu_kernels.norm_linear(x, norm, weight.packed, out_dtype)
        assert out.dtype == out_dtype and out.shape == (rows, n)
        assert relative_error(out, expected) < weight.tolerance(dtype)


@pytest.mark.parametrize("group", (32, 64, 128))
def test_error_of_bytes(cpu_kernels: type[Kernels], group: int) -> None:
    """Inputs as bytes with a scale per group cost less than a hundredth: a tenth of what four bits cost the weights."""
    draw = Draw(group)
    x, norm, weight = draw.normal(1, 2048), draw.norm(2048), draw.operand(512, 2048, group=group, dtype=F32)
    expected = reference.norm_linear(x.double(), doubled(norm), weight.exact, torch.float64)
    error = relative_error(cpu_kernels.norm_linear(x, norm, weight.packed, F32), expected)
    assert 1e-4 < error < 1e-2


@Types
@Rows
@pytest.mark.parametrize(
    ("n", "k", "group"), [(64, 64, 32), (42, 320, 64), (96, 384, 128), (34, 97, None), (64, 130, None)]
)
def test_norm_swiglu(
    cpu_kernels: type[Kernels], n: int, k: int, group: int | None, rows: int, dtype: torch.dtype
) -> None:
    draw = Draw(n + k + rows)
    x, norm = draw.normal(rows, k, dtype=dtype), draw.norm(k)
    weight = draw.operand(n, k, group=group, dtype=dtype, bias=rows % 2 == 1)
    out = cpu_kernels.norm_swiglu(x, norm, weight.packed)
    assert out.dtype == dtype
    expected = reference.norm_swiglu(x.double(), doubled(norm), weight.exact)
    assert relative_error(out, expected) < 2 * weight.tolerance(dtype)


# (N, K, group, channels, taps)
CONVOLUTIONS = [
    (64, 64, 32, 48, 4),
    (48, 320, 64, 20, 3),
    (37, 97, None, 37, 2),
    (80, 128, None, 72, 4),
    (32, 256, 128, 16, 7),
    (24, 64, None, 24, 19),
]


class Convolved:
    """Random arguments of `norm_linear_conv`; of states that are not to be looked at, NaN."""

    def __init__(
        self, n: int, k: int, group: int | None, channels: int, taps: int, spans: Sequence[Span], dtype: torch.dtype
    ) -> None:
        self.index = rows_index(spans)
        self.tokens = self.index.slots >= 0
        draw = Draw(n + k + len(self.tokens))
        self.x, self.norm = draw.normal(len(self.tokens), k, dtype=dtype), draw.norm(k)
        self.x[~self.tokens] = torch.nan
        self.weight, self.gates = draw.operand(n, k, group=group, dtype=dtype), draw.rows(18, k, dtype=dtype)
        state = torch.full((SLOTS, taps - 1, channels), torch.nan, dtype=dtype)
        for span in spans:
            if span.slot >= 0 and span.position:
                state[span.slot] = draw.normal(taps - 1, channels, dtype=dtype)
        self.conv = Convolution(draw.normal(channels, 1, taps, dtype=dtype), state)

    def run(self, kernels: type[Kernels]) -> tuple[Tensor, Tensor]:
        gates = self.gates.packed.values
        return kernels.norm_linear_conv(self.x, self.norm, self.weight.packed, gates, self.conv, self.index)

    def check(self, kernels: type[Kernels]) -> None:
        dtype, before, tokens = self.x.dtype, self.conv.state.clone(), self.tokens
        exact = Convolution(self.conv.weight.double(), self.conv.state.double())
        of_reference = doubled(self.norm), self.weight.exact, self.gates.exact.values
        expected = reference.norm_linear_conv(self.x.double(), *of_reference, exact, self.index)
        mixed, gated = self.run(kernels)
        assert (mixed.dtype, gated.dtype) == (dtype, F32)
        assert mixed.shape == expected[0].shape and gated.shape == expected[1].shape
        runs = dict(runs_of(self.index.slots))
        others = [slot for slot in range(SLOTS) if slot not in runs]
        assert same_bits(self.conv.state[others], before[others])
        if not runs:
            return
        # Products are rounded before the convolution, and after it.
        assert relative_error(mixed[tokens], expected[0][tokens]) < 2 * self.weight.tolerance(dtype)
        assert relative_error(gated[tokens], expected[1][tokens].double()) < TOLERANCE[dtype]
        for slot, rows in runs.items():
            assert relative_error(self.conv.state[slot], exact.state[slot]) < 2 * self.weight.tolerance(dtype)
            count, behind = rows.stop - rows.start, before.shape[1]
            if count < behind and self.index.positions[rows.start]:
                assert torch.equal(self.conv.state[slot, : behind - count], before[slot, count:])


@pytest.mark.parametrize("position", (0, 7))
@Types
@Rows
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_norm_linear_conv(
    cpu_kernels: type[Kernels],
    sizes: tuple[int, int, int | None, int, int],
    rows: int,
    dtype: torch.dtype,
    position: int,
) -> None:
    Convolved(*sizes, [Span(4, position, rows)], dtype).check(cpu_kernels)


@Types
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_norm_linear_conv_of_a_mix(
    cpu_kernels: type[Kernels], sizes: tuple[int, int, int | None, int, int], mix: str, dtype: torch.dtype
) -> None:
    Convolved(*sizes, MIXES[mix], dtype).check(cpu_kernels)


@pytest.mark.parametrize("slots", ([2, 2, 2, SLOTS], [2, 2, 2, 2**40], [2, 1, 1, 2]))
def test_slots_that_a_convolution_refuses(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    """Those that there are not, and one of two runs."""
    case = Convolved(*CONVOLUTIONS[3], [Span(2, 10, 3), Span(1, 0, 1)], F32)
    before = case.conv.state.clone()
    case.index = case.index._replace(slots=torch.tensor(slots))
    with pytest.raises(AssertionError, match="norm_linear_conv failed"):
        case.run(cpu_kernels)
    assert same_bits(case.conv.state, before)


@Types
@Rows
@pytest.mark.parametrize(
    ("n", "k", "group", "heads", "parts"),
    [
        (37, 320, 32, 5, 1),
        (48, 384, 128, 3, 2),
        (16, 192, 64, None, None),
        (48, 96, None, 12, 3),
        (21, 97, None, None, None),
    ],
)
def test_linear_add(
    cpu_kernels: type[Kernels],
    n: int,
    k: int,
    group: int | None,
    heads: int | None,
    parts: int | None,
    rows: int,
    dtype: torch.dtype,
) -> None:
    draw = Draw(n + k + rows)
    x, residual = draw.normal(rows, k, dtype=dtype), draw.normal(rows, n, dtype=dtype)
    weight = draw.operand(n, k, group=group, dtype=dtype, bias=n % 2 == 1)
    squares, exact = None, None
    if heads is not None and parts is not None:
        sums = draw.normal(rows * heads, parts).square() * k / heads / parts
        squares, exact = HeadSquares(sums, EPS), HeadSquares(sums.double(), EPS)
    out = cpu_kernels.linear_add(x, weight.packed, residual, squares)
    assert out.dtype == dtype
    expected = reference.linear_add(x.double(), weight.exact, residual.double(), exact)
    assert relative_error(out, expected) < weight.tolerance(dtype)


@pytest.mark.parametrize("strange", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("rows", (1, 3, 40))
@pytest.mark.parametrize(("group", "dtype"), [(32, F32), (128, BF16), (None, BF16), (None, F32)], ids=str)
def test_what_is_not_finite_gives_nan(
    cpu_kernels: type[Kernels], group: int | None, dtype: torch.dtype, rows: int, strange: float
) -> None:
    """In its own row, and in no other."""
    draw = Draw(rows)
    x, norm, weight = (
        draw.normal(rows, 256, dtype=dtype),
        draw.norm(256),
        draw.operand(37, 256, group=group, dtype=dtype),
    )
    residual, bad = draw.normal(rows, 37, dtype=dtype), rows // 2
    x[bad, 100] = strange
    strange_rows = torch.zeros(rows, 1, dtype=torch.bool)
    strange_rows[bad] = True
    for out in (
        cpu_kernels.norm_linear(x, norm, weight.packed, dtype),
        cpu_kernels.linear_add(x, weight.packed, residual),
    ):
        finite = out.isfinite()
        assert finite[~strange_rows[:, 0]].all() and not finite[bad].any()
    assert cpu_kernels.norm_linear(x, norm, weight.packed, dtype)[bad].isnan().all()


@pytest.mark.parametrize("group", (32, None))
def test_rows_do_not_depend_on_each_other(cpu_kernels: type[Kernels], group: int | None) -> None:
    """A row's result among others is its result alone, as far as the arithmetic of more rows is the same."""
    draw = Draw(1)
    x, norm, weight = draw.normal(20, 256), draw.norm(256), draw.operand(64, 256, group=group, dtype=F32)
    together = cpu_kernels.norm_linear(x, norm, weight.packed, F32)
    alone = torch.cat([cpu_kernels.norm_linear(row[None], norm, weight.packed, F32) for row in x])
    assert torch.equal(together, alone)


def test_zeros(cpu_kernels: type[Kernels]) -> None:
    draw = Draw(2)
    x = torch.zeros(3, 64)
    weight = draw.operand(48, 64, group=32, dtype=F32, bias=True)
    bias = weight.packed.bias
    assert bias is not None
    out = cpu_kernels.norm_linear(x, draw.norm(64), weight.packed, F32)
    assert torch.equal(out, bias.expand(3, -1))
