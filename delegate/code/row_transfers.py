"""Rows of state on their way to the host's memory and back, beside other work of the device.

A GPU gathers rows into one buffer, which one copy takes to pinned memory, and the other way round: 32,000 tokens of a model
with ten layers of attention are 10,000 places in its caches, and a copy of each would take the host 40 ms. All of it is on a
stream of its own. The gathering takes a few percent of the time of the copy over the bus, so one buffer is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ostinato.delegate.constants.rows import Piece, StateRows

from .side_stream import side_lock
from .transfers import Mark
from .used_streams import UsedStreams, current_stream

# Rows, and the numbers of those that are copied.
Chosen = Sequence[tuple[StateRows, Sequence[int]]]


@dataclass
class HostRows:
    """Rows of state in the host's memory, pinned for a GPU.

    Attributes:
        data: [n] uint8 each, in the order of `StateRows.pieces`.
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
        used: streams of the program, to which the stream of transfers is added.
    """

    def __init__(self, device: torch.device, used: UsedStreams) -> None:
        self._device = device
        self._used = used
        self._stream: torch.cuda.Stream | None = None
        # Memory of the device in which a piece is gathered.
        self._staging: torch.Tensor | None = None

    def empty(self, chosen: Chosen) -> HostRows:
        """Make room on the host for these rows. The data are whatever the memory holds."""
        with side_lock, torch.inference_mode(False):
            pinned = self._device.type == "cuda"
            data = [
                torch.empty(piece.nbytes, dtype=torch.uint8, pin_memory=pinned)
                for rows, numbers in chosen
                for piece in rows.pieces(len(numbers))
            ]
            return HostRows(data, Mark(self._device))

    def to_host(self, chosen: Chosen) -> HostRows:
        """Begin to copy rows to the host, and return where they will be."""
        host = self.empty(chosen)

        def read(piece: Piece, rows: torch.Tensor, data: torch.Tensor, staging: torch.Tensor) -> None:
            piece.read(rows, staging)
            if staging is not data:
                data.copy_(staging, non_blocking=True)

        self._each(chosen, host, read, host.mark)
        return host

    def to_device(self, host: HostRows, chosen: Chosen) -> Mark:
        """Begin to copy what `to_host` returned for as many rows to these rows, and return when they may be used."""

        def write(piece: Piece, rows: torch.Tensor, data: torch.Tensor, staging: torch.Tensor) -> None:
            if staging is not data:
                staging.copy_(data, non_blocking=True)
            piece.write(rows, staging)

        mark = Mark(self._device)
        self._each(chosen, host, write, mark)
        return mark

    def close(self) -> None:
        """Free the memory on the device. The program has waited for its streams."""
        self._staging = None

    def _each(
        self,
        chosen: Chosen,
        host: HostRows,
        copy: Callable[[Piece, torch.Tensor, torch.Tensor, torch.Tensor], None],
        mark: Mark,
    ) -> None:
        """Call `copy` for each piece with the numbers of the rows, the memory on the host, and as much of the device's. Then
        record the mark."""
        pieces = [(rows.pieces(len(numbers)), numbers) for rows, numbers in chosen]
        if self._device.type == "cpu":
            data = iter(host.data)
            for some, numbers in pieces:
                index = torch.tensor(numbers, dtype=torch.int64)
                for piece in some:
                    memory = next(data)
                    copy(piece, index, memory, memory)
            return
        # During a capture in another thread no pinned memory may be made or freed.
        with side_lock, torch.cuda.device(self._device), torch.inference_mode(False):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._used.note()
                most = max((one.nbytes for one in host.data), default=0)
                if self._staging is None or self._staging.nbytes < most:
                    self._staging = torch.empty(most, dtype=torch.uint8, device=self._device)
                data = iter(host.data)
                for some, numbers in pieces:
                    index = torch.tensor(numbers, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
                    for piece in some:
                        memory = next(data)
                        if piece.buffers.is_cuda:
                            copy(piece, index, memory, self._staging[: memory.nbytes])
                        else:
                            # State of code on the host, which has ended with its step.
                            copy(piece, torch.tensor(numbers, dtype=torch.int64), memory, memory)
                mark.record()
