"""Transfers of values between the device and code on the host.

    send       device -> pinned memory            queued behind the work that computes the value
    arrived                                       the host waits for these copies, and for nothing queued after them
    to_device  host -> pinned memory              by the CPU, unless the value is already there

A value is sent as soon as it is computed (`departures`). The device goes on with other work while the host waits and
computes. A value that the host computes is not copied to the device: code on the device reads the pinned memory over the
bus. A GPU has only one engine for copies to it, so a copy would wait behind all constants that are on their way
(constants/streaming.py): 7 ms behind 400 MB. Reading takes 0.1 ms for 2 MB (measured on an H200, 2026-11-22).

`Transfers` serves a plan, through static buffers. `Sent` and `to_device_once` serve calls without a plan, whose sizes may
never come again.

A graph ends with copies of the values that leave for the host. If the values are small, one kernel writes all of them to
pinned memory instead. The sizes of the values become known only while the graph is recorded, and then no pinned memory is
allocated. So such a graph is recorded twice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from .side_stream import side_lock
from .used_streams import current_stream

# Bytes of a cache line of the CPU. Copies begin at multiples of it.
LINE = 64
# Up to this many bytes in all, one kernel writes the values that leave a graph to pinned memory. One copy per value would
# take longer.
_BY_KERNEL = 1 << 18
# Small values that leave a graph together begin at multiples of this many bytes.
_ALIGNMENT = 16


class Needs(Protocol):
    """Inputs and outputs of a segment, as numbers of values."""

    @property
    def inputs(self) -> tuple[int, ...]: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...


class Transfers:
    """Static buffers of one plan, by the numbers of their values. Each is made when its value passes for the first time.

    All copies of a step are queued on the current stream. The plan's graphs must be launched on the same stream.

    Args:
        device: the program's device. On the CPU no memory is pinned and a copy is done when its call returns; the rest is the
            same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host: dict[int, torch.Tensor] = {}
        self._from_host: dict[int, torch.Tensor] = {}
        # Tensors of the device over the memory of `_from_host`.
        self._on_device: dict[int, torch.Tensor] = {}
        # Numbers of small values that leave a graph together -> bytes of the device, over the pinned memory of all of them.
        self._together: dict[tuple[int, ...], torch.Tensor] = {}
        self._arrived, self._read = Mark(device), Mark(device)
        self._may_be_read = False

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        """Queue copies of values from the device to the host. The next step overwrites the copies.

        The copies of the last step are not read any more: code on the host has ended when its call returns.
        """
        if values:
            for number, value in values.items():
                self._buffer(self._to_host, number, value).copy_(value, non_blocking=True)
            self._arrived.record()

    def ensure_room(self, values: Mapping[int, torch.Tensor]) -> bool:
        """Whether all values already have pinned memory. If not, it is allocated now."""
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
        """Record the copies of `send` in a graph, for values that have pinned memory."""
        if self._device.type == "cpu":
            # On the CPU the values of a graph become known here, when it runs.
            self.ensure_room(values)
        together = self._together.get(tuple(values))
        if together is not None:
            torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()], out=together)
            return
        for number, value in values.items():
            if number in self._to_host:
                self._buffer(self._to_host, number, value).copy_(value, non_blocking=True)

    def launched(self) -> None:
        """Note that a graph with copies to the host has been launched."""
        self._arrived.record()

    def arrived(self, numbers: Collection[int]) -> dict[int, torch.Tensor]:
        """Wait for the copies of these values that were sent in this step, and return them."""
        if not numbers:
            return {}
        self._arrived.wait()
        return {number: self._to_host[number] for number in numbers}

    def to_device(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copy values to pinned memory, and return tensors of the device over it. The next step overwrites this memory."""
        if not values:
            return {}
        if self._may_be_read:
            # Work of the last step may still be reading the buffers. This step has not waited for that work if its code on
            # the host takes nothing from the device.
            self._read.wait()
            self._may_be_read = False
        for number, value in values.items():
            fill(self._buffer(self._from_host, number, value), value)
            if number not in self._on_device:
                self._on_device[number] = seen_by(self._device, self._from_host[number])
        return {number: self._on_device[number] for number in values}

    def end(self) -> None:
        """Note that all work of a step is queued."""
        if self._from_host:
            self._read.record()
            self._may_be_read = True

    def release(self) -> None:
        """Free the buffers after all queued work that uses them. torch does not know of kernels that read pinned memory."""
        for mark in (self._arrived, self._read):
            mark.wait()
        for buffers in (self._to_host, self._from_host, self._on_device, self._together):
            buffers.clear()

    def _buffer(self, buffers: dict[int, torch.Tensor], number: int, value: torch.Tensor) -> torch.Tensor:
        buffer = buffers.get(number)
        # Values between segments keep their sizes in a plan. A result may have another size each time, but no graph reads it.
        if buffer is None or buffer.shape != value.shape:
            buffer = buffers[number] = _empty_on_host(value.shape, value.dtype, self._device)
            self._on_device.pop(number, None)
        return buffer


class PinnedPool:
    """Reusable buffers of pinned memory for calls without a plan, in sizes that are powers of two.

    torch keeps pinned memory for later use too, but asks CUDA about all copies of a buffer before it gives the buffer again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of `nbytes` bytes or more."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else _empty_on_host((size,), torch.uint8, self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. Nothing may write to the buffer or read it any more."""
        self._free[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        self._free.clear()


class Sent:
    """Copies of values from the device to one buffer on the host, queued on the current stream. Keys are the values' numbers.

    Args:
        behind: memory that work queued before the copies may read; kept until the copies have arrived.
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
        """Wait for all copies, and return the copy of value `number`."""
        self._mark.wait()
        self.behind.clear()
        return self._copies[number]

    def done(self, number: int) -> None:
        """Give up the copy of value `number`, which has arrived. After the last one the buffer returns to the pool."""
        del self._copies[number]
        if not self._copies:
            self._pool.give(self._buffer)


def to_device_once(value: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of the device over pinned memory that holds the value, and that memory.

    The caller must keep the memory until the device has read it.
    """
    if device.type == "cpu":
        return value, value
    pinned = value if value.is_pinned() else fill(_empty_on_host(value.shape, value.dtype, device), value)
    return seen_by(device, pinned), pinned


def seen_by(device: torch.device, pinned: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device over the same pinned memory, without a copy. It does not keep the memory alive."""
    if device.type == "cpu" or pinned.numel() == 0:
        return pinned.to(device)
    return _bytes_at(device, pinned.data_ptr(), pinned.nbytes).view(pinned.dtype).view(pinned.shape)


@functools.lru_cache(maxsize=64)
def _bytes_at(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Pinned memory as a tensor of the device. Cached: torch's look-up of the address takes as long as a few launches."""
    with torch.inference_mode(False):
        return torch.as_tensor(_PinnedMemory(address, nbytes), device=device)


def needed_on_device(segments: Sequence[Needs], on_host: Collection[int], results: Collection[int]) -> frozenset[int]:
    """Numbers of the values that segments on the device take or the method returns."""
    taken = [segment.inputs for index, segment in enumerate(segments) if index not in on_host]
    return frozenset(results).union(*taken)


def departures(segments: Sequence[Needs], on_host: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Segment on the device -> numbers of the values that leave for the host after it.

    Each value leaves once, together with the other values that its first reader on the host needs. The method's inputs are
    not included.
    """
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
    """Segment on the device -> the next segment on the host, if that one takes nothing that is made in between.

    The segment on the host can then begin as soon as the segment on the device is queued.
    """
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
    """Tensors like the values, one after the other in `memory` (bytes), each at a multiple of `alignment` bytes."""
    found: dict[int, torch.Tensor] = {}
    at = 0
    for number, value in values.items():
        found[number] = memory[at : at + value.nbytes].view(value.dtype).view(value.shape)
        at += _aligned(value.nbytes, alignment)
    return found


def fill(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value on the host into a contiguous buffer on the host, and return the buffer.

    One thread copies. torch's copy of more than 32,768 elements starts a team of OpenMP threads. After the copy they go on
    looking for work for milliseconds, on cores that the next code on the host needs.
    """
    value = value.contiguous()
    ctypes.memmove(buffer.data_ptr(), value.data_ptr(), value.nbytes)
    return buffer


def results_of(values: Mapping[int, torch.Tensor], results: Sequence[int], seen: Collection[int]) -> list[torch.Tensor]:
    """Return a method's results. Those in `seen` lie in the host's memory and are copied to the device.

    Otherwise the host might overwrite that memory in its next work, before the caller's queued work has read it.
    """
    return [
        values[number].clone() if number in seen and values[number].device.type == "cuda" else values[number]
        for number in results
    ]


class _PinnedMemory:
    """Bytes of the host, at an address that is also valid on the device (the protocol `__cuda_array_interface__`)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"version": 2, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def _empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Not an inference tensor: it is also written outside inference mode.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A point in the device's queue of work that the host can wait for. On the CPU there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record(current_stream(self._device))

    def wait(self) -> None:
        """Wait until all work that was queued before the last `record` is done."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        if self._event is None:
            return True
        # Another thread's capture would end with an error.
        with side_lock:
            return self._event.query()

    def hold_back(self) -> None:
        """Make what is queued on the current stream from now on wait for it. The host does not wait."""
        if self._event is not None:
            current_stream(self._device).wait_event(self._event)
