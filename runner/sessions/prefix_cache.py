"""The prefix cache: state at beginnings of sequences, from which sessions that begin alike go on.

Where a layer has state of fixed size (a recurrent or a convolution's), a session can go on only where that state was kept:
from a snapshot. Keys and values alone can be taken up to any token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ostinato.delegate import StateKind
from ostinato.delegate.errors import CapacityError
from ostinato.runner.model.model import Model

from .history import History
from .in_turn import in_turn
from .prefix import Hit, Known, Prefix, PrefixCacheStats
from .prefix_tree import Node, PrefixTree
from .session import Session, SessionState, Snapshot
from .sessions import Sessions

_FIXED_STATE = (StateKind.CONVOLUTION, StateKind.RECURRENT, StateKind.OTHER)


class PrefixCache:
    """Prefixes, the one that was used longest ago first. Threads take turns, as with the sessions themselves: any of them may
    need the room that prefixes have.

    Args:
        sessions: the sessions that go on from prefixes.
        model: their model.
        host_bytes: the most bytes of the host's memory for prefixes that leave the device. 0: these are forgotten.
        enabled: whether to keep anything.

    Attributes:
        needs_rows: whether a session can go on only from where a prefix ends, and a prefix takes a row for a snapshot.
        enabled: whether anything can be kept.
        version: number of changes so far.
        lock: that of the sessions.
        standing: file -> the prefix that has it among its `files`.
        write: called with a prefix that has files and is on the host, before it is forgotten.
    """

    def __init__(self, sessions: Sessions, model: Model, host_bytes: int = 0, enabled: bool = True) -> None:
        program = model.program
        self._sessions, self._program, self._most_host_bytes = sessions, program, host_bytes
        self.lock = sessions.lock
        self._tree = PrefixTree[Known]()
        self._on_device: dict[Prefix, None] = {}
        self._on_host: dict[Prefix, None] = {}
        # Those on the device in whose place there is a longer one.
        self._outdated: dict[Prefix, None] = {}
        self._host_bytes = 0
        self.version = 0
        # Whose prompt is computed now, and where it ends.
        self._owners: dict[Hashable, Node[Known]] = {}
        sessions.tier.evict = self.make_room
        self.standing: dict[Path, Prefix] = {}
        self.write: Callable[[Prefix], None] = lambda prefix: None
        self.needs_rows = any(program.buffers_of(kind) for kind in _FIXED_STATE)
        capacity = program.capacity
        has_room = capacity.snapshots > 0 if self.needs_rows else bool(capacity.groups)
        self.enabled = enabled and model.samples and capacity.slot_bytes > 0 and has_room

    @property
    @in_turn
    def stats(self) -> PrefixCacheStats:
        capacity = self._program.capacity
        rows = sum(prefix.snapshot is not None and self.needs_rows for prefix in self._on_device)
        nbytes = rows * capacity.slot_bytes
        groups = [group for group in capacity.groups if group.pages]
        for number, group in enumerate(groups):
            lists = [prefix.snapshot._known.pages[number] for prefix in self._on_device if prefix.snapshot is not None]
            nbytes += len({page for mine in lists for page in mine.numbers}) * group.page_bytes
        return PrefixCacheStats(len(self._on_device), len(self._on_host), nbytes, self._host_bytes)

    @in_turn
    def find(self, tokens: list[int]) -> Hit:
        """Look up the longest beginning of the tokens after which there is state. All of them count only if their logits are
        there too."""
        if not self.enabled or len(tokens) < 2:
            return Hit(version=self.version)
        path, known, last = self._tree.match(tokens)
        hit = Hit(None, 0, known, None, path[-1], self.version)
        limit = min(known, len(tokens) - 1)
        if not limit:
            return hit
        whole = path[-1].value if path[-1].end == len(tokens) else None
        if whole is not None and whole.prefix is not None and whole.prefix.has_logits:
            return hit._replace(prefix=whole.prefix, position=len(tokens))
        candidates: Iterable[Node[Known]] = reversed(path)
        if not self.needs_rows:
            candidates = chain(self._tree.below(last), candidates)
        hit = hit._replace(owner=next((owner for owner, node in self._owners.items() if _is_below(node, last)), None))
        for node in candidates:
            prefix = node.value.prefix if node.value is not None else None
            if prefix is None or (self.needs_rows and node.end > limit):
                continue
            position = min(node.end, limit)
            if self._sessions.pages.cover(prefix.firsts, position):
                return hit._replace(prefix=prefix, position=position)
        return hit

    @in_turn
    def open(self, hit: Hit) -> Session | None:
        """Open a session that has the tokens of a hit. None: there is no state, or another thread has had it leave.

        Raises:
            CapacityError: no slot is free, or too few pages for what comes back from the host.
        """
        prefix = hit.prefix
        if prefix is None or (prefix.snapshot is None and prefix.offloaded is None):
            return None
        self.touch(prefix)
        if prefix.snapshot is not None:
            return self._open_at(prefix.snapshot, hit.position)
        assert prefix.offloaded is not None
        history = History(self.tokens_of(prefix.node)[: hit.position])
        state = SessionState(history, hit.position, hit.position)
        return self._sessions.tier.open_offloaded(self._sessions, prefix.offloaded, state)

    @in_turn
    def open_longest(self, tokens: list[int]) -> Session | None:
        """Open a session with the longest beginning of the tokens after which there is state, all of them if it can be. None:
        there is none.

        Raises:
            CapacityError: as `open`.
        """
        # `find` leaves the last token to be computed, as a prompt needs its logits: here that is one that nobody has.
        return self.open(self.find([*tokens, -1]))

    @in_turn
    def save(self, tokens: list[int], path: Path) -> None:
        """Write a session with these tokens to a file. What is not known of them is computed.

        Raises:
            CapacityError: no slot or too few pages are free; nothing was written.
            SessionFileError: the file cannot be written.
        """
        with self.open_longest(tokens) or self._sessions.open() as session:
            # The last one waits for the next step, as it does in a session that has sampled it.
            if rest := tokens[session.position : -1]:
                session.prefill(rest)
            if session.position < len(tokens):
                session.append(tokens[-1])
            session.save(path)

    @in_turn
    def load(self, path: Path) -> list[int]:
        """Keep the state of the session in a file, and return its tokens.

        Raises:
            SessionFileError: see `Engine.load_session`.
            CapacityError: no slot or too few pages are free, or no room for a prefix.
        """
        with self._sessions.tier.load(self._sessions, path) as session:
            if not self.keep(session):
                raise CapacityError("the prefix cache has no room for it: load the program with more snapshots")
            return list(session.tokens)

    @in_turn
    def stand(self, path: Path, tokens: list[int], lasting: int) -> Prefix | None:
        """Have a file get the longest state within these tokens when there is no more room for it, and no other state.

        Args:
            path: the file.
            tokens: the tokens of a conversation.
            lasting: number of them with which it will go on. One can go on from any token of keys and values alone.

        Returns:
            The state's prefix; None: there is none.
        """
        self.leave(path)
        nodes, _, _ = self._tree.match(tokens[:lasting] if self.needs_rows else tokens)
        known = (node.value.prefix for node in reversed(nodes) if node.value is not None)
        prefix = next((prefix for prefix in known if prefix is not None), None)
        if prefix is not None:
            prefix.files.add(path)
            self.standing[path] = prefix
        return prefix

    @in_turn
    def leave(self, path: Path) -> None:
        """Have a file get no state."""
        prefix = self.standing.pop(path, None)
        if prefix is not None:
            prefix.files.discard(path)

    @in_turn
    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix is used now."""
        self._outdated.pop(prefix, None)
        for prefixes in (self._on_device, self._on_host):
            if prefix in prefixes:
                prefixes[prefix] = prefixes.pop(prefix)

    @in_turn
    def keep(
        self, session: Session, logits: bool = False, known: Node[Known] | None = None, but: Collection[int] = ()
    ) -> bool:
        """Keep the state after all tokens of a session that the model has seen. Returns whether there was room.

        It outdates those of its own beginnings, back to where other tokens part. They leave first, and not for the host.

        Args:
            session: the session.
            logits: whether to keep its logits too, if there are any, beside a row: the same tokens may come again.
            known: a node that its tokens begin with, or that begins with them. None: it is not known.
            but: numbers of tokens of beginnings that are not outdated: another sequence is likely to part there.
        """
        if not self.enabled or not session.seen:
            return False
        # Without rows there may be thousands, and a last token is soon computed again.
        logits = logits and self.needs_rows
        node = self._node_of(session, known)
        there = node.value.prefix if node.value is not None else None
        if there is not None and there.snapshot is not None and there.has_logits >= logits:
            self.touch(there)
            return True
        try:
            snapshot = self._snapshot(session, logits)
        except CapacityError:
            self._prune(node)
            return False
        # What left the device for it may have taken the node away.
        node = self._node_of(session, known)
        value = node.value = node.value or Known()
        prefix = value.prefix = value.prefix or Prefix(node)
        self._empty(prefix)
        prefix.snapshot = snapshot
        self._on_device[prefix] = None
        self.version += 1
        above = node.parent
        while above is not None and len(above.children) == 1:
            shorter = above.value.prefix if above.value is not None else None
            if shorter is not None and above.end in but:
                self.touch(shorter)
            elif shorter in self._on_host:
                # It is the first to be forgotten.
                self._on_host = {shorter: None, **self._on_host}
            elif shorter is not None:
                self._outdated[shorter] = None
            above = above.parent
        return True

    @in_turn
    def make_room(self) -> bool:
        """Have a prefix leave the device. Returns whether there was one. The first are those that are outdated, then the one
        that was used longest ago."""
        prefix = next(chain(self._outdated, self._on_device), None)
        if prefix is not None:
            self._leave(prefix)
        return prefix is not None

    @in_turn
    def announce(self, tokens: list[int], owner: Hashable, hit: Hit) -> Node[Known]:
        """Note that the owner's prompt is computed now. Returns its node, which stays until it is released.

        `hit`: what was found for the tokens.
        """
        node = self._tree.insert(tokens, hit.node if hit.version == self.version else None)
        self._owners[owner] = node
        node.value = node.value or Known()
        node.value.owners += 1
        self.version += 1
        return node

    def is_owner(self, owner: Hashable) -> bool:
        """Whether the owner's prompt is computed now."""
        return owner in self._owners

    @in_turn
    def withdraw(self, owner: Hashable) -> None:
        """Note that the owner's prompt is computed, or is not any more."""
        if self._owners.pop(owner, None) is not None:
            self.version += 1

    @in_turn
    def release(self, node: Node[Known]) -> None:
        """Note that nobody goes on from a node any more that `announce` returned."""
        assert node.value is not None
        node.value.owners -= 1
        self._prune(node)

    @in_turn
    def drop(self, prefix: Prefix) -> None:
        """Forget a prefix."""
        self._empty(prefix)
        for path in prefix.files:
            del self.standing[path]
        prefix.files.clear()
        if prefix.node.value is not None and prefix.node.value.prefix is prefix:
            prefix.node.value.prefix = None
        self._prune(prefix.node)

    @in_turn
    def reset(self) -> None:
        """Forget all prefixes."""
        for prefix in [*self._on_device, *self._on_host]:
            self.drop(prefix)

    def _empty(self, prefix: Prefix) -> None:
        """Give back what a prefix has."""
        self._on_device.pop(prefix, None)
        self._outdated.pop(prefix, None)
        if prefix in self._on_host:
            del self._on_host[prefix]
            assert prefix.offloaded is not None
            self._host_bytes += prefix.offloaded.count(-1)
        if prefix.snapshot is not None:
            prefix.snapshot.close()
        prefix.snapshot = prefix.offloaded = None

    def _open_at(self, snapshot: Snapshot, position: int) -> Session:
        """Open a session with the first `position` tokens of a snapshot: if that has a row, with all of them."""
        sessions = self._sessions
        sessions.steps.settle()
        slot = sessions.tier.take_slot()
        pages = sessions.pages.share_first(snapshot._known.pages, position)
        if snapshot.copied is None:
            self._program.numbers_of(StateKind.SAMPLING).forget(slot)
            sessions.pages.write_block_tables(slot, pages)
        else:
            sessions.slots.write(snapshot.copied, slot)
        before = snapshot._known
        logits = before.logits if position == before.seen else None
        state = SessionState(before.history.share(position), position, position, logits=logits, pages=pages)
        return Session(sessions, slot, state)

    def _snapshot(self, session: Session, logits: bool) -> Snapshot:
        """A snapshot of what the model has seen of a session. Raises CapacityError: all rows are somebody else's."""
        sessions = self._sessions
        sessions.steps.settle()
        state, copied = session._open, None
        if self.needs_rows:
            copied = sessions.tier.with_room(lambda: sessions.slots.keep(session.slot))
        pages = sessions.shared(state).pages
        history = state.history.share(state.seen)
        kept = SessionState(history, state.seen, state.seen, logits=state.logits if logits else None, pages=pages)
        return Snapshot(sessions, kept, copied)

    def _leave(self, prefix: Prefix) -> None:
        """Have a prefix leave the device: to the host, if it has room, or to its files."""
        snapshot = prefix.snapshot
        assert snapshot is not None
        outdated = prefix in self._outdated
        self._outdated.pop(prefix, None)
        del self._on_device[prefix]
        prefix.snapshot = None
        self.version += 1
        if prefix.files or (self._most_host_bytes and not outdated):
            # The host may have no memory for it.
            with suppress(Exception):
                prefix.offloaded = self._sessions.tier.offload_prefix(snapshot)
        if prefix.offloaded is None:
            snapshot.close()
            self.drop(prefix)
            return
        self._on_host[prefix] = None
        self._host_bytes += prefix.offloaded.count(1)
        while self._host_bytes > self._most_host_bytes:
            oldest = next(iter(self._on_host))
            if oldest.files:
                self.write(oldest)
            self.drop(oldest)

    def _node_of(self, session: Session, known: Node[Known] | None) -> Node[Known]:
        """The node of the tokens that the model has seen of a session. See `keep`."""
        if known is not None and session.seen <= known.end:
            return self._tree.at(known, session.seen)
        return self._tree.insert(session.tokens[: session.seen], known)

    def _prune(self, node: Node[Known]) -> None:
        self.version += 1
        known = node.value
        if known is not None and known.prefix is None and not known.owners:
            node.value = None
            self._tree.prune(node)

    @in_turn
    def tokens_of(self, node: Node[Known]) -> list[int]:
        """The tokens of a node."""
        parts: list[list[int]] = []
        found: Node[Known] | None = node
        while found is not None:
            parts.append(found.tokens)
            found = found.parent
        return [token for part in reversed(parts) for token in part]


def _is_below(node: Node[Known] | None, other: Node[Known]) -> bool:
    while node is not None and node is not other:
        node = node.parent
    return node is not None
