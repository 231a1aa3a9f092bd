"""The forms of sampling that are held to one definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from ostinato.delegate.sampling_params import SamplingParams
from ostinato.export.kernels.sampling import reference, rows_triton

from .runs import DEVICE
from .sampling_cases import ALL_PARAMS, PARAMS, VOCAB, Sample


@dataclass(frozen=True)
class Form:
    """One form of sampling, and what it is held to.

    Attributes:
        sample: takes the arguments of a `Case`. None: the C++ kernel, which a fixture builds.
        vocabs: sizes of the vocabulary.
        single: whether it is called for one row after the other.
        settings: attributes of its module that are changed for it.
        params: of the rows that are sampled together.
        turns: number of cases for each size.
    """

    sample: Sample | None
    vocabs: Sequence[int]
    device: str = DEVICE
    single: bool = False
    settings: Mapping[str, int] | None = None
    params: Sequence[SamplingParams] = ALL_PARAMS if DEVICE == "cuda" else PARAMS
    turns: int = 10 if DEVICE == "cuda" else 1

    @property
    def is_interpreted(self) -> bool:
        return DEVICE == "cpu" and self.sample is not None and self.sample.__module__.endswith("_triton")


LARGE = [2048, 2049, 151_936, VOCAB] if DEVICE == "cuda" else []
# With blocks of 32: one, and more than there are tokens checked at once, the last with a rest, of more pieces than a turn
# takes.
BLOCKS = {"BLOCK": 32, "TILE": 8} if DEVICE == "cpu" else None
ROWS = Form(rows_triton.sample_next, (1, 97, 605, *LARGE), settings=BLOCKS)
# The C++ kernel's tasks have 16,384 tokens of a single row, or several rows.
CPU = Form(None, (1, 97, 16_384, 40_000), "cpu", params=ALL_PARAMS, turns=3)

FORMS = {
    "reference": Form(reference.sample_next, (97,)),
    "rows": ROWS,
    "rows one by one": replace(ROWS, single=True),
    "C++": CPU,
    "C++ row by row": replace(CPU, single=True),
}
each_form = pytest.mark.parametrize("name", FORMS)
