"""Divides an answer's text into the model's reasoning and what it says, wherever the text is cut."""

from __future__ import annotations

from typing import NamedTuple

from .stop_strings import overlap

_BEGIN, END_OF_REASONING = "<think>", "</think>"


class Divided(NamedTuple):
    """Text of an answer: reasoning, and content."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Takes what stands between `<think>` and `</think>` at the begin of an answer as its reasoning.

    White space around the reasoning, and before the content behind it, is dropped.

    Args:
        prompt: the prompt's text: it may have begun the reasoning, or ended it.
    """

    def __init__(self, prompt: str) -> None:
        before = prompt.rstrip()
        self._inside = before.endswith(_BEGIN)
        # Whether it is known where the answer begins.
        self._known = self._inside or before.endswith(END_OF_REASONING)
        # Whether white space comes next that is dropped.
        self._strips = self._inside
        self._held = ""

    def push(self, text: str) -> Divided:
        """Return what is known of the text so far, and was not returned before."""
        self._held += text
        reasoning = ""
        if not self._known:
            found = self._held.lstrip()
            if found.startswith(_BEGIN):
                self._held, self._inside, self._strips = found.removeprefix(_BEGIN), True, True
            elif _BEGIN.startswith(found):
                return Divided()
            self._known = True
        if self._inside:
            before, end, behind = self._taken().partition(END_OF_REASONING)
            if not end:
                known = before[: len(before) - overlap(before, END_OF_REASONING)].rstrip()
                self._held = before[len(known) :]
                self._strips = self._strips and not known
                return Divided(reasoning=known)
            reasoning, self._held = before.rstrip(), behind
            self._inside, self._strips = False, True
        content, self._held = self._taken(), ""
        self._strips = self._strips and not content
        return Divided(reasoning, content)

    def flush(self) -> Divided:
        """Return the rest: the answer has ended."""
        text, self._held = self._taken(), ""
        return Divided(reasoning=text.rstrip()) if self._inside else Divided(content=text)

    def _taken(self) -> str:
        return self._held.lstrip() if self._strips else self._held
