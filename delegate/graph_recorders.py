"""How a step is recorded and launched: as a CUDA graph, or on a machine without a GPU over static buffers alone."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from .errors import first_line
from .graph_nodes import GraphNodes, look_into, start_early

logger = logging.getLogger(__name__)

# Compute capability of the first GPUs with programmatic dependent launch.
_EARLY_CAPABILITY = (9, 0)

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Graph(Protocol):
    """A recorded step over static buffers. `nodes` says what it consists of."""

    nodes: GraphNodes

    def launch(self) -> list[torch.Tensor]:
        """Execute the step once; returns the static output buffers."""

    def release(self) -> None:
        """Free the graph and its buffers."""


class GraphRecorder(Protocol):
    """Where warm-up and recording happen."""

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once where the capture will be made."""

    def record(self, run: Run, static_inputs: Sequence[torch.Tensor]) -> Graph:
        """Record `run` over the static inputs without executing it; raises what made the capture fail."""


class CudaGraphRecorder:
    """`torch.cuda.CUDAGraph`. Recording takes place on `stream`; launches go to the caller's current stream.

    Args:
        stream: where warm-up and recording happen.
        early_kernels: let marked kernels start before the one ahead has ended (graph_nodes.py), on GPUs that support it.
    """

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
                    early = start_early(graph.raw_cuda_graph())
                    nodes = replace(nodes, early=early.count, note=early.note)
                graph.instantiate()
            except Exception as error:
                if not self._early_kernels:
                    raise
                # The graph may lack an edge by now. A capture executes nothing, so another one only costs a moment.
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
    """End a capture that has failed already; the error that this gives adds nothing to the first one."""
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


class HostGraphRecorder:
    """For machines without a GPU: the same static buffers and rules; a launch runs the compiled code.

    It saves nothing and cannot be faster. It exists so that the state machine is the same program everywhere.
    """

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


# Programs have locks of their own but share the side stream: one thread's work must not get into another's capture.
_side_lock = threading.Lock()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for captures and shared runs. One stream per method would cost 32 MiB each on an H200: cuBLAS keeps a
    workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def run_on_stream(stream: torch.cuda.Stream, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on `stream`, after all work that the current stream holds and before all that it will get."""
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
