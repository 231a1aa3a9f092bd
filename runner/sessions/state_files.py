"""State files: they take the state for which the prefix cache has no more room, and give it back.

Threads write and read them beside the steps, and touch the host's memory and the files alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.delegate.errors import OstinatoError, SessionFileError
from ostinato.runner.text.common_prefix import common_length

from .history import History
from .offloaded import Offloaded, OnHost
from .pages import Kept
from .prefix import Prefix
from .prefix_cache import PrefixCache
from .saved_state import Wanted
from .session import Session, SessionState
from .sessions import Sessions

log = logging.getLogger("ostinato")

# The most bytes that wait to be written, if one state is not more. What is forgotten faster than that is not written.
MAX_WAITING_BYTES = 1 << 30
# A session waits for its state to be read: not behind that of one other.
_READERS = 2


@dataclass
class StateFileStats:
    """Counts of state files.

    Attributes:
        written, read: states that were written, and that sessions were opened with.
        given_up: states that were forgotten because too much waited to be written, or because a file could not be written.
    """

    written: int = 0
    read: int = 0
    given_up: int = 0


@dataclass(eq=False)
class _Write:
    """State on its way to files.

    Attributes:
        paths: the files.
        given: the state.
        done: when it is written, or why it is not.
    """

    paths: set[Path]
    given: OnHost
    done: Future[None] = field(default_factory=Future)


class StateFiles:
    """Writes what the prefix cache forgets, if a file stands on it (`PrefixCache.stand`), and reads it. One thread at a time
    may use it, and calls `settle` while it is `busy`.

    Args:
        sessions: the sessions.
        cache: their prefix cache.

    Attributes:
        stats: counts.
    """

    def __init__(self, sessions: Sessions, cache: PrefixCache) -> None:
        self._sessions, self._cache = sessions, cache
        self._saved = sessions.tier.saved
        self._writer = ThreadPoolExecutor(1, "state-writer")
        self._reader = ThreadPoolExecutor(_READERS, "state-reader")
        # Those whose copies to the host may be under way, and those that the thread has.
        self._copying: deque[_Write] = deque()
        self._writing: deque[_Write] = deque()
        self._reading: list[Future[OnHost | None]] = []
        self.stats = StateFileStats()
        cache.write = self._write_forgotten

    @property
    def busy(self) -> bool:
        """Whether something is to be written, or read."""
        return bool(self._copying or self._writing or self._reading)

    def save(self, path: Path, tokens: list[int], lasting: int) -> Future[None]:
        """Write the state of a conversation that the prefix cache has, see `PrefixCache.stand`.

        A file that has as much of it stays as it is.

        Returns:
            When it is written, or why it cannot be: SessionFileError.

        Raises:
            SessionFileError: the cache has none.
        """
        prefix = self._cache.stand(path, tokens, lasting)
        if prefix is None:
            raise SessionFileError("nothing is known of these tokens: the prefix cache is off, or has no room for them")
        # It need not be written once more when it is forgotten.
        self._cache.leave(path)
        while self._is_full(0):
            self._wait_for_first()
        if prefix.offloaded is None:
            assert prefix.snapshot is not None
            offloaded = self._sessions.tier.copy_prefix(prefix.snapshot)
            offloaded.rows.mark.wait()
        else:
            offloaded = prefix.offloaded
        return self._add({path}, prefix, offloaded)

    def leave(self, path: Path) -> Future[None]:
        """Write nothing to a file any more. Returns when that is so."""
        self._cache.leave(path)
        for write in (*self._copying, *self._writing):
            write.paths.discard(path)
        # The thread may be writing it.
        return self._writer.submit(lambda: None)

    def read(self, path: Path, tokens: Sequence[int], least: int) -> Future[OnHost | None] | None:
        """Read the state in a file, if a session with these tokens can go on from it, with `least` of them or more.

        Returns:
            When it is read; its result is None where the file has no such state. None: there is nothing to read.
        """

        def wanted(pages: Sequence[Kept], state: SessionState) -> bool:
            return self._position(pages, state, tokens) >= least

        for write in (*reversed(self._copying), *reversed(self._writing)):
            if path in write.paths and wanted(write.given.offloaded.pages, write.given.state):
                found: Future[OnHost | None] = Future()
                found.set_result(write.given)
                return found
        if not path.exists():
            return None
        reading = self._reader.submit(self._read, path, wanted)
        self._reading.append(reading)
        return reading

    def open(self, found: OnHost, tokens: Sequence[int]) -> Session:
        """Open a session with what was read for these tokens. Raises CapacityError: no slot is free, or too few pages."""
        position = self._position(found.offloaded.pages, found.state, tokens)
        state = SessionState(History(list(tokens[:position])), position, position)
        session = self._sessions.tier.open_offloaded(self._sessions, found.offloaded, state)
        self.stats.read += 1
        return session

    def settle(self) -> None:
        """Have the thread write states whose copies are done, and free those that it has written: another thread may not free
        pinned memory during a capture."""
        self._reading = [reading for reading in self._reading if not reading.done()]
        while self._copying and self._copying[0].given.offloaded.rows.mark.is_done:
            write = self._copying.popleft()
            self._writing.append(write)
            self._writer.submit(self._write, write)
        while self._writing and self._writing[0].done.done():
            write = self._writing.popleft()
            error = write.done.exception()
            del write.given
            if error is None:
                self.stats.written += 1
            else:
                if not self.stats.given_up:
                    log.warning("state that cannot be written is computed again: %s", error)
                self.stats.given_up += 1

    def finish(self) -> None:
        """Wait until everything is written, and read."""
        wait(self._reading)
        while self.busy:
            self._wait_for_first()

    def close(self) -> None:
        """Finish, and end the threads."""
        self.finish()
        for threads in (self._writer, self._reader):
            threads.shutdown()

    def _write_forgotten(self, prefix: Prefix) -> None:
        """See `PrefixCache.write`."""
        assert prefix.offloaded is not None
        if self._is_full(prefix.offloaded.nbytes):
            self.stats.given_up += 1
            return
        self._add(set(prefix.files), prefix, prefix.offloaded)

    def _add(self, paths: set[Path], prefix: Prefix, offloaded: Offloaded) -> Future[None]:
        """Have a prefix's copy on the host be written to files. Returns when it is."""
        tokens = self._cache.tokens_of(prefix.node)
        write = _Write(paths, OnHost(offloaded, SessionState(History(tokens), len(tokens), len(tokens))))
        self._copying.append(write)
        self.settle()
        return write.done

    def _is_full(self, nbytes: int) -> bool:
        """Whether too much waits to be written for so many bytes more."""
        waiting = sum(write.given.offloaded.nbytes for write in (*self._copying, *self._writing))
        return waiting > 0 and waiting + nbytes > MAX_WAITING_BYTES

    def _wait_for_first(self) -> None:
        if self._copying:
            self._copying[0].given.offloaded.rows.mark.wait()
            self.settle()
        if self._writing:
            wait([self._writing[0].done])
        self.settle()

    def _position(self, pages: Sequence[Kept], state: SessionState, tokens: Sequence[int]) -> int:
        """Number of the tokens that a session has if it goes on from this state; 0: it cannot. The last one is computed."""
        known = state.history.tokens[: state.seen]
        common, limit = common_length(known, list(tokens)), len(tokens) - 1
        if self._cache.needs_rows:
            return state.seen if state.seen == common <= limit else 0
        position = min(common, limit)
        return position if self._sessions.pages.cover([kept.first for kept in pages], position) else 0

    def _write(self, write: _Write) -> None:
        """Write state, in the thread."""
        try:
            for path in tuple(write.paths):
                if not self._has(path, write.given.state.history.tokens):
                    self._saved.write(path, write.given)
        except Exception as error:
            write.done.set_exception(error)
        else:
            write.done.set_result(None)

    def _has(self, path: Path, tokens: list[int]) -> bool:
        """Whether a file has state for all these tokens."""
        try:
            return self._saved.tokens_of(path)[: len(tokens)] == tokens
        except OstinatoError:
            return False

    def _read(self, path: Path, wanted: Wanted) -> OnHost | None:
        """Read state, in a thread. What cannot be read is computed."""
        try:
            return self._saved.read(path, wanted)
        except OstinatoError:
            return None
