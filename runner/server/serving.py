"""The life of a server: it loads, says that it is ready, answers, drains, and ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import OptionError
from ostinato.runner.async_engine import AsyncEngine
from ostinato.runner.load_bar import LoadBar

from .answering import Answering
from .app import Service, make_app
from .connections import Connection
from .gate import Gate
from .metrics import Metrics
from .sessions import SessionStore

log = logging.getLogger("ostinato.server")

# How long a server whose engine has ended says so before it ends.
_LAST_WORDS_SECONDS = 5.0
# How long the connections may take to close when all answers are out.
_CLOSE_SECONDS = 2
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        artifact: the artifact's folder.
        host, port: where to listen; port 0: any free one.
        name: the model's name for clients; None: the folder's.
        keys: see `Gate`.
        drain_seconds: how long requests may go on after SIGTERM.
        logs_requests, logs_prompts: whether each request is logged, and its prompt and answers, too.
        session_dir, session_ttl_seconds: see `SessionStore`; without a folder there are no sessions.
        engine: options of `Engine.load`.
    """

    artifact: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    keys: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    logs_requests: bool = True
    logs_prompts: bool = False
    session_dir: Path | None = None
    session_ttl_seconds: float = 3600.0
    engine: dict[str, Any] = field(default_factory=dict)


def serve(options: ServeOptions) -> int:
    """Serve until a signal, or the engine's end. Returns the exit status: 1 if the engine has ended.

    Raises:
        OptionError: the address is taken, or is none of this machine.
        OstinatoError: what `Engine.load` raises.
    """
    listener = _listener(options)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    with listener:
        return uvloop.run(_serve(options, listener))


async def _serve(options: ServeOptions, listener: socket.socket) -> int:
    folder = artifact_paths(options.artifact)[0].parent
    begin = time.perf_counter()
    with LoadBar() as bar:
        done = 0

        def on_load(so_far: int, total: int) -> None:
            nonlocal done
            if not so_far:
                bar.begin(total)
            bar.advance(so_far - done)
            done = so_far
            if so_far == total:
                log.info("loaded; capturing graphs and warming up")

        engine = AsyncEngine(options.artifact, on_load=on_load, **options.engine)
        sessions = None
        if options.session_dir is not None:
            # Loading may take long: what is wrong with the folder is said before.
            sessions = SessionStore(engine, options.session_dir, options.session_ttl_seconds)
        log.info("loading %s", options.artifact)
        await engine.__aenter__()
    try:
        name = options.name or folder.resolve().name
        metrics = Metrics(name)
        service = Service(
            engine, Answering(engine, metrics), metrics, name, options.logs_requests, options.logs_prompts, sessions
        )
        gate = Gate(make_app(service), options.keys)
        server = _Server(uvicorn.Config(gate, **_UVICORN), gate, service, options.drain_seconds)

        def say_ready() -> None:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            limits = engine.limits
            log.info(
                "ready after %.1f s: http://%s:%d serves %s, %d sessions of %s tokens",
                *(time.perf_counter() - begin, shown, port, name, limits.sessions, f"{limits.max_seq_len:,}"),
            )

        server.on_ready = say_ready
        tasks = [asyncio.create_task(server.watch())]
        if service.sessions is not None:
            tasks.append(asyncio.create_task(service.sessions.watch()))
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        if service.sessions is not None:
            await service.sessions.close()
        return 1 if server.lost_engine else 0
    finally:
        await engine.close()


_UVICORN: dict[str, Any] = {
    "http": Connection,
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "timeout_graceful_shutdown": _CLOSE_SECONDS,
    # Longer than most load balancers keep an idle connection, so that it is they who close it.
    "timeout_keep_alive": 75,
}


class _Server(uvicorn.Server):
    """Ends when all requests have, after the first signal, and at once after the second.

    Attributes:
        on_ready: called when it listens.
        lost_engine: whether it ends because the engine has.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None
        self.lost_engine = False
        self._gate, self._service, self._drain_seconds = gate, service, drain_seconds
        self._signalled: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and then call `on_ready`."""
        await super().startup(sockets)
        self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal. uvicorn would send it to the process once more at the end."""
        if self._signalled is not None:
            self.force_exit = True
        self._signalled = self._signalled or time.monotonic()
        self._gate.draining = True

    async def watch(self) -> None:
        """End the server when it is time."""
        gate, service = self._gate, self._service
        while self._signalled is None:
            await asyncio.sleep(_LOOK_SECONDS)
            if service.engine.failure is not None and not self.lost_engine:
                self.lost_engine = True
                log.error("%s; the server ends", service.engine.failure)
                self._drain_seconds = _LAST_WORDS_SECONDS
                asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._end)
        log.info("draining: %d requests go on, for at most %g s", gate.active, self._drain_seconds)
        while gate.active and not self.force_exit and time.monotonic() < self._signalled + self._drain_seconds:
            await asyncio.sleep(_LOOK_SECONDS)
        if gate.active:
            log.warning("%d requests end before their answers", gate.active)
            # They end with an error that says so.
            await service.engine.close()
        self.should_exit = True

    def _end(self) -> None:
        self.should_exit = True


def _listener(options: ServeOptions) -> socket.socket:
    """A socket at the address, before anything is loaded. Raises OptionError: there cannot be one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen on {options.host} port {options.port}: {reason}") from error
    return listener
