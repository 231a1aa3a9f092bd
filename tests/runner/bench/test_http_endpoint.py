"""`ostinato bench --load --url`: callers over a small server that streams as others do. No test asserts a time."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Bench, records

pytest.importorskip("aiohttp")

from aiohttp import web

SMALL = ["--load", "-p", "16", "-n", "8", "--range-ratio", "0", "--concurrency", "2", "--requests", "4"]
WARM_UP = 2

Handler = Callable[["Body"], AsyncIterator[bytes]]
Body = dict[str, Any]


class Cut(Exception):
    """Raised by a handler: the connection breaks here."""


class Refusal(Exception):
    """Raised by a handler: the request is answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status, self.body = status, body


@dataclass
class Server:
    """A server with OpenAI's interface. `handler` yields the bytes of an answer, or raises what happens instead."""

    handler: Handler
    runner: web.AppRunner
    models: Any = field(
        default_factory=lambda: {"data": [{"id": "small", "max_model_len": 200, "vocab_size": 50}, {"id": "large"}]}
    )
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        return self.models if isinstance(self.models, web.Response) else web.json_response(self.models)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async for data in self.handler(body):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
        except Cut:
            assert request.transport is not None
            request.transport.abort()
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=refusal.body)
        return response


def event(text: str = "", reason: str | None = None, usage: dict[str, Any] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, **more}
    return encoded({"id": "1", "object": "text_completion", "choices": [choice], "usage": usage})


def encoded(message: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(message, ensure_ascii=False)}\n\n".encode()


def answer_ids(body: Body) -> list[int]:
    """Token ids of an answer: 100 and on, which are in no prompt."""
    return [100 + number for number in range(body["max_tokens"])]


async def continuous(body: Body) -> AsyncIterator[bytes]:
    """As vLLM: the number of tokens so far in each event, of which one has three tokens and one no text."""
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    ids, done = answer_ids(body), 0
    while done < len(ids):
        new = ids[done : done + (3 if done == 1 else 1)]
        done += len(new)
        told = {"token_ids": new, "prompt_token_ids": None} if body.get("return_token_ids") else {}
        usage: Body = {"prompt_tokens": len(body["prompt"]), "completion_tokens": done, "prompt_tokens_details": None}
        yield event("" if done == 5 else "né" * len(new), "length" if done == len(ids) else None, usage, **told)
    usage |= {"prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2}}
    yield encoded({"id": "1", "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


async def at_the_end(body: Body) -> AsyncIterator[bytes]:
    """As llama.cpp: one event per token, but where a character is unfinished, and the number of tokens in the last one."""
    for number in range(body["max_tokens"]):
        if number != 2:
            yield event("x")
        else:
            yield b": keep-alive\n\n"
    usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
    yield event("", "length", usage)
    yield b"data: [DONE]\n\n"


async def without_usage(body: Body) -> AsyncIterator[bytes]:
    for _ in range(body["max_tokens"] - 1):
        yield event("x")
    yield event("x", "length")


async def in_small_parts(body: Body) -> AsyncIterator[bytes]:
    """Lines end as Windows' do, there are comments and fields beside the data, and all is cut anywhere."""
    whole = b": hello\r\n\r\n"
    async for data in continuous(body):
        whole += b"event: message\r\n" + data.replace(b"\n", b"\r\n")
    for place in range(0, len(whole), 7):
        yield whole[place : place + 7]
        await asyncio.sleep(0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """`serve(handler, models=...)`: a server in a thread, until the test ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners: list[web.AppRunner] = []

    def wait(work: Awaitable[Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)  # type: ignore[arg-type]

    async def begin(server: Server) -> None:
        await server.runner.setup()
        await web.TCPSite(server.runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{server.runner.addresses[0][1]}"

    def run(handler: Handler, **more: Any) -> Server:
        app = web.Application()
        server = Server(handler, web.AppRunner(app), **more)
        app.router.add_get("/v1/models", server.list_models)
        app.router.add_post("/v1/completions", server.complete)
        runners.append(server.runner)
        wait(begin(server))
        return server

    yield run
    for runner in runners:
        wait(runner.cleanup())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("handler", [continuous, in_small_parts])
def test_a_number_in_each_event(bench: Bench, serve: Callable[..., Server], handler: Handler) -> None:
    server = serve(handler)
    (row,) = records(bench, *SMALL, "--url", server.url + "/v1/", "--sampling", '{"top_p": 0.5, "temperature": 1}')
    assert (row["url"], row["model"]) == (server.url, "small") and "device" not in row
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 32)
    # Six events have tokens; the one behind them has none.
    assert [(len(one["itl_ms"]), one["output_tokens"], one["reused_tokens"]) for one in row["samples"]] == [
        (5, 8, 8)
    ] * 4
    assert row["put_back"] is row["refused"] is row["steps"] is row["ms_per_step"] is None
    assert row["client_cpu_share"] > 0
    body = server.bodies[-1]
    assert len(server.bodies) == WARM_UP + 4 and server.keys == {None}
    assert len(body.pop("prompt")) == 16 and all(
        0 <= token < 50 for one in server.bodies[:-1] for token in one["prompt"]
    )
    assert body == {
        "model": "small",
        "max_tokens": 8,
        "temperature": 1,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }


@pytest.mark.parametrize(("handler", "gaps"), [(at_the_end, 6), (without_usage, 7)])
def test_events_are_counted(bench: Bench, serve: Callable[..., Server], handler: Handler, gaps: int) -> None:
    """The number at the end counts, but it is no arrival."""
    server = serve(handler, models={"data": [{"id": "m", "meta": {"n_vocab": 9, "n_ctx": 24}}]})
    (row,) = records(bench, *SMALL, "--url", server.url)
    assert [(len(one["itl_ms"]), one["output_tokens"], one["error"]) for one in row["samples"]] == [(gaps, 8, None)] * 4
    assert row["total_reused_tokens"] == (4 * 3 if handler is at_the_end else 0)
    assert max(token for body in server.bodies for token in body["prompt"]) < 9
    assert server.bodies[0]["temperature"] == 0


def test_one_token(bench: Bench, serve: Callable[..., Server]) -> None:
    """An answer's only event ends it, and may have no text."""

    async def nothing_to_see(body: Body) -> AsyncIterator[bytes]:
        yield event("", "length", {"completion_tokens": body["max_tokens"]})

    words = ["--load", "-p", "16", "-n", "1", "--range-ratio", "0", "--concurrency", "2", "--requests", "4"]
    (row,) = records(bench, *words, "--url", serve(nothing_to_see).url)
    assert (row["completed"], row["total_output_tokens"]) == (4, 4) and row["median_ttft_ms"] > 0


def test_conversations(bench: Bench, serve: Callable[..., Server]) -> None:
    server = serve(continuous)
    words = ["--turns", "3", "--requests", "6", "--shared-prefix", "5", "--seed", "1"]
    (row,) = records(bench, *SMALL, *words, "--url", server.url)
    assert (row["completed"], row["turns"]) == (6, 3)
    bodies = server.bodies[WARM_UP:]
    assert all(body["return_token_ids"] for body in bodies)
    prompts = {turn: [body["prompt"] for body in bodies if len(body["prompt"]) == 21 + 24 * turn] for turn in range(3)}
    assert [len(found) for found in prompts.values()] == [2, 2, 2]
    assert len({tuple(body["prompt"][:5]) for body in bodies}) == 1
    # Each begins with all that was said before, answers included.
    for turn in (1, 2):
        for prompt in prompts[turn]:
            assert prompt[: -16 - 8] in prompts[turn - 1] and prompt[-16 - 8 : -16] == list(range(100, 108))


def test_table(bench: Bench, serve: Callable[..., Server], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    server = serve(continuous)
    words = [*SMALL, "--url", server.url, "--model", "large", "--vocab-size", "7", "--plot", tmp_path / "load.png"]
    lines = bench(*words, "--concurrency", "1,2").splitlines()
    assert "between tokens, ms" in lines[0] and "put back" not in lines[0] and "reused" in lines[0]
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "4"], ["2", "4"]]
    assert not any("steps" in line for line in lines) and any(line.startswith("2: ") for line in lines)
    assert lines[-1].startswith(f"url {server.url}, model large, date ")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"
    assert {body["model"] for body in server.bodies} == {"large"}
    assert max(token for body in server.bodies for token in body["prompt"]) < 7


def test_a_key(bench: Bench, serve: Callable[..., Server], tmp_path: Path) -> None:
    server, key = serve(continuous), tmp_path / "key"
    key.write_text("s3cret\n")
    out = bench(*SMALL, "--url", server.url, "--api-key-file", key, "-o", "json")
    assert server.keys == {"Bearer s3cret"} and "s3cret" not in out


# --- what goes wrong


async def cut(body: Body) -> AsyncIterator[bytes]:
    yield event("x", None, {"completion_tokens": 1})
    await asyncio.sleep(0)
    raise Cut


async def busy(body: Body) -> AsyncIterator[bytes]:
    raise Refusal(429, '{"error": {"message": "too many wait", "type": "rate_limit_error", "code": 429}}')
    yield b""


async def broken(body: Body) -> AsyncIterator[bytes]:
    raise Refusal(500, "Internal Server Error")
    yield b""


async def of_other_forms(body: Body) -> AsyncIterator[bytes]:
    raise Refusal(422, '{"detail": [{"loc": "prompt"}]}')
    yield b""


async def fails_later(body: Body) -> AsyncIterator[bytes]:
    yield event("x", None, {"completion_tokens": 1})
    yield encoded({"error": {"message": "the GPU is full", "code": 500}})


async def no_json(body: Body) -> AsyncIterator[bytes]:
    yield b"data: {'choices'\n\n"


async def too_short(body: Body) -> AsyncIterator[bytes]:
    yield event("x", "stop", {"completion_tokens": 1})
    yield b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (busy, "status 429: too many wait"),
        (broken, "status 500: Internal Server Error"),
        (of_other_forms, "status 422: {'detail': [{'loc': 'prompt'}]}"),
        (cut, "the connection broke: "),
        (fails_later, "an error in the stream: the GPU is full"),
        (no_json, "an event of the stream cannot be read: "),
        (too_short, "1 of 8 tokens came"),
    ],
)
def test_requests_that_fail(bench: Bench, serve: Callable[..., Server], handler: Handler, reason: str) -> None:
    """Those that fail are in no figure, and the others go on."""

    async def every_other(body: Body) -> AsyncIterator[bytes]:
        async for data in handler(body) if len(server.bodies) % 2 else continuous(body):
            yield data

    server = serve(every_other)
    (row,) = records(bench, *SMALL, "--url", server.url, "--concurrency", "1")
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (2, 2, 16)
    assert row["error"].startswith(reason)
    assert [sample["error"] is None for sample in row["samples"]] == [False, True] * 2
    assert "2 of 4 requests failed, the first: " + reason in bench(*SMALL, "--url", server.url, "--concurrency", "1")


def test_a_server_that_goes(refused: Bench, serve: Callable[..., Server]) -> None:
    """Nothing more can be measured."""

    async def last(body: Body) -> AsyncIterator[bytes]:
        async for data in continuous(body):
            yield data
        if len(server.bodies) == WARM_UP + 1:
            (site,) = server.runner.sites
            await site.stop()

    server = serve(last)
    assert "cannot be reached any more: ClientConnectorError" in refused(
        *SMALL, "--url", server.url, "--concurrency", "1"
    )


def test_no_token_ids(refused: Bench, serve: Callable[..., Server]) -> None:
    server = serve(at_the_end)
    line = refused(*SMALL, "--url", server.url, "--turns", "2")
    # The warm-up finds it.
    assert "--turns needs the token ids of answers" in line and len(server.bodies) <= WARM_UP


def test_no_server(refused: Bench) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        line = refused(*SMALL, "--url", f"http://127.0.0.1:{held.getsockname()[1]}")
    assert "/v1/models cannot be read: ClientConnectorError" in line


@pytest.mark.parametrize(
    ("models", "words", "reason"),
    [
        ({"data": []}, [], "/v1/models lists no model"),
        ({"models": []}, [], "/v1/models is no list of models"),
        ({"data": [{"id": "m"}]}, [], "does not say how many token ids m has: give --vocab-size"),
        ({"data": [{"id": "m"}]}, ["--model", "n"], "does not have the model 'n', but m"),
        (
            {"data": [{"id": "m", "vocab_size": 9, "max_model_len": 23}]},
            [],
            "a conversation would have 24 tokens, m takes 23",
        ),
    ],
)
def test_models_that_cannot_be(
    refused: Bench, serve: Callable[..., Server], models: Any, words: list[str], reason: str
) -> None:
    server = serve(continuous, models=models)
    assert reason in refused(*SMALL, *words, "--url", server.url) and not server.bodies


def test_a_key_that_is_wrong(refused: Bench, serve: Callable[..., Server]) -> None:
    server = serve(continuous, models=web.json_response({"error": {"message": "who are you?"}}, status=401))
    assert refused(*SMALL, "--url", server.url).endswith("/v1/models: status 401: who are you?")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--url", "localhost:8000"], "--url takes an address such as http://localhost:8000, got 'localhost:8000'"),
        (["--url", "http://a:b@localhost"], "--url takes an address"),
        (["--url", "http://["], "--url takes an address"),
        (["--url", "http://x:99999"], "--url takes an address"),
        (["--sessions", "2"], "--sessions is for an engine here: it does not go with --url"),
        (["--cuda_graph", "off"], "--cuda-graph is for an engine here"),
        (["--prefault"], "--prefault is for an engine here"),
        (["--vocab-size", "0"], "--vocab-size must be 1 or more, got 0"),
        (["--api-key-file", "/dev/null"], "--api-key-file /dev/null: it must hold one key"),
        (["--api-key-file", "/nowhere"], "/nowhere: No such file"),
        (["ARTIFACT"], "an ARTIFACT or, with --load, the --url of a server"),
    ],
)
def test_options_that_cannot_be(refused: Bench, words: list[str], reason: str) -> None:
    assert reason in refused(*SMALL, "--url", "http://127.0.0.1:1", *words)


def test_options_of_a_url_alone(refused: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "an ARTIFACT or, with --load, the --url of a server" in refused("-p", "3")
    assert "--url is an option of --load: give --load, too" in refused("--url", "http://127.0.0.1:1")
    assert "--model is an option of --url: give --url, too" in refused("ARTIFACT", "--load", "--model", "m")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    line = refused(*SMALL, "--url", "http://127.0.0.1:1")
    assert line == "error: --url needs aiohttp: pip install 'ostinato[serve]'"
