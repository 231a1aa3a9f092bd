"""Inputs of prefill and decode, as tensors on the host that are made once and filled for each call.

After a wait for the GPU, little of the host's code is in its caches, and each operator of torch takes 10 to 20 us. A whole
launch should take 100 us.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache

import torch

# Integers up to this number are cached, in 16 MB.
MAX_COUNTED = 1 << 20


class PromptInputs:
    """The inputs of calls with one fixed number of rows. Rows behind a shorter prompt are padding, with slot -1.

    Args:
        rows: number of rows of a call.
        by_row: True for `rows_logits`, which takes tokens [rows] and the number of the last token's row. False for `prefill`,
            which takes tokens [1, rows].
    """

    def __init__(self, rows: int, by_row: bool = False) -> None:
        self._rows = rows
        self._columns = [array("q", bytes(8 * rows)) for _ in range(3)]
        self._last = array("q", [0])
        tokens, positions, slots = (torch.frombuffer(numbers, dtype=torch.int64) for numbers in self._columns)
        last = torch.frombuffer(self._last, dtype=torch.int64)
        self._tensors = (tokens, positions, slots, last) if by_row else (tokens.view(1, rows), positions, slots)

    def filled(self, tokens: Sequence[int], position: int, slot: int) -> tuple[torch.Tensor, ...]:
        """Fill in tokens of a session from `position` on, and return the inputs. The next call overwrites them.

        Returns:
            int64 tensors, in the order of the method's inputs: tokens, positions and slots of the rows. By row also the
            number of the last token's row [1].
        """
        count = len(tokens)
        columns = array("q", tokens), _positions(position, position + count), array("q", [slot]) * count
        padding = self._rows - count
        for column, values in zip(self._columns, columns, strict=True):
            # A row of padding may have any token and any position.
            column[:] = values + values[-1:] * padding if padding else values
        if padding:
            self._columns[2][count:] = array("q", [-1]) * padding
        self._last[0] = count - 1
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
