"""Bodies of requests and responses, as OpenAI's endpoints for chats and for completions have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ostinato.delegate.errors import InputError, OptionError
from ostinato.delegate.sampling_params import TokenLogprobs

from .stream import Result
from .text.tokenizer import Tokenizer

# They change nothing here.
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "stream_options")
# There is one value of each.
_ONLY = {"stream": False, "echo": False, "best_of": 1, "response_format": {"type": "text"}}


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of OpenAI's interface.

    Attributes:
        read: body of a request -> its prompt, a string for a completion and the messages of a chat, and its other options by
            the names that vLLM gives them. Raises OptionError, InputError: something that is not done here.
        answer: name, model, all answers to the request and the tokenizer -> body of the response, without `usage`.
    """

    read: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]
    answer: Callable[[str, str, Sequence[Result], Tokenizer], dict[str, Any]]


def error_body(
    code: str | None, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    """Body of the response to a request that is refused, or has failed."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _read_chat(body: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = _options(body)
    wants, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if not isinstance(wants, bool):
        raise OptionError(f"logprobs of a chat must be true or false, got {wants!r}")
    if count is not None and not wants:
        raise OptionError("top_logprobs needs logprobs to be true")
    if wants:
        given["logprobs"] = 0 if count is None else count
    return given.pop("messages", None) or [], given


def _read_completion(body: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = _options(body)
    prompt = given.pop("prompt", None)
    if not isinstance(prompt, str):
        raise InputError(f"prompt must be a string, one for each line, got {prompt!r}")
    return prompt, given


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name, value in _ONLY.items():
        if given.pop(name, value) != value:
            raise OptionError(f"{name} must be {value!r} here, got {body[name]!r}")
    if "raw" in given:
        raise OptionError("unknown key 'raw': the url says whether the chat template is applied")
    return given


def _answer_chat(name: str, model: str, results: Sequence[Result], tokenizer: Tokenizer) -> dict[str, Any]:
    choices = [
        _choice(i, result, chat_logprobs(result.logprobs, tokenizer))
        | {"message": {"role": "assistant", "content": result.text}}
        for i, result in enumerate(results)
    ]
    return _body(f"chatcmpl-{name}", "chat.completion", model, choices)


def _answer_completion(name: str, model: str, results: Sequence[Result], tokenizer: Tokenizer) -> dict[str, Any]:
    choices = [
        _choice(i, result, completion_logprobs(result.logprobs, tokenizer)) | {"text": result.text}
        for i, result in enumerate(results)
    ]
    return _body(f"cmpl-{name}", "text_completion", model, choices)


def _body(name: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def _choice(index: int, result: Result, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason(result), "logprobs": logprobs}
    if result.prompt_logprobs:
        choice["prompt_logprobs"] = [record and record._asdict() for record in result.prompt_logprobs]
    return choice


def chat_logprobs(records: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Records of tokens as a chat's choice has them; None: there are none."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(record.token, record.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in record.top]}
        for record in records
    ]
    return {"content": content} if content else None


def completion_logprobs(
    records: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, first: int | None = None, offset: int = 0
) -> dict[str, Any] | None:
    """Records of tokens as a completion's choice has them; None: there are none.

    Args:
        records: one for each token; None in the place of a prompt's first token.
        tokenizer: gives their texts.
        first: that token.
        offset: number of characters before the first of them.
    """
    if not records:
        return None
    texts = [tokenizer.decode([first if record is None else record.token]) for record in records]  # type: ignore[list-item]
    return {
        "tokens": texts,
        "token_logprobs": [record and record.logprob for record in records],
        "top_logprobs": [record and _by_text(record, tokenizer) for record in records],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


def finish_reason(result: Result) -> str:
    """Why an answer has ended, in OpenAI's words: they have one for answers that were cut."""
    return "stop" if result.finish_reason == "stop" else "length"


def _by_text(record: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in record.top:
        # Several tokens may have the same text, special ones none: the most likely one stands for them.
        found.setdefault(tokenizer.decode([token]), logprob)
    return found


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(_read_chat, _answer_chat),
    "/v1/completions": Endpoint(_read_completion, _answer_completion),
}
