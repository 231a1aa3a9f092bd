"""Runs in kernels: which rows of a call are tokens of one session, as `operands.Place` says.

Slots are written by unmarked kernels alone, so kernels that start early look for runs before they wait. The functions take
what was loaded, no pointers: torch would take every tensor that a call gets for one that the kernel writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The most rows of a call: kernels hold something about each of them.
MOST_ROWS = 256


@triton.jit
def begins_of_runs(slots: tl.tensor, ahead: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """Which rows begin a run, bool; padding has runs too, and so have the places from `rows` on.

    slots, ahead: of each row, and of the row ahead of it, [ROWS].
    """
    row = tl.arange(0, slots.shape[0])
    return (row == 0) | (row == rows) | ((row < rows) & (slots != ahead))


@triton.jit
def numbers_of_runs(slots: tl.tensor, ahead: tl.tensor, rows: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(the number of each row's run, [ROWS], how many runs there are); see `begins_of_runs`."""
    begins = begins_of_runs(slots, ahead, rows)
    inside = tl.arange(0, slots.shape[0]) < rows
    return tl.cumsum(begins.to(tl.int32), 0) - 1, tl.sum((begins & inside).to(tl.int32), 0)


@triton.jit
def run_at(number: tl.tensor, numbers: tl.tensor, slots: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(first row, rows, slot) of a run by its number; the slot of padding is -1."""
    first = tl.sum((numbers < number).to(tl.int32), 0)
    mine = numbers == number
    return first, tl.sum(mine.to(tl.int32), 0), tl.max(tl.where(mine, slots, -1), 0)
