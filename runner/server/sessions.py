"""Conversations by id: clients go on with them without sending what was said before.

What a session is are its messages and the tokens of its last turn. The state behind these is in the engine's prefix cache, on
the device or in the host's memory, and when the session leaves, in a file.
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
from ostinato.runner.scheduler.messages import QueueFullError
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
    """

    id: str
    owner: str
    history: ChatHistory
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    busy: bool = False

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

    async def complete(self, asked: Sequence[Message], prompt: Prompt, result: Result, said: Message) -> None:
        """Have the turn be part of the session. See `ChatHistory.add`. Raises SessionFileError: it cannot be written."""
        session = self.session
        session.history.add(self._store.tokenizer, asked, prompt, result, said)
        await self._store.write(session)

    def release(self) -> None:
        """Let others go on with the session. Releasing twice is fine, and does not end the turn of another."""
        if not self._released:
            self._released, self.session.busy, self.session.used = True, False, time.time()


class SessionStore:
    """The sessions of a server. Their messages are in files from the first turn on; their state when they leave.

    Args:
        engine: has their state.
        folder: where their files are. It is made if it is not there.
        ttl_seconds: a session that was not used for so long leaves memory.

    Raises:
        OptionError: the folder cannot be used.
    """

    def __init__(self, engine: AsyncEngine, folder: Path, ttl_seconds: float) -> None:
        self._engine, self._folder, self._ttl_seconds = engine, folder, ttl_seconds
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
        if session.busy:
            raise BusySessionError(f"session {name!r} is busy: an answer goes on with it")
        # It may have left while it was looked for.
        self._by_id[name] = session
        return Turn(self, session)

    def list(self, owner: str) -> list[Session]:
        """The owner's sessions that are in memory, the one that was used longest ago first."""
        mine = (session for session in self._by_id.values() if secrets.compare_digest(session.owner, owner))
        return sorted(mine, key=lambda session: session.used)

    def fork(self, session: Session) -> Session:
        """Another session that goes on from here. Raises QueueFullError: there are too many."""
        return self._added(session.owner, session.history.fork())

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

    async def save(self, session: Session, compute: bool = True) -> None:
        """Write a session with its state to its files. `compute`: also what the prefix cache has lost of it.

        Raises:
            SessionFileError: a file cannot be written.
            CapacityError: there is no room to compute it now.
        """
        await self.write(session)
        if session.history.tokens:
            with self._files_by_name():
                await self._engine.save_state(session.history.tokens, self._state_path(session.id), compute)

    async def load(self, session: Session) -> None:
        """Have the prefix cache keep a session's state from its file.

        Raises:
            SessionFileError: there is no such file, or it is of another artifact.
            CapacityError: there is no room for it.
        """
        with self._files_by_name():
            await self._engine.load_state(self._state_path(session.id))

    async def delete(self, session: Session) -> None:
        """Forget a session, and remove its files."""
        self._by_id.pop(session.id, None)
        for path in (self._path(session.id), self._state_path(session.id)):
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
        session.busy = True
        try:
            await self.save(session, compute=False)
        except SessionFileError as error:
            if not self._path(session.id).exists():
                log.error("session %s stays in memory: %s", session.id, error)
                session.used = time.time()
                return
        except OstinatoError:
            # Its messages are written. The state is computed again.
            pass
        finally:
            session.busy = False
        self._by_id.pop(session.id, None)

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
        session = self._by_id.setdefault(name, session)
        with suppress(OstinatoError):
            await self.load(session)
        return session

    @contextmanager
    def _files_by_name(self) -> Iterator[None]:
        """Have errors name files without their folder: clients are told these."""
        try:
            yield
        except SessionFileError as error:
            raise SessionFileError(str(error).replace(f"{self._folder}{os.sep}", "")) from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _state_path(self, name: str) -> Path:
        return self._folder / f"{name}.session"
