"""Capacity of a loaded program: numbers of sessions and of positions, chosen when the program is loaded.

The artifact says for each mutable buffer what its first dimension counts (`Growth`), and how many bytes one unit takes. Pages
are counted for each page group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .artifact.names import META_PAGE_SIZE
from .artifact.pte import ProgramFile
from .artifact.records import BufferSpec, Growth, MethodRecord, StateKind, TensorSpec
from .errors import OptionError
from .memory import free_device_memory, size_text

# Largest number of sessions when free memory decides their number: as many as can step together.
MAX_SESSIONS = 256
# Part of the memory asked for that snapshots get if their number is open.
_SNAPSHOTS_PART = 32


@dataclass(frozen=True)
class GroupCapacity:
    """Room of a loaded program in one page group.

    Attributes:
        name, window: see `PageGroup`.
        pages: number of pages, for all sessions together.
        pages_per_session: the most pages that a session needs at once. With a window: as many as the window and the longest
            call of a method touch.
        page_bytes: bytes of one page, in the KV caches of the group together.
    """

    name: str
    window: int
    pages: int
    pages_per_session: int
    page_bytes: int


@dataclass(frozen=True)
class Capacity:
    """Room of a loaded program for sessions and positions.

    Attributes:
        slots: number of slots, one per session.
        page_size: positions in a page, in all groups.
        slot_bytes: bytes of one slot, in all mutable buffers together.
        groups: the page groups; none for a program without KV caches.
        snapshots: number of rows behind the slots, for copies of slots. No method reads or writes them.
    """

    slots: int = 1
    page_size: int = 0
    slot_bytes: int = 0
    groups: tuple[GroupCapacity, ...] = ()
    snapshots: int = 0

    @property
    def rows(self) -> int:
        """Rows of buffers that count slots: the slots, and behind them those of snapshots."""
        return self.slots + self.snapshots

    @property
    def kv_tokens(self) -> int:
        """Positions in the pages of all sessions together, in the group that has most."""
        return max((group.pages for group in self.groups), default=0) * self.page_size

    @property
    def page_texts(self) -> list[str]:
        """One text per group, such as "97 pages of 64 positions (window 4096), 8.4 MB each". A single group without a window
        is not named."""
        named = len(self.groups) > 1
        return [
            f"{group.pages} pages of {self.page_size} positions{f' ({group.name})' if named or group.window else ''}, "
            f"{size_text(group.page_bytes)} each"
            for group in self.groups
        ]

    def group(self, name: str) -> GroupCapacity:
        """The page group of this name, which the program must have."""
        return next(group for group in self.groups if group.name == name)


@dataclass(frozen=True)
class CapacityOptions:
    """Capacity that a caller of `load_program` asks for; see the arguments there.

    Raises:
        OptionError: a value that is not a number, or is out of range.
    """

    sessions: int | None = None
    kv_tokens: int | None = None
    gpu_memory_fraction: float | None = None
    snapshots: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("sessions", 1), ("kv_tokens", 1), ("snapshots", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise OptionError(f"{name} must be an integer of {least} or more, got {value!r}")
        fraction = self.gpu_memory_fraction
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise OptionError(f"gpu_memory_fraction must be more than 0 and at most 1, got {fraction!r}")


def choose_capacity(
    records: Iterable[MethodRecord],
    metadata: Mapping[str, Any],
    options: CapacityOptions,
    device: torch.device,
    bytes_to_load: int,
) -> Capacity:
    """Choose the capacity of a program.

    Args:
        records: records of all methods of the program.
        metadata: results of the program's constant methods.
        options: capacity that the caller asks for.
        device: the program's device.
        bytes_to_load: bytes of constants that will be loaded on the device.

    A group whose layers have a window gets as many pages as all sessions need at once, if that is fewer than other groups
    get. Where there is room for more than all sessions, it has as many more pages as they. A program whose state does not
    grow has no rows for snapshots, whatever is asked for.

    Raises:
        OptionError: more than one session for a program whose state does not grow; fewer pages than sessions; a fraction of
            GPU memory for a program on the CPU, or a fraction without room for one session.
    """
    records = list(records)
    specs = {key: spec for record in records for key, spec in record.buffer_specs.items()}
    slot_bytes = _row_bytes(spec for spec in specs.values() if spec.growth is Growth.SLOTS)
    page_size = int(metadata.get(META_PAGE_SIZE, 0))
    groups = _groups(specs.values(), page_size, _longest_call(records))
    if not slot_bytes and not groups:
        if options != CapacityOptions() and (options.sessions or 1) > 1:
            raise OptionError(f"the program's state has room for one session, got sessions={options.sessions}")
        return Capacity()
    # Pages that hold all positions of a session. A model without attention has no pages.
    each = max((spec.shape[1] for spec in specs.values() if spec.kind is StateKind.BLOCK_TABLE), default=0)
    room = _room(options, device, bytes_to_load)
    one = slot_bytes + sum(group.pages_per_session * group.page_bytes for group in groups)
    slots, snapshots = options.sessions or 1, options.snapshots or 0
    if room is not None:
        if options.snapshots is None and slot_bytes:
            snapshots = room // _SNAPSHOTS_PART // slot_bytes
        room -= snapshots * slot_bytes
        if options.sessions is None:
            slots = max(1, min(MAX_SESSIONS, room // one))

    def dealt(pages: int) -> list[GroupCapacity]:
        """The groups, if a group without a window has this number of pages."""
        more = max(0, pages - slots * each)
        return [replace(group, pages=min(pages, slots * group.pages_per_session + more)) for group in groups]

    pages = slots * each
    if options.kv_tokens is not None and each:
        pages = -(-options.kv_tokens // page_size)
    elif room is not None and each:
        left = room - slots * slot_bytes
        pages = max(0, bisect_right(range(pages + 1), left, key=lambda count: _page_bytes(dealt(count))) - 1)
    if each and pages < slots:
        asked = (
            f"kv_tokens={options.kv_tokens}"
            if options.kv_tokens is not None
            else f"{size_text(max(0, room or 0))} of memory"
        )
        page_bytes = sum(group.page_bytes for group in groups)
        raise OptionError(
            f"{slots} sessions need a page of {page_size} positions each, {slots * page_size} in all: {asked} is not enough; "
            f"a session takes {size_text(slot_bytes)}, a page {size_text(page_bytes)}"
        )
    return Capacity(slots, page_size, slot_bytes, tuple(dealt(pages)), snapshots)


def sized(parsed: ProgramFile, capacity: Capacity) -> ProgramFile:
    """Return the program with the sizes of this capacity: shapes of buffers, and ranges of inputs that are slot numbers."""

    def buffer(spec: BufferSpec) -> BufferSpec:
        if spec.growth is Growth.FIXED:
            return spec
        count = capacity.rows if spec.growth is Growth.SLOTS else capacity.group(spec.group.name).pages
        return replace(spec, shape=(count, *spec.shape[1:]))

    def value(spec: TensorSpec) -> TensorSpec:
        if spec.counts is Growth.FIXED or spec.value_range is None:
            return spec
        # A page number that every group has.
        fewest = min((group.pages for group in capacity.groups), default=0)
        count = capacity.slots if spec.counts is Growth.SLOTS else fewest
        return replace(spec, value_range=(spec.value_range[0], count - 1))

    def record(one: MethodRecord) -> MethodRecord:
        specs = {key: buffer(spec) for key, spec in one.buffer_specs.items()}
        return replace(one, inputs=tuple(map(value, one.inputs)), buffer_specs=specs)

    methods = {name: replace(one, record=record(one.record)) for name, one in parsed.methods.items()}
    return replace(parsed, methods=methods)


def first_block_table(spec: BufferSpec, capacity: Capacity) -> torch.Tensor:
    """Return a block table [rows, M] int32 that deals out the group's pages in order; the entries after them are -1.

    A slot has `pages_per_session` pages. If its positions need more, because there is a window, the pages come again in the
    same order: a page is free again when a call needs it next.
    """
    group, (rows, each) = capacity.group(spec.group.name), spec.shape
    own = torch.arange(each, dtype=torch.int32) % group.pages_per_session
    table = torch.arange(rows, dtype=torch.int32)[:, None] * group.pages_per_session + own
    # Rows of snapshots have none.
    table[capacity.slots :] = -1
    return torch.where(table < group.pages, table, -1)


def _groups(specs: Iterable[BufferSpec], page_size: int, longest: int) -> list[GroupCapacity]:
    """The page groups, without pages. `longest`: the most rows of a session in one call."""
    specs = [spec for spec in specs if spec.growth is Growth.PAGES or spec.kind is StateKind.BLOCK_TABLE]
    found = []
    for group in dict.fromkeys(spec.group for spec in specs):
        own = [spec for spec in specs if spec.group == group]
        each = max((spec.shape[1] for spec in own if spec.kind is StateKind.BLOCK_TABLE), default=0)
        if group.window:
            each = min(each, pages_touched(group.window + longest - 1, page_size))
        page_bytes = _row_bytes(spec for spec in own if spec.growth is Growth.PAGES)
        found.append(GroupCapacity(group.name, group.window, 0, each, page_bytes))
    return found


def pages_touched(positions: int, page_size: int) -> int:
    """The most pages in which so many consecutive positions may lie."""
    return -(-(positions - 1) // page_size) + 1


def _longest_call(records: Iterable[MethodRecord]) -> int:
    """The most rows that a call of a method takes: entries of an input of slot numbers."""
    inputs = [spec for record in records for spec in record.inputs if spec.counts is Growth.SLOTS and spec.shape]
    return max((spec.shape[0].max for spec in inputs), default=1)


def _row_bytes(specs: Iterable[BufferSpec]) -> int:
    return sum(spec.nbytes // spec.shape[0] for spec in specs)


def _page_bytes(groups: Sequence[GroupCapacity]) -> int:
    return sum(group.pages * group.page_bytes for group in groups)


def _room(options: CapacityOptions, device: torch.device, bytes_to_load: int) -> int | None:
    """Bytes for slots and pages; None if no fraction of the memory is asked for."""
    if options.gpu_memory_fraction is None:
        return None
    free = free_device_memory(device)
    if free is None:
        raise OptionError("gpu_memory_fraction is for programs on a GPU; on a CPU give sessions and kv_tokens")
    return max(0, int((free - bytes_to_load) * options.gpu_memory_fraction))
