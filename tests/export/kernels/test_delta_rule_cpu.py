"""The gated delta rule in C++, token by token, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.delta_rule import reference
from ostinato.export.kernels.operands import Decay

from ...comparison import relative_error
from .cpu_cases import BF16, F32, ROWS, Draw
from .padding import padded, padded_positions

TOLERANCE = {F32: 1e-5, BF16: 4e-3}
# (key heads, heads, K, V): value heads that share, sizes that fill no vector, odd ones.
SHAPES = [(1, 2, 16, 64), (2, 4, 32, 32), (1, 3, 8, 24), (5, 5, 17, 16), (2, 2, 128, 128), (1, 1, 9, 5)]


class Case:
    """Random arguments: heads of slow and of fast decay, a state that is not zero."""

    def __init__(self, shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, position: int) -> None:
        self.key_heads, self.heads, self.key_dim, self.value_dim = shape
        draw = Draw(rows + self.heads)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.mixed = draw.normal(rows, 2 * keys + 2 * values, dtype=dtype)
        self.gates = draw.normal(rows, 2 * self.heads)
        self.decay = Decay(torch.linspace(-6, 2, self.heads), draw.normal(self.heads))
        self.state = draw.normal(self.heads, self.key_dim, self.value_dim)
        self.positions = position + torch.arange(rows)
        self.norm_weight = draw.normal(self.value_dim)
        if position == 0:
            self.state.fill_(torch.nan)

    def run(self, kernels: type[Kernels]) -> tuple[Tensor, Tensor, Tensor]:
        """(out, squares of each token's heads, the state afterwards)."""
        state = self.state.clone()
        arguments = self.mixed, self.gates, self.decay, state, self.positions, self.norm_weight, self.key_heads
        out, squares = kernels.delta_step(*arguments)
        assert out.dtype == self.mixed.dtype and squares.dtype == F32
        return out, squares.sum(1).view(-1, self.heads), state

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(self.mixed)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        q, k, v, z = self.mixed.double().split((keys, keys, values, values), dim=1)
        b, a = self.gates.double().t().chunk(2)

        def of_heads(x: Tensor) -> Tensor:
            heads = reference.l2_normalize(x.view(rows, self.key_heads, -1))
            return heads.repeat_interleave(self.heads // self.key_heads, dim=1).transpose(0, 1)

        g = -self.decay.a_log.double().exp()[:, None] * F.softplus(a + self.decay.dt_bias.double()[:, None])
        before = torch.zeros_like(self.state) if self.positions[0] == 0 else self.state
        o, after = reference.naive_gated_delta_rule(
            of_heads(q) * self.key_dim**-0.5,
            of_heads(k),
            v.view(rows, self.heads, -1).transpose(0, 1),
            g,
            b.sigmoid(),
            before.double(),
        )
        o = o.transpose(0, 1)
        out = o * self.norm_weight.double() * F.silu(z.view(rows, self.heads, -1))
        return out.reshape(rows, -1), o.square().sum(-1), after


@pytest.mark.parametrize("position", (0, 300))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", (*ROWS, 130))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(
    cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, position: int
) -> None:
    case = Case(shape, rows, dtype, position)
    limits = TOLERANCE[dtype], TOLERANCE[F32], TOLERANCE[F32]
    for found, exact, limit in zip(case.run(cpu_kernels), case.exact(), limits, strict=True):
        assert relative_error(found, exact) < limit


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_reference_of_a_step(dtype: torch.dtype) -> None:
    """The plain function, which other kernels are compared with, takes several tokens too."""
    case = Case((2, 4, 16, 24), 70, dtype, 3)
    limits = 2 * TOLERANCE[dtype], 2 * TOLERANCE[dtype], TOLERANCE[F32]
    for found, exact, limit in zip(case.run(Kernels), case.exact(), limits, strict=True):
        assert relative_error(found, exact) < limit


def test_nan_shows_from_its_token_on(cpu_kernels: type[Kernels]) -> None:
    case = Case((2, 4, 32, 32), 9, F32, 5)
    case.mixed[4, -1] = torch.nan  # a gate of the last head's output
    case.mixed[6, 0] = torch.nan  # a query of the first key head
    out, _, state = case.run(cpu_kernels)
    strange = out.isnan().view(9, 4, 32)
    assert strange[4].sum() == 1 and strange[6, :2].all() and not strange[[0, 1, 2, 3, 5, 7, 8]].any()
    assert not state.isnan().any()
    case.mixed[7, 64] = torch.nan  # a key of the first key head: what is written with it stays
    out, _, state = case.run(cpu_kernels)
    assert out.view(9, 4, 32)[7:, :2].isnan().all() and state[:2].isnan().all() and not state[2:].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernels", ("cpu", "reference"))
@pytest.mark.parametrize("position", (0, 300))
@pytest.mark.parametrize(("length", "rows"), [(1, 4), (3, 4), (63, 64), (70, 200)])
def test_padding(
    cpu_kernels: type[Kernels], kernels: str, length: int, rows: int, position: int, dtype: torch.dtype
) -> None:
    of = cpu_kernels if kernels == "cpu" else Kernels
    case = Case((2, 4, 32, 32), length, dtype, position)
    expected = case.exact()
    case.mixed, case.gates = padded(case.mixed, rows), padded(case.gates, rows)
    case.positions = padded_positions(case.positions, rows)
    out, squares, after = case.run(of)
    assert out.shape[0] == rows and squares.shape[0] == rows
    limits = 2 * TOLERANCE[dtype], 2 * TOLERANCE[dtype], TOLERANCE[F32]
    for found, exact, limit in zip((out[:length], squares[:length], after), expected, limits, strict=True):
        assert relative_error(found, exact) < limit
