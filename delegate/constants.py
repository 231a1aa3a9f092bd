"""One pool per loaded program owns every constant and every mutable buffer, on the program's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .artifact import BufferSpec, constant_digest, dtype_from_name, dtype_name
from .errors import ArtifactError
from .ptd import ConstantsFile, Entry

# 16 MiB through pinned memory keeps a PCIe 5 link busy while the next piece is copied by the CPU.
_STAGING_BYTES = 16 << 20


@dataclass
class ConstantStats:
    """`count` constants are held, `shared` of them by two methods or more; `bytes_saved` against a copy a method."""

    count: int = 0
    nbytes: int = 0
    shared: int = 0
    bytes_saved: int = 0


class ConstantPool:
    """Tensors by key; a constant is loaded and checked when the first method asks for it.

    Args:
        file: the parsed `.ptd`.
        device: where the tensors live. On the CPU they lie on the file's map; on a GPU each is copied once.
        verify: compare each constant's SHA-256 with the manifest when it is loaded.
        on_load: called with the number of bytes after each constant, for progress displays.
    """

    def __init__(
        self,
        file: ConstantsFile,
        device: torch.device,
        verify: bool = True,
        on_load: Callable[[int], None] | None = None,
    ) -> None:
        self._file = file
        self._device = device
        self._verify = verify
        self._on_load = on_load
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_specs: dict[str, BufferSpec] = {}
        self._users: dict[str, int] = {}
        self._staging: _Staging | None = None

    def bind(self, keys: Iterable[str], share: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of `keys`, each the pool's own; with `share=False` private copies that the pool does not keep."""
        bound = {}
        for key in keys:
            if not share:
                bound[key] = self._load(key, private=True)
                continue
            if key not in self._tensors:
                self._tensors[key] = self._load(key)
            self._users[key] = self._users.get(key, 0) + 1
            bound[key] = self._tensors[key]
        self._staging = None
        return bound

    def release(self, keys: Iterable[str]) -> None:
        """Take back one use of each key; the tensors stay until `close`."""
        for key in keys:
            self._users[key] -= 1

    def bind_buffers(self, specs: dict[str, BufferSpec]) -> dict[str, torch.Tensor]:
        """The mutable buffers of `specs`, made on first use: zeros, or the first value that `model.ptd` holds."""
        for key, spec in specs.items():
            if key not in self._buffers:
                self._buffers[key] = self._first_value(key, spec)
                self._buffer_specs[key] = spec
        return {key: self._buffers[key] for key in specs}

    def reset_buffers(self) -> None:
        """Put the first values back, in place."""
        for key, spec in self._buffer_specs.items():
            if spec.initialised:
                self._buffers[key].copy_(self._first_value(key, spec))
            else:
                self._buffers[key].zero_()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Mutable buffers made so far, by fully qualified name."""
        return dict(self._buffers)

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
        self._buffer_specs.clear()
        self._users.clear()

    def _first_value(self, key: str, spec: BufferSpec) -> torch.Tensor:
        if spec.initialised:
            return self._load(key, private=True)
        return torch.zeros(spec.shape, dtype=dtype_from_name(spec.dtype), device=self._device)

    def _load(self, key: str, private: bool = False) -> torch.Tensor:
        entry = self._file.entries.get(key)
        if entry is None or entry.dtype is None:
            raise ArtifactError(
                f"{self._file.path} lacks the constant {key!r}: it belongs to another export, or is damaged"
            )
        if self._verify:
            self._check_hash(key, entry)
        if self._device.type == "cpu":
            tensor = entry.tensor().clone() if private else entry.tensor()
        else:
            self._staging = self._staging or _Staging(self._device)
            tensor = self._staging.upload(entry)
        if self._on_load is not None:
            self._on_load(entry.nbytes)
        return tensor

    def _check_hash(self, key: str, entry: Entry) -> None:
        expected = self._file.manifest.constants.get(key)
        assert entry.dtype is not None
        found = constant_digest(entry.data, dtype_name(entry.dtype), entry.shape, entry.strides)
        if found != expected:
            raise ArtifactError(
                f"{self._file.path} is damaged: constant {key!r} has SHA-256 {found[:12]}..., the manifest says "
                f"{(expected or 'nothing')[:12]}...: copy the artifact again or export it again"
            )


def free_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Take the memory from under the tensors. torch's container never lets go of a user-managed constant (seen with 2.11
    and 2.13), so dropping our own references would leave a whole model allocated."""
    for tensor in tensors:
        tensor.set_()  # type: ignore[call-overload]


class _Staging:
    """Two pinned buffers: the CPU fills one while the other is on its way to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._halves = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._done: list[torch.cuda.Event | None] = [None, None]

    def upload(self, entry: Entry) -> torch.Tensor:
        assert entry.dtype is not None
        out = torch.empty_strided(entry.shape, entry.strides, dtype=entry.dtype, device=self._device)
        if entry.nbytes == 0:
            return out
        source = torch.frombuffer(entry.data, dtype=torch.uint8)
        target = torch.as_strided(out, (out.numel(),), (1,)).view(torch.uint8)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for i, begin in enumerate(range(0, entry.nbytes, _STAGING_BYTES)):
                size = min(_STAGING_BYTES, entry.nbytes - begin)
                half, done = self._halves[i % 2], self._done[i % 2]
                if done is not None:
                    done.synchronize()
                half[:size].copy_(source[begin : begin + size])
                target[begin : begin + size].copy_(half[:size], non_blocking=True)
                self._done[i % 2] = event = torch.cuda.Event()
                event.record(self._stream)
        self._stream.synchronize()
        return out
