"""What the tests of `ostinato bench` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.runner import device
from ostinato.runner.cli import main

# 5 and 2 tokens prefilled, 4 decoded, from nothing and from 6 tokens, timed twice.
SMALL = ["-p", "5,2", "-n", "4", "-d", "0,6", "-r", "2"]

Bench = Callable[..., str]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of 256 MiB would take most of the tests' time."""
    monkeypatch.setattr(device, "_HOST_COPY_BYTES", 1 << 20)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """`bench(word, ...)`: run the command in this process; returns its stdout."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main(["bench", *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Bench:
    """`refused(word, ...)`: the one error line; exit status 2 and an empty stdout."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main(["bench", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in err
        return line

    return run


def records(bench: Bench, *words: object) -> list[dict[str, Any]]:
    return json.loads(bench(*words, "--output", "json"))
