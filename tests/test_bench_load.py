"""Tests scripts/bench_load.py: a run against recorded output of llama-batched-bench, and the goals on made-up figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_bench_batch import RECORDED, llama

sys.path.append(str(ROOT / "scripts"))

import bench_load
from bench_load import GOALS, Goal, Row

__all__ = ["llama"]

GOOD = [Row(callers, goal.speed, None, 10.0, 1.0, goal.p99_itl_ms, 0, None) for callers, goal in GOALS.items()]


def test_a_run(llama: Path, capitals_artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf, found = tmp_path / "model.gguf", tmp_path / "found.json"
    gguf.touch()
    words = [capitals_artifact, "--concurrency", "3,1", "-p", "16", "-n", "8", "--requests", "6", "--json", found]
    words += ["--llama-batched-bench", llama, "--gguf", gguf]
    status = bench_load.main([str(word) for word in words])
    out, err = capfd.readouterr()
    record = json.loads(found.read_text())
    assert [(row["callers"], row["failed"]) for row in record["loads"]] == [(1, 0), (3, 0)]
    # Of two lines for a number of sequences, the last: generated tokens over the time of all of them.
    assert [row["peer"] for row in record["loads"]] == pytest.approx([8 / 0.328143, 3 * 8 / 0.823154])
    for row, measured in zip(record["loads"], record["records"], strict=True):
        assert row["ratio"] == pytest.approx(row["speed"] / row["peer"])
        assert (row["speed"], row["p99_itl_ms"]) == (measured["output_throughput"], measured["p99_itl_ms"])
        assert len(measured["samples"]) == 6
    # Either outcome is right: the machine may be busy. A CPU has no goals.
    assert [one["what"] for one in record["goals"]] == ["1 over llama.cpp", "3 over llama.cpp"]
    assert status == (0 if all(one["held"] for one in record["goals"]) else 1)
    assert "callers" in out and "goal" not in out.splitlines()[3]
    assert "--load --concurrency 1,3 -p 16 -n 8 --range-ratio 0.2 --cuda_graph off" in err
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked[-10:] == ["-c", "72", "-npp", "16", "-ntg", "8", "-npl", "1,3", "--output-format", "jsonl"]


def test_what_llama_writes() -> None:
    text = "\nllama_batched_bench: n_kv_max = 768\n" + RECORDED.read_text()
    assert bench_load.read_llama(text) == pytest.approx({1: 24.379615, 3: 29.156148})


def test_all_goals_hold() -> None:
    assert all(one.held for one in bench_load.findings(GOOD, GOALS))
    lines = bench_load.render(GOOD, GOALS).splitlines()
    assert lines[0].split()[-1] == "held" and [line.count("yes") for line in lines[2:]] == [2] * len(GOALS)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"speed": 1749.0}, "8: output: 1,749.0 tokens/s, wanted: 1,750 or more"),
        ({"p99_itl_ms": 14.5}, "8: between tokens, p99: 14.50 ms, wanted: 14 ms or less"),
        ({"failed": 2}, "8: failed: 2 requests, wanted: 0"),
        ({"peer": 2000.0}, "8 over llama.cpp: 0.875, wanted: 0.97 or more: two runs differ by 3%"),
    ],
)
def test_a_missed_goal(changed: dict[str, float], missed: str) -> None:
    rows = [replace(row, **changed) if row.callers == 8 else row for row in GOOD]  # type: ignore[arg-type]
    (found,) = [one for one in bench_load.findings(rows, GOALS) if not one.held]
    assert f"{found.what}: {found.found}, wanted: {found.wanted}" == missed
    assert bench_load.render(rows, GOALS).count("NO") == ("speed" in changed) + ("p99_itl_ms" in changed)


def test_loads_without_goals() -> None:
    (row,) = bench_load.render([GOOD[0]], {8: Goal(1, 1)}).splitlines()[2:]
    assert "yes" not in row and bench_load.findings([GOOD[0]], {8: Goal(1, 1)}) == []


def test_when_nothing_came(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_load.row_of({"max_concurrency": 4, "completed": 0, "error": "gone"}, None)
    assert "all requests of 4 callers failed: gone" in capsys.readouterr().err


def test_files_that_are_missing(capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(capitals_artifact), "--llama-batched-bench", "nowhere", "--gguf", "nowhere"]
    assert bench_load.main(words) == 2
    assert "no such file: nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_load.parse([str(capitals_artifact), "--gguf", "nowhere"])
