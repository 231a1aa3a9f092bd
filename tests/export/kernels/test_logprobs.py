"""All forms of log-probabilities against their definition by a stable sort in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.sampling_params import MAX_LOGPROBS
from ostinato.export.kernels import Kernels
from ostinato.export.kernels.sampling import logprobs_triton, reference

from .conftest import traced_layer
from .runs import DEVICE
from .sampling_cases import KINDS, VOCAB, random_logits

Form = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
FORMS = ("reference", "rows", "C++")
VOCABS = (1, 7, 20, 33, 605, 2048, 5000)
LARGE = (2049, 151_936, VOCAB)
each_form = pytest.mark.parametrize("name", FORMS)


@pytest.fixture
def form(name: str, request: pytest.FixtureRequest) -> Form:
    if name == "C++":
        cpu: type[Kernels] = request.getfixturevalue("cpu_kernels")
        return cpu.logprobs
    if name == "reference":
        return reference.logprobs
    return lambda logits, tokens: tuple(  # type: ignore[return-value]
        one.cpu() for one in logprobs_triton.logprobs(logits.to(DEVICE), tokens.to(DEVICE))
    )


def check(form: Form, logits: Tensor, tokens: Tensor) -> None:
    count = min(MAX_LOGPROBS, logits.shape[1])
    x = logits.nan_to_num(nan=torch.finfo(torch.float32).min).double()
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :count]
    own = x.gather(1, tokens[:, None])
    numbers, values = form(logits, tokens)
    assert numbers.dtype == torch.int32 and values.dtype == torch.float32
    assert torch.equal(numbers[:, 0].long(), (x >= own).sum(1))
    assert torch.equal(numbers[:, 1:].long(), order)
    expected = x.log_softmax(1).gather(1, torch.cat([tokens[:, None], order], 1))
    torch.testing.assert_close(values, expected.float(), atol=1e-5, rtol=1e-5)


def tokens_of(logits: Tensor) -> Tensor:
    """Return a token for each row: the first, the last and the most likely one, then any."""
    rows, vocab = logits.shape
    tokens = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(vocab))
    for row, token in enumerate((0, vocab - 1, int(logits[2 % rows].argmax()))[:rows]):
        tokens[row] = token
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
@each_form
def test_definition(form: Form, vocab: int, kind: str) -> None:
    logits = random_logits(kind, 4, vocab, vocab)
    check(form, logits, tokens_of(logits))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("vocab", LARGE)
@pytest.mark.parametrize("name", ["C++", *["rows"] * (DEVICE == "cuda")])
def test_large_vocabularies(form: Form, vocab: int, rows: int) -> None:
    for kind in KINDS:
        logits = random_logits(kind, rows, vocab, vocab)
        check(form, logits, tokens_of(logits))


@each_form
def test_the_most_likely_stand_together(form: Form) -> None:
    """All in one piece, one quad or one block, or one in each; and all the same."""
    logits = random_logits("random", 6, 5000, 3)
    logits[0, 40:70] = torch.arange(30) + 5.0
    logits[1, 4:8] += 9
    logits[2, 2048:4096] += 9
    logits[3, ::2048] = torch.tensor([7.0, 9.0, 8.0])
    logits[4], logits[5] = 1.5, 0.0
    logits[5, ::3] = -0.0
    check(form, logits, torch.tensor([69, 7, 4000, 2048, 17, 4999]))


@each_form
def test_infinity_and_nan(form: Form) -> None:
    """A NaN counts as the lowest number; of equal ones, also of these, the first comes first."""
    logits = random_logits("random", 6, 300, 5)
    logits[0, ::3], logits[1, 1::7], logits[2, 50:52] = torch.nan, -torch.inf, torch.inf
    logits[3], logits[4] = torch.nan, -torch.inf
    logits[5, 10:] = torch.nan
    check(form, logits, torch.tensor([1, 1, 51, 299, 0, 299]))


@pytest.mark.parametrize("token", (-1, 50, 2**40))
def test_a_token_that_there_is_not(cpu_kernels: type[Kernels], token: int) -> None:
    with pytest.raises(AssertionError, match="logprobs failed"):
        cpu_kernels.logprobs(torch.zeros(2, 50), torch.tensor([0, token]))


LAYER = """
import torch
from ostinato.export.kernels.sampling.logprobs_triton import logprobs

class Layer(torch.nn.Module):
    def forward(self, logits, tokens):
        return logprobs(logits, tokens)

rows = torch.export.Dim("R", min=1, max=512)
inputs, dynamic = (torch.zeros(5, 300), torch.arange(5)), ({0: rows}, {0: rows})
"""


def test_traced() -> None:
    assert traced_layer(LAYER) == (["ostinato.logprobs_rows.default"], [], [("R", 21), ("R", 21)])
