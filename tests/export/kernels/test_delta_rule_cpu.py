"""The gated delta rule in C++, token by token, against the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.delta_rule import reference
from ostinato.export.kernels.operands import Decay, runs_of

from ...comparison import relative_error
from .cpu_cases import BF16, F32, MIXES, ROWS, SLOTS, Draw, Span, padding, rows_index, same_bits

TOLERANCE = {F32: 1e-5, BF16: 4e-3}
# (key heads, heads, K, V): value heads that share, sizes that fill no vector, odd ones.
SHAPES = [(1, 2, 16, 64), (2, 4, 32, 32), (1, 3, 8, 24), (5, 5, 17, 16), (2, 2, 128, 128), (1, 1, 9, 5)]


class Case:
    """Random arguments: heads of slow and of fast decay, states that are not zero, and NaN where none is to be looked at."""

    def __init__(self, shape: tuple[int, int, int, int], spans: Sequence[Span], dtype: torch.dtype) -> None:
        self.key_heads, self.heads, self.key_dim, self.value_dim = shape
        self.index = rows_index(spans)
        rows = len(self.index.slots)
        draw = Draw(rows + self.heads)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.mixed = draw.normal(rows, 2 * keys + 2 * values, dtype=dtype)
        self.gates = draw.normal(rows, 2 * self.heads)
        for values_of_rows in (self.mixed, self.gates):
            values_of_rows[self.index.slots < 0] = torch.nan
        self.decay = Decay(torch.linspace(-6, 2, self.heads), draw.normal(self.heads))
        self.norm_weight = draw.normal(self.value_dim)
        state = (self.heads, self.key_dim, self.value_dim)
        self.state = torch.full((SLOTS, *state), torch.nan)
        for span in spans:
            if span.slot >= 0 and span.position:
                self.state[span.slot] = draw.normal(*state)

    @property
    def tokens(self) -> Tensor:
        """Which rows are tokens."""
        return self.index.slots >= 0

    def run(self, kernels: type[Kernels]) -> tuple[Tensor, Tensor, Tensor]:
        """(out, squares of each token's heads, the states afterwards)."""
        state = self.state.clone()
        arguments = self.mixed, self.gates, self.decay, state, self.index, self.norm_weight, self.key_heads
        out, squares = kernels.delta_step(*arguments)
        assert out.dtype == self.mixed.dtype and squares.dtype == F32
        assert len(out) == len(self.mixed) and len(squares) == len(self.mixed) * self.heads
        return out, squares.sum(1).view(-1, self.heads), state

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same by the definition; NaN for padding."""
        out = torch.full((len(self.mixed), self.heads * self.value_dim), torch.nan, dtype=torch.float64)
        squares, state = out[:, : self.heads].clone(), self.state.double()
        for slot, of in runs_of(self.index.slots):
            out[of], squares[of], state[slot] = self.exact_run(slot, of)
        return out, squares, state

    def exact_run(self, slot: int, of: slice) -> tuple[Tensor, Tensor, Tensor]:
        mixed, gates = self.mixed[of].double(), self.gates[of].double()
        rows = len(mixed)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        q, k, v, z = mixed.split((keys, keys, values, values), dim=1)
        b, a = gates.t().chunk(2)

        def of_heads(x: Tensor) -> Tensor:
            heads = reference.l2_normalize(x.view(rows, self.key_heads, -1))
            return heads.repeat_interleave(self.heads // self.key_heads, dim=1).transpose(0, 1)

        g = -self.decay.a_log.double().exp()[:, None] * F.softplus(a + self.decay.dt_bias.double()[:, None])
        before = self.state[slot].double()
        o, after = reference.naive_gated_delta_rule(
            of_heads(q) * self.key_dim**-0.5,
            of_heads(k),
            v.view(rows, self.heads, -1).transpose(0, 1),
            g,
            b.sigmoid(),
            torch.zeros_like(before) if self.index.positions[of][0] == 0 else before,
        )
        o = o.transpose(0, 1)
        out = o * self.norm_weight.double() * F.silu(z.view(rows, self.heads, -1))
        return out.reshape(rows, -1), o.square().sum(-1), after

    def check(self, kernels: type[Kernels], loose: float = 1.0) -> None:
        out, squares, state = self.run(kernels)
        exact_out, exact_squares, exact_state = self.exact()
        mine = [slot for slot, _ in runs_of(self.index.slots)]
        others = [slot for slot in range(SLOTS) if slot not in mine]
        assert same_bits(state[others], self.state[others])
        if not mine:
            return
        limit, tokens = loose * TOLERANCE[self.mixed.dtype], self.tokens
        assert relative_error(out[tokens], exact_out[tokens]) < limit
        assert relative_error(squares[tokens], exact_squares[tokens]) < (limit if loose > 1 else TOLERANCE[F32])
        for slot in mine:
            assert relative_error(state[slot], exact_state[slot]) < TOLERANCE[F32]


@pytest.mark.parametrize("position", (0, 300))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", (*ROWS, 130))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompt(
    cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, position: int
) -> None:
    Case(shape, [Span(4, position, rows)], dtype).check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mix(cpu_kernels: type[Kernels], shape: tuple[int, int, int, int], mix: str, dtype: torch.dtype) -> None:
    Case(shape, MIXES[mix], dtype).check(cpu_kernels)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_reference_of_a_step(mix: str, dtype: torch.dtype) -> None:
    """The plain function, which other kernels are compared with."""
    Case((2, 4, 16, 24), MIXES[mix], dtype).check(Kernels, loose=2)


def test_nan_shows_from_its_token_on(cpu_kernels: type[Kernels]) -> None:
    case = Case((2, 4, 32, 32), [Span(1, 5, 9), Span(6, 70, 1)], F32)
    case.mixed[4, -1] = torch.nan  # a gate of the last head's output
    case.mixed[6, 0] = torch.nan  # a query of the first key head
    out, _, state = case.run(cpu_kernels)
    strange = out.isnan().view(10, 4, 32)
    assert strange[4].sum() == 1 and strange[6, :2].all() and not strange[[0, 1, 2, 3, 5, 7, 8, 9]].any()
    assert not state[[1, 6]].isnan().any()
    case.mixed[7, 64] = torch.nan  # a key of the first key head: what is written with it stays
    out, _, state = case.run(cpu_kernels)
    assert out.view(10, 4, 32)[7:9, :2].isnan().all() and state[1, :2].isnan().all()
    assert not state[1, 2:].isnan().any() and not state[6].isnan().any() and not out[9].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernels", ("cpu", "reference"))
@pytest.mark.parametrize("position", (0, 300))
@pytest.mark.parametrize(("length", "rows"), [(1, 4), (3, 4), (63, 64), (70, 200)])
def test_prompt_with_padding(
    cpu_kernels: type[Kernels], kernels: str, length: int, rows: int, position: int, dtype: torch.dtype
) -> None:
    case = Case((2, 4, 32, 32), [Span(3, position, length), padding(rows - length)], dtype)
    case.check(cpu_kernels if kernels == "cpu" else Kernels, loose=2)


@pytest.mark.parametrize("slots", ([2, 2, 2, SLOTS], [2, 2, 2, 2**40], [2, 1, 1, 2]))
def test_slots_that_it_refuses(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    """Those that there are not, and one of two runs."""
    case = Case((2, 4, 32, 32), [Span(2, 10, 3), Span(1, 0, 1)], F32)
    before = case.state.clone()
    index = case.index._replace(slots=torch.tensor(slots))
    with pytest.raises(AssertionError, match="delta_step failed"):
        cpu_kernels.delta_step(case.mixed, case.gates, case.decay, case.state, index, case.norm_weight, case.key_heads)
    assert same_bits(case.state, before)
