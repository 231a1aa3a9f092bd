"""Command lines with odd values for every option: exit status 0 or 2, one line for an error, and no traceback.

`OSTINATO_COMMAND_LINES=2000 pytest tests/runner/test_command_lines.py` tries 2,000 other ones than a run without it does.
"""

from __future__ import annotations

import argparse
import io
import os
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from ostinato.delegate.errors import ExportError
from ostinato.runner.cli import COMMANDS, main

EXAMPLES = int(os.environ.get("OSTINATO_COMMAND_LINES", "0"))

NUMBERS = ["0", "-1", "-0", "1", "2", "3", "4", "64", "250", "0.5", "1e-38", "1e-46", "1e39", "1e400", "nan", "-inf"]
NUMBERS += ["9" * 20, "9" * 5000, "1_0", " 2", "٣", "1,2", "0,0", ","]
WORDS = ["", " ", "é", "日本", "a\nb", "\udce9", "%s", "x" * 300, "on", "both", "none", "-", "--", "--help"]
WORDS += ["{}", '{"enable_thinking": 1}', "sha256:" + "0" * 64]
PATHS = ["/", "nothing/below", "file", "file.png", "folder", "link", "/proc/x", "/proc/x.png", "/dev/full", "/dev/null"]
ALL = [*NUMBERS, *WORDS, *PATHS]
ODD = st.sampled_from(ALL)
# So many repetitions are right, and take for ever.
SHORT = st.sampled_from([*WORDS, "0", "-1", "1", "2", "0.5", "nan", "9" * 5000])

# A command line that is right and quick; what is drawn stands behind it and overrides it.
RIGHT = {
    "export": ["--model", "CHECKPOINT", "--output", "made"],
    "recompile": ["ARTIFACT", "--output", "made"],
    "run": ["ARTIFACT", "--prompt", "What is the capital of Peru?", "--max-new-tokens", "3"],
    "chat": ["ARTIFACT"],
    "bench": ["ARTIFACT", "-p", "3", "-n", "2", "-d", "0", "-r", "1"],
    "inspect": ["ARTIFACT"],
}


def options_of(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[command][0]).add_arguments(parser)
    return [action for action in parser._actions if action.option_strings]


def fitting(action: argparse.Action) -> list[str]:
    """The odd values that the parser takes, and the right ones that it names."""
    if action.choices:
        return list(action.choices)
    if action.metavar == "N,N":
        return NUMBERS
    found = []
    for word in ALL:
        with suppress(ValueError, argparse.ArgumentTypeError):
            if callable(action.type):
                action.type(word)
            found.append(word)
    return found


OPTIONS = {command: options_of(command) for command in RIGHT}


@st.composite
def option(draw: st.DrawFn, command: str) -> list[str]:
    """One option, mostly with a value."""
    action = draw(st.sampled_from(OPTIONS[command]))
    name = draw(st.sampled_from(list(action.option_strings)))
    if action.nargs == 0 or draw(st.integers(0, 19)) == 0:
        return [name]
    value: st.SearchStrategy[Any] = SHORT if action.dest == "repetitions" else ODD
    if action.dest != "repetitions" and draw(st.integers(0, 4)):
        value = st.sampled_from(fitting(action))
    word = draw(value)
    return [f"{name}={word}"] if name.startswith("--") and draw(st.booleans()) else [name, word]


@st.composite
def command_line(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(list(RIGHT)))
    words = list(RIGHT[command])
    if draw(st.integers(0, 7)) == 0:
        words[draw(st.integers(0, len(words) - 1))] = draw(ODD)
    for more in draw(st.lists(option(command), max_size=4)):
        words += more
    if draw(st.integers(0, 15)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(ODD))
    return [command, *words]


@pytest.fixture
def places(
    capitals_artifact: Path, capitals_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Return the values of ARTIFACT and CHECKPOINT, in a folder with what PATHS names. An export ends before it is traced."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ExportError("nothing is exported here")

    monkeypatch.setattr("ostinato.export.model.export_program", refuse)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("hello")
    Path("folder").mkdir()
    Path("link").symlink_to("link")
    return {"ARTIFACT": str(capitals_artifact), "CHECKPOINT": str(capitals_checkpoint)}


def outcome(words: list[str]) -> tuple[object, str, str]:
    """Exit status, stdout and stderr of a command in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: object = main(words)
        except SystemExit as stop:
            status = stop.code
        err.flush()
    return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()  # type: ignore[attr-defined]


@settings(
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(words=command_line())
@example(words=["bench", "ARTIFACT", "--repetitions=--"])
@example(words=["bench", "ARTIFACT", "--n-gen=--"])
@example(words=["inspect", "ARTIFACT", "a\nb"])
def test_no_traceback(places: dict[str, str], words: list[str]) -> None:
    status, out, err = outcome([places.get(word, word) for word in words])
    note(err)
    errors = [line for line in err.splitlines() if line.startswith("error: ") or ": error: " in line]
    assert status in (0, 2)
    assert len(errors) == (1 if status == 2 else 0)
    assert status == 0 or err.splitlines()[-1] == errors[0]
    assert "Traceback" not in out + err
