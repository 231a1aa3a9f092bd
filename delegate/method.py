"""`Method`: one loaded method of a program, which `execute` runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from .artifact.pte import DelegateMethod
from .artifact.records import TensorSpec
from .code.method_code import MethodCode
from .code.side_stream import side_lock
from .code.used_streams import UsedStreams
from .constants.pool import Binding
from .errors import ClosedError, OstinatoError, StepError, first_line
from .graphs.state_machine import MethodStats, StateMachine
from .inputs import InputCheck
from .memory import MemoryWatch


class Owner:
    """Base class of handles that own device memory and loaded code. They cannot be copied: a copy would free them twice."""

    def __copy__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied: it owns loaded code and device memory")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it owns loaded code and device memory")


class Method(Owner):
    """One loaded method. Made by `Program.load_method`; freed with its program or by `close`."""

    def __init__(
        self,
        entry: DelegateMethod,
        code: MethodCode,
        state_machine: StateMachine,
        binding: Binding,
        lock: threading.RLock,
        device: torch.device,
        streams: UsedStreams,
        watch: MemoryWatch,
        skip_copy: bool,
        on_close: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._code: MethodCode | None = code
        self._state_machine = state_machine
        # The code keeps only addresses. This reference keeps the tensors alive.
        self._bound = binding.tensors
        self._lock = lock
        self._device = device
        self._streams = streams
        self._skip_copy = skip_copy
        self._on_close = on_close
        self._inputs = entry.inputs
        self._input_order, self._output_order = entry.input_order, entry.output_order
        # The last plan's buffers, in its order and in that of `execute`.
        self._static: tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]] = ((), ())
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
        """Phase, numbers of warmups, captures, replays and fallbacks, and the plans: live, except the list of plans."""
        return self._state_machine.stats

    @property
    def static_inputs(self) -> tuple[torch.Tensor, ...]:
        """Input buffers of the last call's plan, in the order of `execute`; empty without a plan.

        Filling these buffers and passing them to `execute` saves its copies. Values stay in them from call to call. A buffer
        is on the host if only code on the host reads it, else on the device. `execute` does not check values on the device.
        """
        static = self._state_machine.static_inputs
        if static is not self._static[0]:
            places = [self._input_order.index(place) for place in range(len(static))]
            self._static = static, tuple([static[place] for place in places])
        return self._static[1]

    def execute(
        self, inputs: Sequence[torch.Tensor], graph: bool = True, checked: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Run one step of the model. The model's state advances exactly once.

        Args:
            inputs: one tensor per input, with the shapes and dtypes of `inputs`, on the host or on the program's device.
                Integer values with a declared range are checked only in tensors on the host. On the device the check would
                cost a synchronisation, so the caller must keep to the range.
            graph: whether a graph may be used. False runs the code as in the phase `disabled`, whatever the options say: for
                shapes that need no plan.
            checked: whether the caller has already checked the inputs, values too. True: nothing is checked here.

        Returns:
            The outputs, on the host and owned by the caller. If `skip_copy_output_to_cpu_for_method` names this method, they
            are on the device. In the replay phase the next call of any method of the program then overwrites them, because
            all graphs share their memory: copy what you keep.

        Raises:
            InputError: wrong number of inputs, or wrong type, shape, dtype, device or value of one. The state is unchanged.
            DeviceMemoryError: the GPU has no room for what the step allocates for itself. The step may be incomplete:
                `Program.reset`, or a step at position 0, makes the state valid again.
            StepError: compiled code failed. The step may be incomplete, as above.
            ClosedError: the method or its program was closed.
        """
        with self._lock:
            if self._code is None:
                raise ClosedError(f"method {self.name!r} is closed")
            if not checked:
                self._check(inputs)
            results = self._run([inputs[i] for i in self._input_order], graph)
            outputs = tuple([results[i] for i in self._output_order])
            if self._skip_copy:
                return outputs
            # A replayed output is the graph's own buffer. It must be copied: on the CPU `.cpu()` would return this buffer.
            owned = self._device.type == "cpu" and not self._state_machine.has_static_outputs
            return outputs if owned else tuple(t.to("cpu", copy=True) for t in outputs)

    def _bind(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Bind the code to these mutable buffers, given by their names in the code."""
        assert self._code is not None
        self._bound = {**self._bound, **buffers}
        self._code.bind(self._bound)

    def close(self) -> None:
        """Wait for the method's work, then free graph, buffers and code, in that order. Closing twice is fine.

        An error of one of these does not keep the others from being freed; it is raised at the end.

        Raises:
            OstinatoError: this thread is making a CUDA graph. Nothing has been closed.
        """
        with self._lock:
            if self._code is None:
                return
            self._streams.wait()
            code, self._code, self._bound, self._static = self._code, None, {}, ((), ())
            with side_lock, ExitStack() as last_first:
                last_first.callback(self._on_close)
                last_first.callback(code.close)
                last_first.callback(self._state_machine.release)

    def _run(self, inputs: Sequence[torch.Tensor], graph: bool) -> list[torch.Tensor]:
        self._streams.note()
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
