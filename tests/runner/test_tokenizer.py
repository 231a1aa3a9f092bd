"""Text <-> tokens, against transformers on the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate import ArtifactError, InputError
from ostinato.runner import Tokenizer
from ostinato.runner.tokenizer import TextStream

TEXTS = [
    "What is the capital of France?",
    "  two  spaces\n\nand\tlines \r\n",
    "São Tomé, Yaoundé, N'Djamena, Chișinău, Reykjavík",
    "東京 is 도쿄 is Токио is طوكيو",
    "emoji 👍🏽 👩‍👩‍👧 🏳️‍🌈 end",
    "12345 1,234.56 0x7f it's we'll DON'T",
    "<|im_start|>user\nhi<|im_end|>\n",
    "not special: <|im_start <|nothing|>",
    "\u0000\u200b\ufeff\u00a0",
    "ﬁ ｶ Å Å",
]


@pytest.fixture(scope="module")
def tokenizer(capitals_checkpoint: Path) -> Tokenizer:
    return Tokenizer(capitals_checkpoint)


@pytest.fixture(scope="module")
def reference(capitals_checkpoint: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(capitals_checkpoint)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_the_text_back(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    normal = reference.backend_tokenizer.normalizer
    assert tokenizer.decode(tokenizer.encode(plain)) == (normal.normalize_str(plain) if normal else plain)


def test_special_tokens_are_one_token_and_no_text(tokenizer: Tokenizer) -> None:
    (start,) = tokenizer.encode("<|im_start|>")
    (end,) = tokenizer.encode("<|im_end|>")
    assert start != end
    assert tokenizer.decode([start, *tokenizer.encode("hi"), end]) == "hi"


def test_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello ✋"},
        {"role": "user", "content": "{{ 7 * 7 }} <b>&amp;</b>"},
    ],
]


@pytest.mark.parametrize("messages", CHATS, ids=len)
def test_render_as_transformers(tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]]) -> None:
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(messages) == expected


TEMPLATES = [
    "{% for message in messages %}\n    {{ message['content'] | trim }}\n{% endfor %}\n{{ eos_token }}",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}",
    "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% if add_generation_prompt %}go{% endif %}{% if tools %}tools{% endif %}{{ pad_token }}{{ bos_token or 'none' }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("where", ["config", "jinja", "list"])
def test_render_other_templates_as_transformers(
    capitals_checkpoint: Path, tmp_path: Path, template: str, where: str
) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copyfile(capitals_checkpoint / "tokenizer.json", tmp_path / "tokenizer.json")
    config = json.loads((capitals_checkpoint / "tokenizer_config.json").read_text())
    del config["chat_template"]
    if where == "config":
        config["chat_template"] = template
    elif where == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    else:
        (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CHATS[2], tokenize=False, add_generation_prompt=True)
    assert Tokenizer(tmp_path).render(CHATS[2]) == expected


def test_template_errors(capitals_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copyfile(capitals_checkpoint / "tokenizer.json", tmp_path / "tokenizer.json")
    bare = Tokenizer(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(InputError, match="no chat template"):
        bare.render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate"):
        Tokenizer(tmp_path).render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="unsafe"):
        Tokenizer(tmp_path).render(CHATS[0])
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path / "nothing")


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters_and_all_of_them(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(stream.flush())
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert stream.flush() == ""


def test_stream_is_no_later_than_it_must(tokenizer: Tokenizer) -> None:
    """A word appears with its token; a character of several tokens with its last one."""
    tokens = tokenizer.encode("Paris and 👍")
    stream = TextStream(tokenizer)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        whole = tokenizer.decode(tokens[:count])
        assert shown == whole.rstrip("\ufffd")


def test_stream_of_a_character_that_never_ends(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ok 👍")
    assert tokenizer.decode(tokens[:-1]).endswith("\ufffd")
    stream = TextStream(tokenizer)
    text = "".join(stream.push(token) for token in tokens[:-1])
    assert text == "ok "
    assert text + stream.flush() == tokenizer.decode(tokens[:-1])


def test_stream_goes_on_after_bytes_that_are_no_character(tokenizer: Tokenizer) -> None:
    """A model may stop in the middle of a character and write on: what follows must not be held back."""
    broken = tokenizer.encode("👍")[:-1]
    after = tokenizer.encode(" and then a whole sentence.")
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in [*broken, *after]]
    text = "".join(pieces)
    assert text == tokenizer.decode([*broken, *after])
    assert pieces[len(broken)] != ""
