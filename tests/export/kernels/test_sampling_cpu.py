"""Sampling in C++ against the plain definition: the same token for every option, on logits of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels import Kernels
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling import reference

from .sampling_cases import OPTIONS as COMMON

VOCAB = 248_320
OPTIONS = [*COMMON, SamplingParams(1.0, 1000, 0.999)]
WORKSPACE = torch.zeros(reference.workspace_size(), dtype=torch.int64)


def sample(kernels: type[Kernels], logits: Tensor, options: SamplingParams, position: int, seed: int) -> int:
    """What is drawn for `position` from logits [1, V], in the second of three slots."""
    params = [
        SamplingTensors(*replace(each, seed=seed % 2**64).tensors())
        for each in (SamplingParams(), options, SamplingParams(2.0))
    ]
    last = LastTokens(torch.tensor([-5, -6, -7]), torch.tensor([-8, -9, -10]))
    tokens = kernels.sample_next(
        logits, torch.tensor([position - 1]), torch.tensor([1]), last, joined(params), WORKSPACE
    )
    assert tokens.shape == (1,) and tokens.dtype == torch.int64
    assert last.token.tolist() == [-5, int(tokens), -7] and last.position.tolist() == [-8, position, -10]
    return int(tokens)


def joined(params: Sequence[SamplingTensors]) -> SamplingTensors:
    """Options of a slot each, together."""
    return SamplingTensors(*map(torch.cat, zip(*params, strict=True)))


def logits_of(kind: str, vocab: int) -> Tensor:
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    return {"random": x, "peaked": x * 12 - 30, "flat": x * 1e-3, "tied": (x * 1.5).round()}[kind]


@pytest.mark.parametrize("kind", ("random", "peaked", "flat", "tied"))
@pytest.mark.parametrize("vocab", (1, 97, 16_384, 40_000))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference(cpu_kernels: type[Kernels], options: SamplingParams, vocab: int, kind: str) -> None:
    logits = logits_of(kind, vocab)
    for position, seed in ((0, 0), (7, 2**63 + 5), (2**33 + 1, -1)):
        expected = sample(Kernels, logits, options, position, seed)
        assert sample(cpu_kernels, logits, options, position, seed) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_vocabulary(cpu_kernels: type[Kernels], options: SamplingParams) -> None:
    logits = logits_of("random", VOCAB)
    assert sample(cpu_kernels, logits, options, 3, 11) == sample(Kernels, logits, options, 3, 11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_that_are_not_finite(cpu_kernels: type[Kernels], options: SamplingParams) -> None:
    logits = logits_of("random", 300)
    logits[0, ::3], logits[0, 1::7], logits[0, 50], logits[0, 51] = math.nan, -math.inf, math.inf, math.inf
    for some in (logits, torch.full_like(logits, math.nan), torch.full_like(logits, -math.inf)):
        assert sample(cpu_kernels, some, options, 5, 1) == sample(Kernels, some, options, 5, 1)


class Rows:
    """Rows of slots with options of their own, among them slots without rows."""

    def __init__(self, slots: Sequence[int], vocab: int = 20_000) -> None:
        self.params = joined([replace(options, seed=3 * slot).tensors() for slot, options in enumerate(OPTIONS)])
        generator = torch.Generator().manual_seed(vocab)
        self.slots = torch.tensor(slots)
        self.logits = torch.randn(len(slots), vocab, generator=generator)
        self.logits[self.slots < 0] = torch.nan
        self.positions = torch.randint(-1, 2**40, (len(slots),), generator=generator)
        self.last = LastTokens(*(-100 - torch.arange(2 * len(OPTIONS)).view(2, -1)))

    def run(self, kernels: type[Kernels]) -> tuple[Tensor, LastTokens]:
        last = LastTokens(self.last.token.clone(), self.last.position.clone())
        return kernels.sample_next(self.logits, self.positions, self.slots, last, self.params, WORKSPACE), last


@pytest.mark.parametrize(
    "slots",
    [[3], [-1], [0, 1], [*range(14, -1, -1)], [5, -1, 2, 2, 2, -1], [-1, -1], [*range(15)] * 3, [7] * 20],
    ids=str,
)
def test_rows_of_several_slots(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    """Each by its slot's options; of a slot with several rows the last one's token is kept."""
    rows = Rows(slots)
    (tokens, last), (expected, kept) = rows.run(cpu_kernels), rows.run(Kernels)
    mine = rows.slots >= 0
    assert tokens.shape == expected.shape and torch.equal(tokens[mine], expected[mine])
    assert torch.equal(last.token, kept.token) and torch.equal(last.position, kept.position)
    without = sorted(set(range(len(OPTIONS))) - set(slots))
    assert torch.equal(last.token[without], rows.last.token[without])


@pytest.mark.parametrize("slot", (len(OPTIONS), 2**40))
def test_a_slot_that_there_is_not(cpu_kernels: type[Kernels], slot: int) -> None:
    rows = Rows([1, slot, 2])
    with pytest.raises(AssertionError, match="sample_next failed"):
        rows.run(cpu_kernels)
