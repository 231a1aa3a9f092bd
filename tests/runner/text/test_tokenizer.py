"""Text to tokens and back, compared with transformers on the same folder."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ostinato.delegate import ArtifactError, InputError
from ostinato.runner import Tokenizer
from ostinato.runner.text.tokenizer import Piece, TextStream

from ...conftest import QWEN3_TEMPLATE

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


def test_many_tokens_are_decoded_as_few(tokenizer: Tokenizer) -> None:
    """Another function of the library does it."""
    text = "The capital of São Tomé is 東京. "
    assert tokenizer.decode(tokenizer.encode(f"<|im_start|>{text}") * 1000) == text * 1000


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


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("messages", CHATS, ids=len)
def test_render_a_published_template_as_transformers(
    capitals_checkpoint: Path, tmp_path: Path, messages: list[dict[str, str]], kwargs: dict[str, bool]
) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(capitals_checkpoint / name, tmp_path / name)
    shutil.copyfile(QWEN3_TEMPLATE, tmp_path / "chat_template.jinja")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    found = Tokenizer(tmp_path).render(messages, kwargs)
    assert found == expected
    assert found.endswith("<think>\n\n</think>\n\n") == (kwargs.get("enable_thinking") is False)


def test_template_errors(capitals_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copyfile(capitals_checkpoint / "tokenizer.json", tmp_path / "tokenizer.json")
    bare = Tokenizer(tmp_path)
    with pytest.raises(InputError, match="no chat template"):
        bare.render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate"):
        Tokenizer(tmp_path).render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="unsafe"):
        Tokenizer(tmp_path).render(CHATS[0])
    with pytest.raises(InputError, match="multiple values for keyword argument 'messages'"):
        Tokenizer(tmp_path).render(CHATS[0], {"messages": []})
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path / "nothing")


def no_template(folder: Path, tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def byte_level(add_prefix_space: bool) -> tokenizers.Tokenizer:
    """A tokenizer like GPT-2's: each token is some bytes of UTF-8."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    built.train_from_iterator(TEXTS * 3, trainer)
    return built


def metaspace(in_normalizer: bool) -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's and Gemma's: a space belongs to the word behind it, and what has no token is spelled in
    bytes."""
    pairs = [("▁", "a"), ("▁", "t"), ("n", "d"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {word: index for index, word in enumerate([*words, *(left + right for left, right in pairs)])}
    built = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if in_normalizer:
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(spaces)
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    built.add_special_tokens(["<s>", "</s>"])
    return built


BUILT = {
    "byte level": lambda: byte_level(False),
    "byte level, prefix space": lambda: byte_level(True),
    "metaspace": lambda: metaspace(False),
    "metaspace, normalizer": lambda: metaspace(True),
}


@pytest.fixture(scope="module", params=["capitals", *BUILT])
def any_tokenizer(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """The shipped tokenizer, or one that is built here."""
    if request.param == "capitals":
        return tokenizer
    return no_template(tmp_path_factory.mktemp("tokenizer"), BUILT[request.param]())


@pytest.mark.parametrize("text", TEXTS)
def test_every_kind_gives_the_text_back(any_tokenizer: Tokenizer, text: str) -> None:
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    found = any_tokenizer.decode(any_tokenizer.encode(plain))
    # The prefix space is in the decoded text: Metaspace cannot tell it from a space of the text itself.
    assert found in (plain, f" {plain}") or found.lstrip(" ") == plain.lstrip(" ")


@pytest.mark.parametrize("kind", BUILT)
def test_special_tokens_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Special tokens in the text are recognised. The tokenizer file's template for whole texts, truncation and padding are
    not applied."""
    built = BUILT[kind]()
    start, end = built.token_to_id("<s>"), built.token_to_id("</s>")
    plain = no_template(tmp_path, built)
    tokens = plain.encode("<s>hi</s>")
    assert (tokens[0], tokens[-1]) == (start, end)
    assert plain.decode(tokens).strip() == "hi"
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    built.enable_truncation(2)
    built.enable_padding(length=50)
    assert no_template(tmp_path, built).encode("<s>hi</s>") == tokens


@pytest.mark.parametrize("kind", ["capitals", *BUILT])
def test_text_in_pieces(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    """What was told keeps its tokens, and what comes behind it has those that it has in the whole text."""
    some, end = (tokenizer, "<|im_end|>") if kind == "capitals" else (no_template(tmp_path, BUILT[kind]()), "</s>")
    first, second, rest = "the hat", f"{end} a nut, then", f"{end}\n and the rest"
    whole = some.encode(first + second + rest)
    told = some.pieces(first)
    assert told == [Piece(first, some.encode(first))] and some.pieces(first + second, told)[0] == told[0]
    told = some.pieces(first + second, told)
    pieces = some.pieces(first + second + rest, told)
    assert [piece.text for piece in pieces] == [first, second, rest]
    assert [token for piece in pieces for token in piece.tokens] == whole
    # Other tokens stay as they are, as far as the text begins with theirs and a special token follows.
    told[1] = Piece(second, [5, 6, 7])
    assert some.pieces(first + second + rest, told)[1].tokens == [5, 6, 7]
    for other in (first + second, f"{first}{second}.{rest}", f"{first}{end} a nun{rest}"):
        assert some.pieces(other, told) == [told[0], Piece(other[len(first) :], some.encode(other[len(first) :]))]
    for other in (f"{first}s{second}", "", first):
        assert some.pieces(other, told) == [Piece(other, some.encode(other))]


def test_a_word_that_has_no_token(tmp_path: Path) -> None:
    built = tokenizers.Tokenizer(models.WordLevel({"hello": 0}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    words = no_template(tmp_path, built)
    assert words.encode("hello hello") == [0, 0]
    with pytest.raises(InputError, match="cannot be encoded"):
        words.encode("hello world")
    # The beginning may end within a word.
    assert words.exceeds("hello " * 1000, 10) and not words.exceeds("hello " * 1000, 11)


def test_a_text_that_the_library_gives_up(tokenizer: Tokenizer) -> None:
    """Its regular expressions panic, which no `except Exception` sees."""
    with pytest.raises(InputError, match="the text cannot be encoded: Onig"):
        tokenizer.encode(" " * 10_000_001)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


@pytest.mark.parametrize("part", [*TEXTS, " ", "\n", "a", " Philippines", "the ", "<|im_end|>", "0123456789", "=" * 30])
def test_a_text_that_is_far_too_long(any_tokenizer: Tokenizer, part: str) -> None:
    """The beginning shows it, and says so of no text that has as many tokens as it may."""
    text = part * (20_000 // len(part))
    count = len(any_tokenizer.encode(text))
    assert any_tokenizer.exceeds(text, 10) == (count > 10)
    for limit in (count // 8, count // 4, count // 2, count - 1, count, count + 1):
        assert not any_tokenizer.exceeds(text, limit) or count > limit
    assert not any_tokenizer.exceeds(text, count)
    # What comes behind the beginning is not looked at.
    assert any_tokenizer.exceeds(f"{text}\ud800", 10) == (count > 10)


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    """The text is an argument that is not valid UTF-8, as Python decodes it."""
    with pytest.raises(InputError, match="not valid Unicode"):
        tokenizer.encode(b"caf\xe9".decode(errors="surrogateescape"))


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters_and_all_of_them(any_tokenizer: Tokenizer, text: str) -> None:
    tokens = any_tokenizer.encode(text)
    stream = TextStream(any_tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(stream.flush())
    assert "".join(pieces) == any_tokenizer.decode(tokens)
    assert stream.flush() == ""


def test_stream_is_no_later_than_it_must(any_tokenizer: Tokenizer) -> None:
    """A word appears with its token; a character of several tokens with its last one."""
    tokens = any_tokenizer.encode("Paris and 👍")
    stream = TextStream(any_tokenizer)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        whole = any_tokenizer.decode(tokens[:count])
        finished = whole.rstrip("\ufffd")
        # A token that begins a character may begin with a space.
        assert shown == finished or (shown == finished.rstrip(" ") and whole != finished)


def test_stream_of_a_character_that_never_ends(any_tokenizer: Tokenizer) -> None:
    tokens = any_tokenizer.encode("ok 👍")
    assert any_tokenizer.decode(tokens[:-1]).endswith("\ufffd")
    stream = TextStream(any_tokenizer)
    text = "".join(stream.push(token) for token in tokens[:-1])
    assert text.strip(" ") == "ok"
    assert text + stream.flush() == any_tokenizer.decode(tokens[:-1])


def test_stream_shows_all_before_a_character_that_never_ends(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in tokenizer.encode("ok 👍")[:-1]) == "ok "


def test_stream_goes_on_after_bytes_that_are_no_character(any_tokenizer: Tokenizer) -> None:
    """A model may stop in the middle of a character and write on: what follows must not be held back."""
    broken = any_tokenizer.encode("👍")[:-1]
    after = any_tokenizer.encode(" and then a whole sentence.")
    stream = TextStream(any_tokenizer)
    pieces = [stream.push(token) for token in [*broken, *after]]
    text = "".join(pieces)
    assert text == any_tokenizer.decode([*broken, *after])
    assert pieces[len(broken)] != ""


def test_stream_of_any_tokens(any_tokenizer: Tokenizer) -> None:
    """For any tokens that a model may give, the pieces together are what `decode` gives, except for bytes that are not
    UTF-8."""
    pick = random.Random(5)
    known = [*any_tokenizer.encode("".join(TEXTS))]
    for _ in range(200):
        tokens = pick.choices(known, k=pick.randrange(1, 20))
        stream = TextStream(any_tokenizer)
        text = "".join([*(stream.push(token) for token in tokens), stream.flush()])
        # If bytes that come one by one turn out not to be UTF-8, `decode` replaces characters that are out already. The
        # length stays.
        assert text == any_tokenizer.decode(tokens) or "\ufffd" in any_tokenizer.decode(tokens)


def test_what_the_own_stream_of_the_library_lacks() -> None:
    """If this test fails, `DecodeStream` may be able to replace `TextStream`."""
    assert not hasattr(decoders.DecodeStream, "flush")
    built = metaspace(False)
    tokens = [built.token_to_id(word) for word in ("<0x28>", "<0xB5>", "a")]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(built, token) for token in tokens]


def test_what_is_remembered_of_values_for_the_template_is_bounded(tokenizer: Tokenizer) -> None:
    """A server's clients give any values."""
    values: list[dict[str, Any]] = [{"number": number} for number in range(1100)]
    assert {tokenizer.keeps_answers(one) for one in values} == {tokenizer.keeps_answers()}
    assert tokenizer.keeps_answers({"long": "x" * 100_000}) == tokenizer.keeps_answers()
    assert sum(map(len, tokenizer._keeps_answers)) < 1_000_000
