"""Warmup -> capture -> replay: the state machine of one method.

    phase     what a call does
    disabled  runs the compiled code
    warmup    runs the compiled code on the stream that will capture; after `warmup_steps` calls, capture
    capture   copies the inputs into static buffers, records (which executes nothing) and launches, piece by piece
    replay    copies the inputs into the static buffers, launches

Each shape of the inputs goes through the phases separately, and has a plan of its own (plans.py). In every phase, each call
advances the model's state exactly once. A segment that cannot be recorded is called instead of replayed. If no segment can be
recorded, or the device has no memory for the graphs, the shape goes to `disabled`, keeps the reason, and runs its code.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from ostinato.delegate.code.side_stream import Call, run_here
from ostinato.delegate.code.transfers import needed_on_device
from ostinato.delegate.errors import InputError
from ostinato.delegate.graphs.static_inputs import StaticInputs
from ostinato.delegate.memory import MemoryWatch
from ostinato.delegate.torch_internals import ALIGNMENT

from .plans import MAX_CHANGES, Code, Plan, PlanStats
from .recorders import GraphRecorder

logger = logging.getLogger(__name__)

Shape = tuple[tuple[int, ...], ...]


class Phase(Enum):
    """Phase of a method's next call, if its inputs have the shape of the last call."""

    DISABLED = "disabled"
    WARMUP = "warmup"
    CAPTURE = "capture"
    REPLAY = "replay"


# Counter of `MethodStats` -> the word for a call that it counts.
PHASE_OF_COUNTER = {"runs": "run", "warmups": "warmup", "captures": "capture", "replays": "replay"}


@dataclass
class MethodStats:
    """Numbers of calls by phase, and the plans.

    Attributes:
        next_phase: value of the `Phase` of the next call, if its inputs have the shape of the last call. The counters say
            which phases calls have been in.
        fallbacks: number of segments that could not be recorded, in all plans together.
        fallback_reason: why the last of these segments could not be recorded, or why a plan was given up.
        plans: numbers of the plans that exist or were given up. The plan that was used last is at the end.
        dropped: number of plans that were freed because there were more shapes than `max_plans`.
    """

    next_phase: str = Phase.DISABLED.value
    runs: int = 0
    warmups: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: int = 0
    fallback_reason: str | None = None
    plans: list[PlanStats] = field(default_factory=list)
    dropped: int = 0


@dataclass
class _ShapeState:
    """Progress of one shape of inputs through the phases."""

    phase: Phase
    warmups: int = 0
    plan: Plan | None = None
    inputs: StaticInputs | None = None
    stats: PlanStats | None = None


class StateMachine:
    """Runs one method through its phases.

    Args:
        code: the method's code.
        recorder: makes the graphs; None to stay in `disabled`.
        device: the program's device. Static buffers are there, except those of inputs that only code on the host takes.
        input_names: names of the inputs, for messages.
        warmup_steps: number of calls before the capture, 1 or more.
        max_plans: number of plans that are kept, 1 or more. The least recently used plan is freed first. Besides, the
            same number of shapes without a plan is remembered.
        call: function that runs code outside graphs: in the phase `disabled`, and in called pieces.
        watch: the program's watch, which recognises a capture that failed for lack of memory.
    """

    def __init__(
        self,
        code: Code,
        recorder: GraphRecorder | None,
        device: torch.device,
        input_names: Sequence[str],
        warmup_steps: int,
        max_plans: int = 1,
        call: Call = run_here,
        watch: MemoryWatch | None = None,
    ) -> None:
        self._code = code
        self._call = call
        self._watch = watch or MemoryWatch(device)
        self._recorder = recorder
        self._device = device
        needed = needed_on_device(code.segments, code.on_host, code.results)
        self._input_devices = [device if n in needed else torch.device("cpu") for n in range(len(input_names))]
        self._input_names = input_names
        self._warmup_steps = warmup_steps
        self._max_plans = max_plans
        self._shapes: OrderedDict[Shape, _ShapeState] = OrderedDict()
        self._last = _ShapeState(Phase.DISABLED if recorder is None else Phase.WARMUP)
        self._stats = MethodStats()

    @property
    def stats(self) -> MethodStats:
        self._stats.next_phase = self._last.phase.value
        # A list first: another thread may be in a step and change the dictionary.
        self._stats.plans = [state.stats for state in list(self._shapes.values()) if state.stats is not None]
        return self._stats

    @property
    def has_static_outputs(self) -> bool:
        """Whether the last outputs are a plan's own buffers."""
        return self._last.plan is not None

    @property
    def static_inputs(self) -> Sequence[torch.Tensor]:
        """The input buffers of the plan that was used last; empty without one."""
        return self._last.plan.inputs if self._last.plan else []

    def __call__(self, inputs: Sequence[torch.Tensor], graph: bool = True) -> list[torch.Tensor]:
        """Run one step. Inputs are on the host or on the device; outputs are on the device.

        Args:
            inputs: in the order of the code's arguments.
            graph: whether a graph may be used. False runs the code as in `disabled`: this shape then gets no nearer to a
                plan, and keeps a plan that it has.

        Raises:
            InputError: in the replay phase, an input does not fit its static buffer. The state is unchanged.
        """
        recorder = self._recorder
        if recorder is None:
            return self._run_disabled(inputs)
        if not graph:
            self._last = _ShapeState(Phase.DISABLED)
            return self._run_disabled(inputs)
        filled = self._last.plan is not None and _same(inputs, self._last.plan.inputs)
        state = self._last if filled else self._state_of(inputs)
        if state.phase is Phase.REPLAY:
            recorder.begin_step()
            if not filled:
                self._fill(state, inputs)
            return self._replay(state)
        if state.phase is Phase.CAPTURE:
            recorder.begin_step()
            return self._capture(state, StaticInputs(inputs, self._input_devices, self._device))
        if state.phase is Phase.WARMUP:
            return self._warm_up(recorder, state, inputs)
        return self._run_disabled(inputs)

    def release(self) -> None:
        """Free the graphs, then the static buffers."""
        for state in self._shapes.values():
            self._free(state)
        self._last.plan = None

    def _state_of(self, inputs: Sequence[torch.Tensor]) -> _ShapeState:
        shape: Shape = tuple([tuple(tensor.shape) for tensor in inputs])
        state = self._shapes.get(shape)
        if state is None:
            state = self._shapes[shape] = _ShapeState(Phase.WARMUP)
            self._forget_oldest(with_plan=False)
        elif state is not self._last:
            self._shapes.move_to_end(shape)
        self._last = state
        return state

    def _forget_oldest(self, with_plan: bool) -> None:
        """Forget the least recently used shape, if there are too many with a plan (or without, as `with_plan` says)."""
        some = [shape for shape, state in self._shapes.items() if (state.plan is not None) is with_plan]
        if len(some) > self._max_plans:
            self._free(self._shapes.pop(some[0]))
            self._stats.dropped += with_plan

    def _run_disabled(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = self._call(self._run_code, inputs)
        self._stats.runs += 1
        return outputs

    def _run_code(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the code on inputs that may lie anywhere. They are copied on the stream of the code, under its lock."""
        return self._code.run(list(map(_as_compiled_for, inputs, self._input_devices)))

    def _warm_up(
        self, recorder: GraphRecorder, state: _ShapeState, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        outputs = recorder.warmup(self._run_code, inputs)
        self._stats.warmups += 1
        state.warmups += 1
        if state.warmups >= self._warmup_steps:
            state.phase = Phase.CAPTURE
        return outputs

    def _capture(self, state: _ShapeState, inputs: StaticInputs) -> list[torch.Tensor]:
        assert self._recorder is not None
        stats = state.stats or PlanStats([list(tensor.shape) for tensor in inputs.buffers])
        plan = Plan(self._code, self._recorder, inputs.buffers, stats, self._call, self._watch, self._device)
        try:
            outputs = plan.capture()
        except BaseException:
            plan.release()
            if stats.given_up is not None:
                self._disable(state, stats, stats.given_up)
            raise
        state.stats = stats
        if stats.called_because:
            reason = list(stats.called_because.values())[-1]
            if stats.given_up is None:
                logger.warning("a segment cannot be captured, it is called instead: %s", reason)
            self._stats.fallbacks += len(stats.called_because)
            self._stats.fallback_reason = reason
        if stats.given_up is not None:
            self._disable(state, stats, stats.given_up)
        elif not plan.has_graphs:
            state.phase = Phase.DISABLED
            stats.given_up = next(iter(stats.called_because.values()), "no segment may be captured")
        if state.phase is Phase.DISABLED:
            plan.release()
            self._stats.runs += 1
            return outputs
        state.plan, state.inputs, state.phase = plan, inputs, Phase.REPLAY
        self._forget_oldest(with_plan=True)
        self._stats.captures += 1
        return outputs

    def _fill(self, state: _ShapeState, inputs: Sequence[torch.Tensor]) -> None:
        """Copy the inputs into the plan's buffers. Raises InputError: one does not fit. Nothing has been copied then."""
        static = state.inputs
        assert static is not None
        for name, tensor, buffer in zip(self._input_names, inputs, static.buffers, strict=True):
            if tensor.dtype != buffer.dtype:
                raise InputError(
                    f"input {name!r} does not fit the captured graph: expected {buffer.dtype}, got {tensor.dtype}"
                )
            if not tensor.is_cpu and tensor.device != self._device:
                raise InputError(
                    f"input {name!r} is on {tensor.device}, the captured graph reads {self._device}: "
                    f"pass a tensor on {self._device} or on the host"
                )
        static.fill(inputs)

    def _replay(self, state: _ShapeState) -> list[torch.Tensor]:
        plan, static = state.plan, state.inputs
        assert plan is not None and static is not None
        if not plan.is_current():
            if not plan.may_change():
                reason = f"constants or buffers were bound anew on more than {MAX_CHANGES} calls in a row"
                return self._give_up(state, plan, reason)
            refusal = plan.update()
            if refusal is not None and refusal.no_memory:
                return self._give_up(state, plan, refusal.reason)
            if refusal is not None:
                logger.warning("a plan cannot be updated, it is made anew: %s", refusal.reason)
                self._free(state)
                state.phase = Phase.CAPTURE
                return self._capture(state, static)
        outputs = plan.run()
        self._stats.replays += 1
        return outputs

    def _give_up(self, state: _ShapeState, plan: Plan, reason: str) -> list[torch.Tensor]:
        inputs = list(plan.inputs)
        self._free(state)
        self._disable(state, plan.stats, reason)
        return self._run_disabled(inputs)

    def _disable(self, state: _ShapeState, stats: PlanStats, reason: str) -> None:
        """Give up graphs for this shape, and note the reason."""
        logger.warning("graphs are given up for one shape of inputs: %s", reason)
        state.phase, state.stats = Phase.DISABLED, stats
        stats.given_up = self._stats.fallback_reason = reason

    def _free(self, state: _ShapeState) -> None:
        if state.plan is not None:
            state.plan.release()
        state.plan = state.inputs = None


def _same(inputs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    """Whether the inputs are these buffers themselves."""
    return len(inputs) == len(buffers) and all(map(operator.is_, inputs, buffers))


def _as_compiled_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`, contiguous and aligned. Compiled code assumes both and does not check, and a slice may
    be neither."""
    tensor = tensor.to(device)
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
