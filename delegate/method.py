"""A loaded method: `Method.execute`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .artifact.pte import DelegateMethod
from .artifact.records import TensorSpec
from .code.method_code import MethodCode
from .constants.pool import Binding
from .errors import ClosedError, OstinatoError, StepError, first_line
from .graphs.state_machine import MethodStats, StateMachine
from .inputs import InputCheck
from .memory import MemoryWatch


class Owner:
    """Handles own device memory and loaded code; a copy would free them twice."""

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

    def execute(
        self, inputs: Sequence[torch.Tensor], graph: bool = True, checked: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Run one step of the model; its state moves exactly once.

        Args:
            inputs: one tensor per input, with the shapes and dtypes of `inputs`, on the host or on the program's device.
                Integer values with a declared range are checked when the tensor is on the host; on the device
                that would cost a synchronisation, so there the caller must keep to the range.
            graph: False runs the code as in the phase `disabled`, whatever the options say: for shapes that need no plan.
            checked: the caller has made sure that the inputs fit, values too: nothing of them is looked at here.

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
            if not checked:
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
