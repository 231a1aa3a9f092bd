"""Parts of a step: what each of its sessions has in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ostinato.runner.model.batch import Run

from .session import Session, SessionState

# A session and its state, which is looked up once in a step.
Opened = tuple[Session, SessionState]


class Part(NamedTuple):
    """Run of a session in a step. `tokens`: those that a prompt adds; None: a step from the token that the slot keeps."""

    session: Session
    state: SessionState
    run: Run
    tokens: Sequence[int] | None


def packed(parts: Sequence[Part], max_rows: int) -> list[list[Part]]:
    """Divide runs into steps of up to `max_rows` rows, in their order; a run that is longer stands alone."""
    steps: list[list[Part]] = []
    room = 0
    for part in parts:
        if not steps or part.run.rows > room:
            steps.append([])
            room = max_rows
        steps[-1].append(part)
        room -= part.run.rows
    return steps
