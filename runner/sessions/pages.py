"""Pages of the KV caches: dealt out to sessions as tokens come, and shared until one of the sharing sessions writes.

Each page group deals out its own pages. A group whose layers have a sliding window takes those back that a session has left
behind its window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from ostinato.delegate import HostRows, Program, StateKind
from ostinato.delegate.artifact.records import Growth
from ostinato.delegate.capacity import GroupCapacity
from ostinato.delegate.errors import CapacityError

# As many numbers are written to a block table one by one, as arguments of kernels: after a wait for the GPU the first takes
# the host 50 us and each other 10, but a copy of several to the device 110.
_FEW_PAGES = 4


@dataclass
class FullPages:
    """Pages that several sessions and snapshots share, and none will write, as all their positions are taken. They are
    counted as one: 32,000 tokens have 500 pages.

    Attributes:
        numbers: numbers of the pages.
        before: the pages before them.
        end: number of pages from position 0 on.
        users: number of page lists, and of `FullPages` after these, that have them.
        host: where `copied` is. It belongs to those on the host who share it.
    """

    numbers: list[int]
    before: FullPages | None
    end: int
    users: int = 1
    host: ReferenceType[HostPages] | None = None

    @property
    def copied(self) -> HostPages | None:
        """The copy of these and those before, if there is one."""
        return None if self.host is None else self.host()

    def split(self, end: int) -> FullPages:
        """Divide the pages, and return those before page `end`. These are their one user."""
        count = len(self.numbers) - (self.end - end)
        self.before = FullPages(self.numbers[:count], self.before, end)
        self.numbers = self.numbers[count:]
        return self.before


@dataclass(eq=False)
class HostPages:
    """A copy on the host of `FullPages` and all those before them. Whoever shares the pages shares the copy.

    Attributes:
        rows: the pages after those of `before`.
        before: the copy of the pages before.
        device: the pages, which have the same contents as long as they have users.
        users: number of those on the host, and of `HostPages` after these, that have it.
    """

    rows: HostRows
    before: HostPages | None
    device: FullPages
    users: int = 0

    def __post_init__(self) -> None:
        self.device.host = ref(self)

    @property
    def count(self) -> int:
        """Number of pages in `rows`."""
        return self.device.end - (0 if self.before is None else self.before.device.end)


class Kept(NamedTuple):
    """Pages of one group that a session has on the host.

    Attributes:
        first: number of pages that it has left behind.
        pages: number of those that it does not share.
        full: those before them that others may share.
    """

    first: int
    pages: int
    full: HostPages | None = None

    @property
    def all_pages(self) -> int:
        """Number of all these pages."""
        return self.pages + (0 if self.full is None else self.full.device.end)


class Absent(NamedTuple):
    """Pages whose contents must come from a copy on the host.

    Attributes:
        group: the group's name.
        copied: the copy.
        numbers: numbers of the pages for its `rows`.
    """

    group: str
    copied: HostPages
    numbers: list[int]


@dataclass
class PageList:
    """A session's pages of one group, in the order of the session's positions.

    Attributes:
        last: numbers of the pages, or where others come before them, of the last ones.
        first: number of pages before all these that the session has left behind. 0 if there are full pages.
        full: pages that come before.
    """

    last: list[int] = field(default_factory=list)
    first: int = 0
    full: FullPages | None = None

    @property
    def begin(self) -> int:
        """Number of pages from position 0 on, before `last`."""
        return self.first if self.full is None else self.full.end

    @property
    def end(self) -> int:
        """Number of pages from position 0 on, with those left behind."""
        return self.begin + len(self.last)

    @property
    def numbers(self) -> list[int]:
        """Numbers of all pages."""
        parts, full = [self.last], self.full
        while full is not None:
            parts.append(full.numbers)
            full = full.before
        return [page for part in reversed(parts) for page in part]


class Pages:
    """The pages of one program. A session has one `PageList` per page group.

    Device memory is changed on the current stream: the block tables when a page is dealt out, and pages that are copied.

    Attributes:
        groups: the program's page groups.
    """

    def __init__(self, program: Program) -> None:
        capacity = program.capacity
        self.groups = [_Group(program, group, len(capacity.groups) > 1) for group in capacity.groups if group.pages]
        self._dropped: deque[list[PageList]] = deque()

    @property
    def free(self) -> int:
        """Number of pages that no session has, in the group that has fewest."""
        return min(self.free_by_group.values(), default=0)

    @property
    def free_by_group(self) -> dict[str, int]:
        """Number of pages that no session has, by the group's name."""
        self._release_dropped()
        return {group.name: len(group.free) for group in self.groups}

    @property
    def names(self) -> list[str]:
        """Names of the groups, in the order of a session's lists."""
        return [group.name for group in self.groups]

    def take(self, kept: Sequence[Kept], seen: int) -> tuple[list[PageList], list[Absent]]:
        """Return pages for a session that comes back, the last `Kept.pages` of each list free ones. Of the others, those on
        the device are shared. Their numbers are not in a block table yet.

        Args:
            kept: what it has on the host, by group.
            seen: number of positions from which it goes on.

        Raises:
            CapacityError: too few pages are free.
        """
        self._release_dropped()
        plans = [group.plan_return(one, seen) for group, one in zip(self.groups, kept, strict=True)]
        absent: list[Absent] = []
        lists = [group.come_back(*plan, seen, absent) for group, plan in zip(self.groups, plans, strict=True)]
        return lists, absent

    def none(self) -> list[PageList]:
        """The pages of a new session."""
        return [PageList() for _ in self.groups]

    def reserve(self, slot: int, owned: list[PageList], first: int, end: int) -> int:
        """Give a session pages that it alone uses, so that it may write the positions `first` to `end` - 1.

        Args:
            slot: the session's slot.
            owned: the session's pages, which cover all positions before `first` that its next rows see; changed in place.
            first, end: range of positions to write.

        Returns:
            End of the positions that the session may write then, or before pages are left behind. Positions from there on,
            and from `end` on, need another call.

        Raises:
            CapacityError: too few pages are free; the session has its pages.
        """
        if not self.groups:
            return end
        self._release_dropped()
        self.leave(owned, first)
        plans = [group.plan(mine, first, end) for group, mine in zip(self.groups, owned, strict=True)]
        return min(
            group.deal_out(slot, mine, *plan) for group, mine, plan in zip(self.groups, owned, plans, strict=True)
        )

    def leave(self, owned: Sequence[PageList], seen: int) -> None:
        """Take back the pages that no row from position `seen` on sees."""
        for group, mine in zip(self.groups, owned, strict=True):
            if group.window:
                group.leave(mine, seen)

    def share(self, owned: Sequence[PageList], seen: int) -> list[PageList]:
        """Share the pages of a session that has `seen` positions with one more, and return its lists. Each sharer copies a
        page before writing it."""
        return [group.share(mine, seen) for group, mine in zip(self.groups, owned, strict=True)]

    def share_first(self, owned: Sequence[PageList], positions: int) -> list[PageList]:
        """Share the pages of the first `positions` of a snapshot with a session, and return its lists. Positions that the
        session then sees must have pages, see `cover`."""
        return [group.share_first(mine, positions) for group, mine in zip(self.groups, owned, strict=True)]

    def cover(self, firsts: Sequence[int], position: int) -> bool:
        """Whether a session that has seen `position` tokens may go on from pages of which so many were left behind, in each
        group: none of them is in its window."""
        return all(
            first * group.size <= max(0, position - group.window + 1)
            for group, first in zip(self.groups, firsts, strict=True)
        )

    def release(self, owned: Sequence[PageList]) -> None:
        """Take a session's pages back. Pages that no other session has are free, and the first is dealt out next."""
        for group, mine in zip(self.groups, owned, strict=True):
            group.release_all(mine)

    def release_later(self, owned: list[PageList]) -> None:
        """As `release`, before the next pages are dealt out. It may be called at any time, in any thread."""
        self._dropped.append(owned)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.release(self._dropped.popleft())

    def write_block_tables(self, slot: int, owned: Sequence[PageList]) -> None:
        """Write the numbers of a session's pages into the block tables."""
        for group, mine in zip(self.groups, owned, strict=True):
            group.write_block_table(slot, mine.first, mine.numbers)


class _Group:
    """The pages of one group.

    Args:
        program: the program.
        capacity: the group's numbers.
        named: whether messages name the group.
    """

    def __init__(self, program: Program, capacity: GroupCapacity, named: bool) -> None:
        self.name, self.window = capacity.name, capacity.window
        self._program = program
        self.size = program.capacity.page_size
        self._period = capacity.pages_per_session
        self._named = named
        # Number of entries in lists of sessions and snapshots, for each page.
        self._users = [0] * capacity.pages
        self.free = list(reversed(range(capacity.pages)))

    def plan(self, mine: PageList, first: int, end: int) -> tuple[list[int], list[bool]]:
        """Return indices of pages to copy, and for each page to add whether it is a free one. Raises CapacityError."""
        begin, stop = first // self.size, -(-end // self.size)
        shared = [
            index for index in range(begin, min(stop, mine.end)) if self._users[mine.last[index - mine.begin]] > 1
        ]
        added = [not self._comes_again(mine, index, shared) for index in range(mine.end, stop)]
        self.check_room(len(shared) + sum(added))
        return shared, added

    def check_room(self, wanted: int) -> None:
        """Raises CapacityError: fewer pages are free."""
        if wanted > len(self.free):
            pages = "page" if wanted == 1 else "pages"
            where = f" in the page group {self.name!r}" if self._named else ""
            raise CapacityError(
                f"the sessions' keys and values need {wanted} more {pages} of {self.size} positions{where}, "
                f"{len(self.free)} of {len(self._users)} are free: close a session, or load the program with more kv_tokens"
            )

    def deal_out(self, slot: int, mine: PageList, shared: Sequence[int], added: Sequence[bool]) -> int:
        """Carry a plan out, and return what `Pages.reserve` returns, for this group."""
        for index in shared:
            page = self.take()
            self._copy(mine.last[index - mine.begin], page)
            self.release([mine.last[index - mine.begin]])
            mine.last[index - mine.begin] = page
        changed = min([*shared, mine.end])
        for is_free in added:
            if is_free:
                mine.last.append(self.take())
            else:
                mine.last.append(mine.last[-self._period])
                self._users[mine.last[-1]] += 1
        self.write_block_table(slot, changed, mine.last[changed - mine.begin :])
        end = mine.end * self.size
        return min(end, (mine.first + 1) * self.size + self.window - 1) if self.window else end

    def plan_return(self, kept: Kept, seen: int) -> tuple[Kept, FullPages | None, list[HostPages]]:
        """Return what is on the device of the pages that others share, and copies of the rest. Raises CapacityError."""
        absent, copied = [], kept.full
        while copied is not None and not (copied.device.users and copied.device.end * self.size <= seen):
            absent.append(copied)
            copied = copied.before
        self.check_room(kept.pages + sum(one.count for one in absent))
        return kept, None if copied is None else copied.device, absent[::-1]

    def come_back(
        self, kept: Kept, full: FullPages | None, copies: Sequence[HostPages], seen: int, absent: list[Absent]
    ) -> PageList:
        """Carry a plan out. Pages that the session will write are not among the full ones."""
        last: list[int] = []
        if full is not None:
            full.users += 1
        for copied in copies:
            numbers, end = [self.take() for _ in range(copied.count)], copied.device.end
            absent.append(Absent(self.name, copied, numbers))
            if end * self.size <= seen:
                full = copied.device = FullPages(numbers, full, end, host=ref(copied))
            else:
                last += numbers
        return PageList([*last, *(self.take() for _ in range(kept.pages))], kept.first, full)

    def leave(self, mine: PageList, seen: int) -> None:
        """Take back the pages whose positions lie behind the window of a row at position `seen`."""
        behind = max(0, seen - self.window + 1) // self.size - mine.first
        if behind > 0:
            self.release(mine.last[:behind])
            del mine.last[:behind]
            mine.first += behind

    def share(self, mine: PageList, seen: int) -> PageList:
        """See `Pages.share`. With a window there are few pages, and they are soon left behind: each is counted by itself."""
        full = 0 if self.window else seen // self.size - mine.begin
        if full > 0:
            mine.full = FullPages(mine.last[:full], mine.full, mine.begin + full)
            del mine.last[:full]
        if mine.full is not None:
            mine.full.users += 1
        for page in mine.last:
            self._users[page] += 1
        return PageList(list(mine.last), mine.first, mine.full)

    def share_first(self, mine: PageList, positions: int) -> PageList:
        """See `Pages.share_first`. A page of which only some positions are shared is one that both may write: it is not among
        the full ones."""
        whole, end = positions // self.size, -(-positions // self.size)
        full, last = mine.full, mine.last[: max(0, end - mine.begin)]
        while full is not None and full.end > whole:
            begin = full.end - len(full.numbers)
            if whole >= begin and end > whole:
                last = [full.numbers[whole - begin]]
            full = full.split(whole) if whole > begin else full.before
        if full is not None:
            full.users += 1
        for page in last:
            self._users[page] += 1
        return PageList(last, mine.first, full)

    def release_all(self, mine: PageList) -> None:
        self.release(mine.last)
        full = mine.full
        while full is not None:
            full.users -= 1
            if full.users:
                break
            self.release(full.numbers)
            full = full.before

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.free.append(page)

    def write_block_table(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write the numbers of a session's pages into the block table, from page `first` on."""
        tables = self._program.buffers_of(StateKind.BLOCK_TABLE, self.name).values() if pages else ()
        for table in tables:
            if len(pages) <= _FEW_PAGES:
                for number, page in enumerate(pages, first):
                    table[slot, number].fill_(page)
            else:
                numbers = torch.tensor(pages, dtype=torch.int32)
                table[slot, first : first + len(pages)].copy_(numbers, non_blocking=True)

    def _comes_again(self, mine: PageList, index: int, copied: Sequence[int]) -> bool:
        """Whether a long prompt takes, as page number `index`, the page that lies `_period` pages before it: no call touches
        both. So a prompt of any length needs no more pages than its window and its longest call touch."""
        former = index - self._period
        if not self.window or former < mine.first:
            return False
        return former >= mine.end or former in copied or self._users[mine.last[former - mine.begin]] == 1

    def take(self) -> int:
        """Return a free page, of which there must be one."""
        page = self.free.pop()
        self._users[page] = 1
        return page

    def _copy(self, source: int, target: int) -> None:
        self._program.rows_of(Growth.PAGES, self.name).copy(source, target)
