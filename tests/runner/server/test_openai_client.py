"""`ostinato serve` with OpenAI's own client: chats and completions, whole and as events."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from .conftest import QUESTION, Server

ASK: Any = {"model": "capitals", "messages": QUESTION, "temperature": 0}


def test_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Paris", "stop")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (18, 4, 22)
    again = client.chat.completions.create(**ASK)
    assert again.choices[0].message.content == "Paris"
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_chat_as_events(client: Any) -> None:
    events = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    *parts, last = events
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Paris"
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[0].choices[0].delta.role == "assistant"
    assert last.choices == [] and last.usage.total_tokens == 22
    assert len({event.id for event in events}) == 1


def test_several_answers_and_prompts(client: Any) -> None:
    prompts = [f"The capital of {country} is" for country in ("France", "Peru", "Japan")]
    answer = client.completions.create(model="capitals", prompt=prompts, n=2, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    one = client.completions.create(model="capitals", prompt=prompts[1], n=2, max_tokens=4, seed=7)
    assert [choice.text for choice in answer.choices[2:4]] == [choice.text for choice in one.choices]
    events = list(client.completions.create(model="capitals", prompt=prompts, n=2, max_tokens=4, seed=7, stream=True))
    texts = ["".join(event.choices[0].text for event in events if event.choices[0].index == i) for i in range(6)]
    assert texts == [choice.text for choice in answer.choices]


def test_parameters_for_another_service_change_nothing(client: Any) -> None:
    """Parameters by which OpenAI keeps, bills or watches. Clients send these to any server."""
    others = {
        **{"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"},
        **{"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "1h"}, "prompt_cache_retention": "24h"},
        "verbosity": "low",
    }
    answer = client.chat.completions.create(**ASK, extra_body=others)
    assert answer.choices[0].message.content == "Paris"


def test_stop_strings(client: Any) -> None:
    answer = client.chat.completions.create(**ASK, stop=["r"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Pa", "stop")
    events = list(client.chat.completions.create(**ASK, stop=["r"], stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "Pa"


def test_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == "Paris"
    assert all(len(one.top_logprobs) == 3 and one.logprob == one.top_logprobs[0].logprob <= 0 for one in content)
    text = "The capital of France"
    echoed = client.completions.create(model="capitals", prompt=text, max_tokens=0, echo=True, logprobs=1)
    (choice,) = echoed.choices
    assert choice.text == "".join(choice.logprobs.tokens) == text
    assert choice.logprobs.token_logprobs[0] is None and max(choice.logprobs.token_logprobs[1:]) <= 0
    assert echoed.usage.completion_tokens == 0
    longer = client.completions.create(
        model="capitals", prompt=text, max_tokens=3, echo=True, logprobs=1, temperature=0
    )
    logprobs = longer.choices[0].logprobs
    assert logprobs.token_logprobs[:-3] == choice.logprobs.token_logprobs
    assert longer.choices[0].text == "".join(logprobs.tokens)
    assert logprobs.text_offset[-1] == len(longer.choices[0].text) - len(logprobs.tokens[-1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not supported"),
        ({"extra_body": {"colour": "red"}}, "unknown parameter 'colour'"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"top_logprobs": 3}, "top_logprobs: it needs logprobs to be true"),
        ({"stream_options": {"include_usage": True}}, "stream_options: it needs stream to be true"),
        ({"extra_body": {"stop_token_ids": [5, 1536]}}, "stop_token_ids takes tokens of 0 to 1535, got 1536"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "mean the same"),
        ({"max_tokens": 3, "extra_body": {"min_tokens": 4}}, "min_tokens 4 is more than max_tokens 3"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": "a" * 251}]},
            "has 261 tokens, and the model takes 251 with the answer",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 10**7}]},
            "has more than 251 tokens, and the model takes 251 with",
        ),
    ],
)
def test_what_is_refused(client: Any, given: dict[str, object], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, **given})
    assert says in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_another_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["capitals"]
    assert client.models.retrieve("capitals").id == "capitals"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o'") as refused:
        client.chat.completions.create(**{**ASK, "model": "gpt-4o"})
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_many_at_a_time(server: Server) -> None:
    countries = ("France", "Japan", "Norway", "Kenya", "Peru", "Italy", "Egypt", "Chad")

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as many:

            async def one(country: str) -> str:
                question: Any = [{"role": "user", "content": f"What is the capital of {country}?"}]
                options: Any = {"model": "capitals", "messages": question, "temperature": 0, "stream": True}
                events = await many.chat.completions.create(**options)
                return "".join([event.choices[0].delta.content or "" async for event in events])

            return await asyncio.gather(*(one(country) for country in countries * 4))

    expected = ["Paris", "Tokyo", "Oslo", "Nairobi", "Lima", "Rome", "Cairo", "N'Djamena"]
    assert asyncio.run(ask()) == expected * 4
