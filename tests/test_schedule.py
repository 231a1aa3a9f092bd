"""Tests of the schedule for several processes, and of artifacts that are made only once."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from .conftest import ROOT
from .processes import PATIENCE
from .schedule import BY_PARAMETER, LONGEST, rank, unit


def test_files_that_are_named_are_there() -> None:
    assert [name for name in (*LONGEST, *BY_PARAMETER) if not (ROOT / name).exists()] == []


def test_long_files_come_first() -> None:
    others = "tests/delegate/artifact/test_files.py::test_a", "tests/test_rooms.py::test_b[x]"
    assert [rank(f"{name}::test_c") for name in LONGEST] == list(range(len(LONGEST)))
    assert {rank(nodeid) for nodeid in others} == {len(LONGEST)}


def test_a_file_is_one_piece_or_one_per_parameter() -> None:
    assert unit("tests/test_rooms.py::test_b[x]") == unit("tests/test_rooms.py::test_c") == "tests/test_rooms.py"
    for name in BY_PARAMETER:
        pieces = [unit(f"{name}::{test}") for test in ("test_a[one]", "test_b[one]", "test_a[two]")]
        assert pieces[0] == pieces[1] != pieces[2]


def test_an_artifact_is_made_once(exported: Callable[..., Path]) -> None:
    """Two processes ask for one artifact: the second waits, and takes what the first has made."""
    builds: list[Path] = []
    second = threading.Event()
    found: list[Path] = []

    def build(path: Path) -> None:
        builds.append(path)
        # The artifact is half done when the second process asks.
        path.mkdir()
        assert second.wait(PATIENCE)
        (path / "model.pte").write_bytes(b"whole")

    def ask(extra: str) -> None:
        found.append(exported("made-once", build, extra))

    extra = str(os.getpid())
    first, other = (threading.Thread(target=ask, args=(extra,)) for _ in range(2))
    first.start()
    other.start()
    second.set()
    for thread in (first, other):
        thread.join(PATIENCE)
    assert len(builds) == 1 and found[0] == found[1] != builds[0]
    assert [path.name for path in found[0].iterdir()] == ["model.pte"]
    shutil.rmtree(found[0])


def test_what_a_failed_export_left_is_taken_away(exported: Callable[..., Path]) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise ZeroDivisionError

    extra = str(os.getpid())
    with pytest.raises(ZeroDivisionError):
        exported("left-over", fail, extra)
    path = exported("left-over", Path.mkdir, extra)
    assert list(path.iterdir()) == []
    path.rmdir()
