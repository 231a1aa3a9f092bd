"""Prompts: text, or the messages of a chat, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.delegate.errors import InputError

from .tokenizer import Message, Tokenizer


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """See `Engine.encode_prompt`."""
    check_prompt(prompt, raw)
    if not isinstance(prompt, str):
        text = tokenizer.render(prompt, chat_template_kwargs)
    else:
        text = prompt if raw else tokenizer.render([{"role": "user", "content": prompt}], chat_template_kwargs)
    tokens = tokenizer.encode(text)
    if not tokens:
        raise InputError("the prompt has no tokens")
    return tokens


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


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
