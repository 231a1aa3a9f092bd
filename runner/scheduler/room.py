"""Room for answers: the slots and pages that they need, and those that are free."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.delegate.capacity import Capacity
from ostinato.delegate.errors import CapacityError
from ostinato.runner.sessions.sessions import Sessions

from .answer import Answer


class Room:
    """The slots and pages of a program.

    Args:
        sessions: who has them.
        capacity: how many there are.
    """

    def __init__(self, sessions: Sessions, capacity: Capacity) -> None:
        self._sessions, self._capacity = sessions, capacity
        self._groups = [group for group in capacity.groups if group.pages]

    def check(self, answers: int, tokens: int) -> None:
        """Raises CapacityError: so many answers to a prompt of so many tokens have no room, even if all is free."""
        capacity = self._capacity
        if answers > capacity.slots:
            raise CapacityError(
                f"{answers} answers to one prompt need as many sessions, the program was loaded for {capacity.slots}: ask "
                f"for fewer, or load it with sessions={answers}"
            )
        for group, pages in zip(self._groups, self.pages_of(tokens + 1), strict=True):
            if pages > group.pages:
                raise CapacityError(
                    f"the prompt has {tokens} tokens and needs {pages} pages of {capacity.page_size} positions, there are "
                    f"{group.pages}: shorten it, or load the program with more kv_tokens"
                )

    def pages_of(self, tokens: int) -> list[int]:
        """Number of pages that a session of so many tokens needs, in each group."""
        size = self._capacity.page_size
        return [min(-(-tokens // size), group.pages_per_session) for group in self._groups]

    def is_free(
        self, answer: Answer, prefilling: Sequence[Answer], decoding: Sequence[Answer], reused: int = 0
    ) -> bool:
        """Whether a slot is free for each of the request's answers, and pages for its prompt beside those of others.

        `reused`: number of tokens whose pages on the device it will share.
        """
        if not self.has_slots(answer, prefilling):
            return False
        here = _is_here(answer)
        wanted = self.pages_of(len(answer.tokens))
        had = self.pages_of(len(answer.source.tokens) if here and answer.source is not None else reused)
        # Those that others will take: for the rest of a prompt, and one more for each.
        promised = [len(decoding) + len(prefilling)] * len(wanted)
        for one in prefilling:
            for number, (end, now) in enumerate(
                zip(self.pages_of(len(one.tokens)), self.pages_of(one.fed), strict=True)
            ):
                promised[number] += end - now
        free = self._sessions.free_pages_by_group.values()
        return all(
            pages >= want - has + others for pages, want, has, others in zip(free, wanted, had, promised, strict=True)
        )

    def has_slots(self, answer: Answer, prefilling: Sequence[Answer]) -> bool:
        """Whether a slot is free for each of the request's answers."""
        slots = 1 + answer.further - (_is_here(answer) and answer.source is answer.kept)
        return self._sessions.free >= slots + sum(one.further for one in prefilling)


def _is_here(answer: Answer) -> bool:
    """Whether the answer goes on from a kept session that is on the device."""
    source = answer.source.session if answer.source is not None else None
    return source is not None and not source.is_offloaded
