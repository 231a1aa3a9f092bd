"""Runs of `ostinato run --prompts` in this process, and lines for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner.cli import main

COUNTRIES = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Chad": "N'Djamena", "Fiji": "Suva", "Oman": "Muscat"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def question(country: str) -> str:
    return f"What is the capital of {country}?"


def batch(name: object, url: str = CHAT, **body: object) -> dict[str, Any]:
    if url == CHAT:
        body.setdefault("messages", [{"role": "user", "content": question("Peru")}])
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "capitals", **body}}


class Runs:
    """Runs of the command in this process, on `questions.jsonl` and `answers.jsonl` of one folder.

    Attributes:
        artifact: the artifact.
        err: stderr of the last run.
    """

    def __init__(self, folder: Path, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.source, self.output = folder / "questions.jsonl", folder / "answers.jsonl"
        self.artifact, self._capsys = artifact, capsys
        self.err = ""

    def write(self, *lines: object) -> None:
        """Write the input: text as it is, and other things as JSON."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(f"{text}\n" for text in texts))

    def words(self, *words: object) -> list[str]:
        return list(map(str, ["run", self.artifact, "--prompts", self.source, "--output", self.output, *words]))

    def __call__(self, *words: object, status: int = 0) -> dict[Any, dict[str, Any]]:
        """Run; return the output's lines by id."""
        self._capsys.readouterr()
        assert main(self.words(*words)) == status
        out, self.err = self._capsys.readouterr()
        assert out == ""
        return self.answers()

    def answers(self) -> dict[Any, dict[str, Any]]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        found = {line["custom_id"] if "custom_id" in line else line["id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


@pytest.fixture
def run(tmp_path: Path, capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(tmp_path, capitals_artifact, capsys)


def content(line: dict[str, Any]) -> str:
    return line["response"]["body"]["choices"][0]["message"]["content"]
