"""scripts/profile_load.py: what it measures, and its goals over made-up figures. No test asserts a time."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import profile_load
from profile_load import Row


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_measured(
    device: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact: Path = request.getfixturevalue("capitals_cuda" if device == "cuda" else "capitals_artifact")
    saved = tmp_path / "found.json"
    words = [str(artifact), "--cuda_graph", "--callers", "1,3", "-p", "20", "-n", "10", "--seconds", "0.3"]
    assert profile_load.main([*words, "--json", str(saved), "--skip-goals"]) == 0
    found = json.loads(saved.read_text())
    assert [row["callers"] for row in found] == [1, 3]
    for row in found:
        assert row["speed"] > 0 and 0 < row["step_ms"] <= row["step_p99_ms"]
        assert 0 < row["decoding"] <= row["callers"]
        if device == "cuda":
            assert 0 < row["own_us"] < row["python_us"] and 0 < row["at_work"] <= 1
        else:
            assert row["own_us"] is row["python_us"] is row["at_work"] is None
    assert "output tokens/s" in capsys.readouterr().out


def test_more_callers_than_room(capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        profile_load.main([str(capitals_artifact), "-p", "2000", "--callers", "1"])
    assert "leaves no room for an answer in max_seq_len" in capsys.readouterr().err


def test_goals() -> None:
    row = Row(32, 3000.0, 31.0, 14.0, 16.0, 500.0, 100.0, 0.97)
    good = [row, replace(row, callers=8, at_work=0.5), replace(row, callers=1, own_us=60.0, at_work=0.9)]
    assert profile_load.misses(good) == []
    assert profile_load.misses([replace(row, callers=128, own_us=401.0, at_work=0.96)]) == [
        "128 callers: at work 96.0% of the time, the goal is 97%",
        "128 callers: the scheduler takes 401 us of a step, the goal is 400",
    ]
