"""A conversation of several turns. Each turn goes on from what the prefix cache knows of the turns before."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from copy import copy
from os import PathLike
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import InputError, OstinatoError, SessionFileError
from ostinato.delegate.sampling_params import SamplingParams

from .chat_history import ChatHistory
from .engine import Engine
from .sessions.prefix_cache import PrefixCache
from .sessions.session import check_max_new_tokens
from .stream import DEFAULT_MAX_NEW_TOKENS, Stream
from .text.prompts import Prompt
from .text.tokenizer import Message
from .text_request import TextRequest


class Conversation:
    """Messages, and the tokens that the model has seen of them. One thread at a time may use it.

    It holds no state on the device. What the prefix cache had to give up costs time alone: it is computed again.

    Args:
        engine: answers the questions.
        chat_template_kwargs, max_new_tokens, sampling_params: as `Engine.generate` takes them, for all answers.
        messages: what was said before.

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
        self._history = ChatHistory(messages)
        self._engine = engine
        self._template_kwargs = chat_template_kwargs
        self._max_new_tokens = max_new_tokens
        self._params = sampling_params or SamplingParams()

    @property
    def messages(self) -> list[Message]:
        """All messages, the answers included."""
        return self._history.messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._history.messages = messages

    @property
    def turns(self) -> int:
        """Number of questions that were answered."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def position(self) -> int:
        """Number of tokens of the last turn's prompt and answer, or of the session that was loaded."""
        return len(self._history.tokens)

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
        other._history = self._history.fork()
        return other

    def save(self, path: str | PathLike[str]) -> None:
        """Write the messages to a file, as JSON, and a session with the last turn's tokens beside it, with `.session` behind
        the name. What the prefix cache does not have of it is computed again.

        Raises:
            SessionFileError: a file cannot be written.
            CapacityError: no slot or too few pages are free for the session; nothing was written.
        """
        path, tokens = Path(path), self._history.tokens
        if tokens:
            with self._engine.driver.lock:
                self._prefixes.save(tokens, _state_path(path))
        self._history.write(path)
        if not tokens:
            _state_path(path).unlink(missing_ok=True)

    def load(self, path: str | PathLike[str]) -> OstinatoError | None:
        """Go on with what `save` wrote, in the place of what was here, with the parameters that there are.

        Returns:
            Why the session beside the messages cannot be used. The next turn computes it again then.

        Raises:
            SessionFileError: the file with the messages cannot be read; nothing has changed.
        """
        path = Path(path)
        self._history, _ = ChatHistory.read(path, self._engine.tokenizer)
        try:
            with self._engine.driver.lock:
                tokens = self._prefixes.load(_state_path(path))
            if tokens != self._history.tokens:
                raise SessionFileError(f"{_state_path(path)} is the session of another conversation")
        except OstinatoError as error:
            self.close()
            return error
        return None

    def close(self) -> None:
        """Forget the tokens. The messages stay, and so does their state in the prefix cache, while there is room for it."""
        self._history.forget_tokens()

    def _last_question(self) -> int:
        """Number of the message. Raises InputError: there is none."""
        for number in reversed(range(len(self.messages))):
            if self.messages[number]["role"] == "user":
                return number
        raise InputError("there is no turn yet")

    def _answer(self, asked: list[Message]) -> Stream[str]:
        engine, limit = self._engine, self.max_seq_len
        prompt = self._history.prompt(engine.tokenizer, asked, self._template_kwargs)
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
                said: Message = {"role": "assistant", "content": result.text}
                self._history.add(self._engine.tokenizer, asked, prompt, result, said)

    @property
    def _prefixes(self) -> PrefixCache:
        return self._engine.driver.scheduler.prefixes


def _state_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.session")
