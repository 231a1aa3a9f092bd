"""Answers in events that are silent for long: comments keep their connections, and clients see none of them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.runner.async_engine import AsyncEngine
from ostinato.runner.server.answering import Answering
from ostinato.runner.server.app import KEEP_ALIVE, Service, make_app
from ostinato.runner.server.gate import Gate
from ostinato.runner.server.metrics import Metrics
from ostinato.runner.server.sessions import SessionStore

from ...processes import PATIENCE
from .test_openai_client import ASK

# Python runs a module of this name when it begins. This one holds the engine's steps while there is a file "hold", which it
# makes after each step while there is a file "each", and has them fail while there is a file "fault".
SITE = """
import sys
import time
from pathlib import Path

if "ostinato.runner.engine_process" in sys.orig_argv:
    from ostinato.runner.model.model import Model

    step, here = Model.step, Path(__file__).parent

    def held(self, runs):
        while (here / "hold").exists():
            time.sleep(0.01)
        if (here / "fault").exists():
            raise ZeroDivisionError("a step that fails")
        found = step(self, runs)
        if (here / "each").exists():
            (here / "hold").touch()
        return found

    Model.step = held
"""


@dataclass
class Held:
    """A server whose steps are held until the client that waits for an event was sent some comments.

    Attributes:
        client: OpenAI's, of this server.
        folder: where the files of SITE are.
        comments: how many to wait for.
    """

    client: openai.AsyncOpenAI
    folder: Path
    comments: int = 3

    def file(self, name: str) -> Path:
        return self.folder / name

    def around(self, app: ASGIApp) -> ASGIApp:
        """An app that lets the steps go on after the comments."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            sent = 0

            async def count(message: Message) -> None:
                nonlocal sent
                await send(message)
                if message.get("body") == KEEP_ALIVE:
                    sent += 1
                    if sent % self.comments == 0:
                        self.file("hold").unlink(missing_ok=True)

            await app(scope, receive, count)

        return run


Scenario = Callable[[Held], Coroutine[Any, Any, None]]


@pytest.fixture
def run(
    capitals_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Scenario], None]:
    """Runs a scenario with a server, whose log has no traceback."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    @asynccontextmanager
    async def serving() -> AsyncIterator[Held]:
        async with AsyncEngine(capitals_artifact, sessions=2) as engine:
            metrics = Metrics("capitals")
            service = Service(engine, Answering(engine, metrics), metrics, "capitals", keep_alive_seconds=0.02)
            service.sessions = SessionStore(engine, tmp_path / "sessions", 3600)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
                    held = Held(client, tmp_path)
                    app = held.around(Gate(make_app(service)))
                    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
                    task = asyncio.create_task(server.serve(sockets=[listener]))
                    yield held
                server.should_exit = True
                await task

    async def main(scenario: Scenario) -> None:
        async with serving() as held:
            await scenario(held)

    def run_it(scenario: Scenario) -> None:
        asyncio.run(main(scenario))
        assert not [record for record in caplog.records if record.exc_info]

    return run_it


def text_of(events: Any) -> str:
    return "".join(event.choices[0].delta.content or "" for event in events)


def test_comments_come_while_nothing_else_does(run: Callable[[Scenario], None]) -> None:
    """Before the first token, and between two."""

    async def scenario(held: Held) -> None:
        held.file("hold").touch()
        held.file("each").touch()
        async with held.client.chat.completions.with_streaming_response.create(**ASK, stream=True) as answer:
            content = await answer.read()
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *blocks, done, end = content.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        comment, data = KEEP_ALIVE.strip(), [i for i, block in enumerate(blocks) if block.startswith(b"data: ")]
        assert blocks[: held.comments] == [comment] * held.comments
        assert blocks[data[0] + 1 : data[1]].count(comment) >= held.comments
        assert len(data) + blocks.count(comment) == len(blocks)

    run(scenario)


def test_clients_see_no_comments(run: Callable[[Scenario], None]) -> None:
    async def scenario(held: Held) -> None:
        held.file("each").touch()
        usage: Any = {"include_usage": True, "continuous_usage_stats": True}
        found = [
            one async for one in await held.client.chat.completions.create(**ASK, stream=True, stream_options=usage)
        ]
        *events, last = found
        assert text_of(events) == "Paris" and not last.choices
        # Each token comes alone, with the number of tokens so far; then why it ended, and the usage.
        assert [one.usage.completion_tokens for one in found] == [1, 2, 3, 4, 4, 4]

        def ask() -> Any:
            with openai.OpenAI(base_url=held.client.base_url, api_key="none", timeout=PATIENCE) as client:
                return list(client.chat.completions.create(**ASK, stream=True))

        assert text_of(await asyncio.to_thread(ask)) == "Paris"

    run(scenario)


def test_an_error_after_a_comment_is_an_event(run: Callable[[Scenario], None]) -> None:
    async def scenario(held: Held) -> None:
        held.file("hold").touch()
        held.file("fault").touch()
        events = await held.client.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="a step that fails"):
            await anext(events)
        held.file("fault").unlink()
        answer = await held.client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "Paris"

    run(scenario)


def test_clients_that_leave_before_the_first_token(run: Callable[[Scenario], None]) -> None:
    """Nothing waits for their answers any more, though the engine has not begun with them."""

    async def scenario(held: Held) -> None:
        await held.client.chat.completions.create(**ASK)
        before = len(asyncio.all_tasks())
        held.file("hold").touch()
        held.comments = 1_000_000
        for _ in range(4):
            events = await held.client.chat.completions.create(**ASK, stream=True)
            await events.close()
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.01)
        held.file("hold").unlink()
        events = await held.client.chat.completions.create(**ASK, stream=True)
        assert text_of([event async for event in events]) == "Paris"

    run(scenario)


def test_a_session_whose_events_end_early_is_free(run: Callable[[Scenario], None]) -> None:
    """After an error, and when the client has left: another turn can begin."""

    async def scenario(held: Held) -> None:
        made: Any = await held.client.post("/sessions", body={}, cast_to=object)
        turn: Any = {**ASK, "extra_body": {"session": made["id"]}}
        held.file("hold").touch()
        held.file("fault").touch()
        with pytest.raises(openai.APIError, match="a step that fails"):
            await anext(await held.client.chat.completions.create(**turn, stream=True))
        held.file("fault").unlink()
        held.file("hold").touch()
        held.comments = 1_000_000
        # No ConflictError.
        events = await held.client.chat.completions.create(**turn, stream=True)
        await events.close()
        held.file("hold").unlink()
        while True:
            try:
                answer = await held.client.chat.completions.create(**turn)
                break
            except openai.ConflictError:
                # The server has not heard of it yet.
                await asyncio.sleep(0.01)
        assert answer.choices[0].message.content == "Paris"

    run(scenario)
