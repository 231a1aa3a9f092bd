"""Rows of state on their way to the host's memory and back, beside other work of the device.

A GPU gathers rows into one buffer, which one copy takes to pinned memory, and the other way round: 32,000 tokens of a model
with ten layers of attention are 10,000 places in its caches, and a copy of each would take the host 40 ms.

All of it is in one stream, so the bus rests while rows are gathered. With a second stream and a second buffer it would not,
and 414 MB would go over it in 7.9 ms, not in 8.4. But the bus takes one stream's copies one after the other while they wait
for nothing, and those of a step, 8 bytes, behind them: a step beside them took 4.9 ms, not 0.5 (H100, 2026-11-26).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ostinato.delegate.constants.rows import Batch, Chosen, Places, batches, places_of

from .side_stream import side_lock
from .transfers import Mark
from .used_streams import UsedStreams, current_stream


@dataclass
class HostRows:
    """Rows of state in the host's memory, pinned for a GPU.

    Attributes:
        data: [n] uint8 each, one for each batch.
        mark: when the data are complete.
    """

    data: list[torch.Tensor]
    mark: Mark

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.data)


class RowTransfers:
    """Copies rows between the device and the host.

    A transfer begins after all work that the current stream has so far. Later work of that stream does not wait for it. Until
    its mark is done, nobody may write rows that go to the host, or use rows that come from it.

    Args:
        device: the program's device. On the CPU a transfer is done when its call returns.
        used: streams of the program, to which the streams of transfers are added.
    """

    def __init__(self, device: torch.device, used: UsedStreams) -> None:
        self._device = device
        self._used = used
        # Both are made for the first transfer. The memory holds one batch between rows and bus.
        self._stream: torch.cuda.Stream | None = None
        self._staging: torch.Tensor | None = None

    def empty(self, chosen: Chosen) -> HostRows:
        """Make room on the host for these rows. The data are whatever the memory holds."""
        with side_lock, torch.inference_mode(False):
            return HostRows([self._room(batch) for batch in batches(chosen)], Mark(self._device))

    def to_host(self, chosen: Chosen) -> HostRows:
        """Begin to copy rows to the host, and return where they will be."""
        host = HostRows([], Mark(self._device))
        with self._begun():
            places = _PlacesOf(chosen)
            for batch in batches(chosen):
                data = self._room(batch)
                host.data.append(data)
                if batch.device.type == "cpu":
                    # In a program for a GPU: state of code on the host, which has ended with its step.
                    places.read(batch, data)
                    continue
                memory = self._memory(batch)
                places.read(batch, memory)
                data.copy_(memory, non_blocking=True)
            host.mark.record()
        return host

    def to_device(self, host: HostRows, chosen: Chosen) -> Mark:
        """Begin to copy what `to_host` returned for as many rows to these rows, and return when they may be used."""
        mark = Mark(self._device)
        with self._begun():
            places = _PlacesOf(chosen)
            for batch, data in zip(batches(chosen), host.data, strict=True):
                if batch.device.type == "cpu":
                    places.write(batch, data)
                    continue
                memory = self._memory(batch)
                memory.copy_(data, non_blocking=True)
                places.write(batch, memory)
            mark.record()
        return mark

    def close(self) -> None:
        """Free the memory on the device. The program has waited for its streams."""
        self._staging = None

    def _room(self, batch: Batch) -> torch.Tensor:
        return torch.empty(batch.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _memory(self, batch: Batch) -> torch.Tensor:
        """Memory of the device for a batch, after the batch before it."""
        if self._staging is None or self._staging.nbytes < batch.nbytes:
            self._staging = torch.empty(batch.nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[: batch.nbytes]

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Let rows be read and written after all work that the current stream has so far; on the CPU at once."""
        if self._device.type == "cpu":
            yield
            return
        # During a capture in another thread no pinned memory may be made or freed.
        with side_lock, torch.cuda.device(self._device), torch.inference_mode(False):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._used.note()
                yield


class _PlacesOf:
    """Where the chosen rows are, as each batch's device needs it."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._found: dict[tuple[int, torch.device], Places] = {}

    def read(self, batch: Batch, data: torch.Tensor) -> None:
        """Gather a batch into `data`, [nbytes] uint8 on its device."""
        for number, piece, begin in batch.parts:
            piece.read(self._of(number, batch.device), data[begin : begin + piece.nbytes])

    def write(self, batch: Batch, data: torch.Tensor) -> None:
        """Scatter what `read` gives."""
        for number, piece, begin in batch.parts:
            piece.write(self._of(number, batch.device), data[begin : begin + piece.nbytes])

    def _of(self, number: int, device: torch.device) -> Places:
        if (number, device) not in self._found:
            self._found[number, device] = places_of(self._chosen[number][1], device)
        return self._found[number, device]
