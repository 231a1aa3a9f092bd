"""Prompts: text, or the messages of a chat, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ostinato.delegate.errors import InputError

from .common_prefix import MIN_SHARED
from .tokenizer import Message, Piece, Tokenizer


class Prompt(NamedTuple):
    """A prompt for the model, and what is known of prompts that will come after it.

    Attributes:
        pieces: its text in pieces, see `Tokenizer.pieces`.
        tokens: their token ids.
        shared: numbers of tokens up to which a later prompt is likely to be the same. None: nothing is known.
        goes_on: whether a later prompt is likely to begin with this one and its answer.
    """

    pieces: list[Piece]
    tokens: list[int]
    shared: list[int] | None
    goes_on: bool


class ContextLengthError(InputError):
    """A prompt has more tokens than the model takes.

    Args:
        count: how many it has.
        limit: how many the model takes, the answer's included.
    """

    def __init__(self, count: str, limit: int) -> None:
        super().__init__(f"the prompt has {count} tokens, and the model takes {limit:,} with the answer: shorten it")


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    told: Sequence[Piece] = (),
    max_tokens: int | None = None,
) -> Prompt:
    """See `Engine.encode_prompt`.

    Args:
        told: text that a chat is likely to begin with, see `Tokenizer.pieces`.
        max_tokens: a prompt that has many more is not encoded. None: any is.

    Raises:
        ContextLengthError: it is not.
    """
    check_prompt(prompt, raw)
    if raw and isinstance(prompt, str):
        _check_length(tokenizer, prompt, max_tokens)
        tokens = tokenizer.encode(prompt)
        found = Prompt([Piece(prompt, tokens)], tokens, None, True)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.render(messages, chat_template_kwargs)
        _check_length(tokenizer, text, max_tokens)
        pieces = tokenizer.pieces(text, told)
        found = _chat_prompt(tokenizer, messages, text, pieces, chat_template_kwargs)
    if not found.tokens:
        raise InputError("the prompt has no tokens")
    return found


def check_prompt(prompt: str | Sequence[Message], raw: bool = False) -> None:
    """Raises InputError: an empty prompt, or something else than text or a chat; with `raw`, than text."""
    if not prompt or (isinstance(prompt, str) and not raw and not prompt.strip()):
        raise InputError("the prompt is empty")
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise InputError(
            "a prompt is text, or a list of messages with role and content; generate_tokens takes token ids"
        )
    if raw and not isinstance(prompt, str):
        raise InputError("raw=True takes a string, not a list of messages")


def _check_length(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> None:
    if max_tokens is not None and tokenizer.exceeds(text, max_tokens):
        raise ContextLengthError(f"more than {max_tokens:,}", max_tokens)


def _chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    text: str,
    pieces: list[Piece],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Prompt:
    """The prompt of these messages, whose text is known, in pieces."""
    tokens = [token for piece in pieces for token in piece.tokens]

    def rendered(told: Sequence[Message]) -> str:
        return tokenizer.render(told, chat_template_kwargs, add_generation_prompt=False)

    # What begins an answer is often not there when the same turn is history.
    shared = [tokenizer.common_tokens(text, tokens, rendered(messages))]
    goes_on = tokenizer.keeps_answers(chat_template_kwargs)
    with suppress(InputError):
        # Many drop a turn's thinking, between calls of tools, when the next one begins. Hermes 3, for one, ends a tool's
        # answer in another way if a message follows.
        later = rendered([*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}])
        shared.append(tokenizer.common_tokens(text, tokens, later))
        goes_on = goes_on and later.startswith(text)
    first, last = min(shared), max(shared)
    return Prompt(pieces, tokens, [first, last] if last - first >= MIN_SHARED else [first], goes_on)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
