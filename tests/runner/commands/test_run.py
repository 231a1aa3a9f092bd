"""The prompts of `ostinato run`: where they come from, several as one conversation, and what the chat template gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner import Engine
from ostinato.runner.cli import main

from ...conftest import QWEN3_TEMPLATE, Fails
from ..conftest import standard_input

QUESTION, OTHER = "What is the capital of France?", "What is the capital of Peru?"


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> Any:
    """`ran(word, ...)`: run the command in this process; return its stdout and its stderr."""

    def run(*words: object, artifact: Path = capitals_artifact) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["run", str(artifact), *map(str, words)]) == 0
        return capsys.readouterr()

    return run


def records(output: tuple[str, str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output[0].splitlines()]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=["none", "LF", "CRLF"])
def test_a_prompt_from_a_file_and_from_standard_input(ran: Any, tmp_path: Path, end: str) -> None:
    """The line end at the end, which editors and `echo` add, is not in the prompt."""
    (asked,) = records(ran("--prompt", QUESTION, "--json"))
    file = tmp_path / "prompt.txt"
    file.write_bytes((QUESTION + end).encode())
    (from_file,) = records(ran("--prompt-file", file, "--json"))
    with standard_input((QUESTION + end).encode()):
        (from_input,) = records(ran("--prompt", "-", "--json"))
    for found in (from_file, from_input):
        assert (found["text"], found["prompt_tokens"]) == ("Paris", asked["prompt_tokens"])


def test_only_one_line_end_is_left_out(ran: Any, tmp_path: Path, capitals_artifact: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one\n\ntwo\n\n")
    (found,) = records(ran("--prompt-file", file, "--raw", "--json"))
    with Engine.load(capitals_artifact) as engine:
        assert found["prompt_tokens"] == len(engine.encode_prompt("one\n\ntwo\n", raw=True))


def test_several_prompts_are_one_conversation(ran: Any, tmp_path: Path, capitals_artifact: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(OTHER)
    words = ["--system", "Be brief.", "--prompt", QUESTION, "--prompt-file", file]
    first, second = records(ran(*words, "--json"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    with Engine.load(capitals_artifact) as engine:
        assert first["prompt_tokens"] == len(engine.encode_prompt(messages))
        assert first["text"] == "".join(engine.generate(messages))
        messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": OTHER}]
        assert second["prompt_tokens"] == len(engine.encode_prompt(messages))
        assert second["text"] == "".join(engine.generate(messages))
    out, err = ran(*words)
    assert out == f"{first['text']}\n{second['text']}\n"
    # Each line counts the steps of its own answer.
    for line, found in zip(err.splitlines(), (first, second), strict=True):
        assert line.startswith(f"prompt: {found['prompt_tokens']} tokens")
        assert f"steps: {len(found['tokens']) - 1} run | " in line


def test_raw_prompts_continue_the_text(ran: Any, capitals_artifact: Path) -> None:
    begin, rest = "The capital of France is", "\nThe capital of Peru is"
    first, second = records(ran("--raw", "--prompt", begin, "--prompt", rest, "--json"))
    with Engine.load(capitals_artifact) as engine:
        assert second["prompt_tokens"] == len(engine.encode_prompt(begin + first["text"] + rest, raw=True))


def test_chat_template_kwargs(ran: Any, capitals_artifact: Path, tmp_path: Path) -> None:
    """Thinking on and off, with a template that a model was published with."""
    thinking = Path(shutil.copytree(capitals_artifact, tmp_path / "thinking"))
    shutil.copyfile(QWEN3_TEMPLATE, thinking / "chat_template.jinja")
    lengths = {}
    for kwargs in ("{}", '{"enable_thinking": true}', '{"enable_thinking": false}'):
        words = ["--prompt", QUESTION, "--chat-template-kwargs", kwargs, "--max-new-tokens", 1, "--json"]
        (found,) = records(ran(*words, artifact=thinking))
        lengths[kwargs] = found["prompt_tokens"]
        with Engine.load(thinking) as engine:
            assert found["prompt_tokens"] == len(
                engine.encode_prompt(QUESTION, chat_template_kwargs=json.loads(kwargs))
            )
    off = lengths.pop('{"enable_thinking": false}')
    assert len(set(lengths.values())) == 1 and off > lengths["{}"]


def test_prompts_that_cannot_be_taken(fails: Fails, capitals_artifact: Path, tmp_path: Path) -> None:
    """All are refused before anything is loaded."""
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"caf\xe9")
    for words, message in (
        (["--prompt", "-", "--prompt", "-"], "--prompt - stands twice: standard input can be read once"),
        (["--prompt-file", tmp_path / "none"], f"{tmp_path / 'none'} cannot be read: No such file or directory"),
        (["--prompt-file", tmp_path], f"{tmp_path} cannot be read: Is a directory"),
        (["--prompt-file", broken], f"{broken} is not UTF-8 text: unexpected end of data at byte 3"),
        (["--prompt", QUESTION, "--prompt", " "], "the prompt is empty"),
        (["--prompt", QUESTION, "--raw", "--system", "Be brief."], "--system is for the chat template"),
        (["--prompt", "x", "--raw", "--chat-template-kwargs", "{}"], "--chat-template-kwargs is for the chat template"),
    ):
        assert message in fails("run", capitals_artifact, *words)
    with standard_input(b"caf\xe9"):
        assert "standard input is not UTF-8 text" in fails("run", capitals_artifact, "--prompt", "-")
    with standard_input(b"\n"):
        assert "the prompt is empty" in fails("run", capitals_artifact, "--prompt", "-")
