"""How a step is recorded and launched: as a CUDA graph, or on a machine without a GPU over static buffers alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ostinato.delegate.code.side_stream import Run, run_on_stream
from ostinato.delegate.errors import first_line

from .nodes import GraphNodes, look_into, start_early, update_executable
from .pool import Capture, GraphPool, Work

logger = logging.getLogger(__name__)

# Compute capability of the first GPUs with programmatic dependent launch.
_EARLY_CAPABILITY = (9, 0)


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

    def begin_step(self) -> None:
        """To be called before anything of a step is queued that uses static buffers."""

    def record(self, work: Work) -> Graph:
        """Record without executing; raises what made the capture fail."""

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pool holds: compare two calls to know what it grew by."""


class CudaGraphRecorder:
    """`torch.cuda.CUDAGraph`. Recording takes place on the pool's stream; launches go to the caller's current stream.

    Args:
        pool: the memory of all graphs of the program.
        early_kernels: let marked kernels start before the one ahead has ended (nodes.py), on GPUs that support it.
    """

    def __init__(self, pool: GraphPool, early_kernels: bool = True) -> None:
        self.pool = pool
        self.device = pool.stream.device
        self._early_kernels = early_kernels and torch.cuda.get_device_capability(self.device) >= _EARLY_CAPABILITY

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_on_stream(self.pool.stream, run, inputs)

    def begin_step(self) -> None:
        self.pool.begin_step()

    def record(self, work: Work) -> Graph:
        return _CudaGraph(self, work)

    def pool_bytes(self) -> int:
        return self.pool.nbytes

    def capture(self, work: Work) -> Capture:
        """Record, look into the graph, and let its marked kernels start early; it is not executable yet."""
        capture = self.pool.capture(work)
        with torch.cuda.device(self.device):
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
        capture.free()
        again = self.pool.capture(work)
        again.nodes = nodes
        return again

    def instantiate(self, capture: Capture, work: Work) -> Capture:
        """Make it executable: `capture`, or one without kernels that start early."""
        with torch.cuda.device(self.device):
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


class _CudaGraph:
    """Made from one capture; after an update, what is launched is still the first one's, over the memory of the last."""

    def __init__(self, recorder: CudaGraphRecorder, work: Work) -> None:
        capture = recorder.instantiate(recorder.capture(work), work)
        self._recorder = recorder
        self._executable: Capture | None = capture
        self._last: Capture | None = capture
        self.nodes, self.outputs, self.instantiate_us = capture.nodes, capture.outputs, capture.instantiate_us

    def launch(self) -> list[torch.Tensor]:
        assert self._executable is not None and self._last is not None
        self._executable.graph.replay()
        self._last.launched()
        return self.outputs

    def update(self, work: Work) -> bool:
        assert self._executable is not None and self._last is not None
        # Waits for launches under way, so that what they use may go.
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
            torch.cuda.synchronize(self._recorder.device)
        self._free()
        self.outputs = []

    def _free(self) -> None:
        for capture in {self._executable, self._last}:
            if capture is not None:
                capture.free()
        self._executable = self._last = None


class HostGraphRecorder:
    """For machines without a GPU: the same static buffers and rules; a launch runs the compiled code.

    It saves nothing and cannot be faster. It exists so that plans and the state machine are the same program everywhere.
    """

    def warmup(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
