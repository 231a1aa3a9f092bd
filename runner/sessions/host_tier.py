"""The host tier: sessions whose slot and pages are in the host's memory, and leave their place on the device to others.

Copies run beside steps. A session's slot and pages are dealt out again when its copy is done, not when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ostinato.delegate import ClosedError, Growth, HostRows, Program, StateKind, StateRows
from ostinato.delegate.artifact.records import dtype_from_name, dtype_name
from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.errors import CapacityError, SessionFileError, first_line
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs

from .history import History
from .pages import FullPages, HostPages, Kept, PageList, Pages
from .session import Session, SessionState, Snapshot
from .session_file import opened_session, read_rows, write_session
from .slots import Slots

if TYPE_CHECKING:
    from ostinato.runner.model.steps import Steps

    from .sessions import Sessions

Taken = TypeVar("Taken")


@dataclass
class Offloaded:
    """What a session has on the device, in the host's memory.

    Attributes:
        rows: its slot, the pages by group that it does not share, and its logits if it has any.
        pages: its pages, by group.
        logits: an example of the logits [vocab] on the meta device.
    """

    rows: HostRows
    pages: list[Kept]
    logits: torch.Tensor | None

    def count(self, users: int) -> int:
        """Count it among those that share copies of pages (1), or no more (-1). Returns by how many bytes all of them have
        more then."""
        nbytes = self.rows.nbytes
        for kept in self.pages:
            copied = kept.full
            while copied is not None:
                copied.users += users
                if copied.users != max(users, 0):
                    break
                nbytes += copied.rows.nbytes
                copied = copied.before
        return users * nbytes


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
            header = self._header(offloaded, session._known)
        write_session(path, header, offloaded.rows)

    def load(self, sessions: Sessions, path: Path) -> Session:
        """See `Engine.load_session`."""
        self._check_program()
        offloaded, state = self._read(path)
        return self.open_offloaded(sessions, offloaded, state)

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
            self._check_program()
            self._steps().settle()
            pages, copied = snapshot._known.pages, snapshot.copied
            # Without a row of its own it has that of any session, which nobody will read.
            row = copied if isinstance(copied, int) else 0
            logits = snapshot._known.logits
            full = [self._copied_pages(name, mine.full) for name, mine in zip(self._pages.names, pages, strict=True)]
            rows = self._program.row_transfers.to_host(self._chosen(row, [mine.last for mine in pages], logits))
            self._leaving.append(_Leaving(rows.mark, snapshot.close))
            self.settle()
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
        return [(rows, some) for (_, rows), some in zip(self._parts(logits), numbers, strict=False)]

    def _parts(self, logits: torch.Tensor | None) -> list[tuple[str, StateRows]]:
        """The rows that a session has, with names: of its slot, of each page group, and its logits."""
        program = self._program
        growth = Growth.SLOTS if program.capacity.slot_bytes else Growth.FIXED
        # Block tables are written anew: the pages have other numbers.
        found = [("slot", program.rows_of(growth, tables=False))]
        found += [(f"pages {name}", program.rows_of(Growth.PAGES, name)) for name in self._pages.names]
        return found if logits is None else [*found, ("logits", StateRows({"logits": logits[None]}))]

    def _header(self, offloaded: Offloaded, state: SessionState) -> dict[str, Any]:
        """What `_read` needs beside the rows, in JSON's types."""
        # A token that was sampled from logits is sampled again.
        pending = [] if offloaded.logits is not None else state.pending
        logits = offloaded.logits
        return {
            "artifact": self._program.id,
            "tokens": state.history.tokens,
            "logprobs": state.logprobs,
            "pending": [(tokens.tokens()[number], tokens.logprobs(number)) for tokens, number in pending],
            "seen": state.seen,
            "prompt_end": state.prompt_end,
            "sampling_params": asdict(state.sampling_params),
            "pages": {name: kept[:2] for name, kept in zip(self._pages.names, offloaded.pages, strict=True)},
            "logits": None if logits is None else [len(logits), dtype_name(logits.dtype)],
            "rows": self._layout(logits),
        }

    def _read(self, path: Path) -> tuple[Offloaded, SessionState]:
        """Read a session from a file, to the host. Raises SessionFileError."""
        with opened_session(path, self._program.id) as (header, file):
            try:
                pages = [Kept(*header["pages"][name]) for name in self._pages.names]
                shape = header["logits"]
                logits = shape and torch.empty(shape[0], dtype=dtype_from_name(shape[1]), device="meta")
                state = SessionState(
                    History(list(header["tokens"])),
                    header["seen"],
                    header["prompt_end"],
                    [(_Saved(token, _logprobs(given)), 0) for token, given in header["pending"]],
                    logprobs=_logprobs(header["logprobs"]),
                    sampling_params=SamplingParams(**header["sampling_params"]),
                )
                same = header["rows"] == self._layout(logits)
                held = min(
                    ((one.first + one.pages) * self._program.capacity.page_size for one in pages), default=state.seen
                )
                if not 0 <= state.seen <= min(held, len(state.history) + len(state.pending)):
                    raise ValueError(f"its state is that of {state.seen} tokens")
                if not 0 <= state.prompt_end <= len(state.history):
                    raise ValueError(f"its prompt has {state.prompt_end} tokens")
            except (KeyError, TypeError, ValueError) as error:
                raise SessionFileError(f"{path} is damaged: its header cannot be read ({first_line(error)})") from error
            if not same:
                raise SessionFileError(f"{path} has other state than the program: save the session again")
            numbers = [1, *(kept.pages for kept in pages), 1]
            # The bytes lie together as those that a transfer takes to this device.
            there = None if logits is None else torch.empty_like(logits, device=self._program.device)
            rows = [rows for _, rows in self._parts(there)]
            host = self._program.row_transfers.empty([(one, range(n)) for one, n in zip(rows, numbers, strict=False)])
            read_rows(path, header, file, host)
        return Offloaded(host, pages, logits), state

    def _layout(self, logits: torch.Tensor | None) -> dict[str, dict[str, int]]:
        """Bytes of a row in each buffer, in the order of a file's body."""
        return {name: rows.bytes_by_name for name, rows in self._parts(logits)}


@dataclass(frozen=True)
class _Saved:
    """A token that a step had sampled when the session was saved."""

    token: int
    token_logprobs: TokenLogprobs | None

    def tokens(self) -> list[int]:
        return [self.token]

    def logprobs(self, number: int) -> TokenLogprobs | None:
        return self.token_logprobs


def _logprobs(given: Sequence[Any] | None) -> TokenLogprobs | None:
    """Log-probabilities as JSON has them."""
    if given is None:
        return None
    token, logprob, rank, top = given
    return TokenLogprobs(token, logprob, rank, [(one, value) for one, value in top])
