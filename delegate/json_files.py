"""JSON that others wrote: what cannot be read ends in one of the project's errors, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import OstinatoError


def parse_json(data: str | bytes, source: str, error: type[OstinatoError]) -> Any:
    """The value that JSON text stands for; `error`, naming `source`, when it is not JSON or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise error(f"{source} cannot be read: its JSON is nested too deeply") from None
    except ValueError as reason:
        raise error(f"{source} cannot be read: {reason}") from reason


def read_json(path: Path, error: type[OstinatoError]) -> Any:
    """As `parse_json`, of a file in UTF-8; a file that cannot be opened is an `error` too."""
    try:
        data = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    return parse_json(data, str(path), error)
