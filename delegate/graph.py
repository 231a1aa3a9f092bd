"""Warmup -> capture -> replay: the state machine of one method, and the two engines that capture.

    phase     what a call does
    disabled  runs the container
    warmup    runs the container on the stream that will capture; after `warmup_steps` calls, capture
    capture   stages the inputs, records (which executes nothing), launches once
    replay    checks the inputs against the static buffers, copies them in, launches

Each call moves the model's state exactly once, in every phase. When a capture fails, nothing has been executed: the
method is taken to `disabled` with the reason kept, and the call is answered by the container.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch

from .errors import InputError
from .graph_nodes import GraphNodes, first_line, look_into, start_early

logger = logging.getLogger(__name__)

# Bytes; Inductor's kernels load up to 16 at a time.
_INPUT_ALIGNMENT = 16

# Compute capability of the first GPUs with programmatic dependent launch.
_EARLY_CAPABILITY = (9, 0)

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Phase(Enum):
    """What the next call of a method will do."""

    DISABLED = "disabled"
    WARMUP = "warmup"
    CAPTURE = "capture"
    REPLAY = "replay"


@dataclass
class MethodStats:
    """Counts of calls by what they did, and what the captured graph consists of.

    Attributes:
        fallback_reason: why a capture was given up.
        graph_nodes: nodes of the captured graph by type, such as "kernel" and "memcpy"; None without a graph.
        graph_kernels: kernels that a replay runs; None without a graph, and where that cannot be counted.
        early_kernels: how many of them start before the one ahead has ended; None as `graph_kernels`.
        graph_note: why the graph could not be looked into, or stayed as it was captured.
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


class Graph(Protocol):
    """A recorded step over static buffers. `nodes` says what it consists of."""

    nodes: GraphNodes

    def launch(self) -> list[torch.Tensor]:
        """Execute the step once; returns the static output buffers."""

    def release(self) -> None:
        """Free the graph and its buffers."""


class CaptureEngine(Protocol):
    """Where warm-up and recording happen."""

    name: str

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once where the capture will be made."""

    def record(self, run: Run, static_inputs: Sequence[torch.Tensor]) -> Graph:
        """Record `run` over the static inputs without executing it; raises what made the capture fail."""


class CudaGraphEngine:
    """`torch.cuda.CUDAGraph`. Recording takes place on `stream`; launches go to the caller's current stream.

    Args:
        stream: where warm-up and recording happen.
        early_kernels: let marked kernels start before the one ahead has ended (graph_nodes.py), where the GPU can do that.
    """

    name = "cuda"

    def __init__(self, stream: torch.cuda.Stream, early_kernels: bool = True) -> None:
        self._stream = stream
        self._early_kernels = early_kernels and torch.cuda.get_device_capability(stream.device) >= _EARLY_CAPABILITY

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_on_stream(self._stream, run, inputs)

    def record(self, run: Run, static_inputs: Sequence[torch.Tensor]) -> Graph:
        graph, outputs = self._capture(run, static_inputs)
        with torch.cuda.device(self._stream.device):
            nodes = look_into(graph.raw_cuda_graph())
            try:
                if self._early_kernels and nodes.by_type is not None:
                    nodes = replace(nodes, early=start_early(graph.raw_cuda_graph()))
                graph.instantiate()
            except Exception as error:
                if not self._early_kernels:
                    raise
                # The graph may lack an edge by now. A capture executes nothing, so another one costs a moment and no more.
                nodes = replace(nodes, early=0, note=first_line(error))
                logger.warning("no kernel of the captured graph starts early: %s", nodes.note)
                outputs = []
                graph.reset()
                graph, outputs = self._capture(run, static_inputs)
                graph.instantiate()
        return _CudaGraph(graph, static_inputs, outputs, nodes)

    def _capture(
        self, run: Run, static_inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """A graph that is not instantiated yet, and its output buffers."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _side_lock:
            # Nothing may still be running into the capture, and cached blocks cannot move to the graph's pool later.
            torch.cuda.synchronize(self._stream.device)
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                # thread_local: another thread's allocation must not break this capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs = run(static_inputs)
                except BaseException:
                    _abandon(graph)
                    raise
                graph.capture_end()
        return graph, outputs


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed already; its own complaint adds nothing to the first one."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        logger.debug("capture_end after a failed capture: %s", error)


class _CudaGraph:
    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        nodes: GraphNodes,
    ) -> None:
        self.nodes = nodes
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._inputs = inputs
        self._outputs = outputs

    def launch(self) -> list[torch.Tensor]:
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph = None
        self._outputs = []
        self._inputs = ()


class HostEngine:
    """For machines with no GPU: the same static buffers and rules, the container run in place of a graph.

    It saves nothing and cannot be faster. It exists so that the state machine is the same program everywhere.
    """

    name = "host"

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run(inputs)

    def record(self, run: Run, static_inputs: Sequence[torch.Tensor]) -> Graph:
        return _HostGraph(run, static_inputs)


class _HostGraph:
    def __init__(self, run: Run, inputs: Sequence[torch.Tensor]) -> None:
        self.nodes = GraphNodes()
        self._run: Run | None = run
        self._inputs = inputs
        self._outputs: list[torch.Tensor] | None = None

    def launch(self) -> list[torch.Tensor]:
        assert self._run is not None
        fresh = self._run(self._inputs)
        if self._outputs is None:
            self._outputs = fresh
        else:
            for static, new in zip(self._outputs, fresh, strict=True):
                static.copy_(new)
        return self._outputs

    def release(self) -> None:
        self._run = None
        self._outputs = None
        self._inputs = ()


# Programs have locks of their own and share the side stream: what one thread runs there must not get into another's capture.
_side_lock = threading.Lock()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for captures and shared runs. A stream of its own for each method would cost 32 MiB each on an H200:
    cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def run_on_stream(stream: torch.cuda.Stream, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on `stream`, after all that the current stream holds and before all that it will get."""
    current = torch.cuda.current_stream(stream.device)
    with _side_lock:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outputs = run(inputs)
        current.wait_stream(stream)
    for tensor in inputs:
        tensor.record_stream(stream)
    for tensor in outputs:
        tensor.record_stream(current)
    return outputs


class PhasedRunner:
    """Runs one method through its phases.

    Args:
        run: the container's `run`.
        engine: None to stay in `disabled`.
        device: where static buffers are made.
        input_names: for messages.
        warmup_steps: calls before the capture, 1 or more.
    """

    def __init__(
        self,
        run: Run,
        engine: CaptureEngine | None,
        device: torch.device,
        input_names: Sequence[str],
        warmup_steps: int,
    ) -> None:
        self._run = run
        self._engine = engine
        self._device = device
        self._input_names = input_names
        self._warmup_steps = warmup_steps
        self._phase = Phase.DISABLED if engine is None else Phase.WARMUP
        self._static_inputs: list[torch.Tensor] = []
        self._graph: Graph | None = None
        self._stats = MethodStats()

    @property
    def phase(self) -> Phase:
        return self._phase

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
        assert self._engine is not None
        outputs = self._engine.warmup(self._run, self._on_device(inputs))
        self._stats.warmups += 1
        if self._stats.warmups >= self._warmup_steps:
            self._phase = Phase.CAPTURE
        return outputs

    def _capture(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._engine is not None
        self._static_inputs = [torch.empty(t.shape, dtype=t.dtype, device=self._device).copy_(t) for t in inputs]
        try:
            self._graph = self._engine.record(self._run, self._static_inputs)
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
    """Compiled code takes its inputs to be contiguous and aligned, and does not look: a slice may be neither."""
    if tensor.is_contiguous() and tensor.data_ptr() % _INPUT_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
