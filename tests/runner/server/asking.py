"""Asks a server with OpenAI's clients in four ways, which must give the same: sync and async, whole and as events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from ...processes import PATIENCE
from .conftest import Server


@dataclass
class Answer:
    """One choice: its texts, why it has ended, and records of its tokens, if they were asked for."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Answers:
    """All choices of a request, and what it has used. `prompt_token_ids`: of the last choice that has them."""

    choices: list[Answer]
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: list[int] | None = None

    @property
    def only(self) -> Answer:
        (choice,) = self.choices
        return choice

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]


def ask(server: Server, **options: Any) -> Answers:
    """The answers to a chat, or to a completion where a prompt is given. They are the same for each client.

    Parameters that OpenAI's clients do not know go into `extra_body`.
    """
    options = {"model": "capitals", **options}
    events = {"stream": True, "stream_options": {"include_usage": True}}

    client = server.client()
    sync: Any = client.completions if "prompt" in options else client.chat.completions
    whole = read([sync.create(**options)])
    found = [read(list(sync.create(**options, **events))), *asyncio.run(_ask(server, options, events))]
    assert all(one == whole for one in found), (whole, found)
    return whole


async def _ask(server: Server, options: Any, events: Any) -> list[Answers]:
    key: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **key) as client:
        endpoint: Any = client.completions if "prompt" in options else client.chat.completions
        stream = await endpoint.create(**options, **events)
        return [read([event async for event in stream]), read([await endpoint.create(**options)])]


def read(parts: Sequence[Any]) -> Answers:
    """The answers of a response's body, or of all events."""
    (usage,) = [part.usage for part in parts if part.usage is not None]
    assert len({(part.id, part.created, part.model) for part in parts}) == 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    found = Answers([], usage.prompt_tokens, usage.completion_tokens)
    choices: dict[int, Answer] = {}
    for part in parts:
        for given in part.choices:
            answer = choices.setdefault(given.index, Answer())
            assert answer.finish_reason is None, "something comes after the end"
            said = getattr(given, "delta", None) or getattr(given, "message", None)
            answer.text += (given.text if said is None else said.content) or ""
            answer.reasoning += getattr(said, "reasoning_content", None) or ""
            answer.token_ids += getattr(given, "token_ids", None) or []
            answer.logprobs += records(given.logprobs)
            answer.finish_reason = given.finish_reason
        # A chat has them once, a completion in each choice.
        for one in (part, *part.choices):
            found.prompt_token_ids = getattr(one, "prompt_token_ids", None) or found.prompt_token_ids
    found.choices = [choices[index] for index in range(len(choices))]
    return found


def records(logprobs: Any) -> list[Any]:
    """One record for each token: its text, its log-probability, and the most likely tokens with theirs."""
    if logprobs is None:
        return []
    if hasattr(logprobs, "content"):
        return [
            (one.token, one.logprob, {top.token: top.logprob for top in one.top_logprobs}) for one in logprobs.content
        ]
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return list(zip(logprobs.tokens, logprobs.token_logprobs, tops, logprobs.text_offset, strict=True))
