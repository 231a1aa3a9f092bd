"""Slots of one program: who has which row of the state of fixed size, and copies of them for forks and snapshots."""

from __future__ import annotations

from collections import deque

import torch

from ostinato.delegate import Growth, Program, StateKind
from ostinato.delegate.errors import CapacityError

# A copy of a slot: the number of a row behind the slots, or a copy of all mutable buffers.
CopiedSlot = int | dict[str, torch.Tensor]


class Slots:
    """The slots of one program, and the rows behind them, for snapshots.

    A row has everything of a session but the pages: the state of layers, its rows of the block tables, and the state of
    sampling. Where a snapshot is restored, the parameters of sampling are written anew; the rest is needed.

    A program whose state does not grow has one slot: all its mutable buffers. Snapshots of it are copies of these, in any
    number.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._count = program.capacity.slots
        self._grows = program.capacity.slot_bytes > 0
        self._free = list(reversed(range(self._count)))
        # Not a list: rows are given back by the garbage collector too, in any thread.
        self._free_rows = deque(range(self._count, program.capacity.rows))

    @property
    def free(self) -> int:
        """Number of slots that no session has."""
        return len(self._free)

    @property
    def free_snapshots(self) -> int:
        """Number of rows that no snapshot has."""
        return len(self._free_rows)

    def take(self) -> int:
        """Return a slot that no session has. Raises CapacityError."""
        if not self._free:
            raise CapacityError(
                f"all {self._count} sessions are open (an answer of generate() that has not ended is one): close one, or "
                f"load the program with more, as in sessions={self._count + 1}"
            )
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Take a slot back, which is dealt out next."""
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy one slot's state to another slot."""
        self._program.rows_of(Growth.SLOTS).copy(source, target)
        self._program.numbers_of(StateKind.SAMPLING).copied(source, target)

    def keep(self, slot: int) -> CopiedSlot:
        """Copy a slot's state, for a snapshot. Raises CapacityError."""
        if not self._grows:
            return {key: buffer.clone() for key, buffer in self._program.mutable_buffers.items()}
        try:
            row = self._free_rows.pop()
        except IndexError:
            count = self._program.capacity.snapshots
            kept = f"all {count} snapshots are in use: close one, or" if count else "there is no room for a snapshot:"
            raise CapacityError(f"{kept} load the program with more, as in snapshots={count + 1}") from None
        self.copy(slot, row)
        return row

    def write(self, copied: CopiedSlot, slot: int) -> None:
        """Copy what `keep` returned to a slot."""
        if isinstance(copied, int):
            self.copy(copied, slot)
            return
        for key, buffer in self._program.mutable_buffers.items():
            buffer.copy_(copied[key])

    def forget_later(self, copied: CopiedSlot) -> None:
        """Take back what `keep` returned. It may be called at any time, in any thread."""
        if isinstance(copied, int):
            self._free_rows.append(copied)
