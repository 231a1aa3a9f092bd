"""Constants that stay on the host and pass through the device, one segment's after the other, each time a method runs.

There are two sets of buffers on the device. While a segment's code works on one, the next segment's constants are copied into
the other, on a stream of their own; the host waits for nothing. The code is bound to its set once.

The copies read the file's map itself, whose pages are registered with CUDA: nothing is copied on the host. Where CUDA refuses
to register them, the driver copies them piece by piece on the way, and the host waits.
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
    """The buffers of a program on the device, which all its methods stream through; made when the first one needs them.

    A program's methods never run at the same time.

    Args:
        device: where the code runs. On the CPU each copy is done when its call returns; the rest is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._sets: dict[tuple[str, int], Tensors] = {}
        self._pages = _RegisteredPages()
        self._copies: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event] = []

    def open(self, sources: Sequence[Tensors], kinds: Sequence[str], registers: bool) -> list[Tensors]:
        """A set of buffers for each of the sources; neighbours have different ones.

        With `registers` the GPU reads the sources' pages by itself, which keeps them in memory until `close`: the sources
        must stay as long.
        """
        targets = []
        for index, (source, kind) in enumerate(zip(sources, kinds, strict=True)):
            key = (kind, index % _SETS)
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
        """Before the first copy of a call: the call before may have failed half way, without freeing what it used."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def send(self, set_index: int, source: Tensors, target: Tensors, entries: int | None) -> None:
        """Queue the copies into set `set_index`, when it is free, of the first `entries` of each tensor; None: of all."""
        if self._copies is None:
            _copy(source, target, entries)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[set_index])
            _copy(source, target, entries)
            self._copied[set_index].record(self._copies)

    def wait(self, set_index: int) -> None:
        """Have the current stream wait for the copies into set `set_index`."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied[set_index])

    def free(self, set_index: int) -> None:
        """What is queued on the current stream is the last that uses set `set_index`."""
        if self._copies is not None:
            self._free[set_index].record(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait for copies under way: their sources may go then."""
        if self._copies is not None:
            self._copies.synchronize()

    def close(self) -> None:
        """Wait for copies under way, then free the buffers and let the pages go."""
        self.synchronize()
        self._pages.release()
        free_tensors(tensor for target in self._sets.values() for tensor in target.values())
        self._sets.clear()
        self._copies = None


class ConstantStream:
    """What streams through the device for one method.

    Args:
        buffers: the program's.
        sources: of each streamed segment, in the order of their calls: its constants on the host, by their names in the code.
        kinds: of each, what tells its code apart: segments that run the same code have the same.
        registers: as of `StreamBuffers.open`.

    Attributes:
        targets: of each, where its code finds them on the device.
    """

    def __init__(
        self, buffers: StreamBuffers, sources: Sequence[Tensors], kinds: Sequence[str], registers: bool = False
    ) -> None:
        self._buffers = buffers
        self._sources = sources
        self.targets = buffers.open(sources, kinds, registers)
        self._entries: int | None = None

    def start(self, entries: int | None = None) -> None:
        """Queue the first copies of a call, of so many entries of their first dimension; None: of all."""
        self._entries = entries
        self._buffers.begin()
        for first in range(min(_SETS, len(self._sources))):
            self._send(first)

    def begin(self, index: int) -> None:
        """Before the code of segment `index` is queued on the current stream, which then waits for its constants."""
        self._buffers.wait(index % _SETS)

    def end(self, index: int) -> None:
        """After it: its buffers are free as soon as that code has run."""
        self._buffers.free(index % _SETS)
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
    """Pages of the host's memory that the GPU reads by itself."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register what the tensors lie on; what is refused is left as it is, with a warning."""
        refused = None
        for begin, end in _pages_of(tensors):
            # Another method may have the same constants.
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
        """Those that were registered; no copy may be under way."""
        while self._ranges:
            begin, _ = self._ranges.pop()
            try:
                call_driver(cuda_driver(), "cuMemHostUnregister", begin)
            except DriverError as error:
                # After an error that ends all work of the process on the GPU.
                logger.debug("pages stay registered: %s", error)


def _pages_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """(first address, end) of the pages below the tensors, rising, without overlaps."""
    ranges: list[tuple[int, int]] = []
    size = mmap.PAGESIZE
    for first, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes):
        first, end = first // size * size, -(-end // size) * size
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((first, end))
    return ranges
