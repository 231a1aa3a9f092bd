"""Sampling in C++ against the plain definition: the same token for every option, on logits of every kind."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.delegate.sampling import Sampling, SamplingInputs
from ostinato.export.kernels import Kernels
from ostinato.export.kernels.sampling import reference

from .sampling_cases import OPTIONS as COMMON

VOCAB = 248_320
OPTIONS = [*COMMON, Sampling(1.0, 1000, 0.999)]


def draw(kernels: type[Kernels], logits: Tensor, options: Sampling, position: int, seed: int) -> int:
    how = SamplingInputs(*replace(options, seed=seed % 2**64).inputs())
    place, kept = torch.tensor([position - 1]), torch.tensor([[-1]])
    workspace = torch.zeros(reference.workspace_size(), dtype=torch.int64)
    token = kernels.sample_next(logits, place, kept, how, workspace)
    assert token.shape == (1, 1) and token.dtype == torch.int64
    assert int(kept) == int(token) and int(place) == position
    return int(token)


def logits_of(kind: str, vocab: int) -> Tensor:
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    return {"random": x, "peaked": x * 12 - 30, "flat": x * 1e-3, "tied": (x * 1.5).round()}[kind]


@pytest.mark.parametrize("kind", ("random", "peaked", "flat", "tied"))
@pytest.mark.parametrize("vocab", (1, 97, 16_384, 40_000))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference(cpu_kernels: type[Kernels], options: Sampling, vocab: int, kind: str) -> None:
    logits = logits_of(kind, vocab)
    for position, seed in ((0, 0), (7, 2**63 + 5), (2**33 + 1, -1)):
        expected = draw(Kernels, logits, options, position, seed)
        assert draw(cpu_kernels, logits, options, position, seed) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_vocabulary(cpu_kernels: type[Kernels], options: Sampling) -> None:
    logits = logits_of("random", VOCAB)
    assert draw(cpu_kernels, logits, options, 3, 11) == draw(Kernels, logits, options, 3, 11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_that_are_not_finite(cpu_kernels: type[Kernels], options: Sampling) -> None:
    logits = logits_of("random", 300)
    logits[0, ::3], logits[0, 1::7], logits[0, 50], logits[0, 51] = math.nan, -math.inf, math.inf, math.inf
    for some in (logits, torch.full_like(logits, math.nan), torch.full_like(logits, -math.inf)):
        assert draw(cpu_kernels, some, options, 5, 1) == draw(Kernels, some, options, 5, 1)
