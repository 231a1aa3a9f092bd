"""State in the host's memory, with which sessions are opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ostinato.delegate import HostRows

from .pages import Kept
from .session import SessionState


@dataclass
class Offloaded:
    """Copy in the host's memory of all that a session has on the device.

    Attributes:
        rows: its slot, the pages by group that it does not share, and its logits if it has any.
        pages: its pages, by group.
        logits: an example of the logits [vocab] on the meta device.
    """

    rows: HostRows
    pages: list[Kept]
    logits: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, also of what others share."""
        nbytes = self.rows.nbytes
        for kept in self.pages:
            copied = kept.full
            while copied is not None:
                nbytes += copied.rows.nbytes
                copied = copied.before
        return nbytes

    def count(self, users: int) -> int:
        """Count it among those that share copies of pages (1), or no more (-1). Returns by how many bytes all of them have
        more then."""
        nbytes = self.rows.nbytes
        for kept in self.pages:
            copied = kept.full
            while copied is not None:
                copied.users += users
                if copied.users != max(users, 0):
                    break
                nbytes += copied.rows.nbytes
                copied = copied.before
        return users * nbytes


class OnHost(NamedTuple):
    """State on the host that a session can be opened with.

    Attributes:
        offloaded: its rows.
        state: its bookkeeping.
    """

    offloaded: Offloaded
    state: SessionState
