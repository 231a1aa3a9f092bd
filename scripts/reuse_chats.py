"""Chats for `bench_reuse.py`: families of models, their tokenizers, and requests of conversations with calls of tools."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench_commands import ROOT, fail

from ostinato.export.models.gguf_tokenizer import write_tokenizer
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.runner.text.common_prefix import common_length
from ostinato.runner.text.prompts import Prompt, encode_prompt
from ostinato.runner.text.tokenizer import Tokenizer

# Tokens, about: a question, an answer, its thinking, and a tool's answer.
QUESTION, ANSWER, THINKING, FOUND = 60, 40, 40, 120
CALLS = 2
_TEXT = """
a about after again air all along also an and another any are around as at away back be because been before below
between both but by came can come could day did different do does each end even every few find first for found from
get give go good great had has have help here home house how if in into is it its just know land large last left life
light like line little live long look made make man many may me men might more most mother move much must my name near
need never new next night no not now number of off often old on one only or other our out over own part people place
plant play point read right river run said same saw say school sea second see sentence set she should show side small
so some
"""
WORDS = _TEXT.split()
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the library.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search for."}},
            "required": ["query"],
        },
    },
}
Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A family of models: how its chats are written.

    Attributes:
        name: as the table has it.
        template: end of the name of its template's file.
        vocabulary: NAME of its vocabulary's file, or of one that is like it.
        special: special tokens of its template, which this vocabulary may lack.
        modes: name of a thinking mode -> values for the template.
        thinking_key: name of a message's thinking; None: it stands in the text, in <think> and </think>.
    """

    name: str
    template: str
    vocabulary: str
    special: tuple[str, ...]
    modes: Mapping[str, Mapping[str, Any]]
    thinking_key: str | None = None


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_BOTH = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
FAMILIES = (
    Family("Qwen3.5", "Qwen3.5-4B", "qwen35", _CHATML, _BOTH),
    Family("Qwen3", "Qwen3-0.6B", "qwen2", _CHATML, _BOTH),
    Family("Llama 3.1", "Llama-3.1-8B-Instruct", "llama-bpe", _LLAMA, {"none": {}}),
    Family("Hermes 3", "Hermes-3-Llama-3.1-8B-tool_use", "llama-bpe", (*_LLAMA, *_CHATML), {"none": {}}),
    Family("gpt-oss", "gpt-oss-120b", "llama-bpe", _HARMONY, {"on": {}}, thinking_key="thinking"),
)


class Asked(NamedTuple):
    """A request, and the tokens that answer it."""

    prompt: Prompt
    answer: list[int]


class Numbered(Tokenizer):
    """A tokenizer whose token ids are numbered in the order of their first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._numbers: dict[int, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._numbers.setdefault(token, len(self._numbers)) for token in super().encode(text)]


@dataclass
class Writer:
    """Writes texts of random words, of about so many tokens."""

    tokenizer: Tokenizer
    random: random.Random
    tokens_per_word: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_per_word = len(self.tokenizer.encode(" ".join(WORDS))) / len(WORDS)

    def text(self, tokens: int) -> str:
        return " ".join(self.random.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word))))


def tokenizers(templates: Path, vocabularies: Path | None, scratch: Path) -> Iterator[tuple[Family, Tokenizer]]:
    """The families whose template is there, each with its tokenizer, whose files are written into `scratch`."""
    there = False
    for family in FAMILIES:
        found = sorted(templates.glob(f"*{family.template}.jinja"))
        if not found:
            print(f"note: left out: {family.name}, {templates} has no *{family.template}.jinja", file=sys.stderr)
            continue
        there = True
        yield family, tokenizer_of(family, found[0], vocabularies, scratch / family.name)
    if not there:
        fail(f"{templates} has no template of {', '.join(family.name for family in FAMILIES)}")


def tokenizer_of(family: Family, template: Path, vocabularies: Path | None, folder: Path) -> Tokenizer:
    """A family's tokenizer. Its files are written into `folder`."""
    import tokenizers

    folder.mkdir()
    source = ROOT / "tests" / "assets" / "capitals" / "tokenizer.json"
    if vocabularies is not None and (file := vocabularies / f"ggml-vocab-{family.vocabulary}.gguf").exists():
        write_tokenizer(GgufFile(file).metadata, folder)
        source = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(source))
    made.add_special_tokens(list(family.special))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": family.special[0]}))
    (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    return Numbered(folder)


def conversations(
    family: Family, tokenizer: Tokenizer, thinks: bool, values: Mapping[str, Any], arguments: argparse.Namespace
) -> list[list[Asked]]:
    """The requests of each conversation."""
    writer = Writer(tokenizer, random.Random(0))
    system = {"role": "system", "content": writer.text(arguments.system)}
    given = {**values, "tools": [TOOL]}
    return [
        [asked(tokenizer, messages, answer, given) for messages, answer in chat]
        for chat in (exchanges(family, writer, system, thinks, arguments.turns) for _ in range(arguments.conversations))
    ]


def exchanges(
    family: Family, writer: Writer, system: Message, thinks: bool, turns: int
) -> Iterator[tuple[list[Message], Message]]:
    """The messages of each request of a conversation, and the message that answers it."""
    messages = [system]

    def said(content: str, **more: Any) -> Message:
        message = {"role": "assistant", "content": content, **more}
        if thinks and family.thinking_key is not None:
            message[family.thinking_key] = writer.text(THINKING)
        elif thinks:
            message["content"] = f"<think>\n{writer.text(THINKING)}\n</think>\n\n{content}"
        return message

    for turn in range(turns):
        messages.append({"role": "user", "content": writer.text(QUESTION)})
        for _ in range(CALLS * (turn % 2)):
            call = {"name": "search", "arguments": {"query": writer.text(8)}}
            message = said("", tool_calls=[{"type": "function", "function": call}])
            yield list(messages), message
            messages += [message, {"role": "tool", "name": "search", "content": writer.text(FOUND)}]
        message = said(writer.text(ANSWER))
        yield list(messages), message
        messages.append(message)


def asked(tokenizer: Tokenizer, messages: Sequence[Message], answer: Message, values: Mapping[str, Any]) -> Asked:
    """The request with these messages, and its answer: what the template renders behind the prompt, up to the token that
    ends it."""
    prompt = tokenizer.render(messages, values)
    begun = prompt[common_length(prompt, tokenizer.render(messages, values, add_generation_prompt=False)) :]
    whole = tokenizer.render([*messages, answer], values, add_generation_prompt=False)
    # Some write the last message in another way than one that is followed by another.
    place = len(prompt) if whole.startswith(prompt) else whole.rindex(begun) + len(begun)
    return Asked(encode_prompt(tokenizer, messages, False, values), tokenizer.encode(whole[place:].rstrip("\n")))
