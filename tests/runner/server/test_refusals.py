"""Words for what is wrong with a body: where it stands, and what could stand there."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.runner.server.protocol import ChatBody, CompletionBody
from ostinato.runner.server.refusals import refusal

MESSAGES = [{"role": "user", "content": "x"}]


def refused(kind: Any, body: Any) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    errors: Any = found.value.errors()
    return refusal([{**error, "loc": ("body", *error["loc"])} for error in errors], body)


@pytest.mark.parametrize(
    ("given", "what", "param"),
    [
        ({"seed": "a"}, "seed: Input should be a valid integer", "seed"),
        ({"stop": 5}, "stop: Input should be a valid string or a valid list", "stop"),
        ({"stop": {"a": 5}}, "stop: Input should be a valid string or a valid list", "stop"),
        ({"stop": ["a", 5]}, "stop.1: Input should be a valid string", "stop.1"),
        ({"prompt": [1, 2, "x"]}, "prompt.2: Input should be a valid integer", "prompt.2"),
        ({"prompt": ["x", 3]}, "prompt.1: Input should be a valid string", "prompt.1"),
        ({"prompt": [[1], [2, -1]]}, "prompt.1.1: Input should be greater than or equal to 0", "prompt.1.1"),
        ({"prompt": None}, "prompt: Field required", "prompt"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5: Input should be less than or equal to 100", "logit_bias.5"),
        ({"seed": "a", "prompt": [[1, "x"]]}, "seed: Input should be a valid integer", "seed"),
        ({"stream_options": {"x": 1}}, "unknown parameter 'stream_options.x'", "stream_options.x"),
        ({"stream_options": {}}, "stream_options: it needs stream to be true", "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options: it needs stream to be true", "stream_options"),
        ({"stream_options": {}, "stream": 1}, "stream: Input should be a valid boolean", "stream"),
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
    ],
)
def test_completions(given: dict[str, Any], what: str, param: str) -> None:
    assert refused(CompletionBody, {"prompt": "x", **given}) == (what, param)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user"}, "messages.0.content: Field required"),
        ({"role": "user", "content": None}, "messages.0.content: Input should be a valid string or a valid list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0.type: Input should be 'text'"),
        ({"content": "x"}, "messages.0.role: Field required"),
    ],
)
def test_messages(message: Any, what: str) -> None:
    assert refused(ChatBody, {"messages": [message]}) == (what, what.partition(":")[0])


@pytest.mark.parametrize("given", [{"top_logprobs": 0}, {"top_logprobs": 2, "logprobs": False}])
def test_likely_tokens_without_log_probabilities(given: Any) -> None:
    what = "top_logprobs: it needs logprobs to be true"
    assert refused(ChatBody, {"messages": MESSAGES, **given}) == (what, "top_logprobs")


def test_what_asks_for_nothing_needs_nothing() -> None:
    given: Any = {"stream_options": None, "top_logprobs": None, "logprobs": None, "stream": None}
    body = ChatBody.model_validate({"messages": MESSAGES, **given})
    assert body.model_fields_set == {"messages"}


def test_how_many_there_may_be() -> None:
    part = {"type": "text", "text": "x"}
    for given, what in (
        ({"prompt": ["x"] * 1025}, "prompt: Input should have at most 1024 prompts"),
        ({"prompt": [[1]] * 1025}, "prompt: Input should have at most 1024 prompts"),
        ({"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids: List should have at most 1024 items"),
        ({"messages": MESSAGES * 16_385}, "messages: Input should have at most 16384 messages and parts of them"),
        (
            {"messages": [{"role": "user", "content": [part] * 8191}] * 2 + MESSAGES},
            "messages: Input should have at most 16384 messages and parts of them",
        ),
    ):
        found, param = refused(ChatBody if "messages" in given else CompletionBody, given)
        assert found.startswith(what) and param == what.partition(":")[0]
    assert len(CompletionBody.model_validate({"prompt": [[1]] * 1024}).prompt) == 1024
    assert len(CompletionBody.model_validate({"prompt": [1] * 5000}).prompt) == 5000
    assert len(ChatBody.model_validate({"messages": [{"role": "user", "content": [part] * 16_383}]}).messages) == 1


def test_something_else_than_an_object() -> None:
    assert refused(ChatBody, [1]) == ("the body must be a JSON object, got [1]", None)
