"""Prompts and answers as token ids, log-probabilities, and numbers of tokens, over HTTP."""

from __future__ import annotations

import math
from typing import Any

import pytest
import requests

from ...processes import PATIENCE
from .asking import ask, read
from .conftest import QUESTION, Server

CHAT: Any = {"messages": QUESTION, "temperature": 0}
TEXTS = [f"The capital of {country} is" for country in ("France", "Peru", "Japan")]


def post(server: Server, path: str, body: Any) -> Any:
    answer = requests.post(f"{server.url}{path}", json=body, timeout=PATIENCE)
    answer.raise_for_status()
    return answer.json()


def tokens_of(server: Server, text: str) -> list[int]:
    tokens: list[int] = post(server, "/tokenize", {"prompt": text})["tokens"]
    return tokens


def test_prompts_of_token_ids(server: Server) -> None:
    options: Any = {"temperature": 0, "max_tokens": 6, "echo": True, "stop": "."}
    ids = [tokens_of(server, text) for text in TEXTS]
    texts = ask(server, prompt=TEXTS, **options)
    assert texts.texts == [f"{text} {capital}" for text, capital in zip(TEXTS, ("Paris", "Lima", "Tokyo"), strict=True)]
    assert ask(server, prompt=ids, **options) == texts
    assert ask(server, prompt=ids[1], **options).texts == texts.texts[1:2]
    assert texts.prompt_tokens == sum(map(len, ids))


def test_what_clients_ask_of_the_tokenizer(server: Server) -> None:
    """lm-eval counts tokens with these, and takes the texts of special tokens from here."""
    info = requests.get(f"{server.url}/tokenizer_info", timeout=PATIENCE).json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert "add_generation_prompt" in info["chat_template"]
    body = {"prompt": info["eos_token"] + TEXTS[0], "add_special_tokens": False}
    assert post(server, "/tokenize", body)["tokens"] == [1535, *tokens_of(server, TEXTS[0])]
    refused = requests.post(f"{server.url}/tokenize", json=body | {"add_special_tokens": True}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")


@pytest.mark.parametrize(
    "given", [{"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}]
)
def test_a_text_has_no_chat_template(server: Server, given: Any) -> None:
    refused = requests.post(f"{server.url}/tokenize", json={"prompt": "x", **given}, timeout=PATIENCE)
    assert refused.status_code == 400 and next(iter(given)) in refused.json()["error"]["message"]
    assert post(server, "/tokenize", {"messages": QUESTION, **given})["count"] > 0


def test_no_tokens_at_all(server: Server) -> None:
    """min_tokens is held against a max_tokens of 0, too."""
    body: Any = {"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 1}
    refused = requests.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert refused.json()["error"]["message"] == "min_tokens 1 is more than max_tokens 0"


def test_token_ids_of_answers(server: Server) -> None:
    chat = ask(server, **CHAT, extra_body={"return_token_ids": True})
    rendered = post(server, "/tokenize", {"messages": QUESTION})
    assert chat.prompt_token_ids == rendered["tokens"] and rendered["count"] == chat.prompt_tokens
    assert post(server, "/detokenize", {"tokens": chat.only.token_ids})["prompt"] == chat.only.text == "Paris"
    refused = requests.post(f"{server.url}/detokenize", json={"tokens": [5, 1536]}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "tokens must lie in 0 to 1535, got 1536")
    assert len(chat.only.token_ids) == chat.completion_tokens
    raw = ask(server, prompt=TEXTS[0], temperature=0, max_tokens=2, extra_body={"return_token_ids": True})
    assert raw.prompt_token_ids == tokens_of(server, TEXTS[0]) and len(raw.only.token_ids) == 2
    plain = ask(server, **CHAT)
    assert plain.prompt_token_ids is None and plain.only.token_ids == []


@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_of_a_chat(server: Server, n: int) -> None:
    """They are alike whole and as events, the most likely token comes first, and none adds up to more than 1."""
    for choice in ask(server, **CHAT, n=n, logprobs=True, top_logprobs=4).choices:
        assert "".join(token for token, *_ in choice.logprobs) == "Paris"
        for token, logprob, top in choice.logprobs:
            assert top[token] == logprob == max(top.values()) and len(top) == 4
            assert sum(map(math.exp, top.values())) <= 1 + 1e-6
    assert all(top == {} for *_, top in ask(server, **CHAT, logprobs=True).only.logprobs)
    assert ask(server, **CHAT).only.logprobs == []


def test_echoes(server: Server) -> None:
    """The prompt's log-probabilities are those that the model gives its tokens when they are asked for one by one."""
    ids = tokens_of(server, TEXTS[0])
    echoed = ask(server, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    assert (echoed.only.text, echoed.completion_tokens) == (TEXTS[0], 0)
    assert echoed.only.logprobs[0][1] is None
    for i, (token, logprob, top, offset) in enumerate(echoed.only.logprobs[1:], 1):
        assert TEXTS[0][offset:].startswith(token)
        (best,) = top.items()
        ((likely, most, *_),) = ask(server, prompt=ids[:i], temperature=0, max_tokens=1, logprobs=1).only.logprobs
        assert likely == best[0] and math.isclose(most, best[1], rel_tol=1e-3, abs_tol=1e-4)
        assert logprob <= best[1]
    longer = ask(server, prompt=ids, echo=True, max_tokens=2, logprobs=1, temperature=0).only
    assert longer.text == f"{TEXTS[0]} Paris"
    assert [one[:2] for one in longer.logprobs[:-2]] == [one[:2] for one in echoed.only.logprobs]


def test_usage_in_each_event(server: Server) -> None:
    options: Any = {"model": "capitals", "prompt": "x", "max_tokens": 6, "seed": 3, "n": 2, "stream": True}
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(server.client().completions.create(**options, stream_options=usage))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[-1] == 12
    assert {event.usage.prompt_tokens for event in events} == {1}
    plain = list(server.client().completions.create(**options))
    assert all(event.usage is None for event in plain) and all(event.choices for event in plain)


def test_cached_tokens(server: Server) -> None:
    """A prompt that is asked again is not computed again, as events say, too."""
    options: Any = {"model": "capitals", "prompt": "Nobody has asked for Ouagadougou here before", "max_tokens": 1}
    first, *others = [server.client().completions.create(**options) for _ in range(2)]
    events = server.client().completions.create(**options, stream=True, stream_options={"include_usage": True})
    last = list(events)[-1]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    for one in (*others, last):
        assert one.usage.prompt_tokens_details.cached_tokens > 0
        assert one.usage.prompt_tokens == first.usage.prompt_tokens


def test_texts_in_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    assert ask(server, messages=[{"role": "user", "content": parts}], temperature=0) == ask(server, **CHAT)


def test_what_changes_nothing(server: Server) -> None:
    extra = {"metadata": {"a": "b"}, "store": False, "user": "me", "tools": [], "tool_choice": "none", "seed": None}
    client = server.client()
    answer = client.chat.completions.create(
        **CHAT, model="capitals", response_format={"type": "text"}, extra_body=extra
    )
    assert read([answer]) == ask(server, **CHAT)
