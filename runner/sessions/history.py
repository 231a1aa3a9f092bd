"""A session's tokens. Forks and snapshots share them: to copy 32,000 takes the host longer than a GPU takes for the state."""

from __future__ import annotations

from collections.abc import Sequence


class History:
    """Tokens, to which more are added at the end.

    Args:
        tokens: the first tokens. The list becomes the history's own.
    """

    __slots__ = ("_shared", "_tokens")

    def __init__(self, tokens: list[int] | None = None) -> None:
        self._tokens = [] if tokens is None else tokens
        # How many of the tokens belong to this history, where the list is another one's, which adds to it. None: all.
        self._shared: int | None = None

    def __len__(self) -> int:
        return len(self._tokens) if self._shared is None else self._shared

    @property
    def tokens(self) -> list[int]:
        """The tokens, in a list that no other history adds to."""
        if self._shared is not None:
            self._tokens, self._shared = self._tokens[: self._shared], None
        return self._tokens

    def since(self, first: int) -> list[int]:
        """A copy of the tokens from number `first` on."""
        return self._tokens[first : self._shared]

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def share(self, count: int | None = None) -> History:
        """Another history with the same tokens, or the first `count` of them. It copies them when it is read or added to."""
        made = History(self._tokens)
        made._shared = len(self) if count is None else count
        return made
