"""What clients may say about sampling, over HTTP: each option changes what it should, alike whole and as events."""

from __future__ import annotations

from typing import Any

import pytest

from .asking import ask
from .conftest import QUESTION, Server

# The model is at a loss here: what comes next is open.
OPEN: Any = {"prompt": "x", "max_tokens": 12}
PARIS = [47, 281, 259]


def test_a_seed_decides(server: Server) -> None:
    first = ask(server, **OPEN, seed=1, n=3)
    assert len(set(first.texts)) == 3
    assert ask(server, **OPEN, seed=1, n=3) == first
    assert ask(server, **OPEN, seed=-1, n=3).texts != first.texts


@pytest.mark.parametrize("only", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}])
def test_filters_that_leave_one_token(server: Server, only: Any) -> None:
    greedy = ask(server, **OPEN, temperature=0)
    assert ask(server, **OPEN, seed=5).texts != greedy.texts
    assert ask(server, **OPEN, seed=5, **only) == greedy


@pytest.mark.parametrize("given", [{"top_k": -1}, {"top_k": 0}, {"min_p": 0}, {"top_k": None}])
def test_filters_that_leave_all(server: Server, given: Any) -> None:
    assert ask(server, **OPEN, seed=5, temperature=1, top_p=1, extra_body=given) == ask(server, **OPEN, seed=5)


def test_temperature(server: Server) -> None:
    """Nearly nothing is nearly greedy; a high one takes what is unlikely."""
    greedy = ask(server, **OPEN, temperature=0, seed=1)
    assert ask(server, **OPEN, temperature=1e-4, seed=1) == greedy == ask(server, **OPEN, temperature=0, seed=2)
    hot = ask(server, **OPEN, temperature=2, seed=1, logprobs=1)
    assert min(logprob for _, logprob, *_ in hot.only.logprobs) < -4


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_lengths_of_chats(server: Server, name: str) -> None:
    cut = ask(server, messages=QUESTION, temperature=0, **{name: 2})
    assert (cut.only.text, cut.only.finish_reason, cut.completion_tokens) == ("Par", "length", 2)


def test_an_answer_that_must_go_on(server: Server) -> None:
    chat: Any = {"messages": QUESTION, "temperature": 0, "max_tokens": 12}
    assert ask(server, **chat).completion_tokens == len(PARIS) + 1
    least = ask(server, **chat, extra_body={"min_tokens": 9})
    assert 9 <= least.completion_tokens <= 12 and least.only.text.startswith("Paris")
    on = ask(server, **chat, extra_body={"ignore_eos": True})
    assert (on.completion_tokens, on.only.finish_reason) == (12, "length")


def test_stops(server: Server) -> None:
    chat: Any = {"messages": QUESTION, "temperature": 0}
    for stop in ("i", ["zzz", "is"], ["ris", "aris"]):
        found = ask(server, **chat, stop=stop).only
        first = min("Paris".find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in "Paris")
        assert (found.text, found.finish_reason) == ("Paris"[:first], "stop")
    ended = ask(server, **chat, extra_body={"stop_token_ids": [PARIS[1]]})
    assert (ended.only.text, ended.only.finish_reason, ended.completion_tokens) == ("P", "stop", 2)


def test_biases(server: Server) -> None:
    many = ask(server, **OPEN, temperature=0, logit_bias={str(PARIS[0]): 100})
    assert many.only.text == "P" * 12
    other = ask(server, messages=QUESTION, temperature=0, logit_bias={str(PARIS[0]): -100})
    assert other.only.text == " Paris"


def test_penalties(server: Server) -> None:
    """A frequent token's penalty grows; one for its presence does not."""
    bias = {"logit_bias": {"47": 100, "46": 60}, "temperature": 0, "max_tokens": 60, "prompt": "x"}
    assert set(ask(server, **bias, presence_penalty=2).only.text) == {"P"}
    assert set(ask(server, **bias, frequency_penalty=2).only.text) == {"P", "O"}
    extra: Any = {"ignore_eos": True, "return_token_ids": True}
    free: Any = {"prompt": "x", "temperature": 0, "max_tokens": 40, "extra_body": extra}
    plain = ask(server, **free).only.token_ids
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert len(set(ask(server, **free, **penalty).only.token_ids)) > len(set(plain))
    extra["repetition_penalty"] = 5
    assert len(set(ask(server, **free).only.token_ids)) > len(set(plain)) + 10
