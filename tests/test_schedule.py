"""Tests of the schedule for several processes, and of artifacts that are made only once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from .conftest import ROOT
from .processes import PATIENCE
from .schedule import ALONE, BY_PARAMETER, LONGEST, group, rank


def test_files_that_are_named_are_there() -> None:
    assert [name for name in (*LONGEST, *BY_PARAMETER, *ALONE) if not (ROOT / name.partition("::")[0]).exists()] == []


def test_long_tests_come_first() -> None:
    others = "tests/delegate/artifact/test_files.py::test_a", "tests/test_rooms.py::test_b[x]"
    # Of two names that a test begins with, the longer one is found first.
    assert [rank(name) for name in LONGEST] == list(range(len(LONGEST)))
    assert {rank(nodeid) for nodeid in others} == {len(LONGEST)}


def test_a_group_is_a_file_or_a_parameter_of_one() -> None:
    assert group("tests/test_rooms.py::test_b[x]") == group("tests/test_rooms.py::test_c")
    assert group("tests/test_rooms.py::test_b[x]") != group("tests/test_readme.py::test_b[x]")
    for name in BY_PARAMETER:
        groups = [
            group(f"{name}::{test}") for test in ("test_a[one]", "test_b[one]", "test_a[two]", "test_c", "test_d")
        ]
        assert groups[0] == groups[1] != groups[2] and groups[3] == groups[4] not in groups[:3]


@pytest.mark.parametrize("count", [1, 3])
def test_tests_that_must_be_alone_come_last(tmp_path: Path, count: int) -> None:
    """A run of pytest-xdist with our schedule, over tests that write their names into a file."""
    log = tmp_path / "log"
    test = f"""
import pytest
@pytest.mark.parametrize("number", range({{}}))
def test_a(number):
    with open({str(log)!r}, "a") as file:
        file.write("{{}}" + chr(10))
"""
    files = {ALONE[0].removesuffix("::"): test.format(4, "alone"), "tests/test_rooms.py": test.format(40, "other")}
    files["conftest.py"] = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
def pytest_xdist_make_scheduler(config, log):
    import schedule
    return schedule.Schedule(config, log)
"""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = ["-q", "-n", str(count), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stdout
    ran = log.read_text().split()
    assert sorted(ran) == ["alone"] * 4 + ["other"] * 40
    # By then each of the other processes has at most two tests that it has been given.
    assert ran.index("alone") >= 40 - 2 * (count - 1) - 1


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
