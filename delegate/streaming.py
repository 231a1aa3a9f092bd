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

from .graph_nodes import DriverError, call_driver, cuda_driver
from .loading import free_tensors

logger = logging.getLogger(__name__)

# CU_MEMHOSTREGISTER_READ_ONLY of cuda.h; without it CUDA refuses a map that cannot be written.
_READ_ONLY = 8
_SETS = 2
# Of one copy. A GPU has one engine for copies to it, and what code on the host gives waits there for the copy under way.
_COPY_BYTES = 16 << 20

Tensors = Mapping[str, torch.Tensor]


class ConstantStream:
    """What streams through the device for one method.

    Args:
        device: where the code runs. On the CPU each copy is done when its call returns; the rest is the same.
        sources: of each streamed segment, in the order of their calls: its constants on the host, by their names in the code.
            Segments that run the same code have the same `kinds`.
        kinds: of each, what tells its code apart.

    Attributes:
        entries: how many entries of their first dimension are sent; None: all.
    """

    def __init__(self, device: torch.device, sources: Sequence[Tensors], kinds: Sequence[str]) -> None:
        self.entries: int | None = None
        self._device = device
        self._sources = sources
        self._targets: list[Tensors] = []
        self._on_gpu = device.type == "cuda"
        sets: dict[tuple[str, int], Tensors] = {}
        for index, (source, kind) in enumerate(zip(sources, kinds, strict=True)):
            place = (kind, index % _SETS)
            if place not in sets:
                sets[place] = {name: torch.empty_like(tensor, device=device) for name, tensor in source.items()}
            self._targets.append(sets[place])
        self._pages = _RegisteredPages() if self._on_gpu else None
        if self._pages is not None:
            self._pages.register(tensor for source in sources for tensor in source.values())
            self._copies = torch.cuda.Stream(device)
            self._copied = [torch.cuda.Event() for _ in range(_SETS)]
            self._free = [torch.cuda.Event() for _ in range(_SETS)]

    @property
    def nbytes(self) -> int:
        """Of the buffers on the device."""
        return sum({id(t): t.nbytes for target in self._targets for t in target.values()}.values())

    def target(self, index: int) -> Tensors:
        """Where segment `index` of the streamed ones finds its constants."""
        return self._targets[index]

    def begin(self, index: int) -> None:
        """Before the code of segment `index` is queued on the current stream, which then waits for its constants."""
        if index == 0:
            if self._on_gpu:
                # The call before may have failed half way, without freeing what it used.
                self._copies.wait_stream(torch.cuda.current_stream(self._device))
            for first in range(min(_SETS, len(self._sources))):
                self._send(first)
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._copied[index % _SETS])

    def end(self, index: int) -> None:
        """After it: its buffers are free as soon as that code has run."""
        if self._on_gpu:
            self._free[index % _SETS].record(torch.cuda.current_stream(self._device))
        if index + _SETS < len(self._sources):
            self._send(index + _SETS)

    def close(self) -> None:
        """Wait for copies under way, then free the buffers and let the pages go."""
        if self._pages is not None:
            self._copies.synchronize()
            self._pages.release()
        free_tensors(tensor for target in self._targets for tensor in target.values())
        self._targets, self._sources = [], []

    def _send(self, index: int) -> None:
        if not self._on_gpu:
            self._copy(index)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[index % _SETS])
            self._copy(index)
            self._copied[index % _SETS].record(self._copies)

    def _copy(self, index: int) -> None:
        for name, target in self._targets[index].items():
            source = self._sources[index][name]
            wanted = source.shape[0] if self.entries is None else self.entries
            together = max(1, _COPY_BYTES * source.shape[0] // max(1, source.nbytes))
            for begin in range(0, wanted, together):
                end = min(wanted, begin + together)
                target[begin:end].copy_(source[begin:end], non_blocking=True)


class _RegisteredPages:
    """Pages of the host's memory that the GPU reads by itself."""

    def __init__(self) -> None:
        self._begins: list[int] = []

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register what the tensors lie on; what is refused is left as it is, with a warning."""
        try:
            driver = cuda_driver()
            for begin, end in _pages_of(tensors):
                call_driver(driver, "cuMemHostRegister", begin, end - begin, _READ_ONLY)
                self._begins.append(begin)
        except DriverError as error:
            logger.warning("the GPU cannot read the mapped weights by itself (%s): long prompts take longer", error)

    def release(self) -> None:
        """Those that were registered; no copy may be under way."""
        for begin in self._begins:
            call_driver(cuda_driver(), "cuMemHostUnregister", begin)
        self._begins = []


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
