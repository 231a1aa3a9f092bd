"""Strings that end an answer, wherever its tokens are divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato.delegate.errors import OptionError


def checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the strings as a tuple. Raises OptionError: something else than strings, or an empty one."""
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(text, str) and text for text in found):
        raise OptionError(f"stop takes strings that are not empty, got {stop!r}")
    return found


class StopStrings:
    """Passes text on up to the first of some strings. What may be the beginning of one is held back.

    Attributes:
        found: whether one was found. Then all text before it was passed on.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that comes before any stop string, as far as that is known."""
        text = self._held + text
        places = [place for place in map(text.find, self._strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back: the answer has ended without a stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, and goes on after."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
