"""The engine's own process: `AsyncEngine` starts it. It drives a scheduler, and does nothing else.

What drives a GPU shares no interpreter with other work: a thread that holds Python's lock for 5 ms would hold up each step.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

from ostinato.delegate.artifact.digest import parse_digest
from ostinato.delegate.errors import OptionError

from .engine import Engine
from .engine_channel import EngineChannel
from .scheduler.messages import (
    Cancel,
    Close,
    Command,
    Describe,
    Ended,
    KeepState,
    LeaveState,
    Load,
    Loading,
    LoadState,
    Output,
    Reply,
    Request,
    ResetPrefixCache,
    Rewind,
    Save,
    SaveState,
    Start,
    Swap,
    ToEngine,
)
from .scheduler.options import DEFAULT_MAX_WAITING, check_options

# How often threads that are at work in files are looked at while there is no step.
_FILE_SECONDS = 0.002


class EngineProcess:
    """Answers the messages of a channel with an engine."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._engine: Engine | None = None
        # A swap that waits for requests to end, and the messages behind it.
        self._waiting: deque[ToEngine] = deque()
        # Commands whose work in files goes on, by their ids.
        self._replies: dict[str, Future[None]] = {}
        self._done = self._total = 0

    def run(self) -> None:
        """Answer until the owner is gone."""
        while self._channel.is_open:
            for message in self._channel.receive(0 if self._steps else _FILE_SECONDS if self._in_files else None):
                self._take(message)
            if self._steps:
                self._step()
            if self._in_files:
                self._settle_files()
            while self._waiting and not self._waits(self._waiting[0]):
                self._answer(self._waiting.popleft())
        if self._engine is not None:
            self._engine.driver.scheduler.files.finish()

    @property
    def _busy(self) -> bool:
        return self._engine is not None and self._engine.driver.scheduler.busy

    @property
    def _steps(self) -> bool:
        """Whether a step comes next. None does while too much waits for the owner to read."""
        return self._busy and not self._channel.is_full

    @property
    def _in_files(self) -> bool:
        """Whether threads are at work in files."""
        return bool(self._replies) or (self._engine is not None and self._engine.driver.scheduler.files.busy)

    def _settle_files(self) -> None:
        """Reply to commands whose work in files is done."""
        self._loaded.driver.scheduler.files.settle()
        for name, done in [one for one in self._replies.items() if one[1].done()]:
            del self._replies[name]
            error = done.exception()
            self._channel.send(Reply(name, error=None if error is None else Ended.of(error)))

    def _waits(self, message: ToEngine) -> bool:
        """Whether a message must wait for requests to end: a swap, unless it is refused."""
        if isinstance(message, Swap) and self._busy:
            with suppress(OptionError):
                _checked(message.options)
                return True
        return False

    def _take(self, message: ToEngine) -> None:
        """Answer a message, or have it wait behind a swap."""
        if self._waiting or self._waits(message):
            self._waiting.append(message)
            if not isinstance(message, Cancel):
                return
            # Its request is one that the swap waits for, or waits behind it.
        self._answer(message)

    def _step(self) -> None:
        assert self._engine is not None
        scheduler = self._engine.driver.scheduler
        outputs = scheduler.step()
        if outputs:
            self._channel.send(outputs)
        if scheduler.failure is not None:
            # No other artifact can be loaded in this process either. Its owner is told by its end.
            sys.exit(scheduler.failure)

    def _answer(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            try:
                self._loaded.driver.scheduler.add(message)
            except Exception as error:
                ended = Ended.of(error)
                self._channel.send([Output(message.id, index, (), (), "error", ended) for index in range(message.n)])
        elif isinstance(message, Cancel):
            self._loaded.driver.scheduler.cancel(message.id, message.index)
        elif isinstance(message, Start):
            self._channel.send(self._loaded_message(message))
        else:
            try:
                value = self._run(message)
            except Exception as error:
                self._channel.send(Reply(message.id, error=Ended.of(error)))
                return
            if isinstance(value, Future):
                self._replies[message.id] = value
            else:
                self._channel.send(Reply(message.id, value))

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None, "the first message is Start"
        return self._engine

    def _run(self, command: Command) -> Any:
        """Run a command, and return what it asks for, in JSON's types, or when that is done."""
        engine = self._loaded
        scheduler = engine.driver.scheduler
        kept = scheduler.kept
        match command:
            case Rewind(_, session, position):
                kept.rewind(session, position)
            case Save(_, session, path):
                kept.save(session, path)
            case Load(_, session, path):
                return kept.load(session, path)
            case Close(_, session):
                kept.close(session)
            case SaveState(_, path, tokens, lasting):
                return scheduler.files.save(Path(path), tokens, lasting)
            case KeepState(_, path, tokens, lasting):
                scheduler.prefixes.stand(Path(path), tokens, lasting)
            case LeaveState(_, path):
                return scheduler.files.leave(Path(path))
            case LoadState(_, path):
                scheduler.prefixes.load(Path(path))
            case Describe():
                return engine.describe()
            case ResetPrefixCache():
                engine.reset_prefix_cache()
            case Swap(_, path, options):
                options = _checked(options)
                # Else nothing of the old program would ever be collected.
                gc.unfreeze()
                engine.swap(path, **options)
                return self._ready()
        return None

    def _loaded_message(self, start: Start) -> Reply:
        """Load the artifact, and capture everything."""
        try:
            options = _checked(start.options)
            self._engine = Engine.load(start.path, **options, on_load=self._advance, on_total=self._begin)
            ready = self._ready()
            # A service manager's SIGTERM goes to all processes. It is the owner's, which may await answers. One that comes
            # before there can be any ends the loading, which may take long.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return Reply(start.id, ready)
        except Exception as error:
            return Reply(start.id, error=Ended.of(error))

    def _ready(self) -> dict[str, Any]:
        """Capture everything, and return what the owner is told."""
        engine = self._loaded
        engine.warm_up(beside_sessions=True)
        # The garbage collector would look at all that torch has, which takes longer than a step.
        gc.collect()
        gc.freeze()
        return {
            "max_seq_len": engine.max_seq_len,
            "vocab": engine.model.vocab,
            "eos_ids": sorted(engine.eos_ids),
            "sessions": engine.sessions.free,
        }

    def _begin(self, total: int) -> None:
        self._total = total
        self._channel.send(Loading(0, total))

    def _advance(self, nbytes: int) -> None:
        before, self._done = self._done, self._done + nbytes
        if self._done * 100 // max(self._total, 1) > before * 100 // max(self._total, 1):
            self._channel.send(Loading(self._done, self._total))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `Engine.load`. Raises OptionError: one that it does not have; of the scheduler, out of range; no
    digest."""
    known = [name for name in signature(Engine.load).parameters if name not in ("path", "on_load", "on_total")]
    for name in options:
        if name not in known:
            raise OptionError(f"unknown option {name!r}: the options are {', '.join(known)}")
    check_options(
        options.get("max_step_ms"), options.get("max_waiting", DEFAULT_MAX_WAITING), options.get("host_cache_bytes", 0)
    )
    if options.get("digest") is not None:
        parse_digest(options["digest"])
    return options


def main() -> None:
    """Answer the owner, whose socket's number is the argument. The process ends when the owner does."""
    # Ctrl-C in a terminal is the owner's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print is not the owner's output.
    os.dup2(2, 1)
    channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])))
    process = EngineProcess(channel)
    try:
        process.run()
    finally:
        channel.drain()


if __name__ == "__main__":
    main()
