"""Limits of a connection: time and bytes that the gate, which sees whole requests, cannot limit."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
# Beside a body, which the gate limits: what is around its chunks, and the fields behind it, of which nobody here reads any.
MAX_OTHER_BYTES = 16 << 20


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's that ends where uvicorn waits for ever and keeps what comes.

    It ends if no head of a request is complete in time: from its begin, or from the first byte behind a response. And it ends
    if a head, or what comes beside a body, has too many bytes.

    Attributes:
        head_seconds: how long a head may take.
    """

    # As long as an idle connection is kept: those of a load balancer may be open before they are used.
    head_seconds = 75.0
    _timer: asyncio.TimerHandle | None = None
    _in_head = False
    # Without the piece in which the request began, nearly all of which may be the one before.
    _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > (MAX_HEAD_BYTES if self._in_head else MAX_OTHER_BYTES) and not self.transport.is_closing():
            self.send_400_response("The request is too large.")

    def on_message_begin(self) -> None:
        self._in_head, self._bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes -= len(body)
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        # uvicorn's own timer, which has the same end, is for connections on which nothing comes: a byte stops it.
        self._timer = self.loop.call_later(self.head_seconds, self.timeout_keep_alive_handler)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
