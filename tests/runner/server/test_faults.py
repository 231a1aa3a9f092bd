"""What goes wrong in a server: requests that cannot be sent on, steps that raise, and engines that end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ...processes import PATIENCE
from .conftest import QUESTION, Server, serving
from .test_gate import connected, head, port_of, reply
from .test_openai_client import ASK

PART = {"type": "text", "text": "x"}
# Python runs a module of this name when it begins. This one makes the engine's steps do what a file says, while it is there.
SITE = """
import sys
import time
from pathlib import Path

if "ostinato.runner.engine_process" in sys.orig_argv:
    from ostinato.runner.model.model import Model

    step, fault, held = Model.step, Path(__file__).with_name("fault"), Path(__file__).with_name("held")

    def faulty(self, runs):
        while held.exists():
            time.sleep(0.01)
        if fault.exists():
            if fault.read_text() == "close":
                self.program.close()
            raise ZeroDivisionError("a step that fails")
        return step(self, runs)

    Model.step = faulty
"""


@pytest.fixture
def faulty(capitals_artifact: Path, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server that waits for no request when it ends, and the file that makes its steps fail. While a file `held` is beside
    it, a step waits."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ("--sessions", 4, "--served-model-name", "capitals", "--drain-seconds", 0)
    with serving(capitals_artifact, *words, PYTHONPATH=os.pathsep.join(paths)) as server:
        yield server, tmp_path / "fault"


def status_of(server: Server, path: str) -> int:
    try:
        with urllib.request.urlopen(server.url + path, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def post(server: Server, path: str, data: bytes) -> urllib.request.Request:
    return urllib.request.Request(server.url + path, data, headers={"Content-Type": "application/json"})


def test_a_step_that_raises(faulty: tuple[Server, Path]) -> None:
    """Those whom it was for are told, with a status or an event, and the next ones are answered."""
    server, fault = faulty
    client: Any = server.client()
    assert client.chat.completions.create(**ASK).choices[0].message.content == "Paris"
    events = iter(client.chat.completions.create(**ASK, extra_body={"ignore_eos": True}, stream=True))
    next(events)
    fault.write_text("raise")
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(**ASK)
    assert failed.value.status_code == 500 and failed.value.code == "engine_error"
    name = failed.value.response.headers["x-request-id"]
    assert f"request {name} has failed: ZeroDivisionError: a step that fails" in failed.value.message
    with pytest.raises(openai.APIError, match="ZeroDivisionError: a step that fails"):
        list(events)
    fault.unlink()
    assert client.chat.completions.create(**ASK).choices[0].message.content == "Paris"
    assert status_of(server, "/health") == 200
    assert server.end() == 0
    assert f"{name} request {name} has failed" in server.log and "Traceback" not in server.log


def test_an_engine_that_can_run_nothing_more(faulty: tuple[Server, Path]) -> None:
    """Its process is there, and useless: the server says so, and ends with status 1."""
    server, fault = faulty
    fault.write_text("close")
    with pytest.raises(openai.InternalServerError):
        server.client().chat.completions.create(**ASK)
    assert server.process.wait(PATIENCE) == 1
    assert "the engine can run nothing more" in server.log and "the server ends" in server.log


def test_an_engine_that_is_killed(faulty: tuple[Server, Path]) -> None:
    """From the first moment on in which a request is told, /health says so too."""
    server, _ = faulty
    client: Any = server.client()
    events = iter(client.chat.completions.create(**ASK, extra_body={"ignore_eos": True}, stream=True))
    next(events)
    os.kill(server.running.engine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="killed by SIGKILL"):
        list(events)
    assert status_of(server, "/health") == 503
    begin = time.monotonic()
    with pytest.raises(openai.InternalServerError, match="killed by SIGKILL") as refused:
        client.chat.completions.create(**ASK)
    assert refused.value.status_code == 503
    assert server.process.wait(PATIENCE) == 1
    assert time.monotonic() - begin < PATIENCE / 10


@contextmanager
def asking(server: Server) -> Iterator[socket.socket]:
    """A connection with a request for a whole answer that the server has begun to read."""
    port, body = port_of(server), json.dumps(ASK).encode()
    lines = "Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue"
    with connected(port) as connection:
        connection.sendall(head(port, *lines))
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        yield connection


def test_an_answer_that_the_end_does_not_wait_for(faulty: tuple[Server, Path]) -> None:
    """Its client is told why there is none, as those are who come while the server ends."""
    server, fault = faulty
    held = fault.with_name("held")
    held.touch()
    with asking(server) as connection:
        server.process.terminate()
        answer = reply(connection)
    held.unlink()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"the server ends before this answer does"' in answer and b'"shutting_down"' in answer
    assert server.process.wait(PATIENCE) == 0


def test_the_log_tells_who_has_gone_away(faulty: tuple[Server, Path]) -> None:
    """Also of a client that waits for a whole answer."""
    server, fault = faulty
    held = fault.with_name("held")
    held.touch()
    with asking(server):
        pass
    end = time.monotonic() + PATIENCE
    while "the client has gone away" not in server.log:
        assert time.monotonic() < end, server.log
        time.sleep(0.01)
    held.unlink()
    assert server.end() == 0


@pytest.mark.parametrize("token", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_a_bias_for_a_token_of_more_than_64_bits(client: Any, token: int) -> None:
    with pytest.raises(openai.BadRequestError, match=r"logit_bias|cannot be sent"):
        client.chat.completions.create(**ASK, logit_bias={str(token): 1})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [None] * 2_000_000}, 400),
        ("/v1/completions", {"prompt": [1] * 2_000_000}, 400),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [-1] * 2_000_000}, 400),
        ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1_000_000)), "x")}, 400),
        ("/v1/completions", {"prompt": "x", **dict.fromkeys(map(str, range(1_000_000)), 1)}, 400),
        ("/v1/chat/completions", {"messages": [{}] * 1_000_000}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 1_000_000}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "what is " * 1_000_000}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 300_000}]}, 400),
        ("/v1/chat/completions", {"messages": [{**QUESTION[0], "more": [[1]] * 1_000_000}], "max_tokens": 1}, 200),
        ("/v1/completions", {"prompt": [[1]] * 2_000_000}, 400),
        ("/detokenize", {"tokens": ["x"] * 2_000_000}, 400),
        ("/detokenize", {"tokens": [5] * 5_000_000}, 200),
        ("/tokenize", {"prompt": "what is " * 300_000, "return_token_strs": True}, 200),
        ("/tokenize", {"prompt": "what is " * 1_000_000}, 200),
    ],
    ids=lambda value: f"{value!r:.60}" if isinstance(value, dict) else None,
)
def test_a_large_body_holds_up_nobody(server: Server, path: str, body: object, status: int) -> None:
    """Some megabytes of JSON take some tenths of a second to parse. What comes after that goes on beside other requests."""
    data = json.dumps(body).encode()
    waits, found = [], []

    def send() -> None:
        try:
            with urllib.request.urlopen(post(server, path, data), timeout=PATIENCE) as answer:
                found.append(answer.status)
        except urllib.error.HTTPError as error:
            found.append(error.code)

    sending = threading.Thread(target=send)
    sending.start()
    while sending.is_alive():
        begin = time.monotonic()
        assert status_of(server, "/health") == 200
        waits.append(time.monotonic() - begin)
    sending.join()
    begin = time.monotonic()
    json.loads(data)
    parse = time.monotonic() - begin
    # Errors that are listed, or text that is encoded with Python's lock held, take 3 seconds or more on a machine that has
    # nothing else to do. On one that has, the parser takes longer, too.
    assert found == [status] and max(waits) < max(1.5, 8 * parse)


def test_long_texts_hold_up_no_short_ones(server: Server) -> None:
    """More long texts are encoded than there are threads of either kind. No chat waits for one of them."""
    data = json.dumps({"prompt": "what is " * 250_000}).encode()
    counts, times, waits = [], [], []

    def send() -> None:
        begin = time.monotonic()
        with urllib.request.urlopen(post(server, "/tokenize", data), timeout=PATIENCE) as answer:
            counts.append(json.load(answer)["count"])
        times.append(time.monotonic() - begin)

    client: Any = server.client()
    sending = [threading.Thread(target=send) for _ in range(8)]
    for one in sending:
        one.start()
    while any(one.is_alive() for one in sending):
        begin = time.monotonic()
        assert client.chat.completions.create(**ASK).choices[0].message.content == "Paris"
        waits.append(time.monotonic() - begin)
    for one in sending:
        one.join()
    assert counts == [500_002] * 8
    # A chat takes some milliseconds, and one that waits takes as long as a long text.
    assert max(waits) < min(times) / 2


def test_characters_that_are_not_unicode(server: Server) -> None:
    """The response that names them is an error that can be read."""
    lone = "\ud800"
    for given in (
        {lone: 1},
        {"logit_bias": {lone: "x"}},
        {"model": lone},
        {"messages": [{"role": lone, "content": lone}]},
    ):
        data = json.dumps({"messages": QUESTION, **given}).encode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(post(server, "/v1/chat/completions", data), timeout=PATIENCE)
        assert refused.value.code in (400, 404) and json.load(refused.value)["error"]["message"]
