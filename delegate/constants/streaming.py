"""Streaming: constants stay on the host and are copied to the device segment by segment, each time a method runs.

The device has two sets of buffers. While a segment's code works on one set, the next segment's constants are copied into the
other set, on a separate stream. The host waits for nothing. The code of a segment is bound to its set once.

The copies read the mapped file directly, because its pages are registered with CUDA: nothing is copied on the host. If CUDA
refuses to register the pages, the driver copies them in small amounts on the way, and the host waits.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Mapping, Sequence

import torch

from ostinato.delegate.cuda_driver import DriverError, call_driver, cuda_driver

from .loading import free_tensors

logger = logging.getLogger(__name__)

# CU_MEMHOSTREGISTER_READ_ONLY of cuda.h; without it CUDA refuses a map that cannot be written.
_READ_ONLY = 8
_SETS = 2

Tensors = Mapping[str, torch.Tensor]


class StreamBuffers:
    """Buffers on the device through which all methods of a program stream constants. Made when the first method needs them.

    Methods can share the buffers because a program's methods never run at the same time.

    Args:
        device: device where the code runs. On the CPU each copy is done when its call returns; the rest is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._sets: dict[tuple[str, int], Tensors] = {}
        self._pages = _RegisteredPages()
        self._copies: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event] = []

    def open(self, sources: Sequence[Tensors], code_keys: Sequence[str], registers: bool) -> list[Tensors]:
        """Return a set of buffers for each of the sources. Neighbouring sources get different sets.

        With `registers` the GPU reads the sources' pages directly, which keeps the pages in memory until `close`. The sources
        must live until then. See `ConstantStream` for the arguments.
        """
        targets = []
        for index, (source, code_key) in enumerate(zip(sources, code_keys, strict=True)):
            key = (code_key, index % _SETS)
            if key not in self._sets:
                self._sets[key] = {
                    name: torch.empty_like(tensor, device=self.device) for name, tensor in source.items()
                }
            targets.append(self._sets[key])
        if self.on_gpu and registers:
            self._pages.register(tensor for source in sources for tensor in source.values())
        if self.on_gpu and self._copies is None:
            self._copies = torch.cuda.Stream(self.device)
            self._copied = [torch.cuda.Event() for _ in range(_SETS)]
            self._free = [torch.cuda.Event() for _ in range(_SETS)]
        return targets

    def begin(self) -> None:
        """Make the copies wait for all queued work: the last call may have failed before it freed its sets.

        To be called before the first copy of a call.
        """
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def send(self, set_index: int, source: Tensors, target: Tensors, entries: int | None) -> None:
        """Queue copies into set `set_index`, once it is free: of the first `entries` of each tensor, or of all if None."""
        if self._copies is None:
            _copy(source, target, entries)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[set_index])
            _copy(source, target, entries)
            self._copied[set_index].record(self._copies)

    def wait(self, set_index: int) -> None:
        """Make the current stream wait for the copies into set `set_index`."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied[set_index])

    def mark_free(self, set_index: int) -> None:
        """Free set `set_index` as soon as the work that is now queued on the current stream is done."""
        if self._copies is not None:
            self._free[set_index].record(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait for copies under way. After that their sources may be freed."""
        if self._copies is not None:
            self._copies.synchronize()

    def close(self) -> None:
        """Wait for copies under way, then free the buffers and unregister the pages."""
        self.synchronize()
        self._pages.release()
        free_tensors(tensor for target in self._sets.values() for tensor in target.values())
        self._sets.clear()
        self._copies = None


class ConstantStream:
    """The constants of one method that stream through the device.

    Args:
        buffers: the program's buffers.
        sources: one entry per streamed segment, in the order of the calls: the segment's constants on the host, by their
            names in its code.
        code_keys: one key per source: segments with equal keys run the same code.
        registers: see `StreamBuffers.open`.

    Attributes:
        targets: one entry per source: the constants on the device, where the segment's code finds them.
    """

    def __init__(
        self, buffers: StreamBuffers, sources: Sequence[Tensors], code_keys: Sequence[str], registers: bool = False
    ) -> None:
        self._buffers = buffers
        self._sources = sources
        self.targets = buffers.open(sources, code_keys, registers)
        self._entries: int | None = None

    def start(self, entries: int | None = None) -> None:
        """Queue the first copies of a call. Copies take the first `entries` of each constant's first dimension; None: all."""
        self._entries = entries
        self._buffers.begin()
        for first in range(min(_SETS, len(self._sources))):
            self._send(first)

    def begin(self, index: int) -> None:
        """Make the current stream wait for the constants of segment `index`. Called before the segment's code is queued."""
        self._buffers.wait(index % _SETS)

    def end(self, index: int) -> None:
        """Free the buffers of segment `index` once its code has run, and queue the next copies into them.

        Called after the segment's code is queued.
        """
        self._buffers.mark_free(index % _SETS)
        if index + _SETS < len(self._sources):
            self._send(index + _SETS)

    def close(self) -> None:
        """Wait for copies under way. The buffers stay with the program."""
        self._buffers.synchronize()

    def _send(self, index: int) -> None:
        self._buffers.send(index % _SETS, self._sources[index], self.targets[index], self._entries)


def _copy(source: Tensors, target: Tensors, entries: int | None) -> None:
    for name, tensor in source.items():
        target[name][:entries].copy_(tensor[:entries], non_blocking=True)


class _RegisteredPages:
    """Pages of the host's memory that the GPU reads directly."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register the pages that the tensors lie on. Pages that CUDA refuses stay as they are, with a warning."""
        refused = None
        for begin, end in _pages_of(tensors):
            # Another method may have registered the same pages.
            if any(first <= begin and end <= last for first, last in self._ranges):
                continue
            try:
                call_driver(cuda_driver(), "cuMemHostRegister", begin, end - begin, _READ_ONLY)
                self._ranges.add((begin, end))
            except DriverError as error:
                refused = error
        if refused is not None:
            logger.warning("the GPU cannot read all mapped weights by itself (%s): long prompts take longer", refused)

    def release(self) -> None:
        """Unregister all registered pages. No copy may be under way."""
        while self._ranges:
            begin, _ = self._ranges.pop()
            try:
                call_driver(cuda_driver(), "cuMemHostUnregister", begin)
            except DriverError as error:
                # This happens after an error that ends all work of the process on the GPU.
                logger.debug("pages stay registered: %s", error)


def _pages_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Ranges (first address, end) of the pages that the tensors lie on, ascending, without overlaps."""
    ranges: list[tuple[int, int]] = []
    size = mmap.PAGESIZE
    for first, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes):
        first, end = first // size * size, -(-end // size) * size
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((first, end))
    return ranges
