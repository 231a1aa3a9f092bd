"""scripts/bench_serve.py: a small run over a real server, and its goals over made-up figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_serve
from bench_serve import Row

GOOD = Row(64, 1000.0, 20.0, 970.0, 25.0, 10.0, 12.0, 0, 400.0, 90.0)


def test_a_small_run(capitals_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "found.json"
    words = ["--concurrency", "1,2", "-p", "16", "-n", "8", "--requests", "4", "--json", str(saved), "--skip-goals"]
    assert bench_serve.main([str(capitals_artifact), *words]) == 0
    found = json.loads(saved.read_text())
    assert [row["callers"] for row in found["rows"]] == [1, 2]
    for row, alone, served in zip(found["rows"], found["alone"], found["served"], strict=True):
        assert row["failed"] == 0 and row["share"] == row["http_speed"] / row["speed"] > 0
        # The same requests, which had all their tokens.
        for name in ("completed", "total_input_tokens", "total_output_tokens"):
            assert alone[name] == served[name] > 0, name
        assert served["url"].startswith("http://127.0.0.1:")
    assert "with HTTP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"http_speed": 969.0}, ["64: tokens/s with HTTP"]),
        ({"callers": 128, "http_speed": 950.0}, []),
        ({"callers": 128, "http_speed": 949.0}, ["128: tokens/s with HTTP"]),
        ({"http_first_ms": 25.1}, ["64: first token"]),
        ({"failed": 1}, ["64: failed"]),
        ({"peer_speed": 1001.0}, ["64 over llama.cpp"]),
        ({"peer_speed": None}, []),
    ],
)
def test_goals(changes: dict[str, float | None], missed: list[str]) -> None:
    found = bench_serve.findings([replace(GOOD, **changes)])  # type: ignore[arg-type]
    assert [one.what for one in found if not one.held] == missed


def test_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_serve.main([str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "no such folder" in capsys.readouterr().err
