"""Records of the prefix cache: a kept state, a hit, and sizes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .offloaded import Offloaded
from .prefix_tree import Node
from .session import Snapshot


@dataclass(eq=False)
class Prefix:
    """State after the first tokens of a sequence.

    Attributes:
        node: its place in the tree.
        snapshot: the state on the device; None: it is on the host.
        offloaded: the state on the host.
        files: files that are to have the state when there is no more room for it.
    """

    node: Node[Known]
    snapshot: Snapshot | None = None
    offloaded: Offloaded | None = None
    files: set[Path] = field(default_factory=set)

    @property
    def has_logits(self) -> bool:
        """Whether the logits after the last token are there."""
        if self.snapshot is not None:
            return self.snapshot._known.logits is not None
        return self.offloaded is not None and self.offloaded.logits is not None

    @property
    def firsts(self) -> list[int]:
        """Numbers of pages that a window has left behind, by page group."""
        if self.snapshot is not None:
            return [mine.first for mine in self.snapshot._known.pages]
        return [] if self.offloaded is None else [kept.first for kept in self.offloaded.pages]


@dataclass(eq=False)
class Known:
    """State after a sequence of tokens, and how many have it as their prompt.

    Attributes:
        prefix: state after it, if there is any.
        owners: number of those whose prompt it is.
    """

    prefix: Prefix | None = None
    owners: int = 0


class Hit(NamedTuple):
    """The best beginning for a sequence of tokens.

    Attributes:
        prefix: the state to go on from; None: there is none.
        position: number of tokens that a session would have then.
        known: number of tokens from the first on that were seen before.
        owner: whose prompt begins with all these, and is computed now; None: nobody's.
        node: the last node of the tree that the tokens begin with, while the cache has this version; None: the root.
        version: the cache's version.
    """

    prefix: Prefix | None = None
    position: int = 0
    known: int = 0
    owner: Hashable | None = None
    node: Node[Known] | None = None
    version: int = 0


@dataclass
class PrefixCacheStats:
    """Sizes of a prefix cache.

    Attributes:
        prefixes, host_prefixes: numbers of sequences with state on the device, and on the host.
        device_bytes: rows of state and pages that they have on the device, also those that sessions share.
        host_bytes: bytes on the host.
    """

    prefixes: int = 0
    host_prefixes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
