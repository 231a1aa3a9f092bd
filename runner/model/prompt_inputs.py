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
    """The inputs of calls with one fixed number of rows.

    Args:
        rows: number of rows of a call. A shorter prompt is padded: its last token and position are repeated.
        by_row: True for `rows_logits`, where each row has a slot, and rows of padding have slot -1. False for `prefill`.
    """

    def __init__(self, rows: int, by_row: bool = False) -> None:
        self._rows = rows
        self._by_row = by_row
        self._columns = [array("q", bytes(8 * rows)) for _ in range(3 if by_row else 2)]
        self._single = array("q", [0])
        tokens, *others = (torch.frombuffer(numbers, dtype=torch.int64) for numbers in (*self._columns, self._single))
        self._tensors = (tokens if by_row else tokens.view(1, rows), *others)

    def filled(self, tokens: Sequence[int], position: int, slot: int) -> tuple[torch.Tensor, ...]:
        """Fill in tokens of a session from `position` on, and return the inputs. The next call overwrites them.

        Returns:
            int64 tensors, in the order of the method's inputs. By row: tokens, positions and slots [rows], and the number of
            the last token's row [1]. Otherwise: tokens [1, rows], positions [rows] and the slot [1].
        """
        count = len(tokens)
        self._columns[0][:] = self._padded(array("q", tokens))
        self._columns[1][:] = self._padded(_positions(position, position + count))
        if self._by_row:
            self._columns[2][:] = array("q", [slot]) * count + array("q", [-1]) * (self._rows - count)
        self._single[0] = count - 1 if self._by_row else slot
        return self._tensors

    def _padded(self, values: array[int]) -> array[int]:
        padding = self._rows - len(values)
        return values + values[-1:] * padding if padding else values


def _positions(first: int, end: int) -> array[int]:
    """The integers from `first` to `end` - 1. They need not be valid positions."""
    if 0 <= first < end <= MAX_COUNTED:
        # Counting to 512 takes four times as long as a copy of the integers.
        return _counted(1 << (end - 1).bit_length())[first:end]
    return array("q", range(first, end))


@cache
def _counted(count: int) -> array[int]:
    return array("q", range(count))
