"""One pool per loaded program owns every constant and every mutable buffer, on the program's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from . import memory
from .artifact import BufferSpec, MethodRecord, StateKind, constant_digest, dtype_from_name, dtype_name
from .errors import ArtifactError, InputError
from .loading import PARALLEL_FROM, ConstantLoader, free_tensors
from .method_code import ALIGNMENT
from .ptd import ConstantsFile, Entry


@dataclass
class ConstantStats:
    """`count` constants are held, `shared` of them by two or more methods; `bytes_saved` is against one copy per method."""

    count: int = 0
    nbytes: int = 0
    shared: int = 0
    bytes_saved: int = 0


@dataclass(frozen=True)
class Binding:
    """What one method is bound to.

    `tensors`: constants and mutable buffers by the names that the compiled code uses. `shared`: keys of the pool's own
    constants among them. `private`: tensors that this method alone has.
    """

    tensors: dict[str, torch.Tensor]
    shared: tuple[str, ...]
    private: tuple[torch.Tensor, ...]


class ConstantPool:
    """Tensors by key; a constant is loaded and checked when the first method asks for it.

    Args:
        file: the parsed `.ptd`.
        device: where the tensors live. On the CPU they lie on the file's map; on a GPU each is copied once.
        verify: compare each constant's SHA-256 with the manifest when it is loaded.
        on_load: called with the number of bytes after each constant, for progress displays; from the thread that binds.
        parallel_from: load with several threads from this many bytes on.
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
        self._loader = ConstantLoader(device, self._check_hash if verify else None, on_load, parallel_from)
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_specs: dict[str, BufferSpec] = {}
        # In place of the pool's own ones, while the program is bound to another state.
        self._lent: dict[str, torch.Tensor] = {}
        self._users: dict[str, int] = {}
        # The program's: its methods use it too.
        self.watch = memory.MemoryWatch(device)

    def bind(self, record: MethodRecord, share: bool = True) -> Binding:
        """The constants and mutable buffers of one method; those that are not there yet are loaded.

        Constants are the pool's own, or with `share=False` private copies that the pool does not keep. A mutable buffer is
        made on first use, from zeros or from its first value in `model.ptd`, and is always shared. When anything fails, all
        that this call allocated is freed, and the pool is as it was before.

        Raises:
            ArtifactError: the file lacks a constant, or one is damaged.
            DeviceMemoryError: the device has no room.
        """
        keys = tuple(dict.fromkeys(record.constants.values()))
        missing = [key for key in keys if not share or key not in self._tensors]
        specs = {key: spec for key, spec in record.buffer_specs.items() if key not in self._buffers}
        with self.watch.explaining(f"loading method {record.method!r}"):
            fresh = self._make(record.method, missing, specs, private=not share)
        constants = {key: fresh[key] for key in missing}
        if share:
            self._tensors |= constants
            for key in keys:
                self._users[key] = self._users.get(key, 0) + 1
            constants = {key: self._tensors[key] for key in keys}
        self._buffers |= {key: fresh[key] for key in specs}
        self._buffer_specs |= specs
        tensors = {name: constants[key] for name, key in record.constants.items()}
        return Binding(
            tensors | self.buffers_for(record), keys if share else (), () if share else tuple(constants.values())
        )

    def release(self, binding: Binding) -> None:
        """Take back one use of each shared constant, which stays until `close`, and free the private ones."""
        for key in binding.shared:
            self._users[key] -= 1
        free_tensors(binding.private)

    def bytes_to_load(self, records: Iterable[MethodRecord]) -> int:
        """Bytes that binding all of `records` would read from the file: each constant once, and none that is loaded."""
        keys = {key for record in records for key in record.constants.values()} - self._tensors.keys()
        for record in records:
            keys |= {key for key, spec in record.buffer_specs.items() if spec.initialised and key not in self._buffers}
        return sum(self._file.entries[key].nbytes for key in keys if key in self._file.entries)

    def buffers_for(self, record: MethodRecord) -> dict[str, torch.Tensor]:
        """The buffers in use, by the names that the method's code has for them."""
        buffers = self.buffers
        return {name: buffers[key] for name, key in record.buffers.items()}

    def new_buffers(self) -> dict[str, torch.Tensor]:
        """Others of the same layout as those made so far, with their first values.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        with self.watch.explaining("making a state"):
            fresh = {key: torch.empty_like(tensor) for key, tensor in self._buffers.items()}
        self._put_first_values(fresh)
        return fresh

    def lend(self, buffers: Mapping[str, torch.Tensor] | None) -> None:
        """Use `buffers` in place of the pool's own ones, all made so far; None: the own ones again.

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

    def reset_buffers(self) -> None:
        """Put the first values back, in place, into the buffers in use."""
        self._put_first_values(self.buffers)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Mutable buffers in use, of those made so far, by fully qualified name."""
        return {**self._buffers, **self._lent}

    def buffers_of(self, kind: StateKind) -> dict[str, torch.Tensor]:
        """Those of `buffers` that were declared to hold `kind`."""
        buffers = self.buffers
        return {key: buffers[key] for key, spec in self._buffer_specs.items() if spec.kind is kind}

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
        """Free all tensors, also those that someone still holds."""
        free_tensors([*self._tensors.values(), *self._buffers.values()])
        self._tensors.clear()
        self._buffers.clear()
        self._lent.clear()
        self._buffer_specs.clear()
        self._users.clear()

    def _make(
        self, method: str, constants: Iterable[str], specs: dict[str, BufferSpec], private: bool
    ) -> dict[str, torch.Tensor]:
        """New tensors for these keys, all or none."""
        entries = {key: self._entry(key) for key in constants}
        constant_bytes = sum(entry.nbytes for entry in entries.values())
        memory.check_room(self._device, method, constant_bytes, sum(spec.nbytes for spec in specs.values()))
        own = set(entries) if private else set()
        first_values = {key: self._entry(key) for key, spec in specs.items() if spec.initialised}
        made: dict[str, torch.Tensor] = {}
        try:
            for key, spec in specs.items():
                if not spec.initialised:
                    made[key] = torch.zeros(spec.shape, dtype=dtype_from_name(spec.dtype), device=self._device)
            return made | self._loader.load(entries | first_values, own | first_values.keys())
        except BaseException:
            free_tensors(made.values())
            raise

    def _put_first_values(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for key, spec in self._buffer_specs.items():
            if spec.initialised:
                buffers[key].copy_(self._entry(key).tensor())
            else:
                buffers[key].zero_()

    def _entry(self, key: str) -> Entry:
        entry = self._file.entries.get(key)
        if entry is None or entry.dtype is None:
            raise ArtifactError(
                f"{self._file.path} lacks the constant {key!r}: it belongs to another export, or is damaged"
            )
        return entry

    def _check_hash(self, key: str, entry: Entry) -> None:
        expected = self._file.manifest.constants.get(key)
        assert entry.dtype is not None
        found = constant_digest(entry.data, dtype_name(entry.dtype), entry.shape, entry.strides)
        if found != expected:
            raise ArtifactError(
                f"{self._file.path} is damaged: constant {key!r} has SHA-256 {found[:12]}..., the manifest says "
                f"{(expected or 'nothing')[:12]}...: copy the artifact again or export it again"
            )


def _other_layout(own: torch.Tensor, given: torch.Tensor) -> str | None:
    """How `given` differs from `own`, None if it can take its place in compiled code."""
    layouts = [(list(x.shape), list(x.stride()), str(x.dtype), str(x.device)) for x in (own, given)]
    for what, wanted, got in zip(("shape", "strides", "dtype", "device"), *layouts, strict=True):
        if wanted != got:
            return f"{what} {got}, expected {wanted}"
    return None if given.data_ptr() % ALIGNMENT == 0 else f"its address is not a multiple of {ALIGNMENT}"
