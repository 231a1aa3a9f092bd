"""All forms of a gated delta-net's convolution against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.delta_rule import prefill_conv_triton, reference, rows_conv_triton
from ostinato.export.kernels.operands import Convolution, RowIndex, runs_of

from .conftest import traced_layer
from .delta_rule_cases import BF16, F32, prompt
from .runs import CROWDS, DEVICE, MIXTURES, SLOT, SLOTS, Run, checkered, real_rows, rows_index, same_bits

# Relative errors of each number: half a unit in the last place of bfloat16 is 2^-8 of it at most.
TOLERANCE = {F32: 1e-5, BF16: 2**-8 + 1e-5}
# Columns of the product, channels, taps.
Shape = tuple[int, int, int]
# `conv_rows`, or `convolve` by way of `of_prompt`.
Convolve = Callable[[Tensor, Convolution, RowIndex], Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of `conv_rows`, in its order."""

    product: Tensor
    conv: Convolution
    index: RowIndex

    def run(self, convolve: Convolve) -> tuple[Tensor, Tensor]:
        """Return the output, and the state after the call. The case can be used again."""
        state = self.conv.state.clone()
        out = convolve(self.product, replace(self.conv, state=state), self.index)
        assert out.dtype == self.product.dtype and out.shape == self.product.shape
        return out, state

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the outputs of the channels in float64, NaN for padding; and the state, which is moved and not computed."""
        weight, state = self.conv.weight.double(), self.conv.state.clone()
        inputs = self.product[:, : len(weight)]
        out = torch.full_like(inputs, torch.nan, dtype=torch.float64)
        for slot, rows in runs_of(self.index.slots):
            before = torch.zeros_like(state[slot]) if self.index.positions[rows.start] == 0 else state[slot]
            window = torch.cat((before, inputs[rows]))
            out[rows] = F.silu(F.conv1d(window.double().t()[None], weight, groups=len(weight))[0]).t()
            state[slot] = window[rows.stop - rows.start :]
        return out, state

    def part(self, begin: int, end: int, state: Tensor) -> Case:
        """Return some of the rows, after another state."""
        index = RowIndex(*(values[begin:end] for values in self.index))
        return Case(self.product[begin:end], replace(self.conv, state=state), index)


def make(shape: Shape, runs: Sequence[Run], dtype: torch.dtype, device: str = DEVICE) -> Case:
    """Make random arguments: NaN in rows of padding and in states that no row needs."""
    columns, channels, taps = shape
    index = rows_index(runs, device=device)
    generator = torch.Generator().manual_seed(columns + taps)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    product = normal(len(index.slots), columns)
    product[index.slots < 0] = torch.nan
    state = torch.full((SLOTS, taps - 1, channels), torch.nan, dtype=dtype, device=device)
    for run in runs:
        if run.slot >= 0 and run.first:
            state[run.slot] = normal(taps - 1, channels)
    return Case(product, Convolution(normal(channels, 1, taps), state), index)


def check(case: Case, convolve: Convolve) -> None:
    """Hold a form to the definition."""
    compare(case, *case.run(convolve))


def compare(case: Case, out: Tensor, state: Tensor) -> None:
    """Hold outputs to the definition, number by number, and bit by bit all states and the columns that are only copied."""
    (exact, moved), rows, channels = case.exact(), real_rows(case.index), len(case.conv.weight)
    limit = TOLERANCE[out.dtype]
    torch.testing.assert_close(out[rows, :channels].double(), exact[rows], rtol=limit, atol=1e-5)
    assert same_bits(out[rows, channels:], case.product[rows, channels:])
    assert same_bits(state, moved)


def of_prompt(convolve: Convolve, packed: bool = False) -> Convolve:
    """Return `convolve` with an input that is a slice of rows with NaN to both sides; a tensor of its own if `packed`."""

    def run(product: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
        return convolve(product if packed else F.pad(product, (8, 16), value=torch.nan)[:, 8:-16], conv, index)

    return run


# 1 and 2 are shorter than what most states hold.
PROMPTS = {
    name: runs
    for first in (0, 7)
    for length, rows in (
        *((length, None) for length in (1, 2, 3, 5, 17, 20, 40, 64, 130)),
        *((1, 16), (2, 5), (3, 64), (16, 32), (17, 64), (130, 192)),
    )
    for name, runs in prompt(length, first, rows).items()
}
# More than one block of channels in both dtypes, the last of them not full. 20 taps reach farther than a block of tokens.
PROMPT_SHAPES: list[Shape] = [
    *((300, 300, taps) for taps in (4, 2, 3, 5, 20)),
    *((channels, channels, 4) for channels in (1, 8, 256, 257)),
]
# Channels that are all columns, that fill no block, that end in a block of their own.
ROWS_SHAPES: list[Shape] = [(12, 12, 4), (40, 33, 4), (9, 6, 2), (70, 66, 3)]


@dataclass(frozen=True)
class Form:
    """One form of the convolution, and what it is held to.

    Attributes:
        convolve: takes the arguments of a `Case`.
        runs: the rows that it takes, by name.
        shapes: columns, channels, taps.
        settings: attributes of modules that are changed for it.
        every: one of `every` cases is taken (`checkered`).
    """

    convolve: Convolve
    runs: Mapping[str, Sequence[Run]]
    shapes: Sequence[Shape]
    device: str = DEVICE
    settings: Sequence[tuple[Any, str, Any]] = ()
    every: int = 1


# Channels are fewer here than a GPU's blocks have.
SMALL_BLOCKS = [(rows_conv_triton, "CONV", rows_conv_triton.ConvConfig(channels=16, warps=1))]
FORMS = {
    "reference of a prompt": Form(of_prompt(reference.convolve), PROMPTS, PROMPT_SHAPES, "cpu", every=3),
    "prompt": Form(of_prompt(prefill_conv_triton.convolve), PROMPTS, PROMPT_SHAPES, every=8),
    "reference": Form(reference.conv_rows, MIXTURES | PROMPTS, ROWS_SHAPES, "cpu", every=4),
    "rows": Form(
        rows_conv_triton.conv_rows,
        MIXTURES,
        ROWS_SHAPES,
        settings=SMALL_BLOCKS if DEVICE == "cpu" else [],
        every=2,
    ),
}
FORMS["many rows"] = replace(FORMS["rows"], runs=CROWDS, shapes=ROWS_SHAPES[:1])


@pytest.fixture
def convolve_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Convolve]:
    """Return the function of a form by its name, with the form's settings in force."""

    def get(name: str) -> Convolve:
        for module, attribute, value in FORMS[name].settings:
            monkeypatch.setattr(module, attribute, value)
        return FORMS[name].convolve

    return get


CONTRACT = [
    pytest.param(name, *case, id="-".join(map(str, (name, *case))))
    for name, form in FORMS.items()
    for case in checkered(form.runs, form.shapes, TOLERANCE, every=form.every, device=form.device)
]


@pytest.mark.parametrize(("name", "runs", "shape", "dtype"), CONTRACT)
def test_definition(
    convolve_of: Callable[[str], Convolve], name: str, runs: str, shape: Shape, dtype: torch.dtype
) -> None:
    form = FORMS[name]
    check(make(shape, form.runs[runs], dtype, form.device), convolve_of(name))


@pytest.mark.parametrize("cut", (1, 2, 3, 16, 35, 39))
@pytest.mark.parametrize("name", FORMS)
def test_two_calls_are_one(convolve_of: Callable[[str], Convolve], name: str, cut: int) -> None:
    form, convolve = FORMS[name], convolve_of(name)
    whole = make(form.shapes[0], [Run(SLOT, 7, 40)], BF16, form.device)
    first, state = whole.part(0, cut, whole.conv.state).run(convolve)
    second, state = whole.part(cut, 40, state).run(convolve)
    compare(whole, torch.cat((first, second)), state)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("convolve", (prefill_conv_triton.convolve, reference.convolve), ids=("kernel", "reference"))
def test_packed_rows(convolve: Convolve, dtype: torch.dtype) -> None:
    """The contract's prompts are slices."""
    check(make(PROMPT_SHAPES[0], [Run(SLOT, 7, 33)], dtype), of_prompt(convolve, packed=True))


@pytest.mark.parametrize("name", [name for name in FORMS if name != "reference of a prompt"])
def test_padding_leaves_no_trace(convolve_of: Callable[[str], Convolve], name: str) -> None:
    """All rows are padding. The reference of a prompt is not asked, because a prompt has a token."""
    form = FORMS[name]
    case = make(form.shapes[0], [Run(SLOT, 7, 20)], F32, form.device)
    nobody = replace(case, index=case.index._replace(slots=torch.full_like(case.index.slots, -1)))
    assert same_bits(nobody.run(convolve_of(name))[1], case.conv.state)


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
    """And only the state is written. The kernel for rows is traced with the rule's (test_delta_rule_triton.py)."""
    assert traced_layer(LAYER) == (["ostinato.convolve.default"], ["state"], [("R", 96)])
