"""Values that pass between the device and code on the host.

    send       device -> pinned memory            queued behind the work that gives the value
    arrived                                       the host waits for these copies, and for nothing queued after them
    to_device  host -> pinned memory -> device    the first by the CPU, the second queued before the work that takes the value

So a value is sent as soon as it is there (`departures`), and what the device has to do besides goes on while the host waits
and computes. `Transfers` are a plan's, through static buffers. `send_once` and `to_device_once` are for a single run, whose
sizes need not come again.

Graphs read the buffers on the device themselves, so nothing is copied there a second time. The copies stand outside of the
graphs. Inside, those to the host would need pinned memory that is allocated while a graph is recorded, for only then are its
outputs' sizes known; and each would save the microseconds of one call, where the host waits for the device in any case.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch


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
        self._on_device: dict[int, torch.Tensor] = {}
        self._arrived, self._sent = _Mark(device), _Mark(device)

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        """Queue copies to the host of values on the device; the next step overwrites them.

        Nobody reads those of the last step any more: code on the host has ended when its call returns.
        """
        if values:
            for number, value in values.items():
                self._buffer(self._to_host, number, value, on_host=True).copy_(value, non_blocking=True)
            self._arrived.record()

    def arrived(self, numbers: Collection[int]) -> dict[int, torch.Tensor]:
        """The copies of these values on the host, complete, which were sent in this step."""
        if not numbers:
            return {}
        self._arrived.wait()
        return {number: self._to_host[number] for number in numbers}

    def to_device(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Buffers on the device that hold the values for all work that is queued from now on; the next step overwrites them.

        The last step's copies may still be reading the pinned buffers. What the host has waited for since need not lie behind
        them, since code on the host may take nothing from the device, and the stream may be another one: so they have an
        event of their own. Where several pieces of a step make copies, the last one's event stands for all.
        """
        if not values:
            return {}
        self._sent.wait()
        for number, value in values.items():
            pinned = _fill(self._buffer(self._from_host, number, value, on_host=True), value)
            self._buffer(self._on_device, number, value, on_host=False).copy_(pinned, non_blocking=True)
        self._sent.record()
        return {number: self._on_device[number] for number in values}

    def release(self) -> None:
        """Let the buffers go. torch gives pinned memory to nobody else before the copies that use it have ended."""
        for buffers in (self._to_host, self._from_host, self._on_device):
            buffers.clear()

    def _buffer(
        self, buffers: dict[int, torch.Tensor], number: int, value: torch.Tensor, on_host: bool
    ) -> torch.Tensor:
        buffer = buffers.get(number)
        # What links hand on has the sizes of the method's inputs; a result may have others each time, and no graph reads it.
        if buffer is None or buffer.shape != value.shape:
            where = torch.device("cpu") if on_host else self._device
            pinned = on_host and self._device.type == "cuda"
            buffer = torch.empty(value.shape, dtype=value.dtype, device=where, pin_memory=pinned)
            buffers[number] = buffer
        return buffer


class Sent:
    """Copies on the host of values on the device, by their numbers."""

    def __init__(self, copies: dict[int, torch.Tensor], mark: _Mark) -> None:
        self._copies = copies
        self._mark = mark

    def arrived(self, number: int) -> torch.Tensor:
        """One of them, complete."""
        self._mark.wait()
        return self._copies[number]


def send_once(values: Mapping[int, torch.Tensor], device: torch.device) -> Sent:
    """Queue copies to the host, in memory of their own."""
    copies = {number: _empty_on_host(value, device) for number, value in values.items()}
    for number, copy in copies.items():
        copy.copy_(values[number], non_blocking=True)
    mark = _Mark(device)
    mark.record()
    return Sent(copies, mark)


def to_device_once(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, for all work that is queued from now on."""
    # torch gives the pinned memory to nobody else before the copy has ended.
    return _fill(_empty_on_host(value, device), value).to(device, non_blocking=True)


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


def _fill(pinned: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy what code on the host gave.

    By one thread: torch's copy of more than 32,768 elements starts a team of OpenMP threads, which go on looking for work for
    milliseconds, on the cores that the next code on the host needs.
    """
    value = value.contiguous()
    ctypes.memmove(pinned.data_ptr(), value.data_ptr(), value.nbytes)
    return pinned


def _empty_on_host(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=device.type == "cuda")


class _Mark:
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
