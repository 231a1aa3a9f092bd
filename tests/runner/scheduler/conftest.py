"""An engine with few pages in several modes, schedulers that drive it, and an event loop for engines in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from ostinato.runner import Engine, Request

from ...processes import PATIENCE
from .driving import CPU_MODES, GPU_MODES, PAGE, Driven, alone, loaded

# Four sessions of 251 tokens would need 16 pages.
SESSIONS, PAGES = 4, 9

Driver = Callable[..., Driven]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine in the event loop of a file's engines."""
    loop = asyncio.new_event_loop()

    def patient(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(asyncio.wait_for(coroutine, PATIENCE))

    yield patient
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture(scope="module", params=[*CPU_MODES, *GPU_MODES])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, mode: str) -> Iterator[Engine]:
    with loaded(request, mode, sessions=SESSIONS, kv_tokens=PAGES * PAGE) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, mode: str) -> Iterator[Engine]:
    """An engine whose only session steps alone, one step after the other."""
    with loaded(request, "GPU" if mode == "GPU" else "in turn") as engine:
        yield engine


@pytest.fixture
def driver(engine: Engine, mode: str) -> Iterator[Driver]:
    """Makes a driven scheduler. At the end all slots and pages are free."""
    made: list[Driven] = []

    def make(rows: int = 32, max_waiting: int = 1024) -> Driven:
        made.append(Driven(engine, mode, rows, max_waiting=max_waiting))
        return made[-1]

    yield make
    for driven in made:
        driven.close()


def check(driven: Driven, *requests: Request) -> None:
    """All answers are those of sessions alone, and ended for the same reason."""
    for request in requests:
        for index in range(request.n):
            found = driven.of(request, index)
            tokens, reason, _ = alone(driven.reference, request, index)
            assert (found.tokens, found.reason, found.error) == (tokens, reason, None)
