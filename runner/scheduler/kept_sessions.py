"""Sessions that stay under a name when their answer has ended, so that another request goes on from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ostinato.delegate.errors import CapacityError, InputError
from ostinato.runner.sessions.session import Session, Snapshot
from ostinato.runner.sessions.sessions import Sessions

Got = TypeVar("Got")


@dataclass(eq=False)
class KeptSession:
    """A session under a name.

    Attributes:
        name: its name.
        tokens: its history.
        session: its state, on the device or on the host. None: it is computed again from the tokens when it is needed.
        busy: whether an answer goes on with it.
        begin: number of tokens before the last request, and a snapshot of the session there.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    session: Session | None = None
    busy: bool = False
    begin: tuple[int, Snapshot] | None = None

    def forget_state(self) -> None:
        """Give back all that the session has on the device and on the host."""
        self.forget_begin()
        if self.session is not None:
            self.session.close()
            self.session = None

    def forget_begin(self) -> None:
        if self.begin is not None:
            self.begin[1].close()
            self.begin = None


class KeptSessions:
    """The kept sessions, the one that was used longest ago first.

    Args:
        sessions: where their state is.
        offloads: whether the state of one that must leave the device goes to the host. Else it is computed again.
    """

    def __init__(self, sessions: Sessions, offloads: bool) -> None:
        self._sessions, self._offloads = sessions, offloads
        self._by_name: dict[str, KeptSession] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> KeptSession:
        """Raises InputError: there is none of this name, or an answer goes on with it."""
        kept = self._by_name.get(name)
        if kept is None:
            raise InputError(f"no session is kept as {name!r}")
        if kept.busy:
            raise InputError(f"session {name!r} is busy: an answer goes on with it")
        return kept

    def check_free(self, name: str) -> None:
        """Raises InputError: the name is taken."""
        if name in self._by_name:
            raise InputError(f"a session is kept as {name!r} already: close it first, or go on from it")

    def reserve(self, name: str) -> KeptSession:
        """Return a new kept session that an answer goes on with."""
        kept = self._by_name[name] = KeptSession(name, busy=True)
        return kept

    def begin(self, kept: KeptSession) -> None:
        """Note that a request goes on from here, where `rewind` then comes back to without computing."""
        kept.forget_begin()
        if kept.session is not None and not kept.session.is_offloaded and kept.tokens:
            try:
                kept.begin = len(kept.tokens), kept.session.snapshot()
            except CapacityError:
                # All rows are taken: then it is computed again.
                return

    def keep(self, kept: KeptSession, session: Session | None, tokens: list[int]) -> None:
        """Take the session back from the answer that went on with it."""
        kept.session, kept.tokens, kept.busy = session, tokens, False
        # It is the last one used now.
        self._by_name[kept.name] = self._by_name.pop(kept.name)

    def drop(self, kept: KeptSession) -> None:
        """Forget a session that an answer went on with, and that has nothing to keep."""
        kept.forget_state()
        self._by_name.pop(kept.name, None)

    def rewind(self, name: str, position: int) -> None:
        """See `Rewind`. Raises InputError: there are not as many tokens."""
        kept = self.get(name)
        if not 0 <= position <= len(kept.tokens):
            raise InputError(f"session {name!r} has {len(kept.tokens)} tokens, rewind takes 0 to that, got {position}")
        if position == len(kept.tokens):
            return
        if kept.begin is not None and kept.begin[0] == position and kept.session is not None:
            self._with_room(kept.session.onload)
            kept.session.restore(kept.begin[1])
        else:
            kept.forget_state()
        kept.tokens = kept.tokens[:position]

    def save(self, name: str, path: str) -> None:
        """See `Save`. A session whose state is gone is computed again first."""
        kept = self.get(name)
        if kept.session is None:
            kept.session = self._with_room(lambda: self._computed(kept.tokens))
        kept.session.save(path)

    def load(self, name: str, path: str) -> int:
        """See `Load`. Returns the number of tokens."""
        self.check_free(name)
        session = self._with_room(lambda: self._sessions.tier.load(self._sessions, Path(path)))
        self._by_name[name] = KeptSession(name, list(session.tokens), session)
        return session.position

    def close(self, name: str) -> None:
        """See `Close`."""
        self.drop(self.get(name))

    def _computed(self, tokens: list[int]) -> Session:
        """A new session with these tokens. Raises CapacityError; nothing has changed."""
        session = self._sessions.open()
        try:
            if tokens:
                session.prefill(tokens)
        except BaseException:
            session.close()
            raise
        return session

    def _with_room(self, get: Callable[[], Got]) -> Got:
        """Do something on the device that raises CapacityError, while others can leave it."""
        while True:
            try:
                return get()
            except CapacityError:
                if not self.make_room():
                    raise

    def make_room(self, waited_for: Iterable[KeptSession] = ()) -> bool:
        """Have something leave the device: the idle session that was used longest ago, or a snapshot, or else the first of
        those that an answer waits for. Returns whether there was one."""
        idle = [kept for kept in self._by_name.values() if not kept.busy]
        if self._leaves(idle):
            return True
        for kept in self._by_name.values():
            if kept.begin is not None:
                # It shares pages with the answer that goes on from there.
                kept.forget_begin()
                return True
        return self._leaves(waited_for)

    def _leaves(self, some: Iterable[KeptSession]) -> bool:
        """Have the first of these that is on the device leave it."""
        for kept in some:
            if kept.session is None or kept.session.is_offloaded:
                continue
            kept.forget_begin()
            if self._offloads:
                # The host may have no memory for it.
                with suppress(Exception):
                    kept.session.offload()
            if not kept.session.is_offloaded:
                kept.forget_state()
            return True
        return False

    def forget_states(self) -> None:
        """Give back all state: the program can run nothing more, or leaves."""
        for kept in list(self._by_name.values()):
            if not kept.busy:
                kept.forget_state()
