"""`load_program` -> `Program` -> `load_method` -> `Method` -> `execute`: the public shape of executorch.runtime."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from .artifact import StateKind, TensorSpec
from .constants import Binding, ConstantPool, ConstantStats
from .errors import ClosedError, OptionError, OstinatoError, StepError, first_line
from .files import Source, artifact_paths, open_artifact
from .graph_pool import GraphPool
from .graph_recorders import CudaGraphRecorder, GraphRecorder, HostGraphRecorder
from .inputs import InputCheck
from .memory import MemoryWatch
from .method_code import MethodCode
from .options import BackendOptions
from .pte import DelegateMethod, ProgramFile
from .side_stream import Call, run_here, run_on_stream, side_stream
from .state_machine import MethodStats, StateMachine
from .streaming import StreamBuffers
from .target import Target, check_target

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


class _Owner:
    """Handles own device memory and loaded code; a copy would free them twice."""

    def __copy__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied: it owns loaded code and device memory")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it owns loaded code and device memory")


class Method(_Owner):
    """One loaded method. Made by `Program.load_method`; freed with its program or by `close`."""

    def __init__(
        self,
        entry: DelegateMethod,
        code: MethodCode,
        state_machine: StateMachine,
        binding: Binding,
        lock: threading.RLock,
        device: torch.device,
        watch: MemoryWatch,
        skip_copy: bool,
        on_close: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._code: MethodCode | None = code
        self._state_machine = state_machine
        # The code keeps addresses; this keeps the tensors that are there.
        self._bound = binding.tensors
        self._lock = lock
        self._device = device
        self._skip_copy = skip_copy
        self._on_close = on_close
        self._inputs = entry.inputs
        self._input_order, self._output_order = entry.input_order, entry.output_order
        self._check = InputCheck(entry.name, self._inputs, device)
        self._watch = watch

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The method's inputs, in the order of `execute`."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The method's outputs, in the order that `execute` returns."""
        return self._entry.outputs

    @property
    def stats(self) -> MethodStats:
        """Phase, warmups, captures, replays, fallbacks, and the plans: a live view, but for which plans there are."""
        return self._state_machine.stats

    @property
    def static_inputs(self) -> tuple[torch.Tensor, ...]:
        """The buffers that the plan of the last call reads, in the order of `execute`; empty where there is none.

        Filling them and passing them to `execute` saves its copies. They are on the device, so their values are not checked
        there, except those that code on the host alone takes; and they stay as they are from call to call.
        """
        static = self._state_machine.static_inputs
        return tuple(static[self._input_order.index(place)] for place in range(len(static)))

    def execute(self, inputs: Sequence[torch.Tensor], graph: bool = True) -> tuple[torch.Tensor, ...]:
        """Run one step of the model; its state moves exactly once.

        Args:
            inputs: one tensor per input, with the shapes and dtypes of `inputs`, on the host or on the program's device.
                Integer values with a declared range are checked when the tensor is on the host; on the device
                that would cost a synchronisation, so there the caller must keep to the range.
            graph: False runs the code as in the phase `disabled`, whatever the options say: for shapes that need no plan.

        Returns:
            The outputs. On the host and owned by the caller, unless `skip_copy_output_to_cpu_for_method` names this
            method: then on the device, and in the replay phase overwritten by the next call of any method of the program,
            because all graphs share their memory: copy what you keep.

        Raises:
            InputError: number, type, shape, dtype, device or value of an input; state is untouched.
            DeviceMemoryError: the GPU has no room for what the step allocates for itself. The step may have been made in
                part: `Program.reset`, or a step at position 0, makes the state whole again.
            StepError: compiled code failed; the same holds.
            ClosedError: the method or its program was closed.
        """
        with self._lock:
            if self._code is None:
                raise ClosedError(f"method {self.name!r} is closed")
            self._check(inputs)
            results = self._run([inputs[i] for i in self._input_order], graph)
            outputs = tuple([results[i] for i in self._output_order])
            if self._skip_copy:
                return outputs
            # A replayed output is the graph's own buffer; on the CPU `.cpu()` would hand out that very buffer.
            owned = self._device.type == "cpu" and not self._state_machine.has_static_outputs
            return outputs if owned else tuple(t.to("cpu", copy=True) for t in outputs)

    def _bind(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Use these mutable buffers, by their names in the code."""
        assert self._code is not None
        self._bound = {**self._bound, **buffers}
        self._code.bind(self._bound)

    def close(self) -> None:
        """Free graph, buffers and code, in that order. Closing twice is fine."""
        with self._lock:
            if self._code is None:
                return
            self._state_machine.release()
            self._code.close()
            self._code = None
            self._bound = {}
            self._on_close()

    def _run(self, inputs: Sequence[torch.Tensor], graph: bool) -> list[torch.Tensor]:
        try:
            return self._state_machine(inputs, graph)
        except RuntimeError as error:
            specs = zip(self._entry.record.inputs, inputs, strict=True)
            shapes = ", ".join(f"{spec.name} {list(tensor.shape)}" for spec, tensor in specs)
            explained = self._watch.explain(error, f"running method {self.name!r} with {shapes}")
            if explained is not None:
                raise explained from error
            if isinstance(error, OstinatoError):
                raise
            raise StepError(
                f"method {self.name!r} failed with {shapes}: {first_line(error)}. The step may have been made in part: "
                "`Program.reset`, or a step at position 0, makes the state whole again"
            ) from error


class Program(_Owner):
    """A loaded artifact. Made by `load_program`; a context manager that closes its methods on exit."""

    def __init__(self, parsed: ProgramFile, pool: ConstantPool, device: torch.device) -> None:
        self._parsed = parsed
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


def load_program(source: Source, verify: bool = True, on_load: Callable[[int], None] | None = None) -> Program:
    """Load an artifact: `load_program("artifact/")` or `load_program(("model.pte", "model.ptd"))`.

    The files are mapped, not read; constants are loaded with the first method that needs them.

    Args:
        source: an artifact folder, the paths of its two files, or that of its `.pte`.
        verify: compare SHA-256 of the program, and later of code and constants, with the manifest.
        on_load: called with the size in bytes of each constant that has been loaded, from the thread that loads the method;
            `Program.bytes_to_load` says beforehand how many they will be.

    Raises:
        ArtifactError: no such file, not an artifact, damaged, or the two files do not belong together.
        TargetError: compiled for another device, architecture, instruction set or torch.
    """
    program_path, constants_path = artifact_paths(source)
    parsed, constants = open_artifact(program_path, constants_path, verify)
    entries = list(parsed.methods.values())
    for entry in entries:
        check_target(entry.target)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if entries[0].target.device == "cuda" else torch.device("cpu")
    )
    return Program(parsed, ConstantPool(constants, device, verify, on_load), device)
