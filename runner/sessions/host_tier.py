"""The host tier: sessions whose slot and pages are in the host's memory, and leave their place on the device to others.

Copies run beside steps. A session's slot and pages are dealt out again when its copy is done, not when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ostinato.delegate import ClosedError, Growth, Program, StateKind, StateRows
from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.errors import CapacityError

from .offloaded import Offloaded, OnHost
from .pages import FullPages, HostPages, Kept, PageList, Pages
from .saved_state import SavedState
from .session import Session, SessionState, Snapshot
from .session_file import write_session
from .slots import Slots

if TYPE_CHECKING:
    from ostinato.runner.model.steps import Steps

    from .sessions import Sessions

Taken = TypeVar("Taken")


class _Leaving(NamedTuple):
    """A copy to the host. When its mark is done, what it read is given back."""

    mark: Mark
    give_back: Callable[[], None]


class HostTier:
    """Moves sessions between the device and the host.

    Args:
        program: the program.
        slots, pages: its slots and pages.
        lock: lets one thread at a time change these.
        steps: returns the steps of these sessions.

    Attributes:
        saved: writes what sessions have on the host to files, and reads it.
        evict: has something leave that nobody needs, and returns whether there was anything. The prefix cache sets it.
    """

    def __init__(
        self,
        program: Program,
        slots: Slots,
        pages: Pages,
        lock: AbstractContextManager[Any],
        steps: Callable[[], Steps],
    ) -> None:
        self._program, self._slots, self._pages, self._lock = program, slots, pages, lock
        self._steps = steps
        self.saved = SavedState(program, pages)
        # Sessions whose copies may be under way, in their order.
        self._leaving: deque[_Leaving] = deque()
        self.evict: Callable[[], bool] = lambda: False

    def offload(self, session: Session) -> None:
        """See `Session.offload`."""
        with self._lock:
            if not session.is_offloaded:
                self._check_program()
                state = session._open
                offloaded = self._copied(session)
                self._steps().forget(session)
                self._leaving.append(
                    _Leaving(offloaded.rows.mark, partial(self._give_back, session.slot, state.pages, state.logits))
                )
                session._offloaded, session.slot = offloaded, -1
                state.pages, state.logits, state.writable = [], None, 0
                self.settle()

    def onload(self, session: Session) -> None:
        """See `Session.onload`."""
        with self._lock:
            state, offloaded = session._known, session._offloaded
            if offloaded is None:
                return
            self._check_program()
            logits = offloaded.logits
            if logits is not None:
                logits = torch.empty_like(logits, device=self._program.device)
            slot, pages, transfers = self.take_slot(), self._pages.none(), self._program.row_transfers
            self._program.numbers_of(StateKind.SAMPLING).forget(slot)
            try:
                pages, absent = self.with_room(lambda: self._pages.take(offloaded.pages, state.seen))
                for one in absent:
                    transfers.to_device(one.copied.rows, self._chosen_pages(one.group, one.numbers))
                own = [
                    mine.last[len(mine.last) - kept.pages :] for mine, kept in zip(pages, offloaded.pages, strict=True)
                ]
                # One transfer comes after the other, so this is the last to arrive.
                arrival = transfers.to_device(offloaded.rows, self._chosen(slot, own, logits))
            except BaseException:
                self._slots.give(slot)
                self._pages.release(pages)
                raise
            self._pages.write_block_tables(slot, pages)
            session._arrival = arrival
            session.slot, state.pages, state.logits = slot, pages, logits
            session._offloaded = state.written_prompt_end = None

    def save(self, session: Session, path: Path) -> None:
        """See `Session.save`. Other threads may step while the file is written."""
        with self._lock:
            self._check_program()
            offloaded = session._offloaded or self._copied(session)
            offloaded.rows.mark.wait()
            packed = self.saved.packed(OnHost(offloaded, session._known))
        write_session(path, *packed)

    def load(self, sessions: Sessions, path: Path) -> Session:
        """See `Engine.load_session`."""
        found = self.saved.read(path)
        assert found is not None
        return self.open_offloaded(sessions, *found)

    @property
    def is_leaving(self) -> bool:
        """Whether copies are under way at whose ends slots and pages come free."""
        self.settle()
        return bool(self._leaving)

    def settle(self, wait: bool = False) -> bool:
        """Take slots and pages back whose copies are done. Returns whether there are any.

        Args:
            wait: whether to wait for the copy that began first.
        """
        with self._lock:
            before = len(self._leaving)
            if wait and before:
                self._leaving[0].mark.wait()
            while self._leaving and self._leaving[0].mark.is_done:
                self._leaving.popleft().give_back()
            return len(self._leaving) < before

    def with_room(self, take: Callable[[], Taken], evicts: bool = True) -> Taken:
        """Call `take`. If it raises CapacityError, wait for what leaves, or if it `evicts`, have something leave, and call it
        again."""
        self.settle()
        while True:
            try:
                return take()
            except CapacityError:
                if not self.settle(wait=True) and not (evicts and self.evict()):
                    raise

    def offload_prefix(self, snapshot: Snapshot) -> Offloaded:
        """Copy what `PrefixCache` keeps to the host. The snapshot is closed when the copy is done."""
        with self._lock:
            offloaded = self.copy_prefix(snapshot)
            self._leaving.append(_Leaving(offloaded.rows.mark, snapshot.close))
            self.settle()
            return offloaded

    def copy_prefix(self, snapshot: Snapshot) -> Offloaded:
        """Begin to copy what `PrefixCache` keeps to the host. Until the copy is done, the snapshot must not be closed."""
        with self._lock:
            self._check_program()
            self._steps().settle()
            pages, copied = snapshot._known.pages, snapshot.copied
            # Without a row of its own it has that of any session, which nobody will read.
            row = copied if isinstance(copied, int) else 0
            logits = snapshot._known.logits
            full = [self._copied_pages(name, mine.full) for name, mine in zip(self._pages.names, pages, strict=True)]
            rows = self._program.row_transfers.to_host(self._chosen(row, [mine.last for mine in pages], logits))
            kept = [Kept(mine.first, len(mine.last), copied) for mine, copied in zip(pages, full, strict=True)]
            return Offloaded(rows, kept, None if logits is None else torch.empty_like(logits, device="meta"))

    def open_offloaded(self, sessions: Sessions, offloaded: Offloaded, state: SessionState) -> Session:
        """Open a session with this state, whose rows are on the host. They stay there.

        Raises:
            CapacityError: no slot is free, or too few pages.
        """
        session = Session(sessions, -1, state)
        session._offloaded = offloaded
        self.onload(session)
        return session

    def take_slot(self) -> int:
        """Return a free slot. What `evict` has leave would give none back. Raises CapacityError."""
        return self.with_room(self._slots.take, evicts=False)

    def _give_back(self, slot: int, pages: list[PageList], logits: torch.Tensor | None) -> None:
        """Give back what a session had. Its logits stayed until now."""
        self._slots.give(slot)
        self._pages.release(pages)

    def _check_program(self) -> None:
        if self._program.closed:
            raise ClosedError("the program is closed")

    def _copied(self, session: Session) -> Offloaded:
        """Begin to copy what a session has. Until the copy is done, nobody may write it."""
        self._steps().settle()
        state = session._open
        self._pages.leave(state.pages, state.seen)
        kept = [Kept(mine.first, mine.end - mine.first) for mine in state.pages]
        logits = None if state.logits is None else state.logits.contiguous()
        numbers = [mine.numbers for mine in state.pages]
        rows = self._program.row_transfers.to_host(self._chosen(session.slot, numbers, logits))
        return Offloaded(rows, kept, None if logits is None else torch.empty_like(logits, device="meta"))

    def _copied_pages(self, group: str, full: FullPages | None) -> HostPages | None:
        """Return the copy of full pages, and begin to copy those that have none. What others share has a copy of its own."""
        parts: list[tuple[FullPages, list[list[int]]]] = []
        copied = None
        while full is not None and (copied := full.copied) is None:
            if not parts or full.users > 1:
                parts.append((full, []))
            parts[-1][1].append(full.numbers)
            full = full.before
        for full, found in reversed(parts):
            numbers = [page for some in reversed(found) for page in some]
            rows = self._program.row_transfers.to_host(self._chosen_pages(group, numbers))
            copied = HostPages(rows, copied, full)
        return copied

    def _chosen_pages(self, group: str, numbers: Sequence[int]) -> list[tuple[StateRows, Sequence[int]]]:
        """Pages of one group."""
        return [(self._program.rows_of(Growth.PAGES, group), numbers)]

    def _chosen(
        self, slot: int, pages: Sequence[Sequence[int]], logits: torch.Tensor | None
    ) -> list[tuple[StateRows, Sequence[int]]]:
        """The rows that a session has, and their numbers: those of pages by group."""
        numbers = [[slot], *pages, [0]]
        return [(rows, some) for (_, rows), some in zip(self.saved.parts(logits), numbers, strict=False)]
