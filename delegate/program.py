"""`load_program` -> `Program` -> `load_method` -> `Method` -> `execute`: the public shape of executorch.runtime."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .artifact.files import open_artifact
from .artifact.paths import Source, artifact_paths
from .artifact.pte import DelegateMethod, ProgramFile
from .artifact.records import Growth, StateKind, TensorSpec
from .artifact.target import Target, check_target
from .capacity import Capacity, CapacityOptions, choose_capacity, sized
from .code.method_code import MethodCode
from .code.row_transfers import RowTransfers
from .code.side_stream import Call, run_here, run_on_stream, side_lock, side_stream
from .code.used_streams import UsedStreams, is_capturing
from .constants.pool import ConstantPool, ConstantStats
from .constants.row_numbers import RowNumbers
from .constants.rows import StateRows
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
    """Numbers and bytes of the loaded constants and mutable buffers.

    `shared` constants are used by two or more methods. `bytes_saved` compares with one copy per method.
    """

    constants: int
    constant_bytes: int
    shared: int
    bytes_saved: int
    mutable_buffers: int
    mutable_buffer_bytes: int


class Program(Owner):
    """A loaded artifact. Made by `load_program`; a context manager that closes its methods on exit."""

    def __init__(self, parsed: ProgramFile, pool: ConstantPool, device: torch.device, capacity: Capacity) -> None:
        self._closed = False
        self._process = os.getpid()
        self._parsed = parsed
        self._capacity = capacity
        self._pool = pool
        self._graph_pool: GraphPool | None = None
        self._streams = UsedStreams(device)
        self._stream_buffers = StreamBuffers(device)
        self._row_transfers = RowTransfers(device, self._streams)
        self._device = device
        self._methods: list[Method] = []
        self._lock = threading.RLock()
        _open_programs.add(self)

    @property
    def method_names(self) -> set[str]:
        return set(self._parsed.methods)

    def method_inputs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs of a method's inputs, in the order of `execute`. The method need not be loaded.

        Raises:
            OptionError: no such method.
        """
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
        """Numbers of sessions, of positions and of snapshots that the program has room for."""
        return self._capacity

    @property
    def target(self) -> Target:
        """Device, architecture and torch release that the code was compiled for."""
        return next(iter(self._parsed.methods.values())).target

    @property
    def mutable_buffers(self) -> dict[str, torch.Tensor]:
        """Mutable buffers that the loaded methods share, by fully qualified name.

        They are the tensors in use, not copies. `close` frees the memory of the program's own buffers.
        """
        return self._pool.buffers

    def buffers_of(self, kind: StateKind, group: str | None = None) -> dict[str, torch.Tensor]:
        """Mutable buffers that the export declared to hold `kind`, by fully qualified name; with `group`, only those of the
        page group of this name. The dictionary is the program's own: do not change it."""
        return self._pool.buffers_of(kind, group)

    def buffers_that_grow(self, growth: Growth, group: str | None = None) -> dict[str, torch.Tensor]:
        """Mutable buffers whose first dimension counts slots, or pages, as `growth` says; with `group`, only those of the
        page group of this name."""
        return self._pool.buffers_that_grow(growth, group)

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the artifact's program and its constants, not of the files beside them: see `Seal.id`."""
        return self._parsed.id

    def rows_of(self, growth: Growth, group: str | None = None, tables: bool = True) -> StateRows:
        """Rows of the buffers that `buffers_that_grow` gives, with the block tables or without. Buffers of a fixed size have
        one row. Not to be kept: the program may soon use other buffers."""
        return self._pool.rows_of(growth, group, tables)

    def numbers_of(self, kind: StateKind) -> RowNumbers:
        """Numbers of slots in the buffers that `buffers_of` gives, [slots] each, by the last component of their names. Not to
        be kept: the program may soon use other buffers."""
        return self._pool.numbers_of(kind)

    @property
    def row_transfers(self) -> RowTransfers:
        """Copies of rows to the host and back, on a stream of their own."""
        return self._row_transfers

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
        """Bytes that loading these methods would read from the file; of all methods, if none is named.

        A constant that methods share counts once, and a loaded constant does not count. Progress displays use this total.
        """
        return self._pool.bytes_to_load([self._entry(name).record for name in names or self._parsed.methods])

    def load_method(self, name: str, backend_options: Mapping[str, bool | int | str] | None = None) -> Method:
        """Load one method and bind the pool's constants to it.

        Args:
            name: one of `method_names`.
            backend_options: see `BackendOptions`.

        Raises:
            OptionError: no such method, or an option that is unknown, has a wrong type or names no method.
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
        """Reset every mutable buffer in use to its first values.

        Models of `ostinato export` reset their state at position 0 by themselves and do not need this call.
        """
        with self._lock:
            self._streams.note()
            self._pool.reset_buffers()

    def prefault(self) -> None:
        """Read all memory-mapped constants of the loaded methods once, so that no step waits for the disk.

        Loading has already done this if it verified the constants and the host has memory to keep them.
        """
        with self._lock:
            self._pool.prefault()

    def new_state(self) -> dict[str, torch.Tensor]:
        """Make another set of the loaded methods' mutable buffers, with the same layout and their first values.

        Raises:
            DeviceMemoryError: the device has no room for them.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the program is closed")
            return self._pool.new_buffers()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def bind_state(self, buffers: Mapping[str, torch.Tensor] | None = None) -> None:
        """Make all methods use `buffers` as their mutable buffers, until the next call of `bind_state`.

        Each method updates its captured graphs at its next call. Nothing is copied or reset: the caller owns the values.

        Args:
            buffers: buffers as `new_state` makes them, each with the shape, strides, dtype and device of the buffer that it
                replaces. They are used in place, and the program keeps them while it is bound to them. None: the program's
                own buffers.

        Raises:
            InputError: a buffer is missing, unknown or of another layout. All methods then stay bound as before.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the program is closed")
            self._pool.lend(buffers)
            for method in self._methods:
                method._bind(self._pool.buffers_for(method._entry.record))

    def close(self) -> None:
        """Wait for the program's work, then free methods, the memory that their graphs shared, and constants, in that order.

        Work of others is not waited for. Closing twice is fine. An error of one part does not keep the others from being
        freed; it is raised at the end. A program that nobody closes is closed when nothing refers to it, or when the
        interpreter ends.

        Raises:
            OstinatoError: this thread is making a CUDA graph. Nothing has been closed.
        """
        with self._lock:
            if self._closed:
                return
            self._streams.wait()
            self._closed = True
            with side_lock, ExitStack() as last_first:
                last_first.callback(self._pool.close)
                last_first.callback(self._stream_buffers.close)
                last_first.callback(self._row_transfers.close)
                if self._graph_pool is not None:
                    last_first.callback(self._graph_pool.close)
                for method in self._methods:
                    last_first.callback(method.close)
        _close_dropped()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A method and its program refer to each other, so this is called by the garbage collector, in any thread. A process
        # that was forked has copies of what the GPU does not know there.
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            _dropped.append(self)
            _close_dropped()

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

        # Without the tensors: the method may be bound to another state when it is closed.
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
            self._streams,
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
                self._graph_pool = self._graph_pool or GraphPool(stream, self._streams)
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


# Graphs must be freed before the memory that they point to, even if a program is not closed before the interpreter ends.
_open_programs: weakref.WeakSet[Program] = weakref.WeakSet()
# Programs that nobody has closed, and nothing refers to any more.
_dropped: list[Program] = []


os.register_at_fork(after_in_child=_open_programs.clear)
os.register_at_fork(after_in_child=_dropped.clear)


@atexit.register
def _close_programs() -> None:
    _dropped.extend(_open_programs)
    _close_dropped()


def _close_dropped() -> None:
    """Close programs that were dropped. While this thread makes a CUDA graph they wait for the next program
    that is loaded or closed."""
    while _dropped and not is_capturing():
        program = _dropped.pop()
        try:
            program.close()
        except Exception:
            logger.exception("a program cannot be closed")


def load_program(
    source: Source,
    verify: bool = True,
    on_load: Callable[[int], None] | None = None,
    *,
    digest: str | None = None,
    sessions: int | None = None,
    kv_tokens: int | None = None,
    gpu_memory_fraction: float | None = None,
    snapshots: int | None = None,
) -> Program:
    """Load an artifact: `load_program("artifact/")` or `load_program(("model.pte", "model.ptd"))`.

    The files are memory-mapped, not read. A constant is loaded with the first method that needs it. By default the program
    has room for one session with max_seq_len positions.

    Args:
        source: an artifact folder, the paths of its two files, or the path of its `.pte`.
        verify: whether to compare the SHA-256 of the program, and later of each constant, with what the files record. The
            hash of compiled code is always checked.
        on_load: function that gets the size in bytes of each loaded constant, called from the thread that loads the method.
            `Program.bytes_to_load` gives the total in advance.
        digest: the digest that the artifact must have, as `ostinato inspect --verify` prints it. It is one of the program and
            all its code, of all constants, and of the files from the checkpoint beside the program. Any other artifact is
            refused before its code is mapped; the program is read into memory, so that later changes of the file change
            nothing. Constants are compared with the manifest when they are loaded, as always; who can write to the mapped
            file can still change them after that, but no code. None: any artifact.
        sessions: number of sessions with a state of their own. None: 1, or with `gpu_memory_fraction` as many as fit.
        kv_tokens: positions of all sessions together, rounded up to whole pages. None: max_seq_len for each session. A larger
            number leaves room for snapshots, which keep pages. Layers with a sliding window take fewer pages, see
            `GroupCapacity`.
        gpu_memory_fraction: share that sessions may take of the GPU memory that is free beside the weights. It sets what is
            None above: as many sessions as fit with max_seq_len positions, at most 256, and as many positions as fit.
        snapshots: number of rows of state for snapshots, each as large as a session's slot. None: none, or of
            `gpu_memory_fraction` a thirty-second.

    Raises:
        OptionError: see `choose_capacity`; a text that is no digest; a digest with `verify=False`.
        ArtifactError: no such file, not an artifact, damaged, the two files do not belong together, or another digest.
        TargetError: compiled for another device, architecture, instruction set or torch.
    """
    _close_dropped()
    options = CapacityOptions(sessions, kv_tokens, gpu_memory_fraction, snapshots)
    if digest is not None and not verify:
        raise OptionError("with a digest, constants are compared with it: leave out verify=False, or the digest")
    program_path, constants_path = artifact_paths(source)
    parsed, constants = open_artifact(program_path, constants_path, verify, digest)
    entries = list(parsed.methods.values())
    for entry in entries:
        check_target(entry.target)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if entries[0].target.device == "cuda" else torch.device("cpu")
    )
    records = [entry.record for entry in entries]
    pool = ConstantPool(constants, device, verify, on_load)
    capacity = choose_capacity(records, parsed.metadata, options, device, pool.bytes_to_load(records, device))
    pool.capacity = capacity
    return Program(sized(parsed, capacity), pool, device, capacity)
