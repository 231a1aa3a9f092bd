"""Tests scripts/server_faults.py: a small run, and what it says when something does not hold."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import server_faults
from server_bodies import Fuzz, malformed
from server_client import Reply, ask, serving


def test_a_small_run(
    capitals_artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests run beside this one: how soon a busy server answers is for the script by itself.
    monkeypatch.setattr(server_faults, "HEALTH_MS", 2000)
    words = ["--requests", "150", "--concurrency", "16", "--fuzzed", "40", "--byte-seconds", "0.05"]
    status = server_faults.main([str(capitals_artifact), *words])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    rows = {line[:40].strip(): line[40:].split()[0] for line in out.splitlines()[2:-1]}
    assert (rows["right answers"], rows["malformed: right status"], rows["gone in mid-answer"]) == ("112", "8", "30")
    assert rows["SIGTERM: whole answers"] == rows["engine killed: requests that are told"] == "16"


def test_every_malformed_request(capitals_artifact: Path, tmp_path: Path) -> None:
    """A small run has some of them."""
    with serving(capitals_artifact, tmp_path / "log") as server:
        for name, (data, status) in malformed(server.max_seq_len).items():
            reply = asyncio.run(ask(server.port, data))
            assert (reply.status, reply.complete) == (status, True), name
        server.process.terminate()
        assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert server_faults.main([str(tmp_path / "none")]) == 2
    assert "error: no such folder" in capsys.readouterr().err


CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"Paris","finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*parts: bytes) -> bytes:
    return CHUNK + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (chunked(EVENT, DONE) + b"0\r\n\r\n", "Paris"),
        (chunked(b": keep-alive\n\n", EVENT, b": keep-alive\n\n", DONE) + b"0\r\n\r\n", "Paris"),
        (chunked(EVENT, DONE), None),
        (chunked(EVENT) + b"0\r\n\r\n", None),
        (chunked(EVENT, b'data: {"error":{"message":"no"}}\n\n', DONE) + b"0\r\n\r\n", None),
        (chunked(EVENT.replace(b'"stop"', b"null"), DONE) + b"0\r\n\r\n", None),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\n{"choices":[{"text":"Oslo"}]}', None),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n{"choices":[{"text":"Oslo"}]}', "Oslo"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}", None),
        (b"", None),
    ],
)
def test_only_a_whole_answer_has_a_text(data: bytes, text: str | None) -> None:
    assert Reply.parse(data).text == text


def test_one_seed_makes_the_same_bodies() -> None:
    body = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "maximum": 9},
            "messages": {"type": "array", "items": {"type": "string"}},
        },
    }
    content = {"content": {"application/json": {"schema": body}}}
    paths = {path: {"post": {"requestBody": content}} for path in ("/v1/chat/completions", "/v1/completions")}
    schema = {"paths": paths, "components": {"schemas": {}}}
    first, again, other = (list(Fuzz(schema, seed).requests(50)) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) > 40
