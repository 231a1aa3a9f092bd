"""Numbers in rows of state that the host writes, such as parameters of sampling. It knows them, and writes what differs."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping

import torch

from ostinato.delegate.torch_internals import copy_each, writes_to

# Each number's place in memory on the host, in bytes, and how it is written there.
_PLACE = 8
_FORMATS = {torch.int64: "q", torch.float32: "f"}


class RowNumbers:
    """Numbers of rows, in buffers that have one for each row.

    What is written through the buffers themselves, or through views of them, is noticed: then all rows are written anew. Who
    writes past them says so: `copied` and `forget`.

    After a wait for the GPU each operator takes the host 10 to 20 us. So several numbers take two, however many they are: a
    copy to the device, and one from there to all buffers.

    Args:
        buffers: [rows] float32 or int64 by name, all on one device.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._buffers = dict(buffers)
        # Row -> its numbers, as far as they are known.
        self._known: dict[int, dict[str, float]] = {}
        self._writes = self._count_writes()
        with torch.inference_mode(False):
            self._on_host = torch.zeros(_PLACE * len(buffers), dtype=torch.uint8)
            on_device = torch.empty_like(self._on_host, device=next((one.device for one in buffers.values()), None))
        self._on_device = on_device if on_device.device.type != "cpu" else self._on_host
        self._memory = self._on_host.numpy().data
        self._places = {name: _PLACE * place for place, name in enumerate(buffers)}
        self._sources = {
            name: self._on_device[place : place + buffers[name].itemsize] for name, place in self._places.items()
        }
        self._targets = functools.lru_cache(maxsize=512)(functools.partial(_bytes_of_row, self._buffers))

    def write(self, row: int, values: Mapping[str, float]) -> None:
        """Write numbers that the host alone changes, by the names of their buffers."""
        known = self._known_of(row)
        other = {name: value for name, value in values.items() if known.get(name) != value}
        if other:
            # If writing fails, the row is not known.
            self._known.pop(row, None)
            self._write(row, other)
            self._known[row] = {**known, **values}

    def write_all(self, values: Mapping[str, float]) -> None:
        """Write the same numbers to all rows, as `write` does: what a row has before it is written by itself."""
        self._notice_writes()
        for name, value in values.items():
            self._buffers[name].fill_(value)
        for row in range(min(map(len, self._buffers.values()))):
            self._known[row] = {**self._known.get(row, {}), **values}
        self._writes = self._count_writes()

    def overwrite(self, row: int, values: Mapping[str, float]) -> None:
        """Write numbers that steps change too."""
        self._notice_writes()
        self._write(row, values)

    def copied(self, source: int, target: int) -> None:
        """Note that a whole row was copied to another one."""
        self._known[target] = dict(self._known_of(source))

    def forget(self, row: int) -> None:
        """Note that a row was written by others."""
        self._known.pop(row, None)

    def _known_of(self, row: int) -> dict[str, float]:
        self._notice_writes()
        return self._known.get(row, {})

    def _notice_writes(self) -> None:
        """Forget all rows if others have written the buffers since the last write here."""
        if self._writes != self._count_writes():
            self._known.clear()

    def _write(self, row: int, values: Mapping[str, float]) -> None:
        if len(values) == 1:
            ((name, value),) = values.items()
            self._buffers[name][row].fill_(value)
        else:
            for name, value in values.items():
                struct.pack_into(_FORMATS[self._buffers[name].dtype], self._memory, self._places[name], value)
            if self._on_device is not self._on_host:
                # This memory is not pinned, so the driver has read it when the call returns, and it can be filled again.
                self._on_device.copy_(self._on_host, non_blocking=True)
            targets = self._targets(row)
            copy_each([targets[name] for name in values], [self._sources[name] for name in values])
        self._writes = self._count_writes()

    def _count_writes(self) -> list[int]:
        return [writes_to(buffer) for buffer in self._buffers.values()]


def _bytes_of_row(buffers: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    with torch.inference_mode(False):
        return {name: buffer[row : row + 1].view(torch.uint8) for name, buffer in buffers.items()}
