"""Asks a server of the capitals model with litellm, in the environment of check_clients.sh, and prints a JSON list: what was
asked, what came, and what should have come.

    python scripts/ask_litellm.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

CHAT = "openai/capitals"
COMPLETION = "text-completion-openai/capitals"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    where: Any = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
    ask: Any = {"model": CHAT, "messages": QUESTION, "temperature": 0, **where}
    found: list[Any] = []

    def tell(what: str, got: Any, wanted: Any) -> None:
        found.append((what, got, wanted))

    whole = litellm.completion(**ask)
    tell("chat", (text_of(whole), whole.choices[0].finish_reason), ("Paris", "stop"))
    tell("usage", (whole.usage.prompt_tokens, whole.usage.completion_tokens), (18, 4))
    again = litellm.completion(**ask)
    tell("cached tokens", again.usage.prompt_tokens_details.cached_tokens > 0, True)
    events = list(litellm.completion(**ask, **USAGE))
    tell("chat as events", joined(events), "Paris")
    tell("usage of events", events[-1].usage.total_tokens, 22)
    tell("async chat", asyncio.run(asynchronous(ask)), ["Paris", "Paris"])
    tell("max_tokens", text_of(litellm.completion(**ask, max_tokens=2)), "Par")
    tell("stop", text_of(litellm.completion(**ask, stop=["i"])), "Par")
    tell("logit_bias", text_of(litellm.completion(**ask, logit_bias={"47": -100})), " Paris")
    logprobs = litellm.completion(**ask, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    tell("logprobs", ["".join(one["token"] for one in logprobs), len(logprobs[0]["top_logprobs"])], ["Paris", 2])
    more = {"top_k": -1, "min_p": 0.01, "min_tokens": 6, "repetition_penalty": 1.0, "ignore_eos": False}
    many = litellm.completion(
        **{**ask, "temperature": 1}, n=2, seed=3, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, max_tokens=8,
        user="me", extra_body=more,
    )  # fmt: skip
    tell("n", [choice.message.content[:5] for choice in many.choices], ["Paris"] * 2)
    tell("min_tokens", many.usage.completion_tokens >= 12, True)
    texts = litellm.text_completion(
        model=COMPLETION, prompt=["The capital of Peru is", "The capital of Japan is"], max_tokens=6, echo=True, logprobs=1,
        temperature=0, stop=".", **where,
    )  # fmt: skip
    tell(
        "completions",
        [one.text for one in texts.choices],
        ["The capital of Peru is Lima", "The capital of Japan is Tokyo"],
    )
    tell("refusal", refusal(ask), "BadRequestError")
    print(json.dumps(found))


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content or ""


def joined(events: list[Any]) -> str:
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


async def asynchronous(ask: Any) -> list[str]:
    whole = await litellm.acompletion(**ask)
    events = await litellm.acompletion(**ask, stream=True)
    return [text_of(whole), joined([event async for event in events])]


def refusal(ask: Any) -> str:
    """Name of the error where a parameter is not supported."""
    try:
        litellm.completion(**ask, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main()
