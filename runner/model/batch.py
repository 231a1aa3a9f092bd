"""A batch, which is what a step of the model takes: runs of neighbouring rows, and the tensors that they become.

After a wait for the GPU, little of the host's code is in its caches, and each operator of torch takes 10 to 20 us. A whole
launch should take 100 us. So the tensors are made once for each shape, and filled for each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, overload

import torch

# Integers up to this number are cached, in 16 MB.
MAX_COUNTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of one slot.

    Attributes:
        slot: the slot; -1 for a row of padding.
        tokens: token ids. None: the one token that the slot keeps, at the position that it keeps.
        position: position of the first token.
        outputs: number of the run's last rows that give logits, and after which a token is sampled.
    """

    slot: int
    tokens: Sequence[int] | None = None
    position: int = -1
    outputs: int = 1

    @property
    def rows(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


class LastTokens(Sequence[Run]):
    """The runs of the tokens that slots keep. They are made when they are looked at: for 128 slots that takes 50 us.

    Attributes:
        slots: the slots. -1 is a row of padding.
    """

    __slots__ = ("slots",)

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Run: ...

    @overload
    def __getitem__(self, place: slice) -> LastTokens: ...

    def __getitem__(self, place: int | slice) -> Run | LastTokens:
        found = self.slots[place]
        return LastTokens(found) if isinstance(found, list) else Run(found)


class Outputs(NamedTuple):
    """Logits and tokens of the rows that a step's runs name as outputs, in their order. The next call of any method may
    overwrite them.

    Attributes:
        logits: [L, vocab] or longer, on the program's device.
        tokens: sampled tokens, [L] int64 or longer, on the program's device. None: nothing was sampled.
    """

    logits: torch.Tensor
    tokens: torch.Tensor | None


class BatchInputs:
    """Input tensors of calls with one fixed number of rows. Rows behind the runs are padding, with slot -1.

    Args:
        rows: number of rows of a call.
        outputs: number of rows that give logits. 0: the method takes tokens [1, rows], and gives those of the last token.
    """

    def __init__(self, rows: int, outputs: int = 0) -> None:
        self._rows = rows
        self._columns = [array("q", bytes(8 * rows)) for _ in range(3)]
        self._outputs = array("q", bytes(8 * outputs))
        columns = [torch.frombuffer(numbers, dtype=torch.int64) for numbers in self._columns]
        if outputs:
            self._tensors = (*columns, torch.frombuffer(self._outputs, dtype=torch.int64))
        else:
            self._tensors = (columns[0].view(1, rows), *columns[1:])

    def filled(self, runs: Sequence[Run]) -> tuple[torch.Tensor, ...]:
        """Fill in runs, and return the inputs. The next call overwrites them.

        Returns:
            int64 tensors, in the order of the method's inputs: tokens, positions and slots of the rows, and numbers of the
            rows that give logits, with -1 for none behind them.
        """
        tokens, positions, slots = array("q"), array("q"), array("q")
        outputs = array("q")
        for run in runs:
            count = run.rows
            if run.tokens is None:
                tokens.append(-1)
                positions.append(-1)
            else:
                tokens.extend(run.tokens)
                positions.extend(_positions(run.position, run.position + count))
            slots.extend(array("q", [run.slot]) * count)
            outputs.extend(_positions(len(slots) - run.outputs, len(slots)))
        padding = self._rows - len(slots)
        if padding:
            # A row of padding may have any token and any position.
            tokens.extend(tokens[-1:] * padding)
            positions.extend(positions[-1:] * padding)
            slots.extend(array("q", [-1]) * padding)
        for column, values in zip(self._columns, (tokens, positions, slots), strict=True):
            column[:] = values
        if self._outputs:
            self._outputs[:] = outputs + array("q", [-1]) * (len(self._outputs) - len(outputs))
        return self._tensors


def _positions(first: int, end: int) -> array[int]:
    """The integers from `first` to `end` - 1. They need not be valid positions."""
    if 0 <= first < end <= MAX_COUNTED:
        # Counting to 512 takes four times as long as a copy of the integers.
        return _counted(1 << (end - 1).bit_length())[first:end]
    return array("q", range(first, end))


@cache
def _counted(count: int) -> array[int]:
    return array("q", range(count))
