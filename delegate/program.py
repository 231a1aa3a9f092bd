"""`load_program` -> `Program` -> `load_method` -> `Method` -> `execute`: the public shape of executorch.runtime."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .artifact.files import Source, artifact_paths, open_artifact
from .artifact.pte import DelegateMethod, ProgramFile
from .artifact.records import Growth, StateKind, TensorSpec
from .artifact.target import Target, check_target
from .capacity import Capacity, CapacityOptions, choose_capacity, sized
from .code.method_code import MethodCode
from .code.side_stream import Call, run_here, run_on_stream, side_stream
from .constants.pool import ConstantPool, ConstantStats
from .constants.streaming import StreamBuffers
from .errors import ClosedError, OptionError
from .graphs.pool import GraphPool
from .graphs.recorders import CudaGraphRecorder, GraphRecorder, HostGraphRecorder
from .graphs.state_machine import StateMachine
from .method import Method, Owner
from .options import BackendOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgramStats:
    """Constants held by the pool, how many are shared, and the bytes that sharing saves."""

    constants: int
    constant_bytes: int
    shared: int
    bytes_saved: int
    mutable_buffers: int
    mutable_buffer_bytes: int


class Program(Owner):
    """A loaded artifact. Made by `load_program`; a context manager that closes its methods on exit."""

    def __init__(self, parsed: ProgramFile, pool: ConstantPool, device: torch.device, capacity: Capacity) -> None:
        self._parsed = parsed
        self._capacity = capacity
        self._pool = pool
        self._graph_pool: GraphPool | None = None
        self._stream_buffers = StreamBuffers(device)
        self._device = device
        self._methods: list[Method] = []
        self._lock = threading.RLock()
        self._closed = False
        _open_programs.add(self)

    @property
    def method_names(self) -> set[str]:
        return set(self._parsed.methods)

    def method_inputs(self, name: str) -> tuple[TensorSpec, ...]:
        """A method's inputs, in the order of `execute`; it need not be loaded. Raises OptionError: no such method."""
        return self._entry(name).inputs

    @property
    def metadata(self) -> dict[str, Any]:
        """Results of the program's constant methods by name, such as `get_max_seq_len`."""
        return dict(self._parsed.metadata)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def capacity(self) -> Capacity:
        """How many sessions there is room for, and how many positions."""
        return self._capacity

    @property
    def target(self) -> Target:
        """What the code was compiled for."""
        return next(iter(self._parsed.methods.values())).target

    @property
    def mutable_buffers(self) -> dict[str, torch.Tensor]:
        """The state that the loaded methods share, by fully qualified name: the tensors themselves; `close` empties
        the program's own."""
        return self._pool.buffers

    def buffers_of(self, kind: StateKind) -> dict[str, torch.Tensor]:
        """Those of `mutable_buffers` that the export declared to hold `kind`."""
        return self._pool.buffers_of(kind)

    def buffers_that_grow(self, growth: Growth) -> dict[str, torch.Tensor]:
        """Those of `mutable_buffers` whose first dimension counts slots, or pages."""
        return self._pool.buffers_that_grow(growth)

    @property
    def stats(self) -> ProgramStats:
        constants: ConstantStats = self._pool.stats
        buffers = self._pool.buffers.values()
        return ProgramStats(
            constants=constants.count,
            constant_bytes=constants.nbytes,
            shared=constants.shared,
            bytes_saved=constants.bytes_saved,
            mutable_buffers=len(buffers),
            mutable_buffer_bytes=sum(tensor.nbytes for tensor in buffers),
        )

    def bytes_to_load(self, *names: str) -> int:
        """Bytes of constants that loading these methods would load; of all methods, if none is named.

        What methods share counts once, and what is loaded already not at all: the total for a display of progress.
        """
        return self._pool.bytes_to_load([self._entry(name).record for name in names or self._parsed.methods])

    def load_method(self, name: str, backend_options: Mapping[str, bool | int | str] | None = None) -> Method:
        """Load one method and bind the pool's constants to it.

        Args:
            name: one of `method_names`.
            backend_options: see `BackendOptions`.

        Raises:
            OptionError: no such method, or an option that is unknown, mistyped or names no method.
            ArtifactError: code or constants are damaged.
            DeviceMemoryError: the GPU has no room for the constants and mutable buffers. What was allocated is freed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the program is closed")
            entry = self._entry(name)
            method = self._load(entry, BackendOptions.parse(backend_options, sorted(self._parsed.methods)))
            self._methods.append(method)
            return method

    def reset(self) -> None:
        """Put the first values back into every mutable buffer in use.

        A model whose state resets at position 0, as those of `ostinato export` do, needs no call of this.
        """
        with self._lock:
            self._pool.reset_buffers()

    def prefault(self) -> None:
        """Read the loaded methods' constants that lie on the file's map once, so that no step waits for the disk.

        Loading has done so already if it has verified them and there is memory to keep them.
        """
        with self._lock:
            self._pool.prefault()

    def new_state(self) -> dict[str, torch.Tensor]:
        """Mutable buffers of the same layout as those of the methods loaded so far, with their first values.

        Raises:
            DeviceMemoryError: the device has no room for them.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the program is closed")
            return self._pool.new_buffers()

    def bind_state(self, buffers: Mapping[str, torch.Tensor] | None = None) -> None:
        """Have all methods work on `buffers` from now on, until they are bound to others; None: to the program's own again.

        Captured graphs are updated by the next call of each. The values are the caller's: nothing is copied or reset.

        Args:
            buffers: as `new_state` makes them, each with the shape, strides, dtype and device of the one it stands for. They
                are used in place; the program keeps them as long as it is bound to them.

        Raises:
            InputError: a buffer is missing, unknown or of another layout; everything stays bound as it was.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the program is closed")
            self._pool.lend(buffers)
            for method in self._methods:
                method._bind(self._pool.buffers_for(method._entry.record))

    def close(self) -> None:
        """Free methods, then the memory that their graphs shared, then constants. Closing twice is fine."""
        with self._lock:
            for method in list(self._methods):
                method.close()
            if self._graph_pool is not None:
                self._graph_pool.close()
            try:
                self._stream_buffers.close()
            finally:
                self._pool.close()
                self._closed = True

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _entry(self, name: str) -> DelegateMethod:
        if name not in self._parsed.methods:
            names = ", ".join(sorted(self._parsed.methods))
            raise OptionError(f"the program has no method {name!r}; its methods are: {names}")
        return self._parsed.methods[name]

    def _load(self, entry: DelegateMethod, options: BackendOptions) -> Method:
        record = entry.record
        code = MethodCode(record, self._parsed.named_data, self._device, self._stream_buffers)
        binding = self._pool.bind(record, options.weight_sharing_across_methods)
        try:
            with self._pool.watch.explaining(f"loading method {record.method!r}"):
                shares = options.weight_sharing_across_methods
                code.bind(binding.tensors, registers=shares and self._pool.keeps_mapped)
        except BaseException:
            code.close()
            self._pool.release(binding)
            raise
        method: Method

        # Without the tensors, which may be another state's by then.
        used = replace(binding, tensors={})

        def forget() -> None:
            self._methods.remove(method)
            self._pool.release(used)

        method = Method(
            entry,
            code,
            self._make_state_machine(entry, code, options),
            binding,
            self._lock,
            self._device,
            self._pool.watch,
            options.skips_copy(entry.name),
            forget,
        )
        return method

    def _make_state_machine(self, entry: DelegateMethod, code: MethodCode, options: BackendOptions) -> StateMachine:
        call: Call = run_here
        recorder: GraphRecorder | None = None
        if self._device.type == "cuda":
            stream = side_stream(self._device)
            if options.use_shared_cuda_stream:
                call = partial(run_on_stream, stream)
            if options.uses_graph(entry.name):
                self._graph_pool = self._graph_pool or GraphPool(stream)
                recorder = CudaGraphRecorder(self._graph_pool, options.cuda_graph_early_kernels)
        elif options.uses_graph(entry.name):
            recorder = HostGraphRecorder()
        return StateMachine(
            code,
            recorder,
            self._device,
            [spec.name for spec in entry.record.inputs],
            options.cuda_graph_warmup_steps,
            options.cuda_graph_max_plans,
            call,
            self._pool.watch,
        )


# Graphs must go before the memory that they point to, also where nobody closes a program before the interpreter ends.
_open_programs: weakref.WeakSet[Program] = weakref.WeakSet()


os.register_at_fork(after_in_child=_open_programs.clear)


@atexit.register
def _close_programs() -> None:
    for program in list(_open_programs):
        try:
            program.close()
        except Exception:
            logger.exception("a program cannot be closed")


def load_program(
    source: Source,
    verify: bool = True,
    on_load: Callable[[int], None] | None = None,
    *,
    sessions: int | None = None,
    kv_tokens: int | None = None,
    gpu_memory_fraction: float | None = None,
) -> Program:
    """Load an artifact: `load_program("artifact/")` or `load_program(("model.pte", "model.ptd"))`.

    The files are mapped, not read; constants are loaded with the first method that needs them. By default there is room for
    one session with max_seq_len positions.

    Args:
        source: an artifact folder, the paths of its two files, or that of its `.pte`.
        verify: compare SHA-256 of the program, and later of code and constants, with the manifest.
        on_load: called with the size in bytes of each constant that has been loaded, from the thread that loads the method;
            `Program.bytes_to_load` says beforehand how many they will be.
        sessions: how many sessions have a state of their own; 1 if None, and nothing else is given.
        kv_tokens: positions of all sessions together, in whole pages; if None, max_seq_len for each session. More than that
            is for snapshots, which keep pages.
        gpu_memory_fraction: of what the GPU has free beside the weights, how much sessions may take. What is not given above
            follows: as many sessions as have room with max_seq_len positions, at most 256; as many positions as have room.

    Raises:
        OptionError: as `choose_capacity`.
        ArtifactError: no such file, not an artifact, damaged, or the two files do not belong together.
        TargetError: compiled for another device, architecture, instruction set or torch.
    """
    options = CapacityOptions(sessions, kv_tokens, gpu_memory_fraction)
    program_path, constants_path = artifact_paths(source)
    parsed, constants = open_artifact(program_path, constants_path, verify)
    entries = list(parsed.methods.values())
    for entry in entries:
        check_target(entry.target)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if entries[0].target.device == "cuda" else torch.device("cpu")
    )
    records = [entry.record for entry in entries]
    pool = ConstantPool(constants, device, verify, on_load)
    capacity = choose_capacity(records, parsed.metadata, options, device, pool.bytes_to_load(records, device))
    pool.pages = capacity.pages
    return Program(sized(parsed, capacity), pool, device, capacity)
