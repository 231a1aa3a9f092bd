"""A file of prompts in JSON Lines: each line's id, request, and the line that answers it.

A line is a request of OpenAI's batch format, `{"custom_id", "method", "url", "body"}`, and is answered as OpenAI answers it
(`openai_bodies.py`); or `{"id", "prompt"}` or `{"id", "messages"}`, with options beside them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ostinato.delegate.errors import InputError, OptionError, first_line
from ostinato.delegate.sampling_params import SamplingParams

from .openai_bodies import ENDPOINTS, error_body
from .stream import Result
from .text.tokenizer import Tokenizer
from .text_request import TextRequest

LineId = str | int

_SAMPLING = frozenset(item.name for item in fields(SamplingParams))
_LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "ignore_eos": (bool, "true or false"),
    "raw": (bool, "true or false"),
    "n": (int, "a whole number"),
    "stop": ((str, list), "a string or a list of strings"),
    "chat_template_kwargs": (dict, "an object"),
}
_BATCH_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Defaults:
    """Options of lines that do not say them.

    Attributes:
        options: all options of a request. `raw` is for lines with a prompt, and chats have the chat template always.
        system: the system message of chats that have none.
    """

    options: TextRequest
    system: str | None = None


@dataclass(frozen=True)
class PromptLine:
    """A line of the file.

    Attributes:
        number: its number, from 1.
        id: `custom_id` or `id`; the line's number if it has none.
        data: the JSON object; empty if the line is none.
        problem: why the line cannot be read; None: it can.
    """

    number: int
    id: LineId
    data: Mapping[str, Any]
    problem: str | None = None

    @classmethod
    def parse(cls, number: int, text: bytes) -> PromptLine:
        try:
            data = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            return cls(number, number, {}, f"line {number} is not JSON: {first_line(error)}")
        if not isinstance(data, dict):
            return cls(number, number, {}, f"line {number} is not a JSON object")
        name = "custom_id" if _is_batch(data) else "id"
        found = data.get(name, number)
        if type(found) is str or (type(found) is int and abs(found) < 2**63):
            return cls(number, found, data)
        return cls(number, number, data, f"{name} must be a string or a whole number, got {found!r}")

    def request(self, defaults: Defaults) -> TextRequest:
        """Return what the line asks for.

        Raises:
            InputError: the line cannot be read, or does not have one prompt.
            OptionError: an option that there is not, or with a wrong value.
        """
        if self.problem is not None:
            raise InputError(self.problem)
        if _is_batch(self.data):
            return self._batch_request(defaults)
        given = {name: value for name, value in self.data.items() if name != "id" and value is not None}
        prompt, messages = given.pop("prompt", None), given.pop("messages", None)
        if (prompt is None) == (messages is None):
            raise InputError("a line has either prompt or messages")
        if messages is not None:
            return chat(messages, given, defaults)
        if not isinstance(prompt, str):
            raise InputError(f"prompt must be a string, got {prompt!r}")
        asked = with_options(defaults.options, given)
        if not asked.raw and defaults.system is not None and prompt.strip():
            turns = [{"role": "system", "content": defaults.system}, {"role": "user", "content": prompt}]
            return replace(asked, prompt=turns)
        return replace(asked, prompt=prompt)

    def answer(self, results: Sequence[Result], tokenizer: Tokenizer, model: str) -> dict[str, Any]:
        """Return the line that answers this one, with all answers of its request."""
        usage = usage_of(results)
        if _is_batch(self.data):
            endpoint, body = ENDPOINTS[self.data["url"]], self.data["body"]
            answered = endpoint.answer(str(self.number), body.get("model") or model, results, tokenizer)
            # Lines of our own do not say it: it depends on what came before, and the rest of an answer does not.
            details = {"prompt_tokens_details": {"cached_tokens": results[0].reused_tokens}}
            return self._response(200, {**answered, "usage": {**usage, **details}}, None)
        answers = [_answer(result) for result in results]
        if len(answers) == 1:
            return {"id": self.id, **answers[0], "usage": usage}
        return {"id": self.id, "choices": [{"index": i, **one} for i, one in enumerate(answers)], "usage": usage}

    def failure(self, code: str, message: str) -> dict[str, Any]:
        """Return the line that says what is wrong with this one."""
        error = {"code": code, "message": message}
        if _is_batch(self.data):
            return self._response(400, error_body(code, message), error)
        return {"id": self.id, "status_code": 400, "error": error}

    def _batch_request(self, defaults: Defaults) -> TextRequest:
        unknown = [name for name in self.data if name not in _BATCH_KEYS]
        if unknown:
            raise OptionError(f"unknown key {unknown[0]!r}: a batch request has {', '.join(_BATCH_KEYS)}")
        url, method, body = (self.data.get(name) for name in ("url", "method", "body"))
        if not isinstance(url, str) or url not in ENDPOINTS:
            raise OptionError(f"url must be {' or '.join(ENDPOINTS)}, got {url!r}")
        if method not in (None, "POST"):
            raise OptionError(f"method must be POST, got {method!r}")
        if not isinstance(body, dict):
            raise OptionError(f"body must be an object, got {body!r}")
        prompt, options = ENDPOINTS[url].read(body)
        if isinstance(prompt, str):
            return replace(with_options(replace(defaults.options, raw=True), options), prompt=prompt)
        return chat(prompt, options, defaults)

    def _response(self, status: int, body: Mapping[str, Any], error: Mapping[str, Any] | None) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req_{self.number}", "body": body}
        return {"id": f"batch_req_{self.number}", "custom_id": self.id, "response": response, "error": error}


def lines_of(path: Path) -> Iterator[PromptLine]:
    """Yield the lines of a file but empty ones. Raises OptionError: it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
                if text.strip():
                    yield PromptLine.parse(number, text)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error


def checked_ids(path: Path) -> list[LineId]:
    """Return the ids of a file's lines.

    Raises:
        OptionError: it cannot be read, or not twice.
        InputError: two lines have the same id.
    """
    if path.exists() and not path.is_file():
        raise OptionError(f"{path} cannot be read: it is not a file, and a file of prompts is read twice")
    found: dict[LineId, int] = {}
    for line in lines_of(path):
        first = found.setdefault(line.id, line.number)
        if first != line.number:
            raise InputError(f"{path}: lines {first} and {line.number} have the same id {line.id!r}")
    return list(found)


def with_options(default: TextRequest, given: Mapping[str, Any]) -> TextRequest:
    """Return the request with options by their names in a file: max_tokens (also max_new_tokens, max_completion_tokens), n,
    stop, ignore_eos, raw, chat_template_kwargs, and the fields of `SamplingParams`. null: as in `default`.

    Raises:
        OptionError: an unknown name, or a value that it does not take.
    """
    changed: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        kind, what = _TYPES.get(name, (object, ""))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise OptionError(f"{name} must be {what or 'a number'}, got {value!r}")
        if name in _LENGTHS:
            if "max_new_tokens" in changed:
                raise OptionError(f"{', '.join(_LENGTHS)} mean the same: give one of them")
            changed["max_new_tokens"] = value
        elif name in _TYPES:
            changed[name] = value
        elif name in _SAMPLING:
            sampling[name] = value
        else:
            raise OptionError(f"unknown key {name!r}")
    if sampling:
        changed["sampling_params"] = replace(default.sampling_params or SamplingParams(), **sampling)
    return replace(default, **changed)


def chat(messages: object, given: Mapping[str, Any], defaults: Defaults) -> TextRequest:
    """Return the request of a chat. Contents may be lists of texts, as OpenAI's are.

    Raises:
        InputError: no messages, or something in them that is not text.
        OptionError: see `with_options`.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError(f"messages must be a list of messages with role and content, got {messages!r}")
    turns = [_message(message) for message in messages]
    if defaults.system is not None and turns[0]["role"] not in ("system", "developer"):
        turns.insert(0, {"role": "system", "content": defaults.system})
    return replace(with_options(replace(defaults.options, raw=False), given), prompt=turns)


def usage_of(results: Sequence[Result]) -> dict[str, int]:
    """Numbers of tokens of one request, by OpenAI's names."""
    prompt, completion = results[0].prompt_tokens, sum(len(result.tokens) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _is_batch(data: Mapping[str, Any]) -> bool:
    return any(name in data for name in _BATCH_KEYS)


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"a message is an object with role and content, got {message!r}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise InputError(f"a message's content is text, got {message.get('content')!r}")
    return {**message, "content": content}


def _answer(result: Result) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason}
    for name in ("logprobs", "prompt_logprobs"):
        if records := getattr(result, name):
            answer[name] = [record and record._asdict() for record in records]
    return answer
