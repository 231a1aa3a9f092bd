"""scripts/bench_prompts.py: which prompts it measures, and its goals over made-up figures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.runner.sessions.warm_up import Captured, WarmUp

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_prompts
from bench_prompts import Row, Times

DONE = WarmUp((Captured("rows", 16, 0.2, 10**6, None), Captured("decode", 1, 5.0, 10**9, None)))


def row(tokens: int, depth: int, wall_ms: float) -> Row:
    """Return a row that is slower without a graph, and whose time is nearly all in kernels."""
    return Row(tokens, depth, tokens, Times(wall_ms + 1, 9000.0), Times(wall_ms, 99.0), wall_ms, wall_ms - 0.1)


GOOD = [row(*case, goal) for case, goal in bench_prompts.GOALS.items()]


def test_deep_prompts_need_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_prompts.cases_of([16, 700], [30_000, 120_000], 30_016) == [(16, 0), (700, 0), (16, 30_000)]
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(
        "note: left out: 16 tokens behind 120,000: max_seq_len is 30,016, export with --max-seq-len 1"
    )
    assert len(bench_prompts.cases_of([16], [30_000, 120_000], 131_072)) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing GPU is named before the artifact is looked at."""
    assert bench_prompts.main(["nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: timing prompts needs an NVIDIA GPU")


@pytest.mark.gpu
def test_without_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_prompts.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not an artifact" in line


def test_all_held() -> None:
    assert bench_prompts.misses(GOOD, DONE) == []
    # This is 28,000 tokens/s.
    assert bench_prompts.GOALS[512, 0] == pytest.approx(18.2857, abs=1e-4)
    # A length without a bucket has no goal.
    assert bench_prompts.misses([replace(row(700, 0, 99.0), bucket=None)], DONE) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (row(16, 0, 4.6), "16 tokens take 4.60 ms with a graph, wanted: 4.50 at most"),
        (row(64, 0, 7.6), "64 tokens take 7.60 ms with a graph, wanted: 7.50 at most"),
        (row(128, 0, 9.1), "128 tokens take 9.10 ms with a graph, wanted: 9.00 at most"),
        (row(512, 0, 18.4), "512 tokens take 18.40 ms with a graph, wanted: 18.29 at most"),
        (row(16, 30_000, 6.1), "16 tokens behind 30,000 take 6.10 ms with a graph, wanted: 6.00 at most"),
        (row(16, 120_000, 8.1), "16 tokens behind 120,000 take 8.10 ms with a graph, wanted: 8.00 at most"),
        (replace(GOOD[5], plain=Times(7.8, 9000.0)), "16 tokens behind 120,000 are slower with a graph"),
        (replace(GOOD[1], graph=Times(7.5, 101.0)), "the host takes more than 100 us for 64 tokens"),
        (replace(GOOD[0], graph_kernels_ms=4.3), "a prompt of 16 takes more than 3% over its kernels"),
    ],
)
def test_a_goal_that_was_missed(changed: Row, complaint: str) -> None:
    rows = [changed if (one.tokens, one.depth) == (changed.tokens, changed.depth) else one for one in GOOD]
    assert bench_prompts.misses(rows, DONE) == [complaint]


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"pool_bytes": 301 * 10**6}, "the buckets take more than 300.0 MB"),
        ({"seconds": 2.1}, "the buckets take more than 2 s to capture"),
    ],
)
def test_what_buckets_take(numbers: dict[str, Any], complaint: str) -> None:
    bucket, decode = DONE.captured
    assert bench_prompts.misses(GOOD, WarmUp((replace(bucket, **numbers), decode))) == [complaint]


def test_the_table() -> None:
    cells = [dict(zip(bench_prompts.COLUMNS, one.cells, strict=True)) for one in (*GOOD, row(17, 0, 5.0))]
    assert [(cell["tokens"], cell["depth"], cell["goal"]) for cell in cells] == [
        ("16", "0", "4.50"),
        ("64", "0", "7.50"),
        ("128", "0", "9.00"),
        ("512", "0", "18.29"),
        ("16", "30,000", "6.00"),
        ("16", "120,000", "8.00"),
        ("17", "0", ""),
    ]
