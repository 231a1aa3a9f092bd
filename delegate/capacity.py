"""How many sessions a program holds, and how many positions they have together: chosen when it is loaded.

The artifact says of each mutable buffer what its first dimension is (`Growth`), and what one row of it takes.
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

# Sessions that are made room for where nobody says how many: as many as can step together.
MAX_SESSIONS = 256


@dataclass(frozen=True)
class Capacity:
    """What a loaded program has room for.

    Attributes:
        slots: sessions.
        pages: of the KV caches, all sessions together; 0 for a program without.
        page_size: positions in a page.
        pages_per_session: the most that one session may have.
        slot_bytes, page_bytes: what one of each takes, in all mutable buffers together.
    """

    slots: int = 1
    pages: int = 0
    page_size: int = 0
    pages_per_session: int = 0
    slot_bytes: int = 0
    page_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Positions of all sessions together."""
        return self.pages * self.page_size


@dataclass(frozen=True)
class CapacityOptions:
    """What a caller of `load_program` asks for; its docstring says what each is.

    Raises:
        OptionError: a number that is none, or out of range.
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
    """What a program gets room for.

    Args:
        records: of all its methods.
        metadata: its constant methods' results.
        options: what is asked for.
        device: the program's.
        bytes_to_load: of constants on it.

    Raises:
        OptionError: more than one session for a program whose state does not grow; fewer pages than sessions; a fraction of
            a GPU's memory for a program on the CPU, or one that has no room for a session.
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
    """The program with the sizes that its buffers, and inputs that are numbers of slots, have with this capacity."""
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


def first_table(spec: BufferSpec, pages: int) -> torch.Tensor:
    """A block table [slots, M] where pages are dealt out in order, as many as there are; -1 where there are no more."""
    slots, each = spec.shape
    table = torch.arange(slots * each, dtype=torch.int32).view(slots, each)
    return torch.where(table < pages, table, -1)


def _row_bytes(specs: Mapping[str, BufferSpec], growth: Growth) -> int:
    return sum(spec.nbytes // spec.shape[0] for spec in specs.values() if spec.growth is growth)


def _room(options: CapacityOptions, device: torch.device, bytes_to_load: int) -> int | None:
    """Bytes for slots and pages; None where nobody asks for a share of the memory."""
    if options.gpu_memory_fraction is None:
        return None
    free = free_device_memory(device)
    if free is None:
        raise OptionError("gpu_memory_fraction is for programs on a GPU; on a CPU give sessions and kv_tokens")
    return max(0, int((free - bytes_to_load) * options.gpu_memory_fraction))
