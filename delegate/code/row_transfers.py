"""Rows of state on their way to the host's memory and back, beside other work of the device.

A GPU gathers rows into one buffer, which one copy takes to pinned memory, and the other way round: 32,000 tokens of a model
with ten layers of attention are 10,000 places in its caches, and a copy of each would take the host 40 ms. There are two such
buffers and two streams: while the bus copies one, the GPU gathers into the other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass
class _Staging:
    """Memory of the device that holds one batch between rows and bus.

    Attributes:
        filled, free: when the last batch is in, and when it is out again.
        memory: uint8, as long as the longest batch so far.
    """

    filled: Mark
    free: Mark
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    @contextmanager
    def filling(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            self.free.hold_back()
            yield
            self.filled.record()

    @contextmanager
    def emptying(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            self.filled.hold_back()
            yield
            self.free.record()


class _OnGpu:
    """Streams and staging of transfers on a GPU: one stream gathers and scatters rows, the other one copies over the bus."""

    def __init__(self, device: torch.device, used: UsedStreams) -> None:
        self.rows, self.bus = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self.rows, self.bus):
            with torch.cuda.stream(stream):
                used.note()
        self._device = device
        self._staging = [_Staging(Mark(device), Mark(device)) for _ in range(2)]
        self._copied, self._turn = Mark(device), Mark(device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy over the bus inside this context, after others' copies that wait, such as that of a step's token.

        The hardware goes on with a stream that has work which waits for nothing: then a step took as long as an offload, 9.5
        ms. So each copy waits for a mark that the other stream sets when the copy before has ended.
        """
        with torch.cuda.stream(self.rows):
            self._copied.hold_back()
            self._turn.record()
        with torch.cuda.stream(self.bus):
            self._turn.hold_back()
            yield
            self._copied.record()

    def staging(self, nbytes: int) -> tuple[_Staging, torch.Tensor]:
        """The staging that was not used last, and so much of its memory."""
        self._staging.reverse()
        chosen = self._staging[0]
        if chosen.memory.nbytes < nbytes:
            # Its memory may be given to others when nothing reads it any more.
            chosen.free.wait()
            # Torch gives it to nobody else's work, which either stream might not wait for.
            with torch.cuda.stream(self.bus):
                chosen.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return chosen, chosen.memory[:nbytes]


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
        self._gpu: _OnGpu | None = None

    def empty(self, chosen: Chosen) -> HostRows:
        """Make room on the host for these rows. The data are whatever the memory holds."""
        with side_lock, torch.inference_mode(False):
            return HostRows([self._room(batch) for batch in batches(chosen)], Mark(self._device))

    def to_host(self, chosen: Chosen) -> HostRows:
        """Begin to copy rows to the host, and return where they will be."""
        host = HostRows([], Mark(self._device))
        with self._begun() as gpu:
            places = _PlacesOf(chosen)
            for batch in batches(chosen):
                data = self._room(batch)
                host.data.append(data)
                if gpu is None or batch.device.type == "cpu":
                    # In a program for a GPU: state of code on the host, which has ended with its step.
                    places.read(batch, data)
                    continue
                staging, memory = gpu.staging(batch.nbytes)
                with staging.filling(gpu.rows):
                    places.read(batch, memory)
                with gpu.copying(), staging.emptying(gpu.bus):
                    data.copy_(memory, non_blocking=True)
            if gpu is not None:
                with torch.cuda.stream(gpu.bus):
                    host.mark.record()
        return host

    def to_device(self, host: HostRows, chosen: Chosen) -> Mark:
        """Begin to copy what `to_host` returned for as many rows to these rows, and return when they may be used."""
        mark = Mark(self._device)
        with self._begun() as gpu:
            places = _PlacesOf(chosen)
            for batch, data in zip(batches(chosen), host.data, strict=True):
                if gpu is None or batch.device.type == "cpu":
                    places.write(batch, data)
                    continue
                staging, memory = gpu.staging(batch.nbytes)
                with gpu.copying(), staging.filling(gpu.bus):
                    memory.copy_(data, non_blocking=True)
                with staging.emptying(gpu.rows):
                    places.write(batch, memory)
            if gpu is not None:
                with torch.cuda.stream(gpu.rows):
                    mark.record()
        return mark

    def close(self) -> None:
        """Free the memory on the device. The program has waited for its streams."""
        self._gpu = None

    def _room(self, batch: Batch) -> torch.Tensor:
        return torch.empty(batch.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    @contextmanager
    def _begun(self) -> Iterator[_OnGpu | None]:
        """Let rows be read and written after all work that the current stream has so far. None: at once, by the CPU."""
        if self._device.type == "cpu":
            yield None
            return
        # During a capture in another thread no pinned memory may be made or freed.
        with side_lock, torch.cuda.device(self._device), torch.inference_mode(False):
            if self._gpu is None:
                self._gpu = _OnGpu(self._device, self._used)
            self._gpu.rows.wait_stream(current_stream(self._device))
            yield self._gpu


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
