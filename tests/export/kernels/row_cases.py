"""Rows of several sessions: mixtures of runs and padding that the kernels for rows are tested with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ostinato.export.kernels.operands import RowIndex

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 6


@dataclass(frozen=True)
class Run:
    """Rows of one slot, or of padding where that is -1, from position `first` on."""

    slot: int
    first: int
    length: int = 1

    @property
    def end(self) -> int:
        return self.first + self.length


# Slot 5 has no rows.
MIXTURES = {
    "single rows": [Run(slot, first) for slot, first in ((3, 5), (0, 0), (4, 70), (1, 1), (2, 16))],
    "one run": [Run(2, 9, 21)],
    "one run from the beginning": [Run(1, 0, 19)],
    "two rows": [Run(0, 33), Run(4, 2)],
    "padding behind": [Run(1, 3, 2), Run(-1, 7, 3)],
    "padding between": [Run(-1, 0), Run(3, 40, 3), Run(-1, 2, 2), Run(0, 0), Run(2, 64, 2), Run(-1, 9)],
    "short runs": [Run(4, 1, 2), Run(3, 0, 3), Run(0, 2, 4), Run(1, 47, 5), Run(2, 15)],
    "a long run among rows": [Run(0, 30), Run(3, 11, 40), Run(1, 0), Run(-1, 0), Run(4, 17)],
    "only padding": [Run(-1, 0, 3)],
}


def checkered(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations of the axes' values. In the interpreter, which takes a second for each, the black squares of a
    chessboard: any two values of three axes still meet.
    """
    numbered = product(*map(enumerate, axes))
    return [
        tuple(value for _, value in square)
        for square in numbered
        if DEVICE == "cuda" or sum(index for index, _ in square) % 2 == 0
    ]


def rows_of(runs: list[Run]) -> int:
    return sum(run.length for run in runs)


def rows_index(runs: list[Run], rotary: int = 2) -> RowIndex:
    """Angles are drawn at random."""
    positions = torch.cat([torch.arange(run.first, run.end) for run in runs])
    slots = torch.tensor([run.slot for run in runs for _ in range(run.length)])
    angles = 3 * torch.randn(len(positions), rotary // 2, generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    return RowIndex(*(values.to(DEVICE) for values in (positions, slots, angles.cos(), angles.sin())))


def real_rows(index: RowIndex) -> Tensor:
    """Numbers of the rows that are no padding."""
    return (index.slots >= 0).nonzero().flatten()
