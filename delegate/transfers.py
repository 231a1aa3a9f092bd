"""Values that pass between the device and code on the host while a plan runs, through static buffers.

    to_host    device -> pinned memory            queued behind the work that gives the value; the host waits for these copies
    to_device  host -> pinned memory -> device    the first by the CPU, the second queued before the work that takes the value

Graphs read the buffers on the device themselves, so nothing is copied there a second time. The copies stand outside of the
graphs. Inside, those to the host would need pinned memory that is allocated while a graph is recorded, for only then are its
outputs' sizes known; and each would save the microseconds of one call, where the host waits for the device in any case.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


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

    def to_host(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies on the host of values on the device, complete; the next step overwrites them.

        Nobody reads those of the last step any more: code on the host has ended when its call returns.
        """
        if not values:
            return {}
        for number, value in values.items():
            self._buffer(self._to_host, number, value, on_host=True).copy_(value, non_blocking=True)
        self._arrived.record()
        self._arrived.wait()
        return {number: self._to_host[number] for number in values}

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
            pinned = self._buffer(self._from_host, number, value, on_host=True).copy_(value)
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
