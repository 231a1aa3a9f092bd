"""scripts/bench_reuse.py and bench_next_turn.py: a run of few conversations, and their goals over made-up figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_next_turn
import bench_reuse
from bench_next_turn import Shared, Turn
from bench_reuse import CONFIG, Asked, Row

from ostinato.runner.text.prompts import Prompt

GOOD = Row("tiny", "Qwen3", "on", "in turn", 10, 3000, 2000, 1800, 1000, 900, 10**6)


@pytest.fixture
def tiny(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that the script exports."""
    from ostinato.runner.cli import main

    def export(*words: str) -> str:
        assert main(list(words)) == 0
        return ""

    monkeypatch.setattr(bench_reuse, "ostinato", export)
    return exported("reuse", bench_reuse.exported, json.dumps(CONFIG))


def test_a_run(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "found.json"
    words = ["--conversations", "3", "--turns", "2", "--system", "300", "--json", str(saved)]
    status = bench_reuse.main([str(tiny), *words])
    out, err = capsys.readouterr()
    rows = json.loads(saved.read_text())
    # The templates in tests/assets are those of one family.
    assert [(row["template"], row["thinking"], row["order"]) for row in rows] == [
        ("Qwen3", thinking, order) for thinking in ("on", "off") for order in ("in turn", "at random")
    ]
    assert "note: left out: gpt-oss, " in err
    for row in rows:
        # A turn is one request, and the next one three.
        assert row["requests"] == 3 * (1 + 3)
        assert 0 < row["own_reused"] <= row["own_could"] < row["could"] <= row["prompt_tokens"]
        assert row["share"] == row["reused"] / row["could"] <= 1
        assert (row["host_bytes"] > 0) == (row["order"] == "in turn")
    missed = [row for row in rows if row["order"] == "in turn" and row["share"] < bench_reuse.GOAL]
    assert (status, out.count("MISSED")) == (1 if missed else 0, len(missed))


def test_known_beginnings() -> None:
    first, other = Asked(Prompt([], [1, 2, 3], None, True), [4, 5]), Asked(Prompt([], [1, 2, 9], None, True), [7])
    later = Asked(Prompt([], [1, 2, 3, 4, 5, 6], None, True), [8])
    assert [known for _, known in bench_reuse.with_known([first, other, later, later])] == [0, 2, 5, 6]
    chats = [[first, later], [other, other], [other, later]]
    assert bench_reuse.in_order(chats, "in turn") == [first, other, other, later, other, later]
    mixed = bench_reuse.in_order(chats, "at random")
    assert len(mixed) == 6 and mixed.index(first) < mixed.index(later)


def test_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (held,) = bench_reuse.findings([GOOD, replace(GOOD, order="at random", reused=0)])
    (missed,) = bench_reuse.findings([replace(GOOD, reused=1799)])
    assert held.held and not missed.held
    assert f"{missed.what}: {missed.found}" == "tiny, Qwen3, thinking on: reused: 90.0%"
    assert bench_reuse.render([GOOD]).splitlines()[-1].split()[-5:] == ["1,800", "90.0%", "90.0%", "1.0", "MB"]
    with pytest.raises(SystemExit) as ended:
        bench_reuse.main([str(tmp_path), "--templates", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path} has no template of Qwen3.5, Qwen3, ")


def test_next_turns(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "found.json"
    words = ["--context", "300", "--answer", "20", "--question", "10", "--prefix", "200", "--callers", "4", "-r", "1"]
    assert bench_next_turn.main([str(tiny), *words, "--json", str(saved)]) == 0
    found = json.loads(saved.read_text())
    assert [(one["state"], one["reused"], one["computed"]) for one in found["turns"]] == [
        ("anew", 0, 330),
        ("device", 300, 30),
        ("file", 300, 30),
        ("host", 300, 30),
    ]
    # Two answers cost one prompt; four requests cost what they have in common once, and 8 tokens each.
    assert [(one["prompt_tokens"], one["computed"]) for one in found["shared"]] == [(400, 200), (4 * 208, 200 + 4 * 8)]
    assert capsys.readouterr().out.split().count("computed") == 2
    with pytest.raises(SystemExit) as ended:
        bench_next_turn.main([str(tiny), "--context", "99999"])
    assert ended.value.code == 2
    assert "max_seq_len is 32,768" in capsys.readouterr().err


def test_goals_of_next_turns() -> None:
    slow, quick = Turn("host", 300, 30, 61.0, [61.0]), Turn("device", 300, 30, 32.0, [32.0])
    found = bench_next_turn.findings([slow, quick], [Shared("2 answers", 400, 400, 200, 1.0)])
    assert [(one.what, one.held) for one in found] == [
        ("ms to the first token, state on the host", False),
        ("ms to the first token, state on the device", True),
        ("2 answers: tokens computed", False),
    ]
