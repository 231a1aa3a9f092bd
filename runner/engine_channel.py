"""Messages over a pair of sockets between an engine's process and its owner: frames with their length in front."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

from .scheduler.messages import ToEngine, decode_to_engine, encode

# Bytes of the length in front of a frame, little-endian.
LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
# Bytes that may wait for the owner to read: some 150,000 tokens. An owner that is stopped would have ever more wait.
_MOST_LEAVING = 1 << 22


def frame(message: Any) -> bytes:
    """A message as its bytes on the socket."""
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class EngineChannel:
    """The engine's end. It never waits for the other end to read: what does not fit the socket is sent later.

    Attributes:
        is_open: whether the owner is there.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._arrived = bytearray()
        self._leaving = bytearray()
        self.is_open = True

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the owner that no step should add to it."""
        return len(self._leaving) > _MOST_LEAVING

    def send(self, message: Any) -> None:
        """Send a message, now or when the owner has read those before it."""
        self._leaving += frame(message)
        self._flush()

    def receive(self, seconds: float | None) -> Iterator[ToEngine]:
        """Yield the messages that have arrived. If none have, wait so long, or if it is None, until there is something or the
        owner is gone."""
        if seconds != 0:
            select.select([self._connection], [self._connection] if self._leaving else [], [], seconds)
        self._flush()
        while self.is_open:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = bool(data)
            self._arrived += data
        while len(self._arrived) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._arrived[:LENGTH_BYTES], "little")
            if len(self._arrived) < end:
                return
            message = decode_to_engine(self._arrived[LENGTH_BYTES:end])
            del self._arrived[:end]
            yield message

    def drain(self) -> None:
        """Wait until the owner has read everything, or is gone."""
        while self._leaving and self.is_open:
            select.select([], [self._connection], [])
            self._flush()

    def _flush(self) -> None:
        while self._leaving and self.is_open:
            try:
                count = self._connection.send(self._leaving)
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False
                return
            del self._leaving[:count]
