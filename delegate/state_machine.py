"""Warmup -> capture -> replay: the state machine of one method.

    phase     what a call does
    disabled  runs the compiled code
    warmup    runs the compiled code on the stream that will capture; after `warmup_steps` calls, capture
    capture   copies the inputs into static buffers, records (which executes nothing), launches once
    replay    checks the inputs against the static buffers, copies them in, launches

Each call moves the model's state exactly once, in every phase. When a capture fails, nothing has been executed: the
method goes to `disabled`, keeps the reason, and answers the call by running its code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from .errors import InputError, first_line
from .graph_nodes import GraphNodes
from .graph_recorders import Graph, GraphRecorder, Run

logger = logging.getLogger(__name__)

# Bytes; Inductor's kernels load up to 16 at a time.
_INPUT_ALIGNMENT = 16


class Phase(Enum):
    """What the next call of a method will do."""

    DISABLED = "disabled"
    WARMUP = "warmup"
    CAPTURE = "capture"
    REPLAY = "replay"


# Counter of `MethodStats` -> the word for a call that it counts.
PHASE_OF_COUNTER = {"runs": "run", "warmups": "warmup", "captures": "capture", "replays": "replay"}


@dataclass
class MethodStats:
    """Numbers of calls by phase, and what the captured graph consists of.

    Attributes:
        fallback_reason: why a capture was given up.
        graph_nodes: nodes of the captured graph by type, such as "kernel" and "memcpy"; None without a graph.
        graph_kernels: kernels that a replay runs; None without a graph, and where that cannot be counted.
        early_kernels: how many of them start before the one ahead has ended; None like `graph_kernels`.
        graph_note: why the graph could not be looked into, or why edges of it stayed as they were captured.
    """

    phase: str = Phase.DISABLED.value
    runs: int = 0
    warmups: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: int = 0
    fallback_reason: str | None = None
    graph_nodes: dict[str, int] | None = None
    graph_kernels: int | None = None
    early_kernels: int | None = None
    graph_note: str | None = None


class StateMachine:
    """Runs one method through its phases.

    Args:
        run: the compiled code's `run`.
        recorder: makes the graph; None to stay in `disabled`.
        device: where static buffers are made.
        input_names: for messages.
        warmup_steps: calls before the capture, 1 or more.
    """

    def __init__(
        self,
        run: Run,
        recorder: GraphRecorder | None,
        device: torch.device,
        input_names: Sequence[str],
        warmup_steps: int,
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._device = device
        self._input_names = input_names
        self._warmup_steps = warmup_steps
        self._phase = Phase.DISABLED if recorder is None else Phase.WARMUP
        self._static_inputs: list[torch.Tensor] = []
        self._graph: Graph | None = None
        self._stats = MethodStats()

    @property
    def stats(self) -> MethodStats:
        self._stats.phase = self._phase.value
        return self._stats

    @property
    def has_static_outputs(self) -> bool:
        """Whether the last outputs are the graph's own buffers."""
        return self._graph is not None

    @property
    def static_inputs(self) -> Sequence[torch.Tensor]:
        """The graph's input buffers, which replays read; empty without a graph."""
        return self._static_inputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One step. Inputs are on the host or on the device; outputs are on the device.

        Raises:
            InputError: in the replay phase, an input that does not fit its static buffer; no state has moved.
        """
        if self._phase is Phase.REPLAY:
            return self._replay(inputs)
        if self._phase is Phase.CAPTURE:
            return self._capture(inputs)
        if self._phase is Phase.WARMUP:
            return self._warm_up(inputs)
        outputs = self._run(self._on_device(inputs))
        self._stats.runs += 1
        return outputs

    def release(self) -> None:
        """Free the graph, then the static buffers."""
        if self._graph is not None:
            self._graph.release()
        self._graph = None
        self._static_inputs = []

    def _warm_up(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._recorder is not None
        outputs = self._recorder.warmup(self._run, self._on_device(inputs))
        self._stats.warmups += 1
        if self._stats.warmups >= self._warmup_steps:
            self._phase = Phase.CAPTURE
        return outputs

    def _capture(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._recorder is not None
        self._static_inputs = [torch.empty(t.shape, dtype=t.dtype, device=self._device).copy_(t) for t in inputs]
        try:
            self._graph = self._recorder.record(self._run, self._static_inputs)
        except Exception as error:
            return self._fall_back(error)
        self._keep_counts(self._graph.nodes)
        outputs = self._graph.launch()
        self._stats.captures += 1
        self._phase = Phase.REPLAY
        return outputs

    def _fall_back(self, error: Exception) -> list[torch.Tensor]:
        reason = first_line(error)
        logger.warning("graph capture failed, going on without a graph: %s", reason)
        self._stats.fallbacks += 1
        self._stats.fallback_reason = reason
        self._phase = Phase.DISABLED
        inputs, self._static_inputs = self._static_inputs, []
        outputs = self._run(inputs)
        self._stats.runs += 1
        return outputs

    def _keep_counts(self, nodes: GraphNodes) -> None:
        self._stats.graph_nodes = nodes.by_type
        self._stats.graph_kernels = nodes.kernels
        self._stats.early_kernels = None if nodes.by_type is None else nodes.early
        self._stats.graph_note = nodes.note

    def _replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._graph is not None
        copies = []
        for name, tensor, static in zip(self._input_names, inputs, self._static_inputs, strict=True):
            if tensor is static:
                continue
            if tensor.shape != static.shape or tensor.dtype != static.dtype:
                raise InputError(
                    f"input {name!r} does not fit the captured graph: expected {list(static.shape)} {static.dtype}, "
                    f"got {list(tensor.shape)} {tensor.dtype}"
                )
            if not tensor.is_cpu and tensor.device != static.device:
                raise InputError(
                    f"input {name!r} is on {tensor.device}, the captured graph reads {static.device}: "
                    f"pass a tensor on {static.device} or on the host"
                )
            copies.append((static, tensor))
        for static, tensor in copies:
            static.copy_(tensor, non_blocking=True)
        outputs = self._graph.launch()
        self._stats.replays += 1
        return outputs

    def _on_device(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_as_compiled_for(tensor.to(self._device)) for tensor in inputs]


def _as_compiled_for(tensor: torch.Tensor) -> torch.Tensor:
    """Compiled code assumes that its inputs are contiguous and aligned, and does not check: a slice may be neither."""
    if tensor.is_contiguous() and tensor.data_ptr() % _INPUT_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
