"""Recorders of a step: as a CUDA graph, or on a machine without a GPU as calls over static buffers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ostinato.delegate.code.side_stream import Code, run_on_stream
from ostinato.delegate.errors import first_line

from .nodes import GraphNodes, inspect_graph, start_early, update_executable
from .pool import Capture, GraphPool, Work, never_free

logger = logging.getLogger(__name__)

# Compute capability of the first GPUs with programmatic dependent launch.
_EARLY_CAPABILITY = (9, 0)


class Graph(Protocol):
    """Recorded work, executable.

    Attributes:
        nodes: facts about the graph's nodes.
        outputs: static buffers that a launch fills. Without a GPU the list is empty before the first launch.
        instantiate_us: microseconds that the last instantiation took.
    """

    nodes: GraphNodes
    outputs: list[torch.Tensor]
    instantiate_us: float

    def launch(self) -> list[torch.Tensor]:
        """Execute the work once, and return `outputs`."""

    def update(self, work: Work) -> bool:
        """Record work anew, with the same shapes. True: the executable graph was updated. False: it was made anew.

        Raises the error that made the recording fail. The graph is then unchanged.
        """

    def release(self) -> None:
        """Free the graph and its buffers."""


class GraphRecorder(Protocol):
    """Runs warm-up steps, and records graphs."""

    def warmup(self, run: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once, on the stream where the capture will be made."""

    def begin_step(self) -> None:
        """Begin a step. To be called before any work that uses static buffers is queued."""

    def record(self, work: Work) -> Graph:
        """Record without executing. Raises the error that made the capture fail."""

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pool holds. The difference of two calls is how much it grew."""


class CudaGraphRecorder:
    """Records with `torch.cuda.CUDAGraph`. Recording is on the pool's stream; launches go to the caller's current stream.

    Args:
        pool: memory that all graphs of the program share.
        early_kernels: whether marked kernels may start before the kernel ahead has ended (nodes.py), on GPUs that support it.
    """

    def __init__(self, pool: GraphPool, early_kernels: bool = True) -> None:
        self.pool = pool
        self.device = pool.stream.device
        self._early_kernels = early_kernels and torch.cuda.get_device_capability(self.device) >= _EARLY_CAPABILITY

    def warmup(self, run: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_on_stream(self.pool.stream, run, inputs)

    def begin_step(self) -> None:
        self.pool.begin_step()

    def record(self, work: Work) -> Graph:
        return _CudaGraph(self, work)

    def pool_bytes(self) -> int:
        return self.pool.nbytes

    def capture(self, work: Work) -> Capture:
        """Record, inspect the graph, and let its marked kernels start early. The graph is not executable yet."""
        capture = self.pool.capture(work)
        with torch.cuda.device(self.device):
            capture.nodes = inspect_graph(capture.graph.raw_cuda_graph())
            if not self._early_kernels or capture.nodes.by_type is None:
                return capture
            try:
                early = start_early(capture.graph.raw_cuda_graph())
                capture.nodes = replace(capture.nodes, early=early.count, note=early.note)
            except Exception as error:
                # After this error the graph may lack an edge, so it must not be used.
                return self.capture_again(capture, work, error)
        return capture

    def capture_again(self, capture: Capture, work: Work, error: Exception) -> Capture:
        """Record the work again, without kernels that start early. `error` is the reason, for the note.

        A capture executes nothing, so another one costs only a moment.
        """
        nodes = replace(capture.nodes, early=0, note=first_line(error))
        logger.warning("no kernel of the captured graph starts early: %s", nodes.note)
        capture.free()
        again = self.pool.capture(work)
        again.nodes = nodes
        return again

    def instantiate(self, capture: Capture, work: Work) -> Capture:
        """Make `capture` executable and return it. If that fails, return a new capture without kernels that start early.

        Raises the error if there are no such kernels. The capture is then freed.
        """
        begin = time.perf_counter()
        try:
            with torch.cuda.device(self.device):
                capture.graph.instantiate()
        except Exception as error:
            if capture.nodes.early:
                return self.instantiate(self.capture_again(capture, work, error), work)
            never_free(capture.graph)
            capture.free()
            raise
        capture.instantiate_us = 1e6 * (time.perf_counter() - begin)
        return capture


class _CudaGraph:
    """A graph made from one capture. After an update the first capture's executable is still launched, over the memory of the
    last capture."""

    def __init__(self, recorder: CudaGraphRecorder, work: Work) -> None:
        capture = recorder.instantiate(recorder.capture(work), work)
        self._recorder = recorder
        self._executable: Capture | None = capture
        self._last: Capture | None = capture
        self.nodes, self.outputs, self.instantiate_us = capture.nodes, capture.outputs, capture.instantiate_us

    def launch(self) -> list[torch.Tensor]:
        assert self._executable is not None
        self._executable.graph.replay()
        return self.outputs

    def update(self, work: Work) -> bool:
        assert self._executable is not None and self._last is not None
        # A capture waits for launches under way, so their memory may be freed after it.
        capture = self._recorder.capture(work)
        executable = self._executable.graph.raw_cuda_graph_exec()
        updated = update_executable(executable, capture.graph.raw_cuda_graph())
        if updated:
            if self._last is not self._executable:
                self._last.free()
            self._executable.outputs = []
        else:
            capture = self._recorder.instantiate(capture, work)
            self._free()
            self._executable = capture
            self.instantiate_us = capture.instantiate_us
        self._last = capture
        self.nodes, self.outputs = capture.nodes, capture.outputs
        return updated

    def release(self) -> None:
        if self._executable is not None:
            self._recorder.pool.used.wait()
        self._free()
        self.outputs = []

    def _free(self) -> None:
        for capture in {self._executable, self._last}:
            if capture is not None:
                capture.free()
        self._executable = self._last = None


class HostGraphRecorder:
    """Recorder for machines without a GPU: the same static buffers and rules, but a launch runs the compiled code.

    It saves no time. It exists so that plans and the state machine are the same program everywhere.
    """

    def warmup(self, run: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run(inputs)

    def begin_step(self) -> None:
        pass

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
