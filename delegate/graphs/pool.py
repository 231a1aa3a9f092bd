"""The memory that the graphs of a program share, and captures into it.

torch's allocator takes the memory of a capture from a pool. Memory that is freed during the capture (the graph's temporaries)
can be given out again. Memory that outlives the capture (its outputs) cannot. All graphs of a program are captured into one
pool, so their temporaries share memory. That is safe because graphs of a program never run at the same time: the program has
a lock, and `begin_step` orders steps on different streams. A buffer between two graphs is an output that the plan keeps
alive. The outputs of called pieces come from outside the pool.
"""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ostinato.delegate.code.side_stream import side_lock
from ostinato.delegate.code.used_streams import UsedStreams
from ostinato.delegate.errors import first_line
from ostinato.delegate.torch_internals import (
    PoolHandle,
    current_stream_handle,
    end_allocation_to_pool,
    pool_bytes,
    release_pool,
)

from .nodes import GraphNodes

logger = logging.getLogger(__name__)

# Queues the work that is to be recorded, over static buffers.
Work = Callable[[], list[torch.Tensor]]


@dataclass(eq=False)
class Capture:
    """Recorded work, and facts about it.

    Attributes:
        graph: the graph.
        outputs: the outputs of the work. A launch fills them.
        nodes: facts about the graph's nodes.
        instantiate_us: microseconds that making the graph executable took.
    """

    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    nodes: GraphNodes = field(default_factory=GraphNodes)
    instantiate_us: float = 0.0

    def free(self) -> None:
        """Free the graph, then the outputs. To be called once."""
        with side_lock:
            self.graph.reset()
            # The last reference; see `never_free`.
            del self.graph
            self.outputs = []


class GraphPool:
    """One pool of device memory for all graphs of a program.

    torch's two allocators, for device memory and for pinned memory, drop a pool with its last graph. After that they capture
    nothing more into it (torch 2.11). So a graph of the pool's own, the *anchor*, stays in the pool as long as captures go
    there.

    With cudaMallocAsync no pool is shared: that allocator has no pools. The driver allocates when a graph is launched, and
    graphs that are launched on one stream share memory by themselves. Outputs lie outside the graphs; see `_output_buffers`.

    Args:
        stream: stream on which captures are made.
        used: streams on which the program's graphs are launched.
    """

    def __init__(self, stream: torch.cuda.Stream, used: UsedStreams) -> None:
        self.stream = stream
        self.used = used
        self._is_shared = torch.cuda.get_allocator_backend() == "native"
        self._handle: PoolHandle | None = None
        self._anchor: Capture | None = None
        # Tensor that the anchor clears, because torch warns of an empty graph.
        self._number: torch.Tensor | None = None
        self._last_stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Device memory that the pool holds, used or not; 0 if the graphs share no pool."""
        if self._handle is None:
            return 0
        return pool_bytes(self._handle)

    def capture(self, work: Work) -> Capture:
        """Record without executing. Raises the error that made the capture fail; later captures still work."""
        device = self.stream.device
        with side_lock:
            # No earlier work may run while the capture begins, and cached blocks cannot move to the pool later.
            torch.cuda.synchronize(device)
            caller = torch.cuda.current_stream(device)
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                if self._anchor is None:
                    self._make_anchor()
                try:
                    if self._is_shared:
                        return self._record(work, self._handle)
                    buffers = self._output_buffers(work, caller)
                    return self._record(lambda: _copied(work(), buffers), None)
                except BaseException:
                    self._renew()
                    raise

    def begin_step(self) -> None:
        """Make the current stream wait for the previous step, if that step was queued on another stream."""
        device, last = self.stream.device, self._last_stream
        if last is None or last.cuda_stream != current_stream_handle(device):
            self._last_stream = torch.cuda.current_stream(device)
            if last is not None:
                self._last_stream.wait_stream(last)

    def close(self) -> None:
        """Free the memory. To be called when all graphs are freed."""
        if self._anchor is not None:
            self._anchor.free()
        self._anchor = self._handle = self._number = self._last_stream = None

    def _output_buffers(self, work: Work, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Allocate buffers for the outputs of a capture with cudaMallocAsync, for use on `stream`.

        Nothing that a capture allocates may outlive it. Only a launch allocates it, so an earlier free ends the process. And
        torch takes a free while any thread captures for a part of that capture. Captures have one stream, so the other graph
        would free this memory in each of its launches, and all but the first would fail.
        """
        # The first capture is for the outputs' shapes only.
        first = self._record(lambda: [_like(output, "meta") for output in work()], None)
        # Not inference tensors: they are also written outside inference mode.
        with torch.cuda.stream(stream), torch.inference_mode(False):
            buffers = [_like(output, stream.device) for output in first.outputs]
        first.free()
        return buffers

    def _make_anchor(self) -> None:
        """Open a pool. If that fails, the next graph has a pool of its own, and the capture after it tries again."""
        if not self._is_shared:
            return
        try:
            if self._number is None:
                self._number = torch.zeros(1, device=self.stream.device)
            number, handle = self._number, torch.cuda.graph_pool_handle()
            self._handle, self._anchor = handle, self._record(lambda: [number.zero_()], handle)
        except Exception as error:
            logger.debug("no pool can be opened for graphs: %s", first_line(error))

    def _renew(self) -> None:
        """Open another pool, directly after a capture that failed.

        If CUDA invalidated the capture, torch captures nothing more into the old pool, and generates no random numbers until
        another capture has ended well. Memory that the failed capture took in the old pool is freed with the last graph
        there. Graphs that were captured earlier keep the old pool alive by themselves.
        """
        anchor, self._anchor, self._handle = self._anchor, None, None
        self._make_anchor()
        if anchor is not None:
            anchor.free()

    def _record(self, work: Work, handle: PoolHandle | None) -> Capture:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            # thread_local: another thread's allocation must not break this capture.
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            outputs = work()
            graph.capture_end()
        except BaseException as error:
            # The traceback refers to the graph, so nobody knows when the last reference would go. And if CUDA invalidated the
            # capture, the allocator of pinned memory asks the graph at each later capture which streams are its own.
            never_free(graph)
            if not self._is_shared:
                # Keep the tensors of the functions that failed: a free before a launch would end the process.
                never_free(_tensors_of(error))
            self._abandon(graph, handle)
            raise
        return Capture(graph, outputs)

    def _abandon(self, graph: torch.cuda.CUDAGraph, handle: PoolHandle | None) -> None:
        """End a capture that has failed. If CUDA invalidated it, `capture_end` raises before torch's allocators are told."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            logger.debug("capture_end after a failed capture: %s", first_line(error))
        else:
            if self._is_shared:
                graph.reset()
            return
        if handle is not None:
            for mend in (end_allocation_to_pool, release_pool):
                try:
                    mend(self.stream.device, handle)
                except RuntimeError as error:
                    logger.debug("after a failed capture: %s", first_line(error))


def _like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copied(outputs: Sequence[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    for buffer, output in zip(buffers, outputs, strict=True):
        buffer.copy_(output)
    return buffers


def _tensors_of(error: BaseException) -> list[object]:
    """Tensors, and containers that may hold some, among the local variables of the functions that `error` passed through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return [value for value in values if isinstance(value, torch.Tensor | dict | list | tuple)]


def never_free(thing: object) -> None:
    """Keep `thing` until the process has ended. A variable of a module would be freed earlier, when the interpreter ends.

    For a graph of torch that an exception's traceback may refer to. torch lists all graphs for its random numbers, and that
    list has no lock (torch 2.11; pytorch 173421): a graph that is freed in one thread, while another thread begins a capture,
    destroys memory of the process. So graphs are made and freed only by the holder of `side_lock`.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
