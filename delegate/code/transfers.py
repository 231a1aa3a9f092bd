"""Values that pass between the device and code on the host.

    send       device -> pinned memory            queued behind the work that gives the value
    arrived                                       the host waits for these copies, and for nothing queued after them
    to_device  host -> pinned memory              by the CPU, where the value is not there already

So a value is sent as soon as it is there (`departures`), and what the device has to do besides goes on while the host waits
and computes. What the host gives is not copied to the device: code there reads the pinned memory itself, over the bus. A copy
would wait behind all constants that are on their way to the device (constants/streaming.py), for a GPU has one engine for
copies to it: 7 ms behind 400 MB, where reading takes 0.1 ms for 2 MB (measured on an H200, 2026-11-22).

`Transfers` are a plan's, through static buffers. `Sent` and `to_device_once` are for a single run, whose sizes need not come
again.

A graph holds the copies of what leaves at its end, or for small values one kernel that writes all of them to pinned memory.
That memory is not allocated while a graph is recorded, and the values' sizes are known only then: so such a graph is recorded
twice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

# Bytes of a line of the CPU's caches, on which copies begin.
LINE = 64
# Bytes up to which one kernel writes all that leaves a graph to pinned memory: of so few a copy for each value takes longer.
_BY_KERNEL = 1 << 18
# Bytes on which each of these begins.
_ALIGNMENT = 16


class Needs(Protocol):
    """Numbers of the values that a segment takes and gives."""

    @property
    def inputs(self) -> tuple[int, ...]: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...


class Transfers:
    """The static buffers of one plan, by the numbers of their values, each made when its value passes for the first time.

    All copies of a step are queued on the current stream, which must be the one that the plan's graphs are launched on.

    Args:
        device: the program's. On the CPU no memory is pinned and a copy is done when its call returns; the rest is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host: dict[int, torch.Tensor] = {}
        self._from_host: dict[int, torch.Tensor] = {}
        # The same memory as the device sees it.
        self._on_device: dict[int, torch.Tensor] = {}
        # What leaves a graph together and is small: bytes of the device over the memory of all.
        self._together: dict[tuple[int, ...], torch.Tensor] = {}
        self._arrived, self._read = Mark(device), Mark(device)
        self._may_be_read = False

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        """Queue copies to the host of values on the device; the next step overwrites them.

        Nobody reads those of the last step any more: code on the host has ended when its call returns.
        """
        if values:
            for number, value in values.items():
                self._buffer(self._to_host, number, value).copy_(value, non_blocking=True)
            self._arrived.record()

    def has_room(self, values: Mapping[int, torch.Tensor]) -> bool:
        """Whether pinned memory for the values was there; if not, it is now."""
        there = {number: tensor.shape for number, tensor in self._to_host.items()}
        missing = {number: value for number, value in values.items() if there.get(number) != value.shape}
        if not missing:
            return True
        sizes = [value.nbytes for value in missing.values()]
        aligned = all(size % _ALIGNMENT == 0 for size in sizes[:-1])
        if len(missing) == len(values) > 1 and aligned and sum(sizes) <= _BY_KERNEL:
            whole = _empty_on_host((sum(sizes),), torch.uint8, self._device)
            self._to_host |= views(whole, missing, _ALIGNMENT)
            self._together[tuple(missing)] = seen_by(self._device, whole)
        else:
            self._together.pop(tuple(values), None)
            for number, value in missing.items():
                self._buffer(self._to_host, number, value)
        return False

    def record(self, values: Mapping[int, torch.Tensor]) -> None:
        """Within a graph: the copies of `send`, of values for which there is room."""
        if self._device.type == "cpu":
            # There a graph's values are known when it runs.
            self.has_room(values)
        together = self._together.get(tuple(values))
        if together is not None:
            torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()], out=together)
            return
        for number, value in values.items():
            if number in self._to_host:
                self._buffer(self._to_host, number, value).copy_(value, non_blocking=True)

    def launched(self) -> None:
        """A graph has been launched that holds copies to the host."""
        self._arrived.record()

    def arrived(self, numbers: Collection[int]) -> dict[int, torch.Tensor]:
        """The copies of these values on the host, complete, which were sent in this step."""
        if not numbers:
            return {}
        self._arrived.wait()
        return {number: self._to_host[number] for number in numbers}

    def to_device(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Tensors of the device, over pinned memory that holds the values; the next step overwrites them."""
        if not values:
            return {}
        if self._may_be_read:
            # What the host has waited for in this step need not lie behind the last step's work, which may still be reading:
            # code on the host may take nothing from the device.
            self._read.wait()
            self._may_be_read = False
        for number, value in values.items():
            fill(self._buffer(self._from_host, number, value), value)
            if number not in self._on_device:
                self._on_device[number] = seen_by(self._device, self._from_host[number])
        return {number: self._on_device[number] for number in values}

    def end(self) -> None:
        """All work of a step is queued."""
        if self._from_host:
            self._read.record()
            self._may_be_read = True

    def release(self) -> None:
        """Let the buffers go, when nothing that is queued uses them: of a kernel over pinned memory torch does not know."""
        for mark in (self._arrived, self._read):
            mark.wait()
        for buffers in (self._to_host, self._from_host, self._on_device, self._together):
            buffers.clear()

    def _buffer(self, buffers: dict[int, torch.Tensor], number: int, value: torch.Tensor) -> torch.Tensor:
        buffer = buffers.get(number)
        # What links hand on has the sizes of the method's inputs; a result may have others each time, and no graph reads it.
        if buffer is None or buffer.shape != value.shape:
            buffer = buffers[number] = _empty_on_host(value.shape, value.dtype, self._device)
            self._on_device.pop(number, None)
        return buffer


class PinnedPool:
    """Buffers of pinned memory that single runs take in turns, in sizes that are powers of two.

    torch keeps pinned memory for later too, but asks CUDA about all copies of a buffer when it is taken again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of that many bytes or more."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else _empty_on_host((size,), torch.uint8, self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Nothing writes to the buffer any more, and nobody will read it."""
        self._free[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        self._free.clear()


class Sent:
    """Copies on the host of values on the device, by their numbers: queued on the current stream, in one buffer.

    Args:
        behind: what work that was queued before the copies reads; kept until they have arrived.
    """

    def __init__(
        self, values: Mapping[int, torch.Tensor], device: torch.device, behind: list[torch.Tensor], pool: PinnedPool
    ) -> None:
        self._pool, self._buffer = pool, pool.take(size_of(values, LINE))
        self._copies = views(self._buffer, values, LINE)
        for number, copy in self._copies.items():
            copy.copy_(values[number], non_blocking=True)
        self._mark = Mark(device)
        self._mark.record()
        self.behind = behind

    def arrived(self, number: int) -> torch.Tensor:
        """One of them, complete."""
        self._mark.wait()
        self.behind.clear()
        return self._copies[number]

    def done(self, number: int) -> None:
        """Nobody reads this one any more; it has arrived."""
        del self._copies[number]
        if not self._copies:
            self._pool.give(self._buffer)


def to_device_once(value: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the device over pinned memory that holds the value, and that memory: the caller must keep it until it has
    been read."""
    if device.type == "cpu":
        return value, value
    pinned = value if value.is_pinned() else fill(_empty_on_host(value.shape, value.dtype, device), value)
    return seen_by(device, pinned), pinned


def seen_by(device: torch.device, pinned: torch.Tensor) -> torch.Tensor:
    """The same pinned memory as a tensor of the device, which does not keep it; nothing is copied."""
    if device.type == "cpu" or pinned.numel() == 0:
        return pinned.to(device)
    return _bytes_at(device, pinned.data_ptr(), pinned.nbytes).view(pinned.dtype).view(pinned.shape)


@functools.lru_cache(maxsize=64)
def _bytes_at(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Bytes of pinned memory, at the same address for the device. Finding that out takes torch as long as a few launches."""
    with torch.inference_mode(False):
        return torch.as_tensor(_PinnedMemory(address, nbytes), device=device)


def needed_on_device(segments: Sequence[Needs], on_host: Collection[int], results: Collection[int]) -> frozenset[int]:
    """Numbers of the values that segments on the device take or the method returns."""
    taken = [segment.inputs for index, segment in enumerate(segments) if index not in on_host]
    return frozenset(results).union(*taken)


def departures(segments: Sequence[Needs], on_host: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Segment on the device -> numbers of the values that leave for the host when it has run: each value once, together with
    the others that its first taker there needs. The method's inputs are not among them."""
    makers = {number: index for index, segment in enumerate(segments) for number in segment.outputs}
    leaving: dict[int, tuple[int, ...]] = {}
    sent: set[int] = set()
    for index in sorted(on_host):
        needs = {number for number in segments[index].inputs if makers.get(number, index) not in on_host} - sent
        if needs:
            last = max(makers[number] for number in needs)
            leaving[last] = (*leaving.get(last, ()), *sorted(needs))
            sent |= needs
    return leaving


def starts(segments: Sequence[Needs], on_host: Collection[int]) -> dict[int, int]:
    """Segment on the device -> the next segment on the host, where that one can begin as soon as this one is queued: it needs
    nothing that is made in between."""
    leaving = departures(segments, on_host)
    made_at = {number: index for index, segment in enumerate(segments) for number in segment.outputs}
    found: dict[int, int] = {}
    for index in sorted(on_host):
        last = max((made_at[number] for number in segments[index].inputs if number in made_at), default=index)
        if last in leaving and not any(last < other < index for other in on_host):
            found[last] = index
    return found


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def size_of(values: Mapping[int, torch.Tensor], alignment: int) -> int:
    """Bytes of memory that `views` needs."""
    return sum(_aligned(value.nbytes, alignment) for value in values.values())


def views(memory: torch.Tensor, values: Mapping[int, torch.Tensor], alignment: int) -> dict[int, torch.Tensor]:
    """Tensors like the values over bytes of memory, one behind the other, each on a multiple of so many bytes."""
    found: dict[int, torch.Tensor] = {}
    at = 0
    for number, value in values.items():
        found[number] = memory[at : at + value.nbytes].view(value.dtype).view(value.shape)
        at += _aligned(value.nbytes, alignment)
    return found


def fill(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value on the host to a contiguous buffer there; returns that.

    By one thread: torch's copy of more than 32,768 elements starts a team of OpenMP threads, which go on looking for work for
    milliseconds, on the cores that the next code on the host needs.
    """
    value = value.contiguous()
    ctypes.memmove(buffer.data_ptr(), value.data_ptr(), value.nbytes)
    return buffer


def results_of(values: Mapping[int, torch.Tensor], results: Sequence[int], seen: Collection[int]) -> list[torch.Tensor]:
    """What a method returns, of which `seen` lie in the host's memory: a caller's work on them may be queued behind what the
    host does next, so they are copied to the device."""
    return [
        values[number].clone() if number in seen and values[number].device.type == "cuda" else values[number]
        for number in results
    ]


class _PinnedMemory:
    """Bytes of the host under the address that they have for the device too (the protocol `__cuda_array_interface__`)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"version": 2, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def _empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # It is written again in other modes.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A place in the device's queue of work, which the host can wait for. On the CPU nothing is ever waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until all is done that was queued before the last `record`."""
        if self._event is not None:
            self._event.synchronize()
