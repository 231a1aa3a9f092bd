"""How a step is recorded and launched: as a CUDA graph, or on a machine without a GPU over static buffers alone."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from .errors import first_line
from .graph_nodes import GraphNodes, look_into, start_early, update_executable

logger = logging.getLogger(__name__)

# Compute capability of the first GPUs with programmatic dependent launch.
_EARLY_CAPABILITY = (9, 0)

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Queues the work that is to be recorded, over static buffers.
Work = Callable[[], list[torch.Tensor]]


class Graph(Protocol):
    """Recorded work, executable.

    Attributes:
        nodes: what it consists of.
        outputs: static buffers that a launch fills; without a GPU there are none before the first launch.
        instantiate_us: microseconds that making it executable took, the last time.
    """

    nodes: GraphNodes
    outputs: list[torch.Tensor]
    instantiate_us: float

    def launch(self) -> list[torch.Tensor]:
        """Execute the work once; returns `outputs`."""

    def update(self, work: Work) -> bool:
        """Record anew, with the same shapes. True: what is executable was updated; False: it had to be made anew.

        Raises what made the recording fail; the graph is then as it was.
        """

    def release(self) -> None:
        """Free the graph and its buffers."""


class GraphRecorder(Protocol):
    """Where warm-up and recording happen."""

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once where the capture will be made."""

    def record(self, work: Work) -> Graph:
        """Record without executing; raises what made the capture fail."""

    def pool_bytes(self) -> int:
        """Device memory that torch holds: compare two calls to know what a graph's pool took."""


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

    def record(self, work: Work) -> Graph:
        return _CudaGraph(self, work)

    def pool_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._stream.device)

    def capture(self, work: Work) -> Capture:
        """Record, look into the graph, and let its marked kernels start early; it is not executable yet."""
        capture = self._begin_to_end(work)
        with torch.cuda.device(self._stream.device):
            capture.nodes = look_into(capture.graph.raw_cuda_graph())
            if not self._early_kernels or capture.nodes.by_type is None:
                return capture
            try:
                early = start_early(capture.graph.raw_cuda_graph())
                capture.nodes = replace(capture.nodes, early=early.count, note=early.note)
            except Exception as error:
                # The graph may lack an edge by now.
                return self.capture_again(capture, work, error)
        return capture

    def capture_again(self, capture: Capture, work: Work, error: Exception) -> Capture:
        """The same, none of whose kernels starts early: `error` says why not. A capture executes nothing, so another one only
        costs a moment."""
        nodes = replace(capture.nodes, early=0, note=first_line(error))
        logger.warning("no kernel of the captured graph starts early: %s", nodes.note)
        capture.outputs = []
        capture.graph.reset()
        again = self._begin_to_end(work)
        again.nodes = nodes
        return again

    def instantiate(self, capture: Capture, work: Work) -> Capture:
        """Make it executable: `capture`, or one without kernels that start early."""
        with torch.cuda.device(self._stream.device):
            begin = time.perf_counter()
            try:
                capture.graph.instantiate()
            except Exception as error:
                if not capture.nodes.early:
                    raise
                capture = self.capture_again(capture, work, error)
                begin = time.perf_counter()
                capture.graph.instantiate()
            capture.instantiate_us = 1e6 * (time.perf_counter() - begin)
        return capture

    def _begin_to_end(self, work: Work) -> Capture:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _side_lock:
            # Nothing may still be running into the capture, and cached blocks cannot move to the graph's pool later.
            torch.cuda.synchronize(self._stream.device)
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                # thread_local: another thread's allocation must not break this capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    _abandon(graph)
                    raise
                graph.capture_end()
        return Capture(graph, outputs)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed already; the error that this gives adds nothing to the first one."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        logger.debug("capture_end after a failed capture: %s", error)


@dataclass
class Capture:
    """What `CudaGraphRecorder` has recorded."""

    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    nodes: GraphNodes = field(default_factory=GraphNodes)
    instantiate_us: float = 0.0


class _CudaGraph:
    """Made from one capture; after an update, what is launched is still the first one's, over the memory of the last."""

    def __init__(self, recorder: CudaGraphRecorder, work: Work) -> None:
        capture = recorder.instantiate(recorder.capture(work), work)
        self._recorder = recorder
        self._executable: torch.cuda.CUDAGraph | None = capture.graph
        self._last: torch.cuda.CUDAGraph | None = capture.graph
        self.nodes, self.outputs, self.instantiate_us = capture.nodes, capture.outputs, capture.instantiate_us

    def launch(self) -> list[torch.Tensor]:
        assert self._executable is not None
        self._executable.replay()
        return self.outputs

    def update(self, work: Work) -> bool:
        assert self._executable is not None
        # Waits for launches under way, so that what they use may go.
        capture = self._recorder.capture(work)
        updated = update_executable(self._executable.raw_cuda_graph_exec(), capture.graph.raw_cuda_graph())
        if updated:
            if self._last is not self._executable and self._last is not None:
                self._last.reset()
        else:
            capture = self._recorder.instantiate(capture, work)
            self._reset()
            self._executable = capture.graph
            self.instantiate_us = capture.instantiate_us
        self._last = capture.graph
        self.nodes, self.outputs = capture.nodes, capture.outputs
        return updated

    def release(self) -> None:
        if self._executable is not None:
            torch.cuda.synchronize()
        self._reset()
        self.outputs = []

    def _reset(self) -> None:
        for graph in {self._executable, self._last}:
            if graph is not None:
                graph.reset()
        self._executable = self._last = None


class HostGraphRecorder:
    """For machines without a GPU: the same static buffers and rules; a launch runs the compiled code.

    It saves nothing and cannot be faster. It exists so that plans and the state machine are the same program everywhere.
    """

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run(inputs)

    def record(self, work: Work) -> Graph:
        return _HostGraph(work)

    def pool_bytes(self) -> int:
        return 0


class _HostGraph:
    def __init__(self, work: Work) -> None:
        self.nodes = GraphNodes()
        self.outputs: list[torch.Tensor] = []
        self.instantiate_us = 0.0
        self._work: Work | None = work
        self._launched = False

    def launch(self) -> list[torch.Tensor]:
        assert self._work is not None
        fresh = self._work()
        if self._launched:
            for static, new in zip(self.outputs, fresh, strict=True):
                static.copy_(new)
        else:
            self.outputs, self._launched = fresh, True
        return self.outputs

    def update(self, work: Work) -> bool:
        self._work = work
        return True

    def release(self) -> None:
        self._work = None
        self.outputs = []


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
        try:
            with torch.cuda.stream(stream):
                outputs = run(inputs)
        finally:
            # What comes next may be a reset of the state that a step wrote before it failed.
            current.wait_stream(stream)
    for tensor in inputs:
        # Those that code on the host takes are there.
        if tensor.is_cuda:
            tensor.record_stream(stream)
    for tensor in outputs:
        tensor.record_stream(current)
    return outputs
