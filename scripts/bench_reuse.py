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
is these pages, and --host-states times a row and a page that no other state shares: where a template drops a turn's thinking
when the next one begins, a conversation needs two states, that in front of the turn's answers and that of its last call of a
tool.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_commands import ROOT, fail, ostinato, told
from check_speed import Finding
from reuse_chats import Asked, conversations, tokenizers

from ostinato.delegate.errors import OstinatoError
from ostinato.delegate.logits_processing import WORD_BITS, words_of
from ostinato.delegate.memory import size_text
from ostinato.runner import Engine
from ostinato.runner.bench.tables import Side, table
from ostinato.runner.scheduler.messages import Request
from ostinato.runner.sessions.prefix_tree import PrefixTree
from ostinato.runner.text.common_prefix import common_length

GOAL = 0.9
# Number of conversations that the device has room for.
ON_DEVICE = 10
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


@dataclass(frozen=True)
class Row:
    """Result of one run.

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
    page_bytes = sum(group.page_bytes for group in capacity.groups)
    bytes_each = host_states * (capacity.slot_bytes + page_bytes) + mine * page_bytes
    for order, host_bytes in (("in turn", len(chats) * bytes_each + pages * page_bytes), ("at random", 0)):
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
