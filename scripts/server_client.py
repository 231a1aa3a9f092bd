"""`ostinato serve` in a process of its own, and a client that can also do what no well-behaved client does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
# Seconds after which a server or a response counts as hung.
PATIENCE = 120
_READY = re.compile(rb"ready after \S+ s: http://\S+:(\d+) serves (\S+), (\d+) sessions of ([\d,]+) tokens")
_DONE = b"data: [DONE]\n\n"


class HungError(Exception):
    """Something took longer than PATIENCE."""


@dataclass(frozen=True)
class Reply:
    """A response.

    Attributes:
        status: 0 if the connection ended before there was one.
        body: what came of the body.
        complete: whether all of it came.
    """

    status: int
    body: bytes = b""
    complete: bool = False

    @classmethod
    def parse(cls, data: bytes) -> Reply:
        """The response that a connection has given up to its end."""
        head, separator, body = data.partition(b"\r\n\r\n")
        if not separator:
            return cls(0)
        status = int(head.split(b" ", 2)[1])
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if fields.get(b"transfer-encoding") != b"chunked":
            return cls(status, body, len(body) == int(fields.get(b"content-length", len(body))))
        found: list[bytes] = []
        while body:
            size, _, rest = body.partition(b"\r\n")
            if size == b"0":
                return cls(status, b"".join(found), True)
            length = int(size or b"0", 16)
            found.append(rest[:length])
            body = rest[length + 2 :]
        return cls(status, b"".join(found))

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_stream(self) -> bool:
        # It may begin with a comment.
        return self.body.startswith((b"data: ", b": "))

    @cached_property
    def events(self) -> list[Any]:
        """The events of a stream, up to its end."""
        texts = self.body.removesuffix(_DONE).split(b"\n\n")
        return [json.loads(text.removeprefix(b"data: ")) for text in texts if text.startswith(b"data: ")]

    @property
    def error(self) -> str | None:
        """What the error says that the response is, or ends with."""
        try:
            last = self.events[-1] if self.is_stream else self.json
            return str(last["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return None

    @property
    def text(self) -> str | None:
        """Text of the first choice; None unless the answer came to its end."""
        if self.status != 200 or not self.complete or self.error is not None:
            return None
        if not self.is_stream:
            choice = self.json["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        first = [one for event in self.events for one in event["choices"] if one["index"] == 0]
        if not self.body.endswith(_DONE) or not first or first[-1]["finish_reason"] is None:
            return None
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in first)


def request(
    path: str, body: Any = None, method: str = "POST", kind: str | None = "application/json", length: int | None = None
) -> bytes:
    """A request as bytes.

    Args:
        body: JSON text, or what becomes that.
        kind: the content type; None: none is said.
        length: the content length that is said; None: the body's.
    """
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    lines.append(f"Content-Length: {len(data) if length is None else length}")
    if kind is not None:
        lines.append(f"Content-Type: {kind}")
    return "\r\n".join([*lines, "", ""]).encode() + data


async def ask(
    port: int, data: bytes, slow_bytes: int = 0, byte_seconds: float = 0.0, late_seconds: float = 0.0
) -> Reply:
    """Send a request, and return the response.

    Args:
        slow_bytes, byte_seconds: number of bytes at the end that go one by one, and the seconds between them.
        late_seconds: how long nothing is read.

    Raises:
        HungError: it does not end.
    """
    reader, writer = await _connect(port, narrow=late_seconds > 0)
    try:
        return await asyncio.wait_for(_exchange(reader, writer, data, slow_bytes, byte_seconds, late_seconds), PATIENCE)
    except asyncio.TimeoutError:
        raise HungError(f"no end after {PATIENCE} s: {data[:300]!r}") from None
    finally:
        writer.transport.abort()


async def leave(port: int, data: bytes, seconds: float | None = None, reset: bool = False) -> bool:
    """Send a request, and go away: when the answer begins, or after some seconds. Returns whether it had begun."""
    reader, writer = await _connect(port)
    try:
        writer.write(data)
        wanted = reader.readuntil(b"data: ") if seconds is None else reader.read(1)
        return bool(await asyncio.wait_for(wanted, PATIENCE if seconds is None else seconds))
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    except asyncio.TimeoutError:
        if seconds is None:
            raise HungError(f"no answer after {PATIENCE} s: {data[:300]!r}") from None
        return False
    finally:
        if reset:
            # The connection ends without a goodbye.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def _connect(port: int, narrow: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not narrow:
        return await asyncio.open_connection(HOST, port)
    connection = socket.socket()
    connection.setblocking(False)
    # Else the system would take megabytes for one who does not read.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(connection, (HOST, port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    return reader, writer


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    data: bytes,
    slow_bytes: int,
    byte_seconds: float,
    late_seconds: float,
) -> Reply:
    received = bytearray()

    async def read() -> None:
        await asyncio.sleep(late_seconds)
        # Where the other side has closed, what it said before counts.
        with suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                received.extend(some)

    reading = asyncio.create_task(read())
    at_once = len(data) - slow_bytes
    writer.write(data[:at_once])
    for byte in data[at_once:]:
        await asyncio.sleep(byte_seconds)
        if received or reading.done():
            break
        writer.write(bytes([byte]))
    await reading
    return Reply.parse(bytes(received))


# --- servers


@dataclass
class Server:
    """A running server.

    Attributes:
        process: its process.
        log: the file with what it writes to stderr.
        port, model: where it listens, and its model's name.
        sessions, max_seq_len: number of sessions, and of tokens that each has room for.
        engine: number of the engine's process.
    """

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0
    model: str = ""
    sessions: int = 0
    max_seq_len: int = 0
    engine: int = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait(self) -> int:
        """Wait until it has ended, and return its exit status. Raises HungError."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise HungError(f"the server has not ended after {PATIENCE} s") from None

    def engine_is_gone(self, seconds: float = 10) -> bool:
        """Whether the engine's process ends within some seconds."""
        end = time.monotonic() + seconds
        while is_running(self.engine):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


@contextmanager
def serving(
    artifact: Path,
    log: Path,
    words: Sequence[object] = (),
    port: int | None = 0,
    patience: float = PATIENCE,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server until the end of the context.

    Args:
        log: the file for what it writes to stderr.
        words: more of its command line.
        port: 0: any free one. None: its default.
        patience: seconds within which it must begin.
        environment: variables beside those of this process.

    Raises:
        HungError: it did not begin.
    """
    command = [sys.executable, "-m", "ostinato.runner.cli", "serve", str(artifact), *map(str, words)]
    command += [] if port is None else ["--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, **(environment or {})})
    server = Server(process, log)
    try:
        end = time.monotonic() + patience
        while not (found := _READY.search(log.read_bytes())):
            if process.poll() is not None or time.monotonic() > end:
                raise HungError(f"the server did not begin:\n{log.read_text()}")
            time.sleep(0.05)
        server.port, server.model, server.sessions = int(found[1]), found[2].decode(), int(found[3])
        server.max_seq_len = int(found[4].replace(b",", b""))
        server.engine = _child_of(process.pid)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        # The engine's process ends when the server's has.
        if not server.engine_is_gone():
            os.kill(server.engine, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and is waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def memory_of(pid: int) -> int:
    """Bytes of memory that are a process's own."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _child_of(pid: int) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"ostinato.runner.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise HungError(f"the server {pid} has no engine")
