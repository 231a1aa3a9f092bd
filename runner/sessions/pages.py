"""Pages of the KV caches: dealt out to sessions as tokens come, and shared until one of the sharing sessions writes.

Each page group deals out its own pages. A group whose layers have a sliding window takes those back that a session has left
behind its window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ostinato.delegate import Program, StateKind
from ostinato.delegate.artifact.records import Growth
from ostinato.delegate.capacity import GroupCapacity
from ostinato.delegate.errors import CapacityError


@dataclass
class PageList:
    """A session's pages of one group, in the order of the session's positions.

    Attributes:
        numbers: numbers of the pages.
        first: number of pages before them that the session has left behind.
    """

    numbers: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def end(self) -> int:
        """Number of pages from position 0 on, with those left behind."""
        return self.first + len(self.numbers)


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

    def take(self, kept: Sequence[tuple[int, int]]) -> list[PageList]:
        """Return free pages for a session that comes back. Their numbers are not in a block table yet.

        Args:
            kept: for each group, the number of pages that the session has left behind, and that of the pages after them.

        Raises:
            CapacityError: too few pages are free.
        """
        self._release_dropped()
        for group, (_, count) in zip(self.groups, kept, strict=True):
            group.check_room(count)
        return [
            PageList([group.take() for _ in range(count)], first)
            for group, (first, count) in zip(self.groups, kept, strict=True)
        ]

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

    def share(self, owned: Sequence[PageList]) -> list[PageList]:
        """Share the pages with one more session, and return its lists. Each sharer copies a page before writing it."""
        for group, mine in zip(self.groups, owned, strict=True):
            group.share(mine.numbers)
        return [PageList(list(mine.numbers), mine.first) for mine in owned]

    def release(self, owned: Sequence[PageList]) -> None:
        """Take a session's pages back. Pages that no other session has are free, and the first is dealt out next."""
        for group, mine in zip(self.groups, owned, strict=True):
            group.release(mine.numbers)

    def release_later(self, owned: list[PageList]) -> None:
        """As `release`, before the next pages are dealt out. It may be called at any time, in any thread."""
        self._dropped.append(owned)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.release(self._dropped.popleft())

    def write_block_tables(self, slot: int, owned: Sequence[PageList]) -> None:
        """Write the numbers of a session's pages into the block tables."""
        for group, mine in zip(self.groups, owned, strict=True):
            group.write_block_table(slot, mine, mine.first)


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
        self._size = program.capacity.page_size
        self._period = capacity.pages_per_session
        self._named = named
        # Number of entries in lists of sessions and snapshots, for each page.
        self._users = [0] * capacity.pages
        self.free = list(reversed(range(capacity.pages)))

    def plan(self, mine: PageList, first: int, end: int) -> tuple[list[int], list[bool]]:
        """Return indices of pages to copy, and for each page to add whether it is a free one. Raises CapacityError."""
        begin, stop = first // self._size, -(-end // self._size)
        shared = [
            index for index in range(begin, min(stop, mine.end)) if self._users[mine.numbers[index - mine.first]] > 1
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
                f"the sessions' keys and values need {wanted} more {pages} of {self._size} positions{where}, "
                f"{len(self.free)} of {len(self._users)} are free: close a session, or load the program with more kv_tokens"
            )

    def deal_out(self, slot: int, mine: PageList, shared: Sequence[int], added: Sequence[bool]) -> int:
        """Carry a plan out, and return what `Pages.reserve` returns, for this group."""
        for index in shared:
            page = self.take()
            self._copy(mine.numbers[index - mine.first], page)
            self.release([mine.numbers[index - mine.first]])
            mine.numbers[index - mine.first] = page
        before = mine.end
        for is_free in added:
            if is_free:
                mine.numbers.append(self.take())
            else:
                mine.numbers.append(mine.numbers[-self._period])
                self._users[mine.numbers[-1]] += 1
        if shared or added:
            self.write_block_table(slot, mine, min([*shared, before]))
        end = mine.end * self._size
        return min(end, (mine.first + 1) * self._size + self.window - 1) if self.window else end

    def leave(self, mine: PageList, seen: int) -> None:
        """Take back the pages whose positions lie behind the window of a row at position `seen`."""
        behind = max(0, seen - self.window + 1) // self._size - mine.first
        if behind > 0:
            self.release(mine.numbers[:behind])
            del mine.numbers[:behind]
            mine.first += behind

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.free.append(page)

    def write_block_table(self, slot: int, mine: PageList, first: int) -> None:
        """Write the numbers of a session's pages, from index `first` on, into the block table."""
        if mine.end > first:
            numbers = torch.tensor(mine.numbers[first - mine.first :], dtype=torch.int32)
            for table in self._program.buffers_of(StateKind.BLOCK_TABLE, self.name).values():
                table[slot, first : mine.end].copy_(numbers, non_blocking=True)

    def _comes_again(self, mine: PageList, index: int, copied: Sequence[int]) -> bool:
        """Whether a long prompt takes, as page number `index`, the page that lies `_period` pages before it: no call touches
        both. So a prompt of any length needs no more pages than its window and its longest call touch."""
        former = index - self._period
        if not self.window or former < mine.first:
            return False
        return former >= mine.end or former in copied or self._users[mine.numbers[former - mine.first]] == 1

    def take(self) -> int:
        """Return a free page, of which there must be one."""
        page = self.free.pop()
        self._users[page] = 1
        return page

    def _copy(self, source: int, target: int) -> None:
        self._program.rows_of(Growth.PAGES, self.name).copy(source, target)
