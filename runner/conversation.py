"""A conversation of several turns. Each turn goes on from what the prefix cache knows of the turns before."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from os import PathLike
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import CapacityError, InputError, OstinatoError, SessionFileError
from ostinato.delegate.sampling_params import SamplingParams

from .engine import Engine
from .sessions.session import check_max_new_tokens
from .stream import DEFAULT_MAX_NEW_TOKENS, Stream
from .text.prompts import Prompt, encode_prompt
from .text.tokenizer import Message, Piece
from .text_request import TextRequest


class Conversation:
    """Messages, and the tokens that the model has seen of them. One thread at a time may use it.

    It holds no state on the device. What the prefix cache had to give up costs time alone: it is computed again.

    Args:
        engine: answers the questions.
        chat_template_kwargs, max_new_tokens, sampling_params: as `Engine.generate` takes them, for all answers.
        messages: what was said before.

    Attributes:
        messages: all messages, the answers included.

    >>> conversation = Conversation(engine)
    >>> print("".join(conversation.ask("What is the capital of France?")))
    Paris
    >>> answer = conversation.ask("And of Peru?")
    >>> print("".join(answer), answer.result.reused_tokens)
    Lima 28
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling_params: SamplingParams | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        check_max_new_tokens(max_new_tokens)
        self.messages: list[Message] = list(messages)
        self._engine = engine
        self._template_kwargs = chat_template_kwargs
        self._max_new_tokens = max_new_tokens
        self._params = sampling_params or SamplingParams()
        # The last turn's prompt and answer, and their text with the tokens that were sampled for its answers.
        self._tokens: list[int] = []
        self._told: list[Piece] = []

    @property
    def turns(self) -> int:
        """Number of questions that were answered."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def position(self) -> int:
        """Number of tokens of the last turn's prompt and answer, or of the session that was loaded."""
        return len(self._tokens)

    @property
    def max_seq_len(self) -> int:
        """The most tokens that it may have."""
        return self._engine.max_seq_len

    def ask(self, text: str) -> Stream[str]:
        """Return the answer as it is generated; pieces may be empty. The turn counts when it has a token of the answer.

        An answer that is closed before its end stays in the conversation as far as it came.

        Raises:
            InputError: an empty question, or the conversation leaves no room in max_seq_len.
            CapacityError: the conversation needs more pages than there are; or, when a piece is taken, sessions that others
                opened have them, or all slots.
        """
        if not text.strip():
            raise InputError("the prompt is empty")
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def retry(self) -> Stream[str]:
        """Answer the last question again, as `ask` does. Raises InputError: there is none."""
        return self._answer(self.messages[: self._last_question() + 1])

    def undo(self) -> str:
        """Take the last question and its answer away, and return the question. Raises InputError: there is none."""
        number = self._last_question()
        question = self.messages[number]["content"]
        del self.messages[number:]
        return question

    def set_system(self, text: str) -> None:
        """Set the system message; "": none. All is computed anew with the next turn.

        Raises:
            InputError: the chat template takes no system message; nothing has changed.
        """
        system: list[Message] = [{"role": "system", "content": text}] if text else []
        self._engine.tokenizer.render(
            [*system, {"role": "user", "content": "Hello"}], chat_template_kwargs=self._template_kwargs
        )
        self.messages = [*system, *(message for message in self.messages if message["role"] != "system")]

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.close()

    def fork(self) -> Conversation:
        """Return another conversation that goes on from here."""
        other = copy(self)
        other.messages = list(self.messages)
        return other

    def save(self, path: str | PathLike[str]) -> None:
        """Write the messages to a file, as JSON, and a session with the last turn's tokens beside it, with `.session` behind
        the name. What the prefix cache does not have of it is computed again.

        Raises:
            SessionFileError: a file cannot be written.
            CapacityError: no slot or too few pages are free for the session; nothing was written.
        """
        path = Path(path)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if path.name else path
        try:
            beside.write_text(json.dumps({"messages": self.messages}, indent=1), encoding="utf-8")
            try:
                if self._tokens:
                    self._save_session(_state_path(path))
                else:
                    _state_path(path).unlink(missing_ok=True)
                os.replace(beside, path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise SessionFileError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: str | PathLike[str]) -> OstinatoError | None:
        """Go on with what `save` wrote, in the place of what was here, with the parameters that there are.

        Returns:
            Why the session beside the messages cannot be used. The next turn computes it again then.

        Raises:
            SessionFileError: the file with the messages cannot be read; nothing has changed.
        """
        path = Path(path)
        messages = _read_messages(path)
        self.close()
        self.messages = messages
        driver = self._engine.driver
        try:
            with driver.lock, self._engine.load_session(_state_path(path)) as session:
                if not driver.scheduler.prefixes.keep(session):
                    raise CapacityError("the prefix cache has no room for it: load the program with more snapshots")
                self._tokens = list(session.tokens)
            self._told = self._loaded()
        except OstinatoError as error:
            return error
        return None

    def close(self) -> None:
        """Forget the tokens. The messages stay, and so does their state in the prefix cache, while there is room for it."""
        self._tokens, self._told = [], []

    def _last_question(self) -> int:
        """Number of the message. Raises InputError: there is none."""
        for number in reversed(range(len(self.messages))):
            if self.messages[number]["role"] == "user":
                return number
        raise InputError("there is no turn yet")

    def _answer(self, asked: list[Message]) -> Stream[str]:
        engine, limit = self._engine, self.max_seq_len
        prompt = encode_prompt(engine.tokenizer, asked, chat_template_kwargs=self._template_kwargs, told=self._told)
        if len(prompt.tokens) >= limit:
            raise InputError(
                f"the conversation has {len(prompt.tokens)} tokens with this question, which leaves no room for an answer: "
                f"max_seq_len is {limit}. Take turns back, or begin anew"
            )
        answer = engine.answer(
            TextRequest(prompt=prompt, max_new_tokens=self._max_new_tokens, sampling_params=self._params)
        )
        return Stream(self._pieces(asked, prompt, answer), answer.result)

    def _pieces(self, asked: list[Message], prompt: Prompt, answer: Stream[str]) -> Generator[str, None, None]:
        """Yield the answer's text. At its end it is part of the conversation, if it has a token."""
        result = answer.result
        try:
            yield from answer
        finally:
            if result.tokens:
                self.messages = [*asked, {"role": "assistant", "content": result.text}]
                self._tokens = prompt.tokens + result.tokens
                self._told = prompt.pieces[:-1]
                said = result.tokens[: -1 if result.finish_reason == "stop" else None]
                # A text may leave out what was said: special tokens, or an unfinished character.
                if self._engine.tokenizer.decode(said) == result.text:
                    text, tokens = prompt.pieces[-1]
                    self._told.append(Piece(text + result.text, tokens + said))

    def _save_session(self, path: Path) -> None:
        driver, tokens = self._engine.driver, self._tokens
        with driver.lock, driver.scheduler.prefixes.open_longest(tokens) or self._engine.open_session() as session:
            # The last one waits for the next step, as it does in a session that has sampled it.
            if rest := tokens[session.position : -1]:
                session.prefill(rest)
            if session.position < len(tokens):
                session.append(tokens[-1])
            session.save(path)

    def _loaded(self) -> list[Piece]:
        """The text of the messages with the tokens that were loaded, if these are tokens of that text.

        Raises:
            InputError: the chat template cannot be rendered.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return []
        tokenizer, ends = self._engine.tokenizer, self._params.ends(self._engine.eos_ids)
        text = tokenizer.render(self.messages[:-1], self._template_kwargs) + self.messages[-1]["content"]
        tokens = self._tokens[: -1 if self._tokens[-1] in ends else None]
        return [Piece(text, tokens)] if tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(text)) else []


def _state_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.session")


def _read_messages(path: Path) -> list[Message]:
    """Raises SessionFileError: the file cannot be read, or has something else."""
    try:
        data = json.loads(path.read_bytes())
        messages = [{"role": one["role"], "content": one["content"]} for one in data["messages"]]
        if not all(isinstance(value, str) for one in messages for value in one.values()):
            raise TypeError
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SessionFileError(f"{path} is no saved conversation") from error
    return messages
