"""A prompt's convolution, its Triton kernel and its reference, against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.delta_rule import prefill_conv_triton, reference
from ostinato.export.kernels.operands import Convolution, RowIndex

from .conftest import traced_layer
from .runs import DEVICE, SLOT, SLOTS, padded, prompt_index, real_rows

BF16, F32 = torch.bfloat16, torch.float32
# Relative errors of each number: half a unit in the last place of bfloat16 is 2^-8 of it at most.
TOLERANCE = {F32: 1e-5, BF16: 2**-8 + 1e-5}
# More than one block of channels in both dtypes, the last of them not full.
CHANNELS = 300
FORMS = pytest.mark.parametrize(
    "function", (prefill_conv_triton.convolve, reference.convolve), ids=("kernel", "reference")
)

Form = Callable[[Tensor, Convolution, RowIndex], Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of the function, in its order."""

    x: Tensor
    conv: Convolution
    index: RowIndex

    @property
    def tokens(self) -> int:
        """Without padding."""
        return len(real_rows(self.index))

    @property
    def window(self) -> Tensor:
        """The inputs of the tokens, and those ahead of them that the taps reach."""
        old = self.conv.state[SLOT]
        before = torch.zeros_like(old) if self.index.positions[0] == 0 else old
        return torch.cat((before, self.x[: self.tokens]))

    @property
    def expected(self) -> Tensor:
        """Of the tokens, float64."""
        weight = self.conv.weight.double()
        return F.silu(F.conv1d(self.window.double().t()[None], weight, groups=weight.shape[0])[0]).t()

    def part(self, start: int, end: int, state: Tensor) -> Case:
        index = RowIndex(*(values[start:end] for values in self.index))
        return Case(self.x[start:end], replace(self.conv, state=state), index)


def draw(tokens: int, dtype: torch.dtype, first: int = 7, channels: int = CHANNELS, taps: int = 4) -> Case:
    """Rows that are slices of rows with NaN between them; where nothing is ahead of them, NaN in the slot's state."""
    generator = torch.Generator().manual_seed(tokens + taps)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    rows = torch.full((tokens, channels + 24), torch.nan)
    rows[:, 8 : 8 + channels] = normal(tokens, channels)
    state = normal(SLOTS, taps - 1, channels)
    if first == 0:
        state[SLOT] = torch.nan
    conv = Convolution(normal(channels, 1, taps).to(DEVICE, dtype), state.to(DEVICE, dtype))
    return Case(rows.to(DEVICE, dtype)[:, 8 : 8 + channels], conv, prompt_index(first, tokens))


def run(function: Form, case: Case) -> tuple[Tensor, Tensor]:
    """(output, state after), of a copy of the state; other slots' states must stay as they are, bit by bit."""
    state = case.conv.state.clone()
    out = function(case.x, replace(case.conv, state=state), case.index)
    assert (out.shape, out.dtype) == (case.x.shape, case.x.dtype)
    others = [slot for slot in range(SLOTS) if slot != SLOT]
    assert torch.equal(state[others], case.conv.state[others])
    return out, state


def check(function: Form, case: Case) -> None:
    """The outputs of tokens against the definition, number by number; the state is its inputs, bit by bit."""
    out, state = run(function, case)
    limit = TOLERANCE[case.x.dtype]
    torch.testing.assert_close(out[: case.tokens].double(), case.expected, rtol=limit, atol=1e-5)
    assert torch.equal(state[SLOT], case.window[case.tokens :])


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("first", (0, 7))
@pytest.mark.parametrize("tokens", (1, 2, 3, 5, 17, 64, 130))
def test_is_the_definition(function: Form, dtype: torch.dtype, first: int, tokens: int) -> None:
    """1 and 2 are shorter than what the state holds. At position 0 the old state is NaN."""
    check(function, draw(tokens, dtype, first))


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("taps", (2, 3, 5, 20))
@pytest.mark.parametrize("tokens", (2, 40))
def test_taps(function: Form, dtype: torch.dtype, taps: int, tokens: int) -> None:
    """20 of them reach farther than the kernel's blocks of tokens."""
    check(function, draw(tokens, dtype, taps=taps))


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", (1, 8, 256, 257))
def test_channels(function: Form, dtype: torch.dtype, channels: int) -> None:
    check(function, draw(20, dtype, channels=channels))


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("first", (0, 7))
@pytest.mark.parametrize(("tokens", "rows"), ((1, 16), (2, 5), (3, 64), (16, 32), (17, 64), (130, 192)))
def test_padding(function: Form, dtype: torch.dtype, first: int, tokens: int, rows: int) -> None:
    """Rows of NaN after the last token, at its position."""
    case = draw(tokens, dtype, first)
    check(function, replace(case, x=padded(case.x, rows), index=prompt_index(first, tokens, rows)))


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packed_rows(function: Form, dtype: torch.dtype) -> None:
    """The other tests' rows are slices, but those with padding."""
    case = draw(33, dtype)
    check(function, replace(case, x=case.x.contiguous()))


@FORMS
@pytest.mark.parametrize("split", (1, 2, 3, 16, 35, 39))
def test_two_calls_are_one(function: Form, split: int) -> None:
    case = draw(40, BF16)
    first, state = run(function, case.part(0, split, case.conv.state))
    second, state = run(function, case.part(split, 40, state))
    torch.testing.assert_close(torch.cat((first, second)).double(), case.expected, rtol=TOLERANCE[BF16], atol=1e-5)
    assert torch.equal(state[SLOT], case.window[case.tokens :])


def test_no_slot() -> None:
    """The kernel takes a call of nothing but padding: no state moves."""
    case = draw(20, F32)
    nobody = case.index._replace(slots=torch.full_like(case.index.slots, -1))
    _, state = run(prefill_conv_triton.convolve, replace(case, index=nobody))
    assert torch.equal(state, case.conv.state)


LAYER = """
import torch
from ostinato.export.kernels.delta_rule.prefill_conv_triton import convolve
from ostinato.export.kernels.operands import Convolution, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3, 96))

    def forward(self, rows, weight, positions):
        index = RowIndex(positions, positions, rows, rows)
        return convolve(rows[:, :96], Convolution(weight, self.state), index)

rows = torch.export.Dim("R", min=2, max=4095)
inputs = torch.zeros(512, 128), torch.zeros(96, 1, 4), torch.arange(512)
dynamic = ({0: rows}, None, {0: rows})
"""


def test_export_keeps_the_number_of_tokens_symbolic() -> None:
    """And only the state is written."""
    assert traced_layer(LAYER) == (["ostinato.convolve.default"], ["state"], [("R", 96)])
