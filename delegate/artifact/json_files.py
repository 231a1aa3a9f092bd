"""Checked reading of JSON that others wrote. Whatever is wrong with the text, one of the project's errors is raised."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ostinato.delegate.errors import OstinatoError

E = TypeVar("E", bound=Enum)


def parse_json(data: str | bytes, source: str, error: type[OstinatoError]) -> Any:
    """Parse JSON text. Raises `error`, which names `source`: the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise error(f"{source} cannot be read: its JSON is nested too deeply") from None
    except ValueError as reason:
        raise error(f"{source} cannot be read: {reason}") from reason


def read_json(path: Path, error: type[OstinatoError]) -> Any:
    """Parse a JSON file in UTF-8. Raises `error`: as in `parse_json`, or the file cannot be opened."""
    try:
        data = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    return parse_json(data, str(path), error)


def as_text(value: object) -> str:
    """Return the value. Raises TypeError unless it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def as_flag(value: object) -> bool:
    """Return the value. Raises TypeError unless it is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def one_of(choices: type[E], value: object, what: str) -> E:
    """Return the choice that has this value. Raises ValueError, which names `what` and all values: no such choice."""
    values = [choice.value for choice in choices]
    if value not in values:
        raise ValueError(f"unknown {what} {value!r}; the known ones are: {', '.join(values)}")
    return choices(value)


def as_numbers(values: object) -> tuple[int, ...]:
    """Return the list as a tuple. Raises TypeError unless it is a list of integers."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"{values!r} is not a list of numbers")
    return tuple(values)


def as_names(data: object) -> dict[str, str]:
    """Return the table. Raises TypeError unless all its values are strings."""
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} is not a table of names")
    return {name: as_text(key) for name, key in data.items()}
