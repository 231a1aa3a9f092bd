"""The way in: keys, limits of bodies, and requests that come while the server ends."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.delegate.errors import OptionError
from ostinato.runner.openai_bodies import error_body

KEY_VARIABLE = "OSTINATO_API_KEY"
MAX_BODY_BYTES = 32 << 20
# A body that comes slower keeps nobody's session, but a connection.
BODY_SECONDS = 60.0
# What a load balancer and Prometheus ask for, who have no key. They say nothing of prompts.
OPEN_PATHS = ("/health", "/metrics")


class _RefusedError(Exception):
    """A request that does not come in: its status, code and message."""

    def __init__(self, status: int, code: str, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind


class Gate:
    """Lets requests in to an app, with their whole body.

    The app finds in `request.state`: `id`, a name of the request that is also in the response's `X-Request-Id`, and `owner`,
    a hash of the key that it gave.

    Args:
        app: the app.
        keys: one of these must be given as `Authorization: Bearer KEY`; none: no key is asked for.
        max_body_bytes, body_seconds: the largest body, and how long it may take to come.

    Attributes:
        draining: whether new requests are refused.
        active: number of requests that are being answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._max_body_bytes, self._body_seconds = max_body_bytes, body_seconds
        self.draining = False
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req-{secrets.token_hex(8)}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        counted = scope["path"] not in OPEN_PATHS
        self.active += counted
        try:
            state = scope.setdefault("state", {})
            state["id"], state["owner"] = name, self._owner(scope)
            if self.draining and counted:
                raise _RefusedError(503, "shutting_down", "the server ends: it takes no new requests", "server_error")
            body = await self._body(scope, receive)
            if scope["method"] == "HEAD":
                # It is answered as GET is, and uvicorn, which has the scope as it was, sends no body.
                scope = {**scope, "method": "GET"}
            await self._app(scope, _with_body(body, receive), send_named)
        except _RefusedError as refused:
            await _refuse(refused, send_named)
        finally:
            self.active -= counted

    def _owner(self, scope: Scope) -> str:
        """Hash of the key that was given; "" if none is asked for. Raises _RefusedError: none, or a wrong one."""
        if not self._keys:
            return ""
        given = b"".join(value for header, value in scope["headers"] if header == b"authorization")
        kind, _, given = given.partition(b" ")
        # Each one is compared, so that the time says nothing.
        found = [key for key in self._keys if hmac.compare_digest(key, given.strip())]
        if kind.lower() == b"bearer" and found:
            return hashlib.sha256(found[0]).hexdigest()
        if scope["path"] in OPEN_PATHS:
            return ""
        raise _RefusedError(401, "invalid_api_key", "give a key as `Authorization: Bearer KEY`", "authentication_error")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises _RefusedError: it is too large, too slow, or something else than JSON."""
        if scope["method"] in ("GET", "HEAD"):
            return b""
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self._body_seconds)
        except asyncio.TimeoutError:
            raise _RefusedError(408, "timeout", f"the body did not come in {self._body_seconds:g} s") from None
        # A page in a browser can send other types to a server on this machine without asking it first.
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and kind != b"application/json":
            raise _RefusedError(415, "unsupported_media_type", "the body must have `Content-Type: application/json`")
        return body

    async def _read(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _RefusedError(400, "disconnected", "the body did not come to its end")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                # The error's traceback would keep it until there is a collection of garbage.
                body.clear()
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> _RefusedError:
        return _RefusedError(
            413, "body_too_large", f"the body has more than {self._max_body_bytes:,} bytes, which is the most"
        )


def read_keys(path: Path | None) -> list[str]:
    """Return the keys of a file, one on each line, or of the environment. None: there are none.

    Raises:
        OptionError: the file cannot be read, or has no key.
    """
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return [key] if key else []
    try:
        keys = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file: {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not keys:
        raise OptionError(f"--api-key-file: {path} has no key")
    return keys


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read, and then what comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _refuse(refused: _RefusedError, send: Send) -> None:
    body = msgspec.json.encode(error_body(refused.code, str(refused), refused.kind))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        # The rest of the body is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
