"""The memory that the graphs of a program share, and captures into it.

torch's allocator gives the memory of a capture out of a pool: what is freed on the way, the graph's temporaries, can be given
out again, and what outlives the capture, its outputs, cannot. All graphs of a program are captured into one pool, so they lie
on each other's temporaries. That is safe because they never run at the same time: a program has a lock, and `begin_step`
orders steps on different streams. A buffer between two graphs is an output that the plan refers to; what a called piece
gives comes from outside the pool.
"""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ostinato.delegate.code.side_stream import side_lock
from ostinato.delegate.errors import first_line
from ostinato.delegate.torch_internals import PoolHandle, current_stream_handle, end_allocation_to_pool, release_pool

from .nodes import GraphNodes

logger = logging.getLogger(__name__)

# Queues the work that is to be recorded, over static buffers.
Work = Callable[[], list[torch.Tensor]]


@dataclass(eq=False)
class Capture:
    """Work that was recorded, and what is known about it.

    Attributes:
        graph: the graph.
        outputs: what the work gave; a launch fills it.
        nodes: what the graph consists of.
        instantiate_us: microseconds that making it executable took.
        kept: whether nothing of it is ever freed, unless it is launched (`keep`).
    """

    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    nodes: GraphNodes = field(default_factory=GraphNodes)
    instantiate_us: float = 0.0
    kept: bool = False

    def keep(self) -> None:
        """For cudaMallocAsync: free nothing of this until it has been launched.

        There an output is allocated by the launch. Until then torch's free of it fails, in a destructor, which ends the
        process. Its address belongs to the graph, so the graph stays too: torch expects no address a second time. No memory
        of the device stands behind either.
        """
        self.kept = True
        for thing in (self.graph, *self.outputs):
            _never_free(thing)

    def launched(self) -> None:
        """A launch did what this one says: from now on it can be freed."""
        if self.kept:
            self.kept = False
            for thing in (self.graph, *self.outputs):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))

    def free(self) -> None:
        """Free the graph, then the outputs."""
        if not self.kept:
            self.graph.reset()
        self.outputs = []


class GraphPool:
    """One pool of device memory for all graphs of a program.

    torch's two allocators, of device and of pinned memory, drop a pool with its last graph, and capture nothing into it any
    more (torch 2.11). So a graph of the pool's own, the *anchor*, is in it as long as captures go there.

    With cudaMallocAsync each graph keeps its own pool. That allocator knows no pools: the driver allocates when a graph is
    launched, and graphs that are launched on one stream share memory by themselves. What one graph leaves allocated can be
    read by others until its next launch, which frees it and allocates it again at the same address.

    Args:
        stream: where captures are made.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._is_shared = torch.cuda.get_allocator_backend() == "native"
        self._handle: PoolHandle | None = None
        self._anchor: Capture | None = None
        # What the anchor clears. An empty graph would be warned of.
        self._number: torch.Tensor | None = None
        self._last_stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Device memory that the pool holds, used or not; 0 where graphs share none."""
        if self._handle is None:
            return 0
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._handle))

    def capture(self, work: Work) -> Capture:
        """Record, executing nothing. Raises what made the capture fail; the next one can be made all the same."""
        device = self.stream.device
        with side_lock:
            # Nothing may still be running into the capture, and cached blocks cannot move to the pool later.
            torch.cuda.synchronize(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self.stream):
                if self._anchor is None:
                    self._make_anchor()
                try:
                    capture = self._record(work, self._handle)
                except BaseException:
                    self._renew()
                    raise
        if not self._is_shared:
            capture.keep()
        return capture

    def begin_step(self) -> None:
        """Have what is queued from now on wait for the step before, where the caller has changed to another stream."""
        device, last = self.stream.device, self._last_stream
        if last is None or last.cuda_stream != current_stream_handle(device):
            self._last_stream = torch.cuda.current_stream(device)
            if last is not None:
                self._last_stream.wait_stream(last)

    def close(self) -> None:
        """Let the memory go; to be called when all graphs are freed."""
        if self._anchor is not None:
            self._anchor.free()
        self._anchor = self._handle = self._number = self._last_stream = None

    def _make_anchor(self) -> None:
        """Open a pool. Where that fails, the next graph has a pool of its own, and the one after it tries again."""
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
        """Open another pool after a capture that failed, at once.

        torch captures nothing more into the old one if CUDA gave the capture up, and draws no random numbers until another
        capture has ended well. What the failed capture took in the old pool is freed with the last graph there: those that
        were captured before hold it by themselves.
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
            if not self._is_shared:
                # Here and in the functions that failed; they can no more be freed than those of `Capture.keep`.
                _never_free([graph, *_tensors_of(error)])
            self._abandon(graph, handle)
            raise
        return Capture(graph, outputs)

    def _abandon(self, graph: torch.cuda.CUDAGraph, handle: PoolHandle | None) -> None:
        """End a capture that has failed. If CUDA gave it up, `capture_end` raises before torch's allocators are told."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            logger.debug("capture_end after a failed capture: %s", first_line(error))
        else:
            if self._is_shared:
                graph.reset()
            return
        # The allocator of pinned memory goes on asking this graph, at each later capture, which streams are its own.
        _never_free(graph)
        if handle is not None:
            for mend in (end_allocation_to_pool, release_pool):
                try:
                    mend(self.stream.device, handle)
                except RuntimeError as error:
                    logger.debug("after a failed capture: %s", first_line(error))


def _tensors_of(error: BaseException) -> list[object]:
    """Tensors, and what may hold some, among the variables of the functions that `error` came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return [value for value in values if isinstance(value, torch.Tensor | dict | list | tuple)]


def _never_free(thing: object) -> None:
    """Keep `thing` until the process has ended: a variable of a module would be freed when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
