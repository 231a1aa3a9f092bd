"""The way in: keys, limits of bodies, names of requests, and the server's end, all over real connections."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn
from starlette.types import Receive, Scope, Send

from ostinato.delegate.errors import OptionError
from ostinato.runner.server.connections import MAX_HEAD_BYTES, MAX_OTHER_BYTES, Connection
from ostinato.runner.server.gate import KEY_VARIABLE, MAX_BODY_BYTES, OPEN_PATHS, Gate, read_keys

from ...processes import PATIENCE
from .conftest import QUESTION, Server, serving

KEYS = ("first-key", "second-key")
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


async def tells(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers with what the gate let in."""
    found = {**scope["state"], "bytes": len((await receive())["body"])}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


@dataclass
class Gated:
    """A gate before an app that tells what comes through, in a server of its own."""

    gate: Gate
    port: int
    limits: type[Connection]

    def get(self, path: str = "/v1/models", **headers: str) -> requests.Response:
        return requests.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=PATIENCE)

    def post(self, data: Any, **headers: str) -> requests.Response:
        return requests.post(f"http://127.0.0.1:{self.port}{CHAT}", data, headers=JSON | headers, timeout=PATIENCE)


@contextmanager
def gated(head_seconds: float = PATIENCE, **options: Any) -> Iterator[Gated]:
    class Limited(Connection):
        pass

    Limited.head_seconds = head_seconds
    gate = Gate(tells, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(gate, http=Limited, lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Gated(gate, listener.getsockname()[1], Limited)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Gated]:
    with gated(keys=KEYS) as found:
        yield found


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        yield connection


def head(port: int, *lines: str) -> bytes:
    """The head of a chat's request."""
    return "\r\n".join((f"POST {CHAT} HTTP/1.1", f"Host: 127.0.0.1:{port}", *lines, "", "")).encode()


def reply(connection: socket.socket) -> bytes:
    """All that comes until the other side closes. It may do so before it has read all."""
    found = b""
    with suppress(ConnectionResetError):
        while some := connection.recv(1 << 16):
            found += some
    return found


def error_of(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


# --- keys


@pytest.mark.parametrize(
    "given", ["Bearer first-key", "Bearer second-key", "bearer first-key", "BEARER first-key", "Bearer  first-key"]
)
def test_a_right_key(keyed: Gated, given: str) -> None:
    assert keyed.get(Authorization=given).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        *(
            "Bearer first-ke",
            "Bearer first-keys",
            "Bearer FIRST-KEY",
            "Bearer third-key",
            "Bearer first-key second-key",
        ),
        *("Bearer", "Bearer \xff", "", "first-key", "Basic first-key", "Bearerfirst-key", "Bearer first-key,"),
        "Basic Zmlyc3Qta2V5Og==",
        None,
    ],
)
def test_no_key_or_a_wrong_one(keyed: Gated, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for answer in (keyed.get(**headers), keyed.post(b"{}", **headers), keyed.get("/health/", **headers)):
        assert error_of(answer) == (401, "invalid_api_key")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "first-key" not in answer.text
    for path in OPEN_PATHS:
        answer = keyed.get(path, **headers)
        assert (answer.status_code, answer.json()["owner"]) == (200, "")


def test_what_comes_with_a_key_belongs_to_its_hash(keyed: Gated) -> None:
    for path in ("/v1/models", *OPEN_PATHS):
        owners = [keyed.get(path, Authorization=f"Bearer {key}").json()["owner"] for key in KEYS]
        assert owners == [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]


def test_without_keys_none_is_asked_for() -> None:
    with gated() as found:
        for given in ({}, {"Authorization": "Bearer any"}):
            answer = found.get(**given)
            assert (answer.status_code, answer.json()["owner"]) == (200, "")


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_keys(None) == []
    monkeypatch.setenv(KEY_VARIABLE, " of-the-environment\n")
    assert read_keys(None) == ["of-the-environment"]
    monkeypatch.setenv(KEY_VARIABLE, " ")
    assert read_keys(None) == []
    path = tmp_path / "keys"
    path.write_text("first-key\n\n  second-key\r\n")
    assert read_keys(path) == [*KEYS]
    for data, says in ((b"", "has no key"), (b"\n \n", "has no key"), (b"\xff\xfe", "cannot be read")):
        path.write_bytes(data)
        with pytest.raises(OptionError, match=f"--api-key-file: {path} {says}"):
            read_keys(path)
    with pytest.raises(OptionError, match="none cannot be read: No such file"):
        read_keys(tmp_path / "none")


# --- bodies


def test_the_largest_body() -> None:
    with gated(max_body_bytes=1000) as found:
        for data in (b" " * 1000, iter([b" " * 600, b" " * 400])):
            assert found.post(data).json()["bytes"] == 1000
        for data in (b" " * 1001, iter([b" " * 600, b" " * 401])):
            answer = found.post(data)
            assert error_of(answer) == (413, "body_too_large")
            assert answer.json()["error"]["message"] == "the body has more than 1,000 bytes, which is the most"
            assert answer.headers["Connection"] == "close"


def test_a_body_that_grows_over_the_limit(server: Server) -> None:
    """Its length is not said, and its last chunk is not there: it is refused when it has become too large."""
    port = port_of(server)
    with connected(port) as connection:
        connection.sendall(head(port, "Content-Type: application/json", "Transfer-Encoding: chunked"))
        for size in (MAX_BODY_BYTES, 1):
            connection.sendall(b"%x\r\n%b\r\n" % (size, b" " * size))
        status, _, rest = reply(connection).partition(b"\r\n")
        assert status.startswith(b"HTTP/1.1 413") and b"more than 33,554,432 bytes" in rest
    # A length that is said is not waited for.
    with connected(port) as connection:
        connection.sendall(head(port, f"Content-Length: {MAX_BODY_BYTES + 1}"))
        assert reply(connection).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "length", ["x", "-2", "+2", "2.0", "0x2", "2_0", "2, 2", "", "9" * 30, "2\r\nContent-Length: 3"]
)
def test_a_length_that_is_none(server: Server, length: str) -> None:
    """The parser refuses it before there is a request."""
    port = port_of(server)
    with connected(port) as connection:
        connection.sendall(head(port, "Content-Type: application/json", f"Content-Length: {length}") + b"{}")
        assert reply(connection).startswith(b"HTTP/1.1 400")


def test_a_body_that_does_not_come() -> None:
    with gated(body_seconds=0.05) as found, connected(found.port) as connection:
        connection.sendall(head(found.port, "Content-Type: application/json", "Content-Length: 2") + b"{")
        status, _, rest = reply(connection).partition(b"\r\n")
        assert status.startswith(b"HTTP/1.1 408") and b"the body did not come in 0.05 s" in rest
        assert found.gate.active == 0


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonl"])
def test_another_type_of_body(server: Server, kind: str | None) -> None:
    """Pages in a browser can send these without being asked. So they must not be read as JSON."""
    body = json.dumps({"messages": QUESTION}).encode()
    answer = requests.post(server.url + CHAT, body, headers={"Content-Type": kind}, timeout=PATIENCE)  # type: ignore[dict-item]
    assert error_of(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_types_of_json(server: Server, kind: str) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()
    assert requests.post(server.url + CHAT, body, headers={"Content-Type": kind}, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"null"])
def test_no_body(server: Server, path: str, body: bytes) -> None:
    answer = requests.post(server.url + path, body, headers=JSON, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "there is no body: send a JSON object")


# --- heads


BEGUN = (b"\r\n", b"P", b"POST /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: a")


@pytest.mark.parametrize("begun", [b"", *BEGUN])
def test_a_head_that_does_not_come(begun: bytes) -> None:
    with gated(head_seconds=0.05) as found, connected(found.port) as connection:
        connection.sendall(begun)
        assert reply(connection) == b""


@pytest.mark.parametrize("begun", BEGUN)
def test_a_second_head_that_does_not_come(begun: bytes) -> None:
    """uvicorn has a limit of its own for what comes behind a response, until there is one byte."""
    with gated() as found, connected(found.port) as connection:
        connection.sendall(head(found.port, "Content-Type: application/json", "Content-Length: 2") + b"{}")
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += connection.recv(1 << 16)
        found.limits.head_seconds = 0.05
        connection.sendall(begun)
        assert reply(connection) == b""


def test_a_head_in_time_ends_the_limit() -> None:
    """A body, and an answer, may take longer."""
    with gated(head_seconds=1) as found, connected(found.port) as late:
        lines = ("Content-Type: application/json", "Content-Length: 2", "Connection: close", "Expect: 100-continue")
        late.sendall(head(found.port, *lines))
        assert late.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        # Another one that begins later is over its limit.
        with connected(found.port) as other:
            assert reply(other) == b""
        late.sendall(b"{}")
        assert reply(late).startswith(b"HTTP/1.1 200")


def test_a_refused_body_that_goes_on_for_ever() -> None:
    """Nobody reads it, and it comes in time."""
    with gated(keys=KEYS) as found, connected(found.port) as connection:
        connection.sendall(head(found.port, "Transfer-Encoding: chunked"))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")
        found.limits.head_seconds = 0.05
        with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
            while True:
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")


def test_a_head_that_is_too_large(server: Server) -> None:
    port = port_of(server)
    for begin in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES):
        with connected(port) as connection:
            # Its first piece does not count, and has 256 KiB at most.
            connection.sendall(begin + b"x" * (MAX_HEAD_BYTES + (1 << 18)))
            assert reply(connection).startswith(b"HTTP/1.1 400")
    large = {"X-Large": "x" * (MAX_HEAD_BYTES - 1000)}
    assert requests.get(f"{server.url}/health", headers=large, timeout=PATIENCE).status_code == 200


def test_what_comes_behind_a_body(server: Server) -> None:
    """Fields may stand there, which nobody reads. uvicorn keeps them."""
    port, body = port_of(server), json.dumps({"messages": QUESTION, "temperature": 0}).encode()
    chunked = b"%x\r\n%b\r\n0\r\nX-Behind: " % (len(body), body)
    lines = ("Content-Type: application/json", "Transfer-Encoding: chunked", "Connection: close")
    with connected(port) as connection:
        connection.sendall(head(port, *lines) + chunked + b"x\r\n\r\n")
        assert b'"content":"Paris"' in reply(connection)
    with connected(port) as connection:
        connection.sendall(head(port, *lines) + chunked + b"x" * (MAX_OTHER_BYTES + (1 << 18)))
        assert reply(connection).startswith(b"HTTP/1.1 400")


def test_more_connections_than_files(server: Server) -> None:
    """libuv closes those for which there is no file, and goes on when there is one again."""
    pid, port = server.process.pid, port_of(server)
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    files = max(map(int, os.listdir(f"/proc/{pid}/fd")))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 8, limit[1]))
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(connected(port)) for _ in range(40)]
            assert reply(connections[-1]) == b""
            connections[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                connections[0].recv(1)
        status = 0
        while status != 200:
            with suppress(requests.ConnectionError):
                status = requests.get(f"{server.url}/health", timeout=PATIENCE).status_code
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


# --- names


def test_every_response_has_the_name_of_its_request(server: Server) -> None:
    url = server.url
    chat: Any = {"messages": QUESTION, "max_tokens": 1}
    answers = [
        requests.get(f"{url}/health", timeout=PATIENCE),
        requests.get(f"{url}/metrics", timeout=PATIENCE),
        requests.get(f"{url}/nowhere", timeout=PATIENCE),
        requests.get(url + CHAT, timeout=PATIENCE),
        requests.post(url + CHAT, b"{", headers=JSON, timeout=PATIENCE),
        requests.post(url + CHAT, b"{}", timeout=PATIENCE),
        requests.post(url + CHAT, b" " * (MAX_BODY_BYTES + 1), headers=JSON, timeout=PATIENCE),
        requests.post(url + CHAT, json=chat, timeout=PATIENCE),
        requests.post(url + CHAT, json={**chat, "stream": True}, timeout=PATIENCE),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 405, 400, 415, 413, 200, 200]
    names = [answer.headers["X-Request-Id"] for answer in answers]
    assert len({*names}) == len(names) and all(name.startswith("req-") for name in names)
    # Those that are answered are in the log, the last one when all of it is out.
    end = time.monotonic() + PATIENCE
    while not all(f"{name} {CHAT} prompt 18" in server.log for name in names[-2:]):
        assert time.monotonic() < end, server.log
        time.sleep(0.01)


def test_the_app_knows_the_name(keyed: Gated) -> None:
    answer = keyed.get(Authorization="Bearer first-key")
    assert answer.json()["id"] == answer.headers["X-Request-Id"]
    assert "X-Request-Id" in keyed.get().headers


# --- methods


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/capitals", "/openapi.json"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    """Load balancers and uptime checks ask so. What comes next on the connection shows that there was no body."""
    with requests.Session() as one:
        whole, bare, again = (one.request(kind, server.url + path, timeout=PATIENCE) for kind in ("GET", "HEAD", "GET"))
    assert (whole.status_code, bare.status_code, again.status_code) == (200, 200, 200)
    assert bare.content == b"" and "X-Request-Id" in bare.headers
    assert bare.headers["Content-Type"] == whole.headers["Content-Type"] == again.headers["Content-Type"]
    if path != "/metrics":
        assert bare.headers["Content-Length"] == str(len(whole.content))


def test_head_of_what_is_not_there(server: Server) -> None:
    for path, status in (("/nowhere", 404), (CHAT, 405), ("/v1/models/another", 404)):
        answer = requests.head(server.url + path, timeout=PATIENCE)
        assert (answer.status_code, answer.content) == (status, b"")


def test_head_needs_a_key(keyed: Gated) -> None:
    url = f"http://127.0.0.1:{keyed.port}"
    assert requests.head(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
    assert requests.head(f"{url}/health", timeout=PATIENCE).status_code == 200


# --- the end


def test_a_gate_that_drains() -> None:
    with gated(keys=KEYS) as found:
        found.gate.draining = True
        assert error_of(found.get(Authorization="Bearer first-key")) == (503, "shutting_down")
        # Who has no key is told nothing of that.
        assert found.get().status_code == 401
        assert [found.get(path).status_code for path in OPEN_PATHS] == [200, 200]


def test_a_server_that_drains(capitals_artifact: Path) -> None:
    """Who is in when the server ends is answered, though his body comes late, and nobody comes in any more. No key, right or
    wrong, is in the log, with prompts and answers in it."""
    words = ("--sessions", 2, "--log-prompts", "--drain-seconds", PATIENCE)
    body = json.dumps({"messages": QUESTION, "temperature": 0}).encode()
    with serving(capitals_artifact, *words, **{KEY_VARIABLE: "key-of-the-environment"}) as server:
        port, right = port_of(server), {"Authorization": "Bearer key-of-the-environment"}
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong-key"}, 401), (right, 200)):
            assert requests.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE).status_code == status
        lines = [f"{name}: {value}" for name, value in (right | JSON).items()]
        with connected(port) as connection:
            connection.sendall(head(port, *lines, f"Content-Length: {len(body)}", "Expect: 100-continue"))
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            # A service manager sends it to all processes of the server.
            for pid in (server.running.engine, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            answer = requests.get(f"{server.url}/v1/models", headers=right, timeout=PATIENCE)
            while answer.status_code == 200:
                answer = requests.get(f"{server.url}/v1/models", headers=right, timeout=PATIENCE)
            assert error_of(answer) == (503, "shutting_down")
            assert requests.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
            connection.sendall(body)
            assert b'"content":"Paris"' in reply(connection)
        assert server.process.wait(PATIENCE) == 0
        assert "answer 'Paris'" in server.log and "draining: " in server.log
        assert "key-of-the-environment" not in server.log and "wrong-key" not in server.log
