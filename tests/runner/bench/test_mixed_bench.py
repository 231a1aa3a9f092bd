"""`ostinato bench --mixed`: a prompt that rides in a step of sessions. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.runner.cli import main
from ostinato.runner.model.batch import Outputs, Run
from ostinato.runner.model.model import Model

from ..conftest import Bench, records

SMALL = ["--mixed", "2+9,3+5", "-p", "4", "-r", "2"]


def test_records(bench: Bench, capitals_artifact: Path) -> None:
    rows = records(bench, capitals_artifact, *SMALL)
    assert [(row["sessions"], row["prompt"], row["cuda_graph"]) for row in rows] == [
        (sessions, prompt, graph) for sessions, prompt in ((2, 9), (3, 5)) for graph in (False, True)
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx((row["step_ms"] + row["prompt_ms"]) / row["together_ms"])
        assert min(row["step_ms"], row["prompt_ms"]) > 0
        assert row["torch"] == torch.__version__ and row["device"]


def test_what_is_measured(bench: Bench, capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition makes three calls of the model: a step of the sessions, the prompt, and both."""
    calls: list[list[int]] = []
    step = Model.step

    def spy(model: Model, runs: list[Run]) -> Outputs:
        calls.append([run.rows for run in runs])
        return step(model, runs)

    monkeypatch.setattr(Model, "step", spy)
    bench(capitals_artifact, "--mixed", "2+9", "-p", "4", "-r", "2", "--cuda_graph", "off")
    histories, rest = calls[:2], calls[2:]
    assert histories == [[4], [4]]
    # The first step takes the tokens that were sampled after the histories.
    assert rest.pop(0) == [9] and rest.pop(0) == [1, 1, 9]
    assert rest == [[1, 1], [9], [1, 1, 9]] * (len(rest) // 3) and len(rest) // 3 == 3 + 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mixed", "32"], "--mixed takes pairs such as 32+224"),
        (["--mixed", "0+5"], "--mixed takes sessions + tokens of a prompt"),
        (["--mixed", "2+x"], "--mixed takes whole numbers"),
        (["--mixed", "2+9", "--sessions", "2"], "--mixed needs 3 sessions, got --sessions 2"),
        (["--mixed", "2+9", "-p", "1,2"], "with it -p takes one number"),
        (["--mixed", "2+9000"], "a session would have 9002 tokens, max_seq_len is"),
    ],
)
def test_wrong_words(
    capitals_artifact: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["bench", str(capitals_artifact), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_the_table(capitals_artifact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "mixed.json"
    assert main(["bench", str(capitals_artifact), *SMALL, "--save", str(saved), "-o", "md"]) == 0
    table = capsys.readouterr().out
    assert "both in one step, ms" in table and "each session has 4 tokens" in table
    assert len(json.loads(saved.read_text())) == 4
