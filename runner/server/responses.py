"""Bodies of responses: the answers of a generation, whole or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from ostinato.runner.openai_bodies import chat_logprobs, completion_logprobs, finish_reason
from ostinato.runner.text.tokenizer import Tokenizer

from . import protocol
from .answering import Choice, Generation, Piece


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a body in JSON's types."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Form(ABC):
    """Form of the answers of one endpoint.

    Args:
        model: the model's name.
        tokenizer: gives texts of single tokens.
        body: what was asked for.
        generation: the answers.
    """

    kind = event_kind = ""

    def __init__(self, model: str, tokenizer: Tokenizer, body: protocol.GenerationBody, generation: Generation) -> None:
        self.generation, self.body, self._model, self._tokenizer = generation, body, model, tokenizer
        self._begun: set[int] = set()
        options = body.stream_options or protocol.StreamOptions()
        self._continuous, self._includes_usage = options.continuous_usage_stats, options.include_usage

    def answer(self) -> dict[str, Any]:
        """The whole answer. The generation is complete."""
        choices = [self.choice(choice) for choice in self.generation.choices]
        return self._head(self.kind) | {"choices": choices, "usage": self.generation.usage()}

    def events(self, ready: list[tuple[Choice, Piece]]) -> bytes:
        """New pieces, as events."""
        return b"".join(self._events_of(choice, piece) for choice, piece in ready)

    def last_events(self) -> bytes:
        """Events behind the last piece."""
        usage = b""
        if self._includes_usage:
            head = self._head(self.event_kind)
            usage = event(head | {"choices": [], "usage": self.generation.usage()})
        return usage + b"data: [DONE]\n\n"

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """A choice of the whole answer."""

    @abstractmethod
    def delta(self, choice: Choice, piece: Piece, first: bool) -> dict[str, Any]:
        """The new part of a choice."""

    def of_prompt(self) -> dict[str, Any]:
        """The prompt's values in the whole answer, or in its first event."""
        return {}

    def _events_of(self, choice: Choice, piece: Piece) -> bytes:
        first, found = choice.index not in self._begun, b""
        always = first or self._continuous or self.body.return_token_ids
        if always or piece.text or piece.reasoning or piece.logprobs:
            of_prompt = {} if self._begun else self.of_prompt()
            self._begun.add(choice.index)
            found = self._event(choice, self.delta(choice, piece, first), None, of_prompt)
        if piece.ended:
            # Some clients read no text of the event that says why the answer has ended.
            found += self._event(choice, self.delta(choice, Piece(), False), finish_reason(choice.result), {})
        return found

    def _event(self, choice: Choice, delta: dict[str, Any], reason: str | None, more: dict[str, Any]) -> bytes:
        body = self._head(self.event_kind) | more
        body["choices"] = [{"index": choice.index, **delta, "finish_reason": reason}]
        if self._continuous:
            body["usage"] = self.generation.usage()
        elif self._includes_usage:
            body["usage"] = None
        return event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        generation = self.generation
        return {"id": generation.id, "object": kind, "created": generation.created, "model": self._model}


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    kind, event_kind = "chat.completion", "chat.completion.chunk"
    body: protocol.ChatBody

    def answer(self) -> dict[str, Any]:
        return super().answer() | self.of_prompt()

    def of_prompt(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[0].request.tokens}

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.content}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        result = choice.result
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(result.logprobs, self._tokenizer),
            "finish_reason": finish_reason(result),
        }
        if self.body.return_token_ids:
            found["token_ids"] = result.tokens
        return found

    def delta(self, choice: Choice, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text or first:
            delta["content"] = piece.text
        found: dict[str, Any] = {"delta": delta, "logprobs": chat_logprobs(piece.logprobs, self._tokenizer)}
        if self.body.return_token_ids:
            found["token_ids"] = piece.tokens
        return found


class CompletionForm(Form):
    """Answers of /v1/completions."""

    kind = event_kind = "text_completion"
    body: protocol.CompletionBody

    def __init__(self, model: str, tokenizer: Tokenizer, body: protocol.GenerationBody, generation: Generation) -> None:
        super().__init__(model, tokenizer, body, generation)
        # Choice -> number of characters of its tokens so far.
        self._offsets: dict[int, int] = {}

    def choice(self, choice: Choice) -> dict[str, Any]:
        result = choice.result
        whole = Piece(choice.content, tokens=result.tokens, logprobs=result.logprobs)
        return {"index": choice.index, **self.delta(choice, whole, True), "finish_reason": finish_reason(result)}

    def delta(self, choice: Choice, piece: Piece, first: bool) -> dict[str, Any]:
        tokenizer, request = self._tokenizer, choice.request
        echoes = self.body.echo and first
        records = [
            *(choice.result.prompt_logprobs if echoes else ()),
            *(piece.logprobs if choice.output_tokens else ()),
        ]
        offset = self._offsets.get(choice.index, 0)
        logprobs = completion_logprobs(records, tokenizer, request.tokens[0], offset)
        if logprobs is not None:
            self._offsets[choice.index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        found: dict[str, Any] = {"text": (choice.prompt if echoes else "") + piece.text, "logprobs": logprobs}
        if self.body.return_token_ids:
            found["token_ids"] = piece.tokens if choice.output_tokens else []
            if first:
                found["prompt_token_ids"] = request.tokens
        return found
