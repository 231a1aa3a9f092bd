"""Loading of constants from the mapped file to the device that uses them: several at a time, each one checked."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from queue import SimpleQueue

import numpy
import torch

from ostinato.delegate.artifact.ptd import Entry
from ostinato.delegate.torch_internals import free_pinned_memory, outside_modes

# SHA-256 runs at 0.5 to 1.8 GB/s on one core, a copy into pinned memory at 5 to 10 GB/s.
_MAX_WORKERS = 12
_MAX_LANES = 6
# A lane has two such buffers in pinned memory, so all lanes have 96 MiB. torch rounds each allocation up to a power of two.
_BUFFER_BYTES = 8 << 20
# For fewer bytes, starting threads and pinning memory costs more than it saves.
PARALLEL_FROM = 64 << 20

Copy = Callable[[Entry, torch.Tensor], None]


class ConstantLoader:
    """Makes tensors from a file's entries.

    Args:
        device: device of the tensors. On the CPU they are views of the mapped file.
        check: function that gets key and entry of each constant, called from several threads. If it raises, the load fails.
        on_load: function that gets the size in bytes of each loaded constant, called from the thread that loads.
        parallel_from: number of bytes from which several threads load.
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[str, Entry], None] | None = None,
        on_load: Callable[[int], None] | None = None,
        parallel_from: int = PARALLEL_FROM,
    ) -> None:
        self._device = device
        self._check = check
        self._on_load = on_load
        self._parallel_from = parallel_from

    def load(self, entries: Mapping[str, Entry], private: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Load all entries, and return their tensors by key. If one fails, or memory runs out, all allocated memory is freed.

        Keys of `private` get memory of their own on the CPU too.
        """
        tensors: dict[str, torch.Tensor] = {}
        try:
            for key, entry in entries.items():
                tensors[key] = self._allocate(entry, key in private)
            self._fill(entries, tensors, entries if self._device.type == "cuda" else private)
        except BaseException:
            free_tensors(tensors.values())
            raise
        return tensors

    def touch(self, entries: Mapping[str, Entry]) -> None:
        """Read one byte of each page of the mapped file, with several threads."""

        def read(key: str) -> None:
            found = numpy.frombuffer(entries[key].data, numpy.uint8)
            # The last byte too: the data need not begin at the start of a page.
            max(found[:: mmap.PAGESIZE].max(initial=0), found[-1:].max(initial=0))

        _for_each(read, list(entries), min(_MAX_WORKERS, available_cores()), lambda key: None)

    def _allocate(self, entry: Entry, private: bool) -> torch.Tensor:
        if self._device.type == "cpu" and not private:
            return entry.tensor()
        return torch.empty_strided(entry.shape, entry.strides, dtype=entry.dtype, device=self._device)

    def _fill(self, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor], copied: Collection[str]) -> None:
        workers = 1
        if sum(entry.nbytes for entry in entries.values()) >= self._parallel_from:
            workers = max(1, min(_MAX_WORKERS, available_cores(), len(entries)))
        with _copier(self._device, workers) as copy:

            def bring(key: str) -> None:
                # The copy first: it goes on while the hash is computed.
                if key in copied:
                    copy(entries[key], tensors[key])
                if self._check is not None:
                    self._check(key, entries[key])

            def report(key: str) -> None:
                if self._on_load is not None:
                    self._on_load(entries[key].nbytes)

            # The largest first: a large one at the end would keep one thread busy after the others are done.
            _for_each(bring, sorted(entries, key=lambda key: -entries[key].nbytes), workers, report)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of zeros. On the host the system provides its memory when it is touched.

    torch would write the zeros: the KV caches of 2,048 positions of a small model, 47 MB, in 0.1 s.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=dtype).untyped_storage()
    # Not a view of the flat tensor, which would keep the memory after `free_tensors`.
    return torch.empty(0, dtype=dtype).set_(storage).resize_(torch.Size(shape))


def free_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of tensors that others still hold. torch's container never releases a user-managed constant (seen in
    2.11 and 2.13), so dropping our own references would leave a whole model allocated."""
    with outside_modes():
        for tensor in tensors:
            tensor.set_()  # type: ignore[call-overload]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _for_each(work: Callable[[str], None], keys: Sequence[str], workers: int, done: Callable[[str], None]) -> None:
    """Call `work` with every key in `workers` threads. Call `done`, in this thread, with each key that is finished.

    If a call raises, calls that have not begun are dropped, the others are waited for, and the exception is raised.
    """
    if workers == 1:
        for key in keys:
            work(key)
            done(key)
        return
    pool = ThreadPoolExecutor(workers, "ostinato-load")
    try:
        futures = {pool.submit(work, key): key for key in keys}
        for future in as_completed(futures):
            future.result()
            done(futures[future])
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _copier(device: torch.device, workers: int) -> Iterator[Copy]:
    """Context with a function that copies to `device`, for `workers` threads at most. At its end all copies are done."""
    if device.type == "cpu":
        yield _copy_on_host
        return
    uploader = _Uploader(device, workers)
    try:
        yield uploader.upload
    finally:
        uploader.close()


def _copy_on_host(entry: Entry, out: torch.Tensor) -> None:
    if entry.nbytes:
        numpy.copyto(_flat_bytes(out).numpy(), _source_bytes(entry))


class _Uploader:
    """Lanes of pinned memory. A thread takes a lane while it uploads. Made by the thread that allocated the targets."""

    def __init__(self, device: torch.device, workers: int) -> None:
        self._lanes = [_Lane(device) for _ in range(min(workers, _MAX_LANES))]
        self._idle: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._idle.put(lane)

    def upload(self, entry: Entry, out: torch.Tensor) -> None:
        lane = self._idle.get()
        try:
            lane.upload(entry, out)
        finally:
            self._idle.put(lane)

    def close(self) -> None:
        """Wait for all copies under way, then give the pinned memory back."""
        self._idle = SimpleQueue()
        # Popped one by one: the variable of a loop would keep the last lane and its memory.
        while self._lanes:
            self._lanes.pop().synchronize()
        # Otherwise torch would keep the memory for its next use of pinned memory.
        free_pinned_memory()


class _Lane:
    """A stream and two buffers of pinned memory: the CPU fills one while the other is on its way to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Work that is queued on the current stream may still use the target tensors' memory.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def upload(self, entry: Entry, out: torch.Tensor) -> None:
        """Copy the bytes of `entry` into `out`. On return the last two buffers may still be on their way."""
        if not entry.nbytes:
            return
        source, target = _source_bytes(entry), _flat_bytes(out)
        with torch.cuda.stream(self._stream):
            for begin in range(0, entry.nbytes, _BUFFER_BYTES):
                size = min(_BUFFER_BYTES, entry.nbytes - begin)
                buffer, sent = self._buffers[self._turn], self._sent[self._turn]
                self._turn = 1 - self._turn
                sent.synchronize()
                # numpy's copy: torch's would start a team of OpenMP threads for each of our threads.
                numpy.copyto(buffer.numpy()[:size], source[begin : begin + size])
                target[begin : begin + size].copy_(buffer[:size], non_blocking=True)
                sent.record(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


def _source_bytes(entry: Entry) -> numpy.ndarray:
    return numpy.frombuffer(entry.data, numpy.uint8)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the tensor's memory as flat bytes. A constant has no gaps between its elements, in any order of dimensions."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
