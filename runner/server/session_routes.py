"""Routes of conversations by id: /v1/sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

from . import protocol
from .answering import messages_of
from .responses import json_response
from .sessions import Session, SessionStore, Turn


def add_session_routes(app: FastAPI, find: Callable[[], SessionStore]) -> None:
    """Add the routes. `find`: returns the sessions, or raises NoSessionError where there are none."""

    @app.post("/v1/sessions", response_model=protocol.SessionCard, responses=protocol.DOCUMENTED)
    async def new_session(request: Request, body: protocol.NewSessionBody | None = None) -> Response:
        """Make a session. Chats that have its id go on with it."""
        store = find()
        session = store.create(request.state.owner, messages_of(body.messages if body is not None else ()))
        await store.write(session)
        return json_response(session.described())

    @app.get("/v1/sessions", response_model=protocol.SessionList, responses=protocol.documented(401, 404, 503))
    async def sessions(request: Request) -> Response:
        """Your sessions that are in memory."""
        return json_response({"object": "list", "data": [one.described() for one in find().list(request.state.owner)]})

    @app.get(
        "/v1/sessions/{name}", response_model=protocol.SessionHistory, responses=protocol.documented(401, 404, 503)
    )
    async def session(request: Request, name: str) -> Response:
        """A session with its messages."""
        found = await find().get(request.state.owner, name)
        return json_response(found.described() | {"history": found.history.messages})

    @app.post("/v1/sessions/{name}/rewind", response_model=protocol.SessionCard, responses=protocol.DOCUMENTED)
    async def rewind(request: Request, name: str, body: protocol.RewindBody) -> Response:
        """Take a session back to its first messages."""
        store = find()
        with _session_of(await store.begin(request.state.owner, name)) as found:
            store.rewind(found, body.messages)
            await store.write(found)
            return json_response(found.described())

    @app.post("/v1/sessions/{name}/{action}", response_model=protocol.SessionCard, responses=protocol.DOCUMENTED)
    async def act(request: Request, name: str, action: Literal["fork", "save", "load"]) -> Response:
        """Make another session that goes on from here; or write the session's state to its file; or bring it back from
        there."""
        store = find()
        with _session_of(await store.begin(request.state.owner, name)) as found:
            if action == "fork":
                found = await store.fork(found)
                await store.write(found)
            elif action == "save":
                await store.save(found)
            else:
                await store.load(found)
            return json_response(found.described())

    @app.delete("/v1/sessions/{name}", response_model=protocol.SessionDeleted, responses=protocol.DOCUMENTED)
    async def delete(request: Request, name: str) -> Response:
        """Forget a session, and remove its files."""
        store = find()
        with _session_of(await store.begin(request.state.owner, name)) as found:
            await store.delete(found)
        return json_response({"id": name, "object": "session.deleted", "deleted": True})


@contextmanager
def _session_of(turn: Turn) -> Iterator[Session]:
    """The session of a turn, which is released at the end."""
    try:
        yield turn.session
    finally:
        turn.release()
