"""The delta rule and the convolution for rows of several sessions, against their definitions in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.delta_rule import reference, rows_conv_triton, rows_triton
from ostinato.export.kernels.operands import Convolution, Decay, RowIndex

from ...comparison import relative_error
from .conftest import traced_layer
from .row_cases import DEVICE, MIXTURES, SLOTS, Run, checkered, real_rows, rows_index, rows_of

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {F32: 1e-5, BF16: 4e-3}
# (key heads, heads, K, V)
SHAPES = [(2, 4, 32, 16), (1, 3, 16, 32)]
MAIN = (16, 32, 128, 128) if DEVICE == "cuda" else SHAPES[0]


def configure(monkeypatch: pytest.MonkeyPatch, values: int, long: int, programs: int, chunk: int = 16) -> None:
    runs = (
        rows_triton.RunsConfig(warps=1, programs=programs, solving_warps=1, solving_programs=programs + 1)
        if programs
        else None
    )
    config = rows_triton.DeltaConfig(values, warps=1, long=long, chunk=chunk, runs=runs)
    monkeypatch.setattr(rows_triton, "CONFIGS", dict.fromkeys(rows_triton.CONFIGS, config))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and channels here are fewer than a GPU's blocks have."""
    if DEVICE == "cpu":
        configure(monkeypatch, values=8, long=4, programs=2)
        monkeypatch.setattr(rows_conv_triton, "CONV", rows_conv_triton.ConvConfig(channels=16, warps=1))


@dataclass(frozen=True)
class Case:
    """Arguments of `delta_step`, in its order."""

    mixed: Tensor
    gates: Tensor
    decay: Decay
    state: Tensor
    index: RowIndex
    norm_weight: Tensor
    key_heads: int

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, squares summed over P, state after); the case can be used again."""
        arguments = vars(self) | {"state": self.state.clone()}
        out, squares = rows_triton.delta_rows(**arguments)
        _, heads, _, value_dim = self.state.shape
        rows = len(self.mixed)
        assert out.dtype == self.mixed.dtype and out.shape == (rows, heads * value_dim)
        assert squares.dtype == F32 and squares.shape[0] == rows * heads and squares.dim() == 2
        return out, squares.sum(1).view(rows, heads), arguments["state"]

    @property
    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `run` should give, row after row, in float64; zeros for padding."""
        _, heads, key_dim, value_dim = self.state.shape
        rows, keys, values = len(self.mixed), self.key_heads * key_dim, heads * value_dim
        out, squares = torch.zeros(rows, values).double(), torch.zeros(rows, heads).double()
        state = self.state.double()

        def of_heads(x: Tensor) -> Tensor:
            return reference.l2_normalize(x.view(-1, key_dim)).repeat_interleave(heads // self.key_heads, dim=0)

        for row in real_rows(self.index).tolist():
            slot = int(self.index.slots[row])
            q, k, v, z = self.mixed[row].double().split((keys, keys, values, values))
            b, a = self.gates[row].double().chunk(2)
            g = -self.decay.a_log.double().exp() * F.softplus(a + self.decay.dt_bias.double())
            before = torch.zeros_like(state[slot]) if self.index.positions[row] == 0 else state[slot]
            o, state[slot] = reference.recurrent_step(
                of_heads(q) * key_dim**-0.5, of_heads(k), v.view(heads, -1), g, b.sigmoid(), before
            )
            out[row] = (o * self.norm_weight.double() * F.silu(z.view(heads, -1))).flatten()
            squares[row] = o.square().sum(1)
        return out.to(DEVICE), squares.to(DEVICE), state


def draw(shape: tuple[int, int, int, int], runs: list[Run], dtype: torch.dtype) -> Case:
    """Heads of slow and of fast decay; states that no row needs are NaN, and so are the rows of padding."""
    key_heads, heads, key_dim, value_dim = shape
    index, rows = rows_index(runs), rows_of(runs)
    generator = torch.Generator().manual_seed(heads + rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    mixed, gates = normal(rows, 2 * key_heads * key_dim + 2 * heads * value_dim).to(dtype), normal(rows, 2 * heads)
    mixed[index.slots < 0] = torch.nan
    gates[index.slots < 0] = torch.nan
    state = torch.full((SLOTS, heads, key_dim, value_dim), torch.nan, device=DEVICE)
    for run in runs:
        if run.slot >= 0 and run.first:
            state[run.slot] = normal(heads, key_dim, value_dim)
    decay = Decay(torch.linspace(-6, 2, heads, device=DEVICE), normal(heads))
    return Case(mixed, gates, decay, state, index, normal(value_dim), key_heads)


def check(case: Case) -> None:
    rows, untouched = real_rows(case.index), set(range(SLOTS)) - set(case.index.slots.tolist())
    out, squares, state = case.run()
    if len(rows):
        for ours, exact, limit in zip((out, squares), case.exact, (TOLERANCE[case.mixed.dtype], 1e-5), strict=False):
            assert relative_error(ours[rows], exact[rows]) < limit
    for slot, (ours, exact) in enumerate(zip(state, case.exact[2], strict=True)):
        if slot in untouched:
            assert ours.isnan().all()
        else:
            assert relative_error(ours, exact) < 1e-5


@pytest.mark.parametrize(("mixture", "shape", "dtype"), checkered(MIXTURES, SHAPES, TOLERANCE), ids=str)
def test_definition(mixture: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(draw(shape, MIXTURES[mixture], dtype))


@pytest.mark.parametrize(
    ("config", "mixture"),
    checkered(
        ((4, 1000, 0, 16), (16, 1, 0, 16), (16, 2, 0, 8), (16, 1, 1, 16), (8, 2, 40, 32)),
        ("one run", "padding between", "short runs", "a long run among rows"),
    ),
    ids=str,
)
def test_configurations(config: tuple[int, int, int, int], mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs row by row, all of them in chunks, by the kernel for rows or by the other; programs with several runs."""
    values, long, programs, chunk = config
    # Tensor cores multiply no fewer than 16 rows.
    configure(monkeypatch, values, long, programs, chunk if DEVICE == "cpu" else max(16, chunk))
    check(draw(MAIN, MIXTURES[mixture], BF16))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow")
@pytest.mark.parametrize("runs", [[Run(3, 500, 256)], [Run(slot, 9, 40) for slot in range(5)]], ids=["one", "five"])
def test_true_shape(runs: list[Run]) -> None:
    check(draw(MAIN, runs, BF16))


def test_repeated_bit_for_bit() -> None:
    case = draw(MAIN, MIXTURES["short runs"], BF16)
    rows = real_rows(case.index)
    first, second = (case.run() for _ in range(2))
    assert torch.equal(first[0][rows], second[0][rows]) and torch.equal(first[2].nan_to_num(), second[2].nan_to_num())


def convolved(runs: list[Run], columns: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    """Compare with the reference, over states that are NaN where no row needs them."""
    index = rows_index(runs)
    generator = torch.Generator().manual_seed(columns)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    product, weight = normal(rows_of(runs), columns), normal(channels, 1, taps)
    product[index.slots < 0] = torch.nan
    state = normal(SLOTS, taps - 1, channels).fill_(torch.nan)
    for run in runs:
        if run.slot >= 0 and run.first:
            state[run.slot] = normal(taps - 1, channels)
    expected, wide = state.double(), Convolution(weight.double(), state.double())
    wide = replace(wide, state=expected)
    exact = reference.conv_rows(product.double(), wide, index)
    found = state.clone()
    mixed = rows_conv_triton.conv_rows(product, Convolution(weight, found), index)
    rows = real_rows(index)
    assert mixed.dtype == dtype and mixed.shape == product.shape
    assert not len(rows) or relative_error(mixed[rows], exact[rows]) < TOLERANCE[dtype]
    assert torch.equal(mixed[rows][:, channels:], product[rows][:, channels:])
    # Inputs are moved, not computed.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("columns", "channels", "taps"), [(12, 12, 4), (40, 33, 4), (9, 6, 2), (70, 66, 3)])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_convolution(mixture: str, columns: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    convolved(MIXTURES[mixture], columns, channels, taps, dtype)


LAYER = """
import torch
from ostinato.export.kernels.delta_rule.rows_conv_triton import conv_rows
from ostinato.export.kernels.delta_rule.rows_triton import delta_step
from ostinato.export.kernels.operands import Convolution, Decay, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 4, 32, 32))
        self.register_buffer("conv", torch.zeros(2, 3, 256))

    def forward(self, product, gates, head, norm, taps, positions):
        index = RowIndex(positions, positions, product, product)
        mixed = conv_rows(product, Convolution(taps, self.conv), index)
        return delta_step(mixed, gates, Decay(head, head), self.state, index, norm, 2)

shapes = ((ROWS, 384), (ROWS, 8), (4,), (32,), (256, 1, 4))
inputs = (*map(torch.zeros, shapes), torch.arange(ROWS))
rows = {0: torch.export.Dim("R", min=1, max=256)}
dynamic = (rows, rows, None, None, None, rows) if ROWS > 1 else None
"""


def test_traced_for_any_number_of_rows() -> None:
    operators, buffers, shapes = traced_layer(LAYER.replace("ROWS", "7"))
    assert operators == ["ostinato.conv_rows.default", "ostinato.delta_rows.default"]
    assert buffers == ["conv", "state"]
    assert shapes == [("R", 128), ("4*R", 1)]


def test_traced_for_one_row() -> None:
    """Then it has the step's kernel."""
    operators, _, shapes = traced_layer(LAYER.replace("ROWS", "1"))
    assert operators == ["ostinato.conv_rows.default", "ostinato.delta_step.default"]
    assert shapes == [(1, 128), (4, 4)]
