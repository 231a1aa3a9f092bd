#!/usr/bin/env python3
"""Count how many of the prompt tokens that could be reused are reused from the prefix cache, by chat template.

    python scripts/bench_reuse.py [ARTIFACT ...] [--templates FOLDER] [--vocabularies FOLDER] [--conversations 50] [--turns 8]
                                  [--system 2000] [--host-states 2] [--json FILE] [--skip-goals]

Conversations share a system prompt of about --system tokens. Every second turn is a loop of tool calls: the assistant's call,
the tool's answer, twice, and then the assistant's own. Templates that read `enable_thinking` are run with it and without.
The models are those of the artifacts. Without any it is a Qwen3.5 with random weights, a recurrent and an attention layer and
32,768 positions, which is exported first.

A random model would say nothing that belongs in a chat. So the script writes the answers: a bitmask lets the model choose the
one token that comes next in what the template itself renders for the answer, with its thinking, its call and its end. The
scheduler samples and feeds each of these tokens as any other. Token ids are numbered in the order of their first use, so that
a small vocabulary is enough: which tokens are the same does not change.

A request could reuse the tokens with which its prompt and any prompt and answer before it begin. It does reuse
`reused_tokens`. Requests come one by one, each conversation's in their order:

    in turn    one of each conversation after the other, with room on the device for 10 of the conversations, and on the host
               for all of them
    at random  with the same room on the device, and none on the host

Room for a conversation is one row for a snapshot, and the pages of the longest one without the system prompt. On the host it
is --host-states times a row and all pages of the longest one: where a template drops a turn's thinking when the next one
begins, a conversation needs two states, that in front of the turn's answers and that of its last call of a tool.

The goal is 90 % in turn. It counts for all tokens; "own" leaves the system prompt out.

FOLDER of --templates has Jinja files as published (default: the one in tests/assets), and that of --vocabularies llama.cpp's
ggml-vocab-NAME.gguf. Templates that it does not have are left out. A family whose vocabulary is not there takes the tokenizer
in tests/assets, with its special tokens.

Exit status: 0 every goal held, 1 not so, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_commands import ROOT, fail, ostinato, told
from check_speed import Finding

from ostinato.delegate.errors import OstinatoError
from ostinato.delegate.logits_processing import WORD_BITS, words_of
from ostinato.delegate.memory import size_text
from ostinato.export.models.gguf_tokenizer import write_tokenizer
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.runner import Engine
from ostinato.runner.bench.tables import Side, table
from ostinato.runner.scheduler.messages import Request
from ostinato.runner.sessions.prefix_tree import PrefixTree
from ostinato.runner.text.common_prefix import common_length
from ostinato.runner.text.prompts import Prompt, encode_prompt
from ostinato.runner.text.tokenizer import Tokenizer

GOAL = 0.9
# Number of conversations that the device has room for.
ON_DEVICE = 10
# Tokens, about: a question, an answer, its thinking, and a tool's answer.
QUESTION, ANSWER, THINKING, FOUND = 60, 40, 40, 120
CALLS = 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
WORDS = [
    "a",
    "about",
    "after",
    "again",
    "air",
    "all",
    "along",
    "also",
    "an",
    "and",
    "another",
    "any",
    "are",
    "around",
    "as",
    "at",
    "away",
    "back",
    "be",
    "because",
    "been",
    "before",
    "below",
    "between",
    "both",
    "but",
    "by",
    "came",
    "can",
    "come",
    "could",
    "day",
    "did",
    "different",
    "do",
    "does",
    "each",
    "end",
    "even",
    "every",
    "few",
    "find",
    "first",
    "for",
    "found",
    "from",
    "get",
    "give",
    "go",
    "good",
    "great",
    "had",
    "has",
    "have",
    "help",
    "here",
    "home",
    "house",
    "how",
    "if",
    "in",
    "into",
    "is",
    "it",
    "its",
    "just",
    "know",
    "land",
    "large",
    "last",
    "left",
    "life",
    "light",
    "like",
    "line",
    "little",
    "live",
    "long",
    "look",
    "made",
    "make",
    "man",
    "many",
    "may",
    "me",
    "men",
    "might",
    "more",
    "most",
    "mother",
    "move",
    "much",
    "must",
    "my",
    "name",
    "near",
    "need",
    "never",
    "new",
    "next",
    "night",
    "no",
    "not",
    "now",
    "number",
    "of",
    "off",
    "often",
    "old",
    "on",
    "one",
    "only",
    "or",
    "other",
    "our",
    "out",
    "over",
    "own",
    "part",
    "people",
    "place",
    "plant",
    "play",
    "point",
    "read",
    "right",
    "river",
    "run",
    "said",
    "same",
    "saw",
    "say",
    "school",
    "sea",
    "second",
    "see",
    "sentence",
    "set",
    "she",
    "should",
    "show",
    "side",
    "small",
    "so",
    "some",
]
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


@dataclass(frozen=True)
class Row:
    """What one run found.

    Attributes:
        model, template, thinking, order: what was run.
        requests, prompt_tokens: how many requests, and tokens of their prompts.
        could, reused: tokens that could be reused, and that were.
        own_could, own_reused: the same without the system prompt.
        host_bytes: the most bytes of the host's memory that it might take.
    """

    model: str
    template: str
    thinking: str
    order: str
    requests: int
    prompt_tokens: int
    could: int
    reused: int
    own_could: int
    own_reused: int
    host_bytes: int

    @property
    def share(self) -> float:
        return self.reused / self.could if self.could else 1.0


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


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            artifacts = arguments.artifact or [exported(scratch / "tiny")]
            for family, tokenizer in tokenizers(arguments.templates, arguments.vocabularies, scratch):
                for thinking, values in family.modes.items():
                    chats = conversations(family, tokenizer, thinking == "on", values, arguments)
                    rows += [
                        row
                        for one in artifacts
                        for row in runs(one, chats, family.name, thinking, arguments.host_states)
                    ]
                    print(f"{family.name}, thinking {thinking}: done", file=sys.stderr, flush=True)
    except OstinatoError as error:
        fail(str(error))
    print(render(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) | {"share": row.share} for row in rows], indent=1) + "\n")
    return 0 if arguments.skip_goals else told(findings(rows))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, nargs="*")
    parser.add_argument("--templates", type=Path, metavar="FOLDER", default=ROOT / "tests" / "assets" / "templates")
    parser.add_argument("--vocabularies", type=Path, metavar="FOLDER")
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt, about")
    parser.add_argument("--host-states", type=int, default=2, help="of each conversation")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.conversations < 2 or min(arguments.turns, arguments.system, arguments.host_states) < 1:
        parser.error("--conversations takes 2 or more, --turns, --system and --host-states 1 or more")
    return arguments


def exported(folder: Path) -> Path:
    """Export the model of `CONFIG` with random weights into a folder."""
    with tempfile.TemporaryDirectory() as config:
        (Path(config) / "config.json").write_text(json.dumps(CONFIG))
        length = str(CONFIG["max_position_embeddings"])
        ostinato(
            "export", "--model", config, "--output", str(folder), "--load-format", "dummy", "--max-seq-len", length
        )
    return folder


# --- conversations


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


# --- running


def runs(
    artifact: Path, chats: Sequence[Sequence[Asked]], template: str, thinking: str, host_states: int
) -> Iterator[Row]:
    """Run the conversations with a model, in both orders."""
    longest = max(len(one.prompt.tokens) + len(one.answer) for chat in chats for one in chat)
    shared = common_length(chats[0][0].prompt.tokens, chats[1][0].prompt.tokens)
    with Engine.load(artifact) as engine:
        capacity = engine.program.capacity
    pages = -(-longest // capacity.page_size)
    mine = pages - shared // capacity.page_size
    # The session that runs, the system prompt, and what conversations have behind it.
    kv_tokens = (2 * pages + ON_DEVICE * mine) * capacity.page_size
    bytes_each = capacity.slot_bytes + pages * sum(group.page_bytes for group in capacity.groups)
    for order, host_bytes in (("in turn", host_states * len(chats) * bytes_each), ("at random", 0)):
        room: dict[str, Any] = {"snapshots": ON_DEVICE, "kv_tokens": kv_tokens, "host_cache_bytes": host_bytes}
        with Engine.load(artifact, **room) as engine:
            found = [reuse(engine, one, known) for one, known in with_known(in_order(chats, order))]
        yield Row(
            artifact.name,
            template,
            thinking,
            order,
            requests=len(found),
            prompt_tokens=sum(len(one.prompt.tokens) for chat in chats for one in chat),
            could=sum(could for could, _ in found),
            reused=sum(reused for _, reused in found),
            own_could=sum(max(0, could - shared) for could, _ in found),
            own_reused=sum(max(0, reused - shared) for _, reused in found),
            host_bytes=host_bytes,
        )


def in_order(chats: Sequence[Sequence[Asked]], order: str) -> list[Asked]:
    """The requests of all conversations, each conversation's in their order."""
    numbers = [number for step in range(len(chats[0])) for number in range(len(chats))]
    if order == "at random":
        random.Random(1).shuffle(numbers)
    left = [iter(chat) for chat in chats]
    return [next(left[number]) for number in numbers]


def with_known(requests: Sequence[Asked]) -> Iterator[tuple[Asked, int]]:
    """Each request, and the number of its prompt's tokens with which a prompt and answer before it begin."""
    seen = PrefixTree[bool]()
    for one in requests:
        yield one, seen.match(one.prompt.tokens)[1]
        seen.insert([*one.prompt.tokens, *one.answer]).value = True


def reuse(engine: Engine, one: Asked, known: int) -> tuple[int, int]:
    """Run a request. Returns `known`, and the number of tokens that were reused."""
    prompt, vocab = one.prompt, engine.model.vocab
    if max(max(prompt.tokens), max(one.answer)) >= vocab:
        fail(f"the texts have more than the model's {vocab:,} tokens")

    def allowed(history: Sequence[int]) -> torch.Tensor | None:
        place = len(history) - len(prompt.tokens)
        if place >= len(one.answer):
            return None
        word, bit = divmod(one.answer[place], WORD_BITS)
        words = torch.zeros(words_of(vocab), dtype=torch.int32)
        # The highest bit is the sign.
        words[word] = 1 << bit if bit < WORD_BITS - 1 else -(1 << bit)
        return words

    request = Request(
        id=engine.driver.new_id(),
        tokens=prompt.tokens,
        max_tokens=len(one.answer),
        ignore_eos=True,
        shared=prompt.shared,
        goes_on=prompt.goes_on,
    )
    outputs = list(engine.driver.outputs(request, allowed))
    for output in outputs:
        if output.error is not None:
            raise output.error.error()
    assert [token for output in outputs for token in output.tokens] == one.answer
    return known, sum(output.reused_tokens for output in outputs)


# --- what was found


def findings(rows: Sequence[Row]) -> list[Finding]:
    return [
        Finding(
            f"{row.model}, {row.template}, thinking {row.thinking}: reused",
            f"{row.share:.1%}",
            row.share >= GOAL,
            f"{GOAL:.0%} or more",
        )
        for row in rows
        if row.order == "in turn"
    ]


def render(rows: Sequence[Row]) -> str:
    columns: dict[str, Side] = dict.fromkeys(("model", "template", "thinking", "order"), "left")
    columns |= dict.fromkeys(("requests", "prompt tokens", "could", "reused", "share", "own", "host"), "right")
    return table(
        columns,
        [
            [
                row.model,
                row.template,
                row.thinking,
                row.order,
                f"{row.requests:,}",
                f"{row.prompt_tokens:,}",
                f"{row.could:,}",
                f"{row.reused:,}",
                f"{row.share:.1%}",
                f"{row.own_reused / row.own_could:.1%}" if row.own_could else "",
                size_text(row.host_bytes),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
