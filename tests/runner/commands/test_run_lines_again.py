"""`ostinato run --prompts`: going on after an interruption, and what is refused before anything runs."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.errors import ClosedError, StepError
from ostinato.runner import Engine
from ostinato.runner.cli import main
from ostinato.runner.stream import Result

from ...conftest import Fails
from ...processes import CLI, INTERRUPTIBLE_CLI, PATIENCE
from .lines import COUNTRIES, Runs, batch, question, run

__all__ = ["run"]


def test_standard_output(run: Runs, capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    run.write(*({"id": country, "prompt": question(country)} for country in COUNTRIES))
    assert main(["run", str(capitals_artifact), "--prompts", str(run.source), "--cuda_graph", "--sessions", "2"]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert {line["id"]: line["text"] for line in lines} == COUNTRIES


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_going_on_after_an_end(run: Runs, number: signal.Signals) -> None:
    """The same command asks what has no answer, and nothing twice."""
    lines = [{"id": i, "prompt": question(list(COUNTRIES)[i % 6]), "max_tokens": 200} for i in range(400)]
    run.write(*lines)
    command = [*INTERRUPTIBLE_CLI, *run.words("--ignore-eos", "--sessions", 2)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not run.output.exists() or run.output.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    error = process.communicate(timeout=PATIENCE)[1]
    before = run.output.read_bytes()
    done = before.count(b"\n")
    assert 5 <= done < 400
    if number == signal.SIGINT:
        assert (process.returncode, error) == (130, "interrupted\n") and before.endswith(b"\n")
    # As a kill in the middle of a write leaves it.
    run.output.write_bytes(before + b'{"id":399,"text":"Li')
    found = run("--sessions", 8)
    whole = before[: before.rfind(b"\n") + 1]
    assert run.output.read_bytes().startswith(whole)
    assert set(found) == set(range(400))
    assert f"| {done} were answered before" in run.err
    assert run.err.startswith(f"{400 - done} requests")


def test_a_half_line(run: Runs, fails: Fails) -> None:
    """It is asked again, also if nothing but the beginning of the first line is there. A file of something else stays."""
    run.write({"id": "a", "prompt": question("Peru")})
    (whole,) = (run(), run.output.read_bytes())[1:]
    for length in (1, 4, 6, len(whole) - 1):
        run.output.write_bytes(whole[:length])
        run()
        assert run.output.read_bytes() == whole
    for other in (
        b"hello",
        b"hello\n",
        whole + b"5\n",
        b'{"id":5}\n{}\n',
        b'{"id":[]}\n',
        b'{"id":1,"response":null}\n',
        whole + b"\n",
    ):
        run.output.write_bytes(other)
        assert "is no answer: give a new file" in fails(*run.words())
        assert run.output.read_bytes() == other


def test_what_is_refused_before_anything_runs(run: Runs, fails: Fails, tmp_path: Path, capitals_artifact: Path) -> None:
    ask = {"prompt": question("Peru")}
    for lines, message in (
        ([{"id": "a", **ask}, ask, batch("a")], "lines 1 and 3 have the same id 'a'"),
        ([{"id": 3, **ask}, ask, "?"], "lines 1 and 3 have the same id 3"),
    ):
        run.write(*lines)
        assert message in fails(*run.words())
        assert not run.output.exists()
    # A number and its text are two ids, as in JSON.
    run.write({"id": 1, **ask}, {"id": "1", **ask})
    assert set(run()) == {1, "1"}
    words = ["run", capitals_artifact, "--prompts", run.source]
    for more, message in (
        (["--prompt", "x"], "--prompt is for one conversation, --prompts for a file of prompts"),
        (["--prompt-file", run.source], "--prompt-file is for one conversation"),
        (["--output", run.source], "that is the file of --prompts"),
        (["--output", tmp_path], "cannot be written: Is a directory"),
        (["--output", tmp_path / "none" / "x"], "cannot be written: No such file or directory"),
        (["--raw", "--system", "x"], "--system is for the chat template"),
        (["--prompts", tmp_path / "none"], f"{tmp_path / 'none'} cannot be read: No such file or directory"),
        (["--prompts", tmp_path], "it is not a file"),
        (["--sessions", "0"], "sessions must be an integer of 1 or more"),
    ):
        assert message in fails(*words, *more)
    assert "--output is for the answers to --prompts" in fails("run", capitals_artifact, "--output", tmp_path / "x")


def test_one_process_writes(run: Runs, fails: Fails) -> None:
    from ostinato.runner.answers_file import AnswersFile

    run.write({"id": "a", "prompt": question("Peru")})
    with AnswersFile(run.output):
        assert "another process writes to it" in fails(*run.words())
    assert run()["a"]["text"] == "Lima"


def test_a_full_disk(run: Runs) -> None:
    run.write(*({"id": country, "prompt": question(country)} for country in COUNTRIES))
    words = [*CLI, *run.words()]
    words[words.index(str(run.output))] = "/dev/full"
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the output: No space left on device\n"


def test_errors_of_the_machine(run: Runs, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no answers: the line is asked again by the next run. If nothing can run any more, this one ends."""
    run.write(*({"id": country, "prompt": question(country)} for country in COUNTRIES))
    answer = Engine.generate_each

    def breaking(kind: type[StepError] | type[ClosedError]) -> None:
        def generate_each(self: Engine, requests: Any) -> Any:
            for number, index, result in answer(self, requests):
                failed = Result(finish_reason="error", error="it broke", error_type=kind.__name__)
                yield number, index, failed if number == 2 else result

        monkeypatch.setattr(Engine, "generate_each", generate_each)

    breaking(StepError)
    assert len(run(status=1)) == 5
    assert run.err.endswith("| 1 have no answer, run the same command again: it broke\n")
    monkeypatch.undo()
    assert {name: line["text"] for name, line in run().items()} == COUNTRIES
    run.output.unlink()
    breaking(ClosedError)
    assert fails(*run.words()) == "error: it broke"
    assert "Peru" not in run.answers()
