"""Rows of a call: runs of several sessions and padding, in the mixtures that all forms of an operation are held to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels.operands import RowIndex

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, SLOT = 9, 1


@dataclass(frozen=True)
class Run:
    """`length` rows of one slot, from position `first` on. Rows of slot -1 are padding."""

    slot: int
    first: int
    length: int = 1

    @property
    def end(self) -> int:
        return self.first + self.length


# Slots 5 to 8 have no rows. Small enough for Triton's interpreter.
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
FOUR_ROWS_MIXTURES = {
    "four sessions": [Run(slot, first) for slot, first in ((3, 5), (0, 0), (4, 70), (1, 1))],
    "one run": [Run(2, 9, 4)],
    "one run from the beginning": [Run(1, 0, 4)],
    "two rows": [Run(0, 33), Run(4, 2)],
    "two runs": [Run(3, 0, 2), Run(0, 5, 2)],
    "padding behind": [Run(1, 1, 2), Run(-1, 7, 2)],
    "padding first": [Run(-1, 0), Run(2, 2, 3)],
    "padding between": [Run(1, 3), Run(-1, 0), Run(0, 0, 2)],
    "only padding": [Run(-1, 0, 3)],
}
# More rows than half of what a step takes. A run crosses row 256; behind it stand single rows, and a long run.
CROWD = [
    *(Run(0, 30), Run(3, 11, 150), Run(1, 0), Run(-1, 0, 20), Run(2, 7, 90), Run(4, 17)),
    *(Run(5, 0, 3), Run(-1, 9), Run(6, 2, 30), Run(7, 40)),
]
CROWDS = {"298 rows": CROWD}
if DEVICE == "cuda":
    CROWDS |= {"512 rows": [*CROWD[:-1], Run(8, 70, 214), Run(7, 40)], "a run of 410": [*CROWD[:1], Run(3, 0, 410)]}
# The C++ kernels read nothing at a position of padding, which may be any.
NOWHERE = 2**40
# Many rows, for the C++ kernels.
LONG_MIXTURES = {
    "one row": [Run(1, 37)],
    "first row": [Run(0, 0)],
    "padding": [Run(-1, NOWHERE)],
    "much padding": [Run(-1, NOWHERE, 20)],
    "rows of several": [Run(3, 5), Run(0, 0), Run(7, 130), Run(2, 64), Run(5, 63)],
    "rows and padding": [Run(4, 99), Run(-1, NOWHERE, 2), Run(1, 200), Run(-1, NOWHERE)],
    "padding first": [Run(-1, NOWHERE, 3), Run(1, 16, 5), Run(-1, NOWHERE), Run(0, 47)],
    "prompt and padding": [Run(6, 30, 17), Run(-1, NOWHERE, 15)],
    "prompt and rows": [Run(2, 0, 40), Run(6, 300), Run(0, 31), Run(3, 15, 17)],
    "prompts": [Run(0, 0, 70), Run(8, 100, 33), Run(1, 0, 2)],
    "deep and many": [Run(2, 1000), *(Run(slot, 7 * slot) for slot in range(3, 9)), Run(1, 500, 3)],
}


def checkered(*axes: Iterable[Any], every: int = 2, device: str = DEVICE) -> list[tuple[Any, ...]]:
    """Combine the axes' values. In the interpreter, which takes a second for each combination, take the black squares of a
    chessboard: any two values of three axes still meet.

    Args:
        every: colours of the board, of which one is taken. With 1, all squares are.
        device: where the cases run. A GPU takes four times as many.
    """
    every = max(1, every // 4) if device == "cuda" else every
    numbered = product(*map(enumerate, axes))
    return [
        tuple(value for _, value in square) for square in numbered if sum(index for index, _ in square) % every == 0
    ]


def in_turn(first: Sequence[Any], second: Sequence[Any], skipped: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield pairs until each value of both has occurred. `skipped` values of the second come last in their first turn."""
    return islice(zip(cycle(first), islice(cycle(second), skipped, None)), max(len(first), len(second)))


def contract(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrise a test by forms and more. A case is named by its values."""
    named = [pytest.param(*case, id="-".join(str(value).removeprefix("torch.") for value in case)) for case in cases]
    return pytest.mark.parametrize(names.split(), named)


def rows_of(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def rows_index(runs: Sequence[Run], rotary: int = 2, device: str = DEVICE, seed: int = 1) -> RowIndex:
    """Return the index of the runs' rows, with random angles. The angles of padding are NaN."""
    positions = torch.cat([torch.arange(run.first, run.end) for run in runs])
    slots = torch.tensor([run.slot for run in runs for _ in range(run.length)])
    angles = 3 * torch.randn(len(slots), rotary // 2, generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
    angles.masked_fill_((slots < 0)[:, None], torch.nan)
    return RowIndex(*(values.to(device) for values in (positions, slots, angles.cos(), angles.sin())))


def prompt_index(first: int, tokens: int, rows: int | None = None, rotary: int = 2) -> RowIndex:
    """Return the index of a prompt of SLOT, padded to `rows` rows."""
    padding = (rows or tokens) - tokens
    return rows_index([Run(SLOT, first, tokens), *[Run(-1, first + tokens - 1, padding)][: padding > 0]], rotary)


def real_rows(index: RowIndex) -> Tensor:
    """Return the numbers of the rows that are tokens."""
    return (index.slots >= 0).nonzero().flatten()


def padded(x: Tensor, rows: int) -> Tensor:
    """Append rows of NaN: x [T, ...] -> [rows, ...]."""
    more = x.new_full((rows - x.shape[0], *x.shape[1:]), torch.nan)
    return torch.cat((x, more))


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bytes; NaN is equal to itself."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
