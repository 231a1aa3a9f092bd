"""Conversations by id: clients go on with them without sending what was said before.

What a session is are its messages and the tokens of its last turn. The state behind these is in the engine's prefix cache, on
the device or in the host's memory, and in a file when there is no more room for it there, or the session leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import InputError, OptionError, OstinatoError, SessionFileError
from ostinato.runner.async_engine import AsyncEngine
from ostinato.runner.chat_history import ChatHistory
from ostinato.runner.scheduler.messages import QueueFullError, Request
from ostinato.runner.stream import Result
from ostinato.runner.text.prompts import Prompt
from ostinato.runner.text.tokenizer import Message, Tokenizer

log = logging.getLogger("ostinato.server")

_ID = re.compile(r"sess-[0-9a-f]{32}")
_LOOK_SECONDS = 0.5
# The most sessions in memory. Each has its messages there.
_MAX_SESSIONS = 10_000


class NoSessionError(OstinatoError):
    """There is no session with this id, or it is somebody else's."""


class BusySessionError(OstinatoError):
    """An answer goes on with the session."""


@dataclass
class Session:
    """A conversation.

    Attributes:
        id: its name, which nobody can guess.
        owner: whose it is, see `Gate`.
        history: its messages and tokens.
        created, used: when it was made and last used, in seconds since 1970.
        busy: whether an answer goes on with it.
        leaving: held while it is on its way to its files.
    """

    id: str
    owner: str
    history: ChatHistory
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    busy: bool = False
    leaving: asyncio.Lock = field(default_factory=asyncio.Lock)

    def described(self) -> dict[str, Any]:
        """The session in JSON's types, without its messages."""
        return {
            "id": self.id,
            "object": "session",
            "created": int(self.created),
            "last_used": int(self.used),
            "messages": len(self.history.messages),
            "tokens": len(self.history.tokens),
        }


class Turn:
    """An answer that goes on with a session, which is busy until it is released.

    Attributes:
        session: the session.
    """

    def __init__(self, store: SessionStore, session: Session) -> None:
        self._store, self.session, self._released = store, session, False
        session.busy, session.used = True, time.time()

    @property
    def state_file(self) -> Path:
        """The file in which there may be state of the session."""
        return self._store.state_path(self.session)

    async def complete(self, asked: Sequence[Message], prompt: Prompt, result: Result, said: Message) -> None:
        """Have the turn be part of the session. See `ChatHistory.add`. Raises SessionFileError: it cannot be written."""
        session = self.session
        session.history.add(self._store.tokenizer, asked, prompt, result, said)
        self._store.keep(session)
        await self._store.write(session)

    def release(self) -> None:
        """Let others go on with the session. Releasing twice is fine, and does not end the turn of another."""
        if not self._released:
            self._released, self.session.busy, self.session.used = True, False, time.time()


class SessionStore:
    """The sessions of a server. Their messages are in files from the first turn on; their state when they leave, or when the
    prefix cache has no more room for it.

    Args:
        engine: has their state.
        folder: where their files are. It is made if it is not there.
        ttl_seconds: a session that was not used for so long leaves memory.

    Raises:
        OptionError: the folder cannot be used.
    """

    def __init__(self, engine: AsyncEngine, folder: Path, ttl_seconds: float) -> None:
        self._engine, self._folder, self._ttl_seconds = engine, folder.absolute(), ttl_seconds
        self._by_id: dict[str, Session] = {}
        try:
            # What people say is for nobody else on this machine.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OptionError(f"--session-dir: {folder} cannot be used: {error.strerror}") from error

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def create(self, owner: str, messages: Sequence[Message] = ()) -> Session:
        """A new session of an owner. Raises QueueFullError: there are too many."""
        return self._added(owner, ChatHistory(messages))

    async def get(self, owner: str, name: str) -> Session:
        """The owner's session with an id; one that has left comes back from its file.

        Raises:
            NoSessionError: there is none, or it is somebody else's.
        """
        session = self._by_id.get(name)
        if session is None and _ID.fullmatch(name):
            session = await self._read(name)
        if session is None or not secrets.compare_digest(session.owner, owner):
            raise NoSessionError(f"there is no session {name[:80]!r}")
        return session

    async def begin(self, owner: str, name: str) -> Turn:
        """Begin a turn of the owner's session.

        Raises:
            NoSessionError: there is none, or it is somebody else's.
            BusySessionError: another answer goes on with it.
        """
        session = await self.get(owner, name)
        async with session.leaving:
            if session.busy:
                raise BusySessionError(f"session {name!r} is busy: an answer goes on with it")
            # It may have left while it was looked for.
            self._by_id[name] = session
            return Turn(self, session)

    def list(self, owner: str) -> list[Session]:
        """The owner's sessions that are in memory, the one that was used longest ago first."""
        mine = (session for session in self._by_id.values() if secrets.compare_digest(session.owner, owner))
        return sorted(mine, key=lambda session: session.used)

    async def fork(self, session: Session) -> Session:
        """Another session that goes on from here. Raises QueueFullError: there are too many."""
        other = self._added(session.owner, session.history.fork())
        # Files of state are replaced, never changed.
        with suppress(OSError):
            await asyncio.to_thread(os.link, self.state_path(session), self.state_path(other))
        self.keep(other)
        return other

    def rewind(self, session: Session, messages: int) -> None:
        """Take a session back to its first messages. Raises InputError: there are not as many."""
        have = len(session.history.messages)
        if messages > have:
            raise InputError(f"session {session.id!r} has {have} messages, rewind takes 0 to that, got {messages}")
        session.history.messages = session.history.messages[:messages]

    async def write(self, session: Session) -> None:
        """Write a session's messages to its file. Raises SessionFileError."""
        path, history = self._path(session.id), session.history.fork()
        with self._files_by_name():
            await asyncio.to_thread(history.write, path, owner=session.owner, created=session.created)

    def keep(self, session: Session) -> None:
        """Have the state of a session be written to its file when there is no more room for it in the prefix cache."""
        history = session.history
        self._engine.keep_state(self.state_path(session), history.tokens, history.lasting)

    async def save(self, session: Session) -> None:
        """Write a session with its state to its files. What is lost of it is computed.

        Raises:
            SessionFileError: a file cannot be written.
            CapacityError, QueueFullError: there is no room to compute it now.
        """
        tokens = session.history.tokens[: session.history.lasting]
        if 0 < len(tokens) < self._engine.limits.max_seq_len:
            file = str(self.state_path(session))
            request = Request(id=self._engine.new_id(), tokens=tokens, max_tokens=1, goes_on=False, state_file=file)
            async for output in self._engine.outputs(request):
                if output.error is not None:
                    raise output.error.error()
        await self._save_known(session)

    async def load(self, session: Session) -> None:
        """Have the prefix cache keep a session's state from its file.

        Raises:
            SessionFileError: there is no such file, or it is of another artifact.
            CapacityError: there is no room for it.
        """
        with self._files_by_name():
            await self._engine.load_state(self.state_path(session))

    async def delete(self, session: Session) -> None:
        """Forget a session, and remove its files."""
        self._by_id.pop(session.id, None)
        await asyncio.to_thread(self._path(session.id).unlink, missing_ok=True)
        path = self.state_path(session)
        with suppress(OstinatoError):
            await self._engine.leave_state(path)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def watch(self) -> None:
        """Have sessions leave that are idle for too long. Does not end."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            limit = time.time() - self._ttl_seconds
            for session in [one for one in self._by_id.values() if not one.busy and one.used < limit]:
                await self._leave(session)

    async def close(self) -> None:
        """Have all sessions leave."""
        for session in list(self._by_id.values()):
            await self._leave(session)

    async def _leave(self, session: Session) -> None:
        async with session.leaving:
            if session.busy:
                return
            try:
                await self._save_known(session)
            except SessionFileError as error:
                if not self._path(session.id).exists():
                    log.error("session %s stays in memory: %s", session.id, error)
                    session.used = time.time()
                    return
            except OstinatoError:
                # Its messages are written. The state is computed again.
                pass
            self._by_id.pop(session.id, None)

    async def _save_known(self, session: Session) -> None:
        """Write a session to its files, with the state that the prefix cache has of it."""
        await self.write(session)
        history = session.history
        if history.tokens:
            with self._files_by_name():
                await self._engine.save_state(self.state_path(session), history.tokens, history.lasting)

    def _added(self, owner: str, history: ChatHistory) -> Session:
        if len(self._by_id) >= _MAX_SESSIONS:
            raise QueueFullError(f"there are {_MAX_SESSIONS:,} sessions, which is the most: delete some, or wait")
        session = Session(f"sess-{secrets.token_hex(16)}", owner, history)
        self._by_id[session.id] = session
        return session

    async def _read(self, name: str) -> Session | None:
        try:
            history, data = await asyncio.to_thread(ChatHistory.read, self._path(name), self._engine.tokenizer)
            session = Session(name, str(data["owner"]), history, float(data["created"]))
        except (SessionFileError, KeyError, ValueError, TypeError):
            return None
        # Another request may have read it meanwhile.
        return self._by_id.setdefault(name, session)

    def state_path(self, session: Session) -> Path:
        """The file for a session's state."""
        return self._folder / f"{session.id}.session"

    @contextmanager
    def _files_by_name(self) -> Iterator[None]:
        """Have errors name files without their folder: clients are told these."""
        try:
            yield
        except SessionFileError as error:
            raise SessionFileError(str(error).replace(f"{self._folder}{os.sep}", "")) from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
