"""The pool of a loaded program: it owns every constant and mutable buffer, on the device of the code that uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ostinato.delegate import memory
from ostinato.delegate.artifact.names import HOST
from ostinato.delegate.artifact.ptd import ConstantsFile, Entry
from ostinato.delegate.artifact.records import (
    BufferSpec,
    Growth,
    MethodRecord,
    StateKind,
    dtype_from_name,
)
from ostinato.delegate.capacity import Capacity, first_block_table
from ostinato.delegate.errors import ArtifactError, InputError
from ostinato.delegate.torch_internals import ALIGNMENT

from .loading import PARALLEL_FROM, ConstantLoader, free_tensors, zeros
from .row_numbers import RowNumbers
from .rows import StateRows, allocate_rows

logger = logging.getLogger(__name__)


class TensorKey(NamedTuple):
    """Identity of a tensor in the pool: its name in the file, and its device."""

    name: str
    device: torch.device


@dataclass
class ConstantStats:
    """`count` constants are in use, `shared` of them by two or more methods.

    `bytes_saved` compares with one copy per method.
    """

    count: int = 0
    nbytes: int = 0
    shared: int = 0
    bytes_saved: int = 0


@dataclass(frozen=True)
class Binding:
    """Tensors that one method is bound to.

    `tensors`: constants and mutable buffers by the names that the compiled code uses. `shared`: those constants among them
    that the pool keeps. `private`: tensors that this method alone has.
    """

    tensors: dict[str, torch.Tensor]
    shared: tuple[TensorKey, ...]
    private: tuple[torch.Tensor, ...]


class ConstantPool:
    """Tensors by key; a constant is loaded and checked when the first method asks for it, once for each device that uses it.

    Args:
        file: the parsed `.ptd`.
        device: the program's device. Tensors are there, except those of segments on the host. On the CPU constants are views
            of the mapped file; to a GPU each is copied once.
        verify: whether to compare each constant's SHA-256 with the manifest when it is loaded.
        on_load: function that gets the size in bytes of each loaded constant, for progress displays; called from the thread
            that binds.
        parallel_from: number of bytes from which several threads load.

    Attributes:
        capacity: numbers of pages, which block tables deal out. Set before anything is bound.
    """

    def __init__(
        self,
        file: ConstantsFile,
        device: torch.device,
        verify: bool = True,
        on_load: Callable[[int], None] | None = None,
        parallel_from: int = PARALLEL_FROM,
    ) -> None:
        self._file = file
        self._device = device
        self.capacity = Capacity()
        check = file.check if verify else None
        devices = dict.fromkeys((device, torch.device(HOST)))
        self._loaders = {device: ConstantLoader(device, check, on_load, parallel_from) for device in devices}
        self._tensors: dict[TensorKey, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_specs: dict[str, BufferSpec] = {}
        # Buffers in use in place of the pool's own, while the program is bound to another state.
        self._lent: dict[str, torch.Tensor] = {}
        # Of the buffers in use, by what is asked for.
        self._rows: dict[tuple[Growth, str | None, bool], StateRows] = {}
        self._kinds: dict[tuple[StateKind, str | None], dict[str, torch.Tensor]] = {}
        self._numbers: dict[StateKind, RowNumbers] = {}
        self._users: dict[TensorKey, int] = {}
        # Whether the host has memory for all constants that are mapped so far.
        self.keeps_mapped = True
        # One watch for the whole program: its methods use it too.
        self.watch = memory.MemoryWatch(device)

    def bind(self, record: MethodRecord, share: bool = True) -> Binding:
        """Return the constants and mutable buffers of one method. Missing ones are loaded.

        Constants are the pool's own, or with `share=False` private copies that the pool does not keep. A mutable buffer is
        made on first use, from zeros or from its first value in `model.ptd`, and is always shared. If anything fails, all
        that this call allocated is freed, and the pool stays as it was.

        Raises:
            ArtifactError: the file lacks a constant, or one is damaged.
            DeviceMemoryError: the device has no room.
        """
        by_name = self._keys(record, record.constants)
        wanted = tuple(dict.fromkeys(by_name.values()))
        missing = [key for key in wanted if not share or key not in self._tensors]
        buffers = dict.fromkeys(self._keys(record, record.buffers).values())
        specs = {key: record.buffer_specs[key.name] for key in buffers if key.name not in self._buffers}
        with self.watch.explaining(f"loading method {record.method!r}"):
            fresh = self._make(record.method, missing, specs, private=not share)
        constants = {key: fresh[key] for key in missing}
        if share:
            self._tensors |= constants
            self._check_mapped()
            for key in wanted:
                self._users[key] = self._users.get(key, 0) + 1
            constants = {key: self._tensors[key] for key in wanted}
        self._buffers |= {key.name: fresh[key] for key in specs}
        self._buffer_specs |= {key.name: spec for key, spec in specs.items()}
        if specs:
            self._forget_views()
        tensors = {name: constants[key] for name, key in by_name.items()}
        return Binding(
            tensors | self.buffers_for(record), wanted if share else (), () if share else tuple(constants.values())
        )

    def prefault(self) -> None:
        """Read all mapped constants once, so that no step waits for the disk."""
        entries = {key.name: self._entry(key.name) for key in self._tensors if key.device.type == HOST}
        self._loaders[torch.device(HOST)].touch(entries)

    def release(self, binding: Binding) -> None:
        """End one use of each shared constant, and free the private ones. Shared constants stay loaded until `close`."""
        for key in binding.shared:
            self._users[key] -= 1
        free_tensors(binding.private)

    def bytes_to_load(self, records: Iterable[MethodRecord], device: torch.device | None = None) -> int:
        """Bytes that binding all of `records` would read from the file.

        Each constant counts once for each device that uses it, or for `device` alone. Loaded constants do not count.
        """
        wanted: set[TensorKey] = set()
        for record in records:
            wanted |= set(self._keys(record, record.constants).values()) - self._tensors.keys()
            for key in self._keys(record, record.buffers).values():
                if record.buffer_specs[key.name].initialised and key.name not in self._buffers:
                    wanted.add(key)
        return sum(
            self._file.entries[key.name].nbytes
            for key in wanted
            if key.name in self._file.entries and device in (None, key.device)
        )

    def buffers_for(self, record: MethodRecord) -> dict[str, torch.Tensor]:
        """Buffers in use, by their names in the method's code."""
        buffers = self.buffers
        return {name: buffers[key] for name, key in record.buffers.items()}

    def new_buffers(self) -> dict[str, torch.Tensor]:
        """Make another set of the buffers made so far, with the same layout and their first values.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        grown = {key: tensor for key, tensor in self._buffers.items() if self._buffer_specs[key].grows}
        with self.watch.explaining("making a state"):
            fresh = {key: torch.empty_like(tensor) for key, tensor in self._buffers.items() if key not in grown}
            fresh |= allocate_rows({key: (one.shape, one.dtype, one.device) for key, one in grown.items()})
        self._write_first_values(fresh)
        return fresh

    def lend(self, buffers: Mapping[str, torch.Tensor] | None) -> None:
        """Use `buffers` in place of all the pool's own buffers. None: use the pool's own buffers again.

        Raises:
            InputError: a buffer is missing, unknown, or of another layout.
        """
        if buffers is not None:
            for key in [*self._buffers, *buffers]:
                if key not in buffers or key not in self._buffers:
                    which = "lacks" if key in self._buffers else "has, and the program does not,"
                    raise InputError(f"the state {which} the buffer {key!r}: make it with `new_state`")
                if (why := _other_layout(self._buffers[key], buffers[key])) is not None:
                    raise InputError(f"the state's buffer {key!r} has another layout: {why}")
        self._lent = dict(buffers or {})
        self._forget_views()

    def reset_buffers(self) -> None:
        """Reset the buffers in use to their first values, in place."""
        self._write_first_values(self.buffers)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Mutable buffers in use, by fully qualified name: only buffers that have been made."""
        return {**self._buffers, **self._lent}

    def buffers_of(self, kind: StateKind, group: str | None = None) -> dict[str, torch.Tensor]:
        """Buffers in use that were declared to hold `kind`; with `group`, only those of this page group. Not to be changed:
        looking through all buffers takes the host longer than a launch, so the answer is kept."""
        found = self._kinds.get((kind, group))
        if found is None:
            found = self._where(lambda spec: spec.kind is kind and group in (None, spec.group.name))
            self._kinds[kind, group] = found
        return found

    def numbers_of(self, kind: StateKind) -> RowNumbers:
        """See `Program.numbers_of`."""
        found = self._numbers.get(kind)
        if found is None:
            buffers = {key.rpartition(".")[2]: buffer for key, buffer in self.buffers_of(kind).items()}
            found = self._numbers[kind] = RowNumbers(buffers)
        return found

    def buffers_that_grow(self, growth: Growth, group: str | None = None) -> dict[str, torch.Tensor]:
        """Buffers in use whose first dimension is `growth`; with `group`, only those of this page group."""
        return self._where(lambda spec: spec.growth is growth and group in (None, spec.group.name))

    def rows_of(self, growth: Growth, group: str | None = None, tables: bool = True) -> StateRows:
        """See `Program.rows_of`."""
        found = self._rows.get((growth, group, tables))
        if found is None:
            kept = self.buffers_that_grow(growth, group)
            if not tables:
                left_out = self.buffers_of(StateKind.BLOCK_TABLE)
                kept = {key: buffer for key, buffer in kept.items() if key not in left_out}
            if growth is Growth.FIXED:
                kept = {key: buffer[None] for key, buffer in kept.items()}
            found = self._rows[growth, group, tables] = StateRows(kept)
        return found

    def _forget_views(self) -> None:
        """Forget what was made of the buffers in use, because others are in use from now on."""
        for made in (self._rows, self._kinds, self._numbers):
            made.clear()

    def _where(self, wanted: Callable[[BufferSpec], bool]) -> dict[str, torch.Tensor]:
        buffers = self.buffers
        return {key: buffers[key] for key, spec in self._buffer_specs.items() if wanted(spec)}

    @property
    def stats(self) -> ConstantStats:
        used = {key: users for key, users in self._users.items() if users > 0}
        sizes = {key: self._tensors[key].nbytes for key in used}
        return ConstantStats(
            count=len(used),
            nbytes=sum(sizes.values()),
            shared=sum(users > 1 for users in used.values()),
            bytes_saved=sum((users - 1) * sizes[key] for key, users in used.items()),
        )

    def close(self) -> None:
        """Free the memory of all tensors, also of those that someone still holds."""
        free_tensors([*self._tensors.values(), *self._buffers.values()])
        self._tensors.clear()
        self._buffers.clear()
        self._lent.clear()
        self._forget_views()
        self._buffer_specs.clear()
        self._users.clear()

    def _keys(self, record: MethodRecord, names: Mapping[str, str]) -> dict[str, TensorKey]:
        """Map names in the code to identities in the pool, for the record's constants or its buffers."""
        host, host_names = torch.device(HOST), record.host_names
        return {name: TensorKey(key, host if name in host_names else self._device) for name, key in names.items()}

    def _make(
        self, method: str, constants: Iterable[TensorKey], specs: Mapping[TensorKey, BufferSpec], private: bool
    ) -> dict[TensorKey, torch.Tensor]:
        """Make new tensors for these constants and buffers, all or none."""
        entries = {key: self._entry(key.name) for key in constants}
        constant_bytes = sum(entry.nbytes for key, entry in entries.items() if key.device == self._device)
        buffer_bytes = sum(spec.nbytes for key, spec in specs.items() if key.device == self._device)
        memory.check_room(self._device, method, constant_bytes, buffer_bytes)
        first_values = {key: self._entry(key.name) for key, spec in specs.items() if spec.initialised}
        own = first_values.keys() | (entries.keys() if private else ())
        made: dict[TensorKey, torch.Tensor] = {}
        loaded: dict[TensorKey, torch.Tensor] = {}
        grown = {key: spec for key, spec in specs.items() if spec.grows}
        try:
            made |= allocate_rows(
                {key: (spec.shape, dtype_from_name(spec.dtype), key.device) for key, spec in grown.items()}
            )
            for key, spec in specs.items():
                if key not in grown and not spec.initialised:
                    made[key] = zeros(spec.shape, dtype_from_name(spec.dtype), key.device)
            for device, loader in self._loaders.items():
                here = {key.name: entry for key, entry in (entries | first_values).items() if key.device == device}
                if here:
                    found = loader.load(here, {key.name for key in own if key.device == device})
                    loaded |= {TensorKey(key, device): tensor for key, tensor in found.items()}
            for key, spec in grown.items():
                self._write_first_rows(spec, made[key], loaded.pop(key, None))
            return made | loaded
        except BaseException:
            free_tensors([*made.values(), *loaded.values()])
            raise

    def _write_first_rows(self, spec: BufferSpec, buffer: torch.Tensor, first: torch.Tensor | None) -> None:
        """Write the first values of a buffer that grows and is zero. `first`: the tensor from the file, if there is one."""
        if spec.kind is StateKind.BLOCK_TABLE:
            buffer.copy_(first_block_table(spec, self.capacity))
        elif first is not None:
            buffer.copy_(first[:1])

    def _check_mapped(self) -> None:
        mapped = sum(tensor.nbytes for key, tensor in self._tensors.items() if key.device.type == HOST)
        warning = memory.mapped_warning(mapped)
        if warning is not None and self.keeps_mapped:
            logger.warning("%s", warning)
            self.keeps_mapped = False

    def _write_first_values(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for key, spec in self._buffer_specs.items():
            if spec.kind is StateKind.BLOCK_TABLE:
                buffers[key].copy_(first_block_table(spec, self.capacity))
            elif spec.initialised:
                first = self._entry(key).tensor()
                buffers[key].copy_(first if spec.growth is Growth.FIXED else first[:1])
            else:
                buffers[key].zero_()

    def _entry(self, key: str) -> Entry:
        entry = self._file.entries.get(key)
        if entry is None or entry.dtype is None:
            raise ArtifactError(
                f"{self._file.path} lacks the constant {key!r}: it belongs to another export, or is damaged"
            )
        return entry


def _other_layout(own: torch.Tensor, given: torch.Tensor) -> str | None:
    """Return how the layout of `given` differs from `own`, None if `given` can replace `own` in compiled code."""
    layouts = [(list(x.shape), list(x.stride()), str(x.dtype), str(x.device)) for x in (own, given)]
    for what, wanted, got in zip(("shape", "strides", "dtype", "device"), *layouts, strict=True):
        if wanted != got:
            return f"{what} {got}, expected {wanted}"
    return None if given.data_ptr() % ALIGNMENT == 0 else f"its address is not a multiple of {ALIGNMENT}"
