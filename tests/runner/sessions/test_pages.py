"""Pages of page groups, dealt out to random sessions: a simple model says which positions each session still sees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import Capacity, CapacityError, GroupCapacity, StateKind
from ostinato.delegate.artifact.records import Growth
from ostinato.delegate.constants.rows import StateRows
from ostinato.runner.sessions.pages import PageList, Pages

SIZE, SLOTS, LENGTH = 4, 3, 80
WIDTH = LENGTH // SIZE
# The most rows of a call, and for each group its window and the pages that this and the call touch.
LONGEST = 10
GLOBAL = ("global", 0, WIDTH)
NARROW = ("window 7", 7, 5)
WIDE = ("window 24", 24, 10)
# No position was written there.
NOTHING = -1.0


class Program:
    """Caches that hold, for each position, the number of the token that was written there; as a loaded program has them."""

    def __init__(self, *groups: tuple[str, int, int], spare: int = 0) -> None:
        self.capacity = Capacity(
            SLOTS,
            SIZE,
            0,
            tuple(GroupCapacity(name, window, SLOTS * each + spare, each, 1) for name, window, each in groups),
        )
        self.caches = {group.name: torch.full((group.pages, SIZE), NOTHING) for group in self.capacity.groups}
        self.tables = {name: torch.full((SLOTS, WIDTH), -1, dtype=torch.int32) for name in self.caches}

    def buffers_of(self, kind: StateKind, group: str) -> dict[str, Tensor]:
        assert kind is StateKind.BLOCK_TABLE
        return {"table": self.tables[group]}

    def rows_of(self, growth: Growth, group: str) -> StateRows:
        assert growth is Growth.PAGES
        return StateRows({"cache": self.caches[group]})


@dataclass
class Conversation:
    """A session or a snapshot, with the numbers of its tokens. A snapshot has no slot."""

    pages: list[PageList]
    tokens: list[float] = field(default_factory=list)
    writable: int = 0
    slot: int = -1


class House:
    """Sessions over one program, as `Sessions` has them. Each call reads through the block table what its rows see."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.pages = Pages(program)
        self.free_slots = list(range(SLOTS))
        self.sessions: list[Conversation] = []
        self.snapshots: list[Conversation] = []
        self.written = 0

    def open(self) -> None:
        self.sessions.append(Conversation(self.pages.none(), slot=self.free_slots.pop()))

    def go_on(self, session: Conversation, count: int) -> None:
        """Write `count` tokens, in calls of LONGEST."""
        first, end = len(session.tokens), len(session.tokens) + count
        if end > session.writable:
            session.writable = self.pages.reserve(session.slot, session.pages, first, end)
        for begin in range(first, end, LONGEST):
            self.call(session, min(LONGEST, end - begin))
        if count > 1:
            self.pages.leave(session.pages, len(session.tokens))

    def call(self, session: Conversation, count: int) -> None:
        first = len(session.tokens)
        session.tokens += [float(self.written + place) for place in range(count)]
        self.written += count
        for group in self.program.capacity.groups:
            table = self.program.tables[group.name][session.slot].tolist()
            cache = self.program.caches[group.name]
            for position in range(first, first + count):
                cache[table[position // SIZE], position % SIZE] = session.tokens[position]
            seen = range(max(0, first - group.window + 1) if group.window else 0, first + count)
            assert [float(cache[table[at // SIZE], at % SIZE]) for at in seen] == [session.tokens[at] for at in seen]

    def copy(self, other: Conversation, slot: int = -1) -> Conversation:
        other.writable = 0
        self.pages.leave(other.pages, len(other.tokens))
        made = Conversation(self.pages.share(other.pages, len(other.tokens)), list(other.tokens), slot=slot)
        if slot >= 0:
            self.pages.write_block_tables(slot, made.pages)
        return made

    def close(self, session: Conversation) -> None:
        self.pages.release(session.pages)
        self.sessions.remove(session)
        self.free_slots.append(session.slot)

    def check(self) -> None:
        """Every page is free, or some conversation has it; pages that no row will see are free."""
        everybody = [*self.sessions, *self.snapshots]
        for place, group in enumerate(self.program.capacity.groups):
            had = {page for one in everybody for page in one.pages[place].numbers}
            assert self.pages.free_by_group[group.name] == group.pages - len(had)
            for one in everybody:
                mine, seen = one.pages[place], len(one.tokens)
                assert len(set(mine.numbers)) == len(mine.numbers) <= group.pages_per_session
                assert mine.first <= max(0, seen - group.window + 1) // SIZE if group.window else mine.first == 0
                assert mine.end >= -(-seen // SIZE)


@pytest.mark.parametrize("groups", [(GLOBAL,), (NARROW,), (WIDE,), (GLOBAL, NARROW), (NARROW, GLOBAL, WIDE)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_sessions(groups: tuple[tuple[str, int, int], ...], seed: int) -> None:
    """No page is written by two sessions, none is lost, and none is missing while nobody keeps snapshots."""
    pick = random.Random(seed)
    house = House(Program(*groups, spare=seed % 3))
    for _ in range(400):
        session = pick.choice(house.sessions) if house.sessions else None
        match pick.choice(
            ("open", "step", "step", "step", "prompt", "prompt", "fork", "keep", "forget", "back", "close")
        ):
            case "open" if house.free_slots:
                house.open()
            case "fork" if house.free_slots and session:
                house.sessions.append(house.copy(session, house.free_slots.pop()))
            case "keep" if session and len(house.snapshots) < 2:
                house.snapshots.append(house.copy(session))
            case "forget" if house.snapshots:
                house.pages.release_later(house.snapshots.pop(pick.randrange(len(house.snapshots))).pages)
            case "back" if session and house.snapshots:
                house.pages.release(session.pages)
                made = house.copy(pick.choice(house.snapshots), session.slot)
                house.sessions[house.sessions.index(session)] = made
            case "close" if session:
                house.close(session)
            case "step" | "prompt" as what if session:
                count = min(LENGTH - len(session.tokens), 1 if what == "step" else pick.randint(1, 35))
                before = house.pages.free_by_group
                try:
                    house.go_on(session, count)
                except CapacityError:
                    # Snapshots keep pages beside those of sessions.
                    assert house.snapshots
                    assert all(free >= before[name] for name, free in house.pages.free_by_group.items())
        house.check()
    for session in list(house.sessions):
        house.close(session)
    house.snapshots.clear()


def test_a_long_prompt_needs_few_pages() -> None:
    """A prompt of any length takes the pages of its window and its longest call, and keeps those of the window."""
    house = House(Program(WIDE))
    for _ in range(SLOTS):
        house.open()
    for session in house.sessions:
        house.go_on(session, LENGTH)
        (mine,) = session.pages
        # Positions 57 to 79 can be seen.
        assert (mine.first, len(mine.numbers)) == (14, 6)
    assert house.pages.free == SLOTS * WIDE[2] - 18


def test_pages_behind_the_window_are_free_at_once() -> None:
    house = House(Program(NARROW))
    house.open()
    (session,) = house.sessions
    counts = []
    for _ in range(20):
        house.go_on(session, 1)
        counts.append(len(session.pages[0].numbers))
    # A page is left with the step of position 4 k + 10, which sees those from 4 k + 4 on.
    assert counts == [1] * 4 + [2] * 4 + [3] * 2 + [2, 2] + [3] * 2 + [2, 2] + [3] * 2 + [2, 2]


def test_full_pages_are_counted_together() -> None:
    """Sharing a long session takes as long as sharing a short one; the page in which it goes on is counted by itself."""
    house = House(Program(GLOBAL, spare=2))
    house.open()
    (session,) = house.sessions
    house.go_on(session, 5 * SIZE + 1)
    copies = [house.copy(session) for _ in range(2)]
    house.snapshots += copies
    (mine,) = session.pages
    assert [copy.pages[0].full for copy in copies] == 2 * [mine.full]
    assert mine.full is not None and (mine.full.users, mine.full.numbers) == (3, mine.numbers[:5])
    assert len(mine.last) == 1
    # Its pages from then on come behind these, also for a copy of a copy.
    house.go_on(session, 2 * SIZE)
    house.snapshots.append(house.copy(session))
    assert mine.full.before is copies[0].pages[0].full and len(mine.full.numbers) == 2
    house.snapshots.append(house.copy(copies[1]))
    house.check()
    for place in (1, 0, 1, 0):
        house.pages.release(house.snapshots.pop(place).pages)
        house.check()
    house.close(session)
    assert house.pages.free == SLOTS * WIDTH + 2


def test_a_short_group_is_named() -> None:
    message = r"need 2 more pages of 4 positions{}, 0 of 15 are free: close a session"
    for groups, where in (((NARROW,), ""), ((GLOBAL, NARROW), " in the page group 'window 7'")):
        house = House(Program(*groups))
        house.open()
        (session,) = house.sessions
        house.go_on(session, 7)
        house.snapshots += [house.copy(session) for _ in range(2)]
        taken = house.pages.groups[-1].free
        kept, taken[:] = list(taken), []
        with pytest.raises(CapacityError, match=message.format(where)):
            house.go_on(session, 3)
        taken += kept
        house.go_on(session, 3)
        house.check()
