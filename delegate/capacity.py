"""Capacity of a loaded program: numbers of sessions and of positions, chosen when the program is loaded.

The artifact says for each mutable buffer what its first dimension counts (`Growth`), and how many bytes one unit takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class Capacity:
    """Room of a loaded program for sessions and positions.

    Attributes:
        slots: number of slots, one per session.
        pages: number of pages of the KV caches, for all sessions together; 0 for a program without KV caches.
        page_size: positions in a page.
        pages_per_session: largest number of pages that one session may have.
        slot_bytes, page_bytes: bytes of one slot and of one page, in all mutable buffers together.
    """

    slots: int = 1
    pages: int = 0
    page_size: int = 0
    pages_per_session: int = 0
    slot_bytes: int = 0
    page_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Positions in the pages of all sessions together."""
        return self.pages * self.page_size


@dataclass(frozen=True)
class CapacityOptions:
    """Capacity that a caller of `load_program` asks for; see the arguments there.

    Raises:
        OptionError: a value that is not a number, or is out of range.
    """

    sessions: int | None = None
    kv_tokens: int | None = None
    gpu_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        for name in ("sessions", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} must be an integer of 1 or more, got {value!r}")
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

    Raises:
        OptionError: more than one session for a program whose state does not grow; fewer pages than sessions; a fraction of
            GPU memory for a program on the CPU, or a fraction without room for one session.
    """
    specs = {key: spec for record in records for key, spec in record.buffer_specs.items()}
    tables = [spec for spec in specs.values() if spec.kind is StateKind.BLOCK_TABLE]
    slot_bytes, page_bytes = _row_bytes(specs, Growth.SLOTS), _row_bytes(specs, Growth.PAGES)
    if not slot_bytes and not page_bytes:
        if options != CapacityOptions() and (options.sessions or 1) > 1:
            raise OptionError(f"the program's state has room for one session, got sessions={options.sessions}")
        return Capacity()
    page_size = int(metadata.get(META_PAGE_SIZE, 0))
    # A model without attention has no pages.
    each = tables[0].shape[1] if tables else 0
    room = _room(options, device, bytes_to_load)
    one = slot_bytes + each * page_bytes
    slots = options.sessions or 1
    if room is not None and options.sessions is None:
        slots = max(1, min(MAX_SESSIONS, room // one))
    pages = slots * each
    if options.kv_tokens is not None and each:
        pages = -(-options.kv_tokens // page_size)
    elif room is not None and page_bytes:
        pages = max(0, min(pages, (room - slots * slot_bytes) // page_bytes))
    if each and pages < slots:
        asked = (
            f"kv_tokens={options.kv_tokens}" if options.kv_tokens is not None else f"{size_text(room or 0)} of memory"
        )
        raise OptionError(
            f"{slots} sessions need a page of {page_size} positions each, {slots * page_size} in all: {asked} is not enough; "
            f"a session takes {size_text(slot_bytes)}, a page {size_text(page_bytes)}"
        )
    return Capacity(slots, pages, page_size, each, slot_bytes, page_bytes)


def sized(parsed: ProgramFile, capacity: Capacity) -> ProgramFile:
    """Return the program with the sizes of this capacity: shapes of buffers, and ranges of inputs that are slot numbers."""
    count_of = {Growth.SLOTS: capacity.slots, Growth.PAGES: capacity.pages}

    def buffer(spec: BufferSpec) -> BufferSpec:
        fixed = spec.growth is Growth.FIXED
        return spec if fixed else replace(spec, shape=(count_of[spec.growth], *spec.shape[1:]))

    def value(spec: TensorSpec) -> TensorSpec:
        if spec.counts is Growth.FIXED or spec.value_range is None:
            return spec
        return replace(spec, value_range=(spec.value_range[0], count_of[spec.counts] - 1))

    def record(one: MethodRecord) -> MethodRecord:
        specs = {key: buffer(spec) for key, spec in one.buffer_specs.items()}
        return replace(one, inputs=tuple(map(value, one.inputs)), buffer_specs=specs)

    methods = {name: replace(one, record=record(one.record)) for name, one in parsed.methods.items()}
    return replace(parsed, methods=methods)


def first_block_table(spec: BufferSpec, pages: int) -> torch.Tensor:
    """Return a block table [slots, M] int32 that deals out pages 0 to `pages` - 1 in order; the entries after them are -1."""
    slots, each = spec.shape
    table = torch.arange(slots * each, dtype=torch.int32).view(slots, each)
    return torch.where(table < pages, table, -1)


def _row_bytes(specs: Mapping[str, BufferSpec], growth: Growth) -> int:
    return sum(spec.nbytes // spec.shape[0] for spec in specs.values() if spec.growth is growth)


def _room(options: CapacityOptions, device: torch.device, bytes_to_load: int) -> int | None:
    """Bytes for slots and pages; None if no fraction of the memory is asked for."""
    if options.gpu_memory_fraction is None:
        return None
    free = free_device_memory(device)
    if free is None:
        raise OptionError("gpu_memory_fraction is for programs on a GPU; on a CPU give sessions and kv_tokens")
    return max(0, int((free - bytes_to_load) * options.gpu_memory_fraction))
