"""scripts/bench_sessions.py: what it measures, and its goals over made-up figures. No test asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ostinato.delegate import load_program

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_sessions
from bench_sessions import Row


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_measured(
    device: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact: Path = request.getfixturevalue("capitals_cuda" if device == "cuda" else "capitals_artifact")
    saved = tmp_path / "found.json"
    words = [str(artifact), "--cuda_graph", "--depths", "3,45,4000", "-r", "2", "--json", str(saved), "--skip-goals"]
    assert bench_sessions.main(words) == 0
    with load_program(artifact) as program:
        slot, page = program.capacity.slot_bytes, program.capacity.groups[0].page_bytes
        table = 4 * program.capacity.groups[0].pages_per_session
    found = json.loads(saved.read_text())
    moved = slot - table + page
    assert [(row["name"], row["depth"], row["nbytes"]) for row in found["rows"]] == [
        (name, depth, nbytes)
        for depth in (3, 45)
        for name, nbytes in {"snapshot": slot, "restore": slot, "fork": slot, "offload": moved, "onload": moved}.items()
    ]
    assert all(0 < row["host_us"] <= row["us"] and row["plain_us"] > 0 for row in found["rows"])
    assert [step["depth"] for step in found["steps"]] == [3, 45]
    out, err = capsys.readouterr()
    assert "a step of another session: " in out
    assert "note: left out: 4,000 tokens, max_seq_len is 251" in err.splitlines()
    assert bench_sessions.main([str(artifact), "--depths", "4000"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: no depth is left"


def test_goals() -> None:
    def row(name: str, depth: int, us: float, plain_us: float = 100.0) -> Row:
        return Row(name, depth, 1000, us, us, plain_us)

    good = [
        row("snapshot", 4000, 60.0),
        row("fork", 0, 100.0),
        row("restore", 32_000, 999.0),
        row("offload", 32_000, 130.0),
    ]
    assert bench_sessions.misses(good) == []
    (line,) = bench_sessions.misses([*good, row("onload", 4000, 131.0)])
    assert line == "onload behind 4,000 tokens takes 131.0 us, the goal is 130.0 us"
    assert len(bench_sessions.misses([row("restore", 4000, 61.0), row("fork", 4000, 101.0)])) == 2
