"""Models that think, and models with defaults of their own, over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.errors import ArtifactError
from ostinato.runner.server.answering import default_max_tokens, default_params

from .asking import ask
from .conftest import QUESTION, Server, serving

# The answer begins inside of `<think>`, or behind it. For the model both are as if nothing was there, since the tokenizer
# drops them; and the second of the three tokens of "Paris" is read as the end of the reasoning.
THINKING = r"""
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"""
DROPPED = {"type": "Replace", "pattern": {"Regex": "<think>\\n(\\n</think>\\n\\n)?"}, "content": ""}
READ = {"type": "Replace", "pattern": {"String": "ar"}, "content": "</think>"}


@pytest.fixture(scope="module")
def thinking(capitals_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = Path(shutil.copytree(capitals_artifact, tmp_path_factory.mktemp("thinking") / "capitals"))
    change(folder / "tokenizer_config.json", chat_template=THINKING)
    decoder = json.loads((folder / "tokenizer.json").read_text())["decoder"]
    change(folder / "tokenizer.json", normalizer=DROPPED, decoder={"type": "Sequence", "decoders": [READ, decoder]})
    change(folder / "generation_config.json", temperature=0.5, top_k=1, repetition_penalty=1.0, max_new_tokens=20)
    with serving(folder, "--sessions", 4) as found:
        yield found
        assert found.end() == 0
        assert "Traceback" not in found.log


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_thinking(thinking: Server) -> None:
    answer = ask(thinking, messages=QUESTION, n=2)
    assert [(choice.reasoning, choice.text) for choice in answer.choices] == [("P", "is")] * 2
    assert answer.completion_tokens == 8


@pytest.mark.parametrize("given", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_no_thinking(thinking: Server, given: Any) -> None:
    answer = ask(thinking, messages=QUESTION, extra_body=given).only
    assert (answer.reasoning, answer.text) == ("", "P</think>is")


def test_values_of_the_template_go_first(thinking: Server) -> None:
    both = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert ask(thinking, messages=QUESTION, extra_body=both).only.reasoning == "P"


def test_an_answer_that_ends_in_thought(thinking: Server) -> None:
    cut = ask(thinking, messages=QUESTION, max_tokens=1)
    assert (cut.only.reasoning, cut.only.text, cut.only.finish_reason) == ("P", "", "length")
    stopped = ask(thinking, messages=QUESTION, stop="think")
    assert (stopped.only.text, stopped.only.finish_reason) == ("", "stop")


def test_completions_are_not_divided(thinking: Server) -> None:
    assert ask(thinking, prompt="The capital of France is", max_tokens=3).only.text == " P</think>is."


def test_defaults_of_the_model(thinking: Server, server: Server) -> None:
    """Its `generation_config.json` has top_k 1, the other model's has none."""
    open_prompt: Any = {"prompt": "x", "max_tokens": 12}
    texts = [ask(server, **open_prompt, seed=seed).texts for seed in (1, 2)]
    assert texts[0] != texts[1]
    # Temperature 1 is what was left out.
    assert ask(server, **open_prompt, seed=1, temperature=1).texts == texts[0]
    greedy = ask(thinking, **open_prompt, temperature=0)
    assert all(ask(thinking, **open_prompt, seed=seed) == greedy for seed in (1, 2))
    # What a client says goes before.
    asked = ask(thinking, **open_prompt, seed=1, temperature=1, extra_body={"top_k": -1})
    assert asked.texts != greedy.texts


def test_the_default_length_of_the_model(thinking: Server) -> None:
    """It is for chats that do not say how long an answer may be. Completions have OpenAI's."""
    on: Any = {"extra_body": {"ignore_eos": True}}
    assert ask(thinking, messages=QUESTION, **on).completion_tokens == 20
    assert ask(thinking, messages=QUESTION, max_tokens=30, **on).completion_tokens == 30
    assert ask(thinking, prompt="x", **on).completion_tokens == 16


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}, (0.6, 0.95, 20, 0.0, 1.0)),
        ({"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "temperature": None}, (1.0, 1.0, 0, 0.1, 1.1)),
    ],
)
def test_default_params(config: dict[str, Any], expected: tuple[float, ...]) -> None:
    found = default_params(config)
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty) == expected


def test_a_default_out_of_range() -> None:
    with pytest.raises(ArtifactError, match=r"generation_config.json: temperature"):
        default_params({"temperature": -1})
    assert default_max_tokens({}) is default_max_tokens({"max_new_tokens": None}) is None
    for wrong in (0, -1, 2.5, True, "20"):
        with pytest.raises(ArtifactError, match=r"generation_config.json: max_new_tokens must be"):
            default_max_tokens({"max_new_tokens": wrong})
