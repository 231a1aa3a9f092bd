"""Words for what is wrong with a request's body."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import protocol


def refusal(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None]:
    """The fault of a body, and the parameter that has it.

    Args:
        errors: what the check has found, one or more, as pydantic lists it; each `loc` begins with the word "body".
        body: the body, which may be anything. None: there is none, or it is null.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    if body is None:
        return "there is no body: send a JSON object", None
    path, found = _deepest(errors, body)
    param = ".".join(map(str, path)) or None
    head, *others = dict.fromkeys(error["msg"] for error in found)
    what = " or ".join([head, *(other.removeprefix("Input should be ") for other in others)])
    if param is None:
        if found[0]["type"].startswith("model_"):
            what = f"the body must be a JSON object, got {reprlib.repr(body)}"
        return what, None
    if found[0]["type"] == "extra_forbidden":
        return (
            f"{param} is not supported" if param in protocol.NOT_SUPPORTED else f"unknown parameter {param!r}"
        ), param
    return f"{param}: {what}", param


def _deepest(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[tuple[str | int, ...], list[Mapping[str, Any]]]:
    """The place of the first parameter that is wrong, and what is wrong there.

    Where a value may have one of several types, there are errors for each of these: those count that are deepest in the
    value, and behind all that fits.
    """
    by_place: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        by_place.setdefault(_place(error, body), []).append(error)
    first = next(iter(by_place))
    place = max((one for one in by_place if one[:1] == first[:1]), key=lambda one: (len(one), *_numbers(one)))
    return place, by_place[place]


def _numbers(place: Sequence[str | int]) -> list[int]:
    return [word for word in place if isinstance(word, int)]


def _place(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """The place of an error without the words of pydantic's that say which of several types it is of."""
    found: list[str | int] = []
    words = list(error["loc"][1:])
    missing = [words.pop()] if error["type"] == "missing" else []
    for word in words:
        if (isinstance(body, dict) and word in body) or (isinstance(body, list) and isinstance(word, int)):
            found.append(word)
            body = body[word]
    return (*found, *missing)
