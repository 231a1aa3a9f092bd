"""HTTP: routes, errors, and answers as they come."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from ostinato.delegate.errors import (
    CapacityError,
    ClosedError,
    InputError,
    OptionError,
    OstinatoError,
    SessionFileError,
)
from ostinato.delegate.version import __version__
from ostinato.runner.async_engine import AsyncEngine, EngineProcessError
from ostinato.runner.openai_bodies import error_body
from ostinato.runner.scheduler.messages import QueueFullError
from ostinato.runner.text.prompts import ContextLengthError

from . import protocol
from .answering import Answering, Choice, Generation, Piece
from .metrics import CONTENT_TYPE, Metrics
from .refusals import refusal
from .responses import ChatForm, CompletionForm, Form, event, json_response
from .session_routes import add_session_routes
from .sessions import BusySessionError, NoSessionError, SessionStore

log = logging.getLogger("ostinato.server")
Got = TypeVar("Got")

# An event that is none: clients drop it, and proxies see that the connection is in use.
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass
class Service:
    """Parts of the server that the routes work with.

    Attributes:
        engine: the engine.
        answering: makes generations.
        metrics: counts them.
        name: the model's name.
        sessions: conversations by id; None: there are none.
        created: when the server began, in seconds since 1970.
        logs_requests, logs_prompts: whether each request is logged, and its prompt and answers, too.
        keep_alive_seconds: how long nothing may be sent of an answer in events. Many proxies wait for 30 or 60 seconds.
    """

    engine: AsyncEngine
    answering: Answering
    metrics: Metrics
    name: str
    logs_requests: bool = True
    logs_prompts: bool = False
    sessions: SessionStore | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    keep_alive_seconds: float = 15.0


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document /openapi.json, without FastAPI's own answer to bodies that are wrong: they get 400."""
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


class _Request(Request):
    """A request whose body is parsed without collections of garbage.

    Each would look at all that is parsed so far, where there is no garbage yet: 30 MB of small lists would hold up all others
    for 5.7 s, and do so for 1.1 s.
    """

    async def json(self) -> Any:
        # The gate has read it. So nobody else runs until the body is parsed.
        await self.body()
        gc.disable()
        try:
            return await super().json()
        finally:
            gc.enable()


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_it(request: Request) -> Response:
            return await answer(_Request(request.scope, request.receive))

        return answer_it


def make_app(service: Service) -> FastAPI:
    """The routes over a service."""
    app = _App(
        title="Ostinato",
        version=__version__,
        description="OpenAI's interface to a language model that was exported ahead of time.",
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = _Route
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(OstinatoError, _failed)
    app.add_exception_handler(Exception, _broken)
    answering, engine = service.answering, service.engine

    @app.post("/v1/chat/completions", response_model=protocol.ChatAnswer, responses=protocol.WITH_EVENTS)
    async def chat(request: Request, body: protocol.ChatBody) -> Response:
        """Answer a chat."""
        _check_model(service, body.model)
        turn = None if body.session is None else await _store(service).begin(request.state.owner, body.session)
        try:
            generation = await answering.chat(body, turn)
            return await _respond(service, request, ChatForm(service.name, answering.tokenizer, body, generation))
        except BaseException:
            if turn is not None:
                turn.release()
            raise

    @app.post("/v1/completions", response_model=protocol.CompletionAnswer, responses=protocol.WITH_EVENTS)
    async def completion(request: Request, body: protocol.CompletionBody) -> Response:
        """Go on with texts, or with token ids."""
        _check_model(service, body.model)
        generation = await answering.completion(body)
        return await _respond(service, request, CompletionForm(service.name, answering.tokenizer, body, generation))

    @app.get("/v1/models", response_model=protocol.ModelList, responses=protocol.documented(401, 503))
    async def models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{model:path}", response_model=protocol.ModelCard, responses=protocol.documented(401, 404, 503))
    async def model(model: str) -> Response:
        """The model that is served, by its name."""
        _check_model(service, model)
        return json_response(_card(service))

    @app.post("/tokenize", response_model=protocol.TokenizeAnswer, responses=protocol.DOCUMENTED)
    async def tokenize(body: protocol.TokenizeBody) -> Response:
        """Token ids of a text, or of a chat."""
        _check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages")
        if body.messages is None and (body.chat_template_kwargs is not None or not body.add_generation_prompt):
            raise InputError("chat_template_kwargs and add_generation_prompt are for messages, and not for a prompt")
        given = body.prompt if body.messages is None else body.messages
        assert given is not None
        found = await answering.tokenize(
            given, body.chat_template_kwargs, body.add_generation_prompt, body.return_token_strs
        )
        return json_response({"max_model_len": engine.limits.max_seq_len, **found})

    @app.post("/detokenize", response_model=protocol.DetokenizeAnswer, responses=protocol.DOCUMENTED)
    async def detokenize(body: protocol.DetokenizeBody) -> Response:
        """The text of token ids."""
        _check_model(service, body.model)
        if (largest := max(body.tokens, default=0)) >= engine.limits.vocab:
            raise InputError(f"tokens must lie in 0 to {engine.limits.vocab - 1}, got {largest}")
        return json_response({"prompt": await answering.detokenize(body.tokens)})

    @app.get("/tokenizer_info", response_model=protocol.TokenizerInfo, responses=protocol.documented(401, 503))
    async def tokenizer_info() -> Response:
        """The chat template and the special tokens: clients that count tokens ask for these."""
        return json_response(
            {name: None for name in protocol.TokenizerInfo.model_fields} | answering.tokenizer.described
        )

    add_session_routes(app, lambda: _store(service))

    @app.get("/metrics", response_class=PlainTextResponse, responses=protocol.documented(503))
    async def metrics() -> Response:
        """Counts of the server, for Prometheus."""
        return PlainTextResponse(service.metrics.text(await engine.describe()), media_type=CONTENT_TYPE)

    @app.get("/health", response_model=protocol.Health, responses=protocol.documented(503))
    async def health() -> Response:
        """Whether requests are answered."""
        if engine.failure is not None:
            return json_response(error_body("unhealthy", str(engine.failure), "server_error"), 503)
        return json_response({"status": "ok"})

    return app


# --- answers


async def _respond(service: Service, request: Request, form: Form) -> Response:
    """The response with a generation's answers: whole, or as events."""
    generation = form.generation
    if not form.body.stream:
        await until_gone(request.receive, generation.run())
        _log(service, request, generation)
        return json_response(form.answer())
    pieces = generation.pieces()
    first = asyncio.ensure_future(anext(pieces))
    try:
        # What fails before the first token has a status of its own, unless the client has waited too long for one.
        await until_gone(request.receive, asyncio.wait({first}, timeout=service.keep_alive_seconds))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await pieces.aclose()
        raise
    return EventResponse(_events(service, request, form, first, pieces), service.keep_alive_seconds)


async def _events(
    service: Service,
    request: Request,
    form: Form,
    first: Awaitable[list[tuple[Choice, Piece]]],
    pieces: AsyncGenerator[list[tuple[Choice, Piece]], None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        try:
            yield form.events(await first)
            async for ready in pieces:
                yield form.events(ready)
        except Exception as error:
            status, body, _ = _error(request, error)
            log.error("%s %s", request.state.id, body["error"]["message"])
            yield event(body | {"status": status}) + b"data: [DONE]\n\n"
            return
        yield form.last_events()
    _log(service, request, form.generation)


class EventResponse(Response):
    """Server-sent events. When the client goes away, their generator is closed.

    Args:
        events: what is sent, whole events.
        keep_alive_seconds: after so long without an event, KEEP_ALIVE is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._keep_alive_seconds = events, keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = time.monotonic()

        async def send_data(data: bytes) -> None:
            nonlocal sent
            sent = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(sent + self._keep_alive_seconds - time.monotonic())
                if time.monotonic() >= sent + self._keep_alive_seconds:
                    await send_data(KEEP_ALIVE)

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            comments = asyncio.create_task(keep_alive())
            try:
                async for data in self._events:
                    if data:
                        await send_data(data)
            finally:
                comments.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with aclosing(self._events):
            try:
                await until_gone(receive, write())
            except ClientGoneError:
                log.info("%s the client has gone away", scope["state"]["id"])


class ClientGoneError(OstinatoError):
    """The client has closed its connection."""


class NoModelError(OstinatoError):
    """Another model is served."""


async def until_gone(receive: Receive, work: Awaitable[Got]) -> Got:
    """Wait for work, but no longer than the client does. Raises ClientGoneError."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client has gone away")
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


# --- errors


def _error(request: Request, error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the response to a request that has failed."""
    text = str(error)
    match error:
        case QueueFullError():
            return 429, error_body("queue_full", text, "rate_limit_error"), {"Retry-After": "1"}
        case ContextLengthError():
            return 400, error_body("context_length_exceeded", text), {}
        case InputError() | OptionError() | CapacityError():
            return 400, error_body(None, text), {}
        case EngineProcessError():
            return 503, error_body("engine_unavailable", text, "server_error"), {}
        case ClosedError():
            # The server closes its engine when --drain-seconds are over.
            return 503, error_body("shutting_down", "the server ends before this answer does", "server_error"), {}
        case NoModelError():
            return 404, error_body("model_not_found", text, param="model"), {}
        case NoSessionError():
            return 404, error_body("session_not_found", text), {}
        case BusySessionError():
            return 409, error_body("session_busy", text), {}
        case SessionFileError():
            return 400, error_body("session_file", text), {}
        case ClientGoneError():
            return 499, error_body(None, text), {}
    return 500, error_body("engine_error", f"request {request.state.id} has failed: {text}", "server_error"), {}


async def _failed(request: Request, error: Exception) -> Response:
    status, body, headers = _error(request, error)
    if status >= 499:
        # A client that has gone away is nobody's fault, and reads no answer.
        log.log(logging.INFO if status == 499 else logging.ERROR, "%s %s", request.state.id, body["error"]["message"])
    return json_response(body, status, headers)


async def _broken(request: Request, error: Exception) -> Response:
    # Starlette raises it once more, and it is logged with its traceback.
    text = f"request {request.state.id} has failed in the server: {type(error).__name__}"
    return json_response(error_body("internal_error", text, "server_error"), 500)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors[0]["loc"][0] == "path":
        return await _refused(request, HTTPException(404))
    what, param = refusal(errors, error.body)
    return json_response(error_body(None, what, param=param), 400)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, path = dict(error.headers or {}), repr(request.url.path[:80])
    what = str(error.detail)
    if error.status_code == 404:
        what = f"there is no {path} here: /openapi.json lists what there is"
    elif error.status_code == 405:
        # Each route knows of its own methods alone, and the gate makes GET of HEAD.
        found = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
        methods: set[str] = set().union(*(route.methods for route in found))
        headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        what = f"{path} takes {headers['Allow']}, got {request.method}"
    return json_response(error_body(None, what), error.status_code, headers)


def _store(service: Service) -> SessionStore:
    """Raises NoSessionError: there are no sessions here."""
    if service.sessions is None:
        raise NoSessionError("sessions are off here: start the server with --session-dir")
    return service.sessions


def _check_model(service: Service, name: str | None) -> None:
    """Raises NoModelError."""
    if name is not None and name != service.name:
        raise NoModelError(f"there is no model {name!r}: this server has {service.name!r}")


# --- helpers


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ostinato",
        "max_model_len": service.engine.limits.max_seq_len,
        "vocab_size": service.engine.limits.vocab,
    }


def _log(service: Service, request: Request, generation: Generation) -> None:
    if not service.logs_requests:
        return
    usage = generation.usage()
    log.info(
        "%s %s prompt %d (%d cached) answer %d %s %.2f s",
        request.state.id,
        request.url.path,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        ",".join(choice.result.finish_reason for choice in generation.choices[:8]),
        time.perf_counter() - generation.begun,
    )
    if service.logs_prompts:
        for choice in generation.choices:
            prompt = choice.prompt or service.answering.tokenizer.decode(choice.request.tokens)
            log.info("%s prompt %r answer %r", request.state.id, prompt, choice.result.text)
