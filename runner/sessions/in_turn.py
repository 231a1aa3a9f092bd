"""Lets one thread at a time into methods that share a lock."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class HasLock(Protocol):
    lock: RLock


Owner = TypeVar("Owner", bound=HasLock)


def in_turn(
    operation: Callable[Concatenate[Owner, Parameters], Returned],
) -> Callable[Concatenate[Owner, Parameters], Returned]:
    """Let one thread at a time into such methods of objects with the same `lock`."""

    @wraps(operation)
    def run(owner: Owner, *arguments: Parameters.args, **named: Parameters.kwargs) -> Returned:
        with owner.lock:
            return operation(owner, *arguments, **named)

    return run
