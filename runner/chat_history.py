"""Messages of a chat, and the tokens that the model has seen of them. It holds no state on the device."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import InputError, SessionFileError

from .stream import Result
from .text.prompts import Prompt, encode_prompt
from .text.tokenizer import Message, Piece, Tokenizer


class ChatHistory:
    """Messages of a chat, and their tokens.

    Args:
        messages: what was said before.

    Attributes:
        messages: all messages, the answers included. Later turns make new lists.
        tokens: the last turn's prompt and answer.
        lasting: number of these that the next turn's prompt is likely to begin with.
    """

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages: list[Message] = list(messages)
        self.tokens: list[int] = []
        self.lasting = 0
        # Text of the last turn, with the tokens that were sampled for its answers.
        self._told: list[Piece] = []

    def prompt(
        self,
        tokenizer: Tokenizer,
        asked: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of these messages, with the tokens that the model has seen of them.

        `max_tokens`, and what is raised: see `encode_prompt`.
        """
        return encode_prompt(tokenizer, asked, False, chat_template_kwargs, self._told, max_tokens)

    def add(
        self, tokenizer: Tokenizer, asked: Sequence[Message], prompt: Prompt, result: Result, said: Message
    ) -> None:
        """Have a turn be the last one.

        Args:
            asked: all messages before the answer.
            prompt: their prompt.
            result: the answer.
            said: the answer as a message.
        """
        self.messages = [*asked, said]
        self.tokens = prompt.tokens + result.tokens
        self.lasting = len(self.tokens) if prompt.goes_on or not prompt.shared else prompt.shared[0]
        self._told = prompt.pieces[:-1]
        tokens = result.tokens[: -1 if result.finish_reason == "stop" else None]
        # A text may leave out what was said: special tokens, or an unfinished character.
        if tokenizer.decode(tokens) == result.text:
            text, before = prompt.pieces[-1]
            self._told.append(Piece(text + result.text, before + tokens))

    def fork(self) -> ChatHistory:
        """Another history that goes on from here."""
        other = copy(self)
        other.messages = list(self.messages)
        return other

    def forget_tokens(self) -> None:
        """Have the next turn encode everything anew."""
        self.tokens, self._told, self.lasting = [], [], 0

    def write(self, path: Path, **more: Any) -> None:
        """Write it to a file, as JSON, which is whole at any time. `more`: other values to put beside it.

        Raises:
            SessionFileError: it cannot be written.
        """
        data = {"messages": self.messages, "tokens": self.tokens, "lasting": self.lasting, "told": self._told, **more}
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if path.name else path
        try:
            try:
                beside.write_text(json.dumps(data, indent=1), encoding="utf-8")
                os.replace(beside, path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise SessionFileError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer) -> tuple[ChatHistory, dict[str, Any]]:
        """Read what `write` wrote. Tokens that are none of the tokenizer's for their text are left out.

        Returns:
            The history, and all values of the file.

        Raises:
            SessionFileError: the file cannot be read, or has something else.
        """
        try:
            data = json.loads(path.read_bytes())
            history = cls(data["messages"])
            if not all(isinstance(one["role"], str) and isinstance(one["content"], str) for one in history.messages):
                raise TypeError
            tokens = [int(token) for token in data.get("tokens", ())]
            lasting = int(data.get("lasting", len(tokens)))
            told = [Piece(str(text), [int(token) for token in some]) for text, some in data.get("told", ())]
        except OSError as error:
            raise SessionFileError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SessionFileError(f"{path} is no saved conversation") from error
        if all(_is_text_of(tokenizer, piece) for piece in told):
            history.tokens, history._told, history.lasting = tokens, told, lasting
        return history, data


def _is_text_of(tokenizer: Tokenizer, piece: Piece) -> bool:
    """Whether the tokens are tokens of the text: another model's are not."""
    try:
        return tokenizer.decode(piece.tokens) == tokenizer.decode(tokenizer.encode(piece.text))
    except (InputError, OverflowError):
        return False
