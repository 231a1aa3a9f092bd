"""Pages of the KV caches: dealt out to sessions as tokens come, and shared until one of the sharing sessions writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ostinato.delegate import Program, StateKind
from ostinato.delegate.artifact.records import Growth
from ostinato.delegate.errors import CapacityError


class Pages:
    """The pages of one program. A session's pages are a list of page numbers, in the order of the session's positions.

    Device memory is changed on the current stream: the block table when a page is dealt out, and pages that are copied.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._size = program.capacity.page_size
        self._users = [0] * program.capacity.pages
        self._free = list(reversed(range(program.capacity.pages)))
        self._dropped: deque[list[int]] = deque()

    @property
    def free(self) -> int:
        """Number of pages that no session has."""
        while self._dropped:
            self.release(self._dropped.popleft())
        return len(self._free)

    def reserve(self, slot: int, owned: list[int], first: int, end: int) -> int:
        """Give a session pages that it alone uses, so that it may write the positions `first` to `end` - 1.

        Args:
            slot: the session's slot.
            owned: numbers of the session's pages, which cover all positions before `first`; changed in place.
            first, end: range of positions to write.

        Returns:
            End of the positions that the session may write now: `end` or more.

        Raises:
            CapacityError: too few pages are free; nothing has changed.
        """
        if not self._users:
            return end
        free = self.free
        begin, stop = first // self._size, -(-end // self._size)
        shared = [index for index in range(begin, min(stop, len(owned))) if self._users[owned[index]] > 1]
        wanted = len(shared) + max(0, stop - len(owned))
        if wanted > free:
            pages = "page" if wanted == 1 else "pages"
            raise CapacityError(
                f"the sessions' keys and values need {wanted} more {pages} of {self._size} positions, {free} of "
                f"{len(self._users)} are free: close a session, or load the program with more kv_tokens"
            )
        for index in shared:
            page = self._take()
            self._copy(owned[index], page)
            self.release([owned[index]])
            owned[index] = page
        before = len(owned)
        owned += [self._take() for _ in range(stop - before)]
        if shared or stop > before:
            self.write_block_table(slot, owned, min([*shared, before]))
        return len(owned) * self._size

    def share(self, owned: Sequence[int]) -> list[int]:
        """Share the pages with one more session, and return their numbers. Each sharer copies a page before writing it."""
        for page in owned:
            self._users[page] += 1
        return list(owned)

    def release(self, owned: Sequence[int]) -> None:
        """Take a session's pages back. Pages that no other session has are free, and the first is dealt out next."""
        for page in reversed(owned):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def release_later(self, owned: list[int]) -> None:
        """As `release`, before the next pages are dealt out. It may be called at any time, in any thread."""
        self._dropped.append(owned)

    def write_block_table(self, slot: int, owned: Sequence[int], first: int = 0) -> None:
        """Write the numbers of a session's pages, from index `first` on, into the block table."""
        if len(owned) > first:
            numbers = torch.tensor(owned[first:], dtype=torch.int32)
            for table in self._program.buffers_of(StateKind.BLOCK_TABLE).values():
                table[slot, first : len(owned)].copy_(numbers, non_blocking=True)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _copy(self, source: int, target: int) -> None:
        for cache in self._program.buffers_that_grow(Growth.PAGES).values():
            cache[target].copy_(cache[source])
