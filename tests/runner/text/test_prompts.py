"""How many tokens of a chat's prompt a later one will share, by chat template."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.runner import Tokenizer
from ostinato.runner.text.prompts import encode_prompt
from ostinato.runner.text.tokenizer import Message

from ...conftest import QWEN3_TEMPLATE

TURNS: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
TokenizerOf = Callable[[str], Tokenizer]
MESSAGE = "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"


@pytest.fixture
def tokenizer_of(capitals_checkpoint: Path, tmp_path: Path) -> TokenizerOf:
    """Gives a tokenizer with a chat template."""

    def get(template: str) -> Tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(capitals_checkpoint / name, tmp_path / name)
        (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer(tmp_path)

    return get


@pytest.mark.parametrize(
    ("template", "shared"),
    [
        # What begins an answer is not there in history.
        (f"{{% for m in messages %}}{MESSAGE}<|im_end|>\n{{% endfor %}}{BEGUN}", "{prompt}<|im_end|>\n"),
        # The last message ends in another way than one that is followed by another.
        (
            f"{{% for m in messages %}}{MESSAGE}{{{{ '' if loop.last else '\\n' }}}}<|im_end|>{{% endfor %}}{BEGUN}",
            "{prompt}",
        ),
        # It cannot render an answer.
        (
            f"{{% for m in messages %}}{{{{ raise_exception('no') if loop.index > 1 }}}}{MESSAGE}<|im_end|>\n{{% endfor %}}"
            f"{BEGUN}",
            "{prompt}<|im_end|>\n",
        ),
    ],
    ids=("generation-prompt", "last-message", "no-answer"),
)
def test_what_a_later_prompt_shares(tokenizer_of: TokenizerOf, template: str, shared: str) -> None:
    tokenizer = tokenizer_of(template)
    found = encode_prompt(tokenizer, TURNS)
    expected = shared.format(prompt=f"<|im_start|>user\n{TURNS[0]['content']}")
    assert found.shared == [len(tokenizer.encode(expected))] and not found.goes_on
    assert found.tokens[: found.shared[0]] == tokenizer.encode(expected)
    assert tokenizer.decode(found.tokens).endswith("<think>")


def test_a_loop_of_tool_calls(tokenizer_of: TokenizerOf) -> None:
    """A template drops the turn's thinking when the next one begins: a later prompt goes on from either place."""
    tokenizer = tokenizer_of(QWEN3_TEMPLATE.read_text())
    called = {"role": "assistant", "content": f"<think>\n{'x' * 99}\n</think>\n\n"}
    messages = [*TURNS, called, {"role": "tool", "content": "y" * 99}]
    found = encode_prompt(tokenizer, messages)
    turn, whole = (
        len(tokenizer.encode(tokenizer.render(some, add_generation_prompt=False))) for some in (TURNS, messages)
    )
    header = tokenizer.encode("<|im_start|>assistant\n")
    assert found.shared == [turn + len(header), whole] and not found.goes_on
    assert encode_prompt(tokenizer, TURNS).shared == [turn]


@pytest.mark.parametrize(("behind", "goes_on"), [("", True), ("{{ '' if loop.last else '\n' }}", False)])
def test_where_answers_are_kept(tokenizer_of: TokenizerOf, behind: str, goes_on: bool) -> None:
    """A prompt goes on behind its answer, unless its last message, a tool's, is written in another way by then."""
    end = f"{{% if m.role == 'tool' %}}{behind}{{% endif %}}<|im_end|>\n"
    begun = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = tokenizer_of(f"{{% for m in messages %}}{MESSAGE}{end}{{% endfor %}}{begun}")
    assert encode_prompt(tokenizer, TURNS).goes_on
    assert encode_prompt(tokenizer, [*TURNS, {"role": "tool", "content": "y"}]).goes_on == goes_on
