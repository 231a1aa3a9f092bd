"""How far two texts, or two lists of tokens, are the same."""

from __future__ import annotations

from typing import TypeVar

# State is not kept, nor waited for, to save fewer tokens: prompts begin with the same tokens of a template.
MIN_SHARED = 32

Compared = TypeVar("Compared", str, list[int])


def common_length(one: Compared, other: Compared) -> int:
    """Number of characters, or tokens, with which both begin."""
    same, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    # Slices are compared 50 times as fast as one token after the other.
    while end - same > 1:
        middle = (same + end) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle
    return same
