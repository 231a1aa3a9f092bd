"""A conversation of several turns over one session, so that a turn prefills only what the session does not have.

A chat template may render earlier turns otherwise than the session saw them: many drop what a model thought. Then the session
goes back to the last snapshot from which both agree.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ostinato.delegate.errors import CapacityError, InputError, OstinatoError, SessionFileError
from ostinato.delegate.sampling_params import SamplingParams

from .engine import Engine
from .sessions.session import Session, Snapshot, check_max_new_tokens
from .stream import DEFAULT_MAX_NEW_TOKENS, Result, Stream
from .text.common_prefix import common_length
from .text.prompts import encode_prompt
from .text.tokenizer import Message, TextStream

# A long prompt is prefilled in parts of so many tokens: an answer can be closed between them.
PREFILL_PART = 512

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Point:
    """A snapshot of the session when it had its first `position` tokens."""

    position: int
    snapshot: Snapshot


class Conversation:
    """Messages, and a session that has seen most of them. One thread at a time may use it.

    Answers go on from the session; whatever takes the state away (no room, a file of another artifact) costs time alone: it
    is computed again from the messages.

    Args:
        engine: where the session is. Snapshots to go back to are made as far as it has room for them.
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
        self._session: Session | None = None
        # Their positions rise, and the session has the tokens of all of them.
        self._points: list[Point] = []

    @property
    def turns(self) -> int:
        """Number of questions that were answered."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def position(self) -> int:
        """Number of tokens that the session has."""
        return 0 if self._session is None else self._session.position

    @property
    def max_seq_len(self) -> int:
        """The most tokens that it may have."""
        return self._engine.max_seq_len

    def ask(self, text: str) -> Stream[str]:
        """Return the answer as it is generated; pieces may be empty. The turn counts when it has a token of the answer.

        An answer that is closed before its end stays in the conversation as far as it came.

        Raises:
            InputError: an empty question, or the conversation leaves no room in max_seq_len.
            CapacityError: when a piece is taken, there are too few pages, or no session is free.
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
        """Return another conversation that goes on from here. This one's session leaves the device until its next turn."""
        other = Conversation(
            self._engine,
            chat_template_kwargs=self._template_kwargs,
            max_new_tokens=self._max_new_tokens,
            sampling_params=self._params,
            messages=self.messages,
        )
        self._bring_back()
        snapshot = self._snapshot() if self.position else None
        other._points, self._points = self._points, []
        self.put_aside()
        if snapshot is not None:
            try:
                other._session = self._engine.open_session()
                other._session.restore(snapshot)
            except CapacityError:
                other.close()
            snapshot.close()
        else:
            other._forget_points()
        return other

    def put_aside(self) -> None:
        """Have the session leave the device, for the sake of others. The next turn brings it back."""
        self._forget_points()
        if self._session is None or self._session.is_offloaded:
            return
        try:
            self._session.offload()
        except OstinatoError:
            self.close()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the messages to a file, as JSON, and the session beside it, with `.session` behind the name.

        Raises:
            SessionFileError: a file cannot be written.
        """
        path = Path(path)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if path.name else path
        try:
            beside.write_text(json.dumps({"messages": self.messages}, indent=1), encoding="utf-8")
            try:
                if self._session is None:
                    _state_path(path).unlink(missing_ok=True)
                else:
                    self._session.save(_state_path(path))
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
        try:
            self._session = self._engine.load_session(_state_path(path))
        except OstinatoError as error:
            return error
        return None

    def close(self) -> None:
        """Give the session back. The messages stay, and the next turn opens another one."""
        self._forget_points()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _last_question(self) -> int:
        """Number of the message. Raises InputError: there is none."""
        for number in reversed(range(len(self.messages))):
            if self.messages[number]["role"] == "user":
                return number
        raise InputError("there is no turn yet")

    def _answer(self, asked: list[Message]) -> Stream[str]:
        begin = time.perf_counter()
        tokenizer, limit = self._engine.tokenizer, self._engine.max_seq_len
        prompt = encode_prompt(tokenizer, asked, chat_template_kwargs=self._template_kwargs)
        tokens = prompt.tokens
        if len(tokens) >= limit:
            raise InputError(
                f"the conversation has {len(tokens)} tokens with this question, which leaves no room for an answer: "
                f"max_seq_len is {limit}. Take turns back, or begin anew"
            )
        result = Result(prompt_tokens=len(tokens))
        return Stream(
            self._pieces(asked, tokens, prompt.shared[-1] if prompt.shared else len(tokens), result, begin), result
        )

    def _pieces(
        self, asked: list[Message], tokens: list[int], stable: int, result: Result, begin: float
    ) -> Generator[str, None, None]:
        text = TextStream(self._engine.tokenizer)
        ends = self._params.ends(self._engine.eos_ids)
        limit, reason = min((self._max_new_tokens, "length"), (self._engine.max_seq_len - len(tokens), "max_seq_len"))
        try:
            session = self._rewind(tokens)
            result.reused_tokens = session.position
            for _ in self._prefill(session, tokens, stable):
                # The caller's own work does not count.
                result.prefill_seconds += time.perf_counter() - begin
                yield ""
                begin = time.perf_counter()
            for count in range(1, limit + 1):
                try:
                    (token,) = self._with_room(partial(self._engine.step, [session], more=count < limit))
                except CapacityError:
                    if not result.tokens:
                        raise
                    reason = "kv_tokens"
                    break
                seconds = time.perf_counter() - begin
                if result.tokens:
                    result.decode_seconds += seconds
                else:
                    result.prefill_seconds += seconds
                result.tokens.append(token)
                if token in ends:
                    reason = "stop"
                    break
                piece = text.push(token)
                result.text += piece
                yield piece
                begin = time.perf_counter()
            rest = text.flush()
            result.text += rest
            result.finish_reason = reason
            yield rest
        except OstinatoError as error:
            result.finish_reason, result.error = "error", str(error)
            if not isinstance(error, (CapacityError, InputError)):
                # The state may be partly updated.
                self.close()
            raise
        finally:
            result.text += text.flush()
            result.methods = self._engine.model.method_stats
            if result.tokens:
                self.messages = [*asked, {"role": "assistant", "content": result.text}]

    def _rewind(self, tokens: list[int]) -> Session:
        """Return the session with as many of the tokens, from the first on, as it can go back to."""
        self._bring_back()
        if self._session is not None:
            common = common_length(tokens, self._session.tokens)
            if common < self._session.position:
                while self._points and self._points[-1].position > common:
                    self._points.pop().snapshot.close()
                if self._points:
                    self._session.restore(self._points[-1].snapshot)
                else:
                    self.close()
        if self._session is None:
            self._session = self._engine.open_session()
        self._session.sampling_params = self._params
        return self._session

    def _bring_back(self) -> None:
        """Have the session on the device, if there is one. Where it finds no room there, it is computed again."""
        if self._session is not None and self._session.is_offloaded:
            try:
                self._session.onload()
            except OstinatoError:
                self.close()

    def _prefill(self, session: Session, tokens: list[int], stable: int) -> Iterator[None]:
        """Prefill the tokens that the session does not have, part by part, and keep points before and after the question."""
        self._keep_point(session)
        for end in (stable, len(tokens)):
            while session.position < end:
                part = tokens[session.position : min(session.position + PREFILL_PART, end)]
                self._with_room(partial(session.prefill, part))
                yield
            if session.position == stable:
                self._keep_point(session)

    def _keep_point(self, session: Session) -> None:
        position = session.position
        if position and (not self._points or self._points[-1].position < position):
            snapshot = self._snapshot()
            if snapshot is not None:
                self._points.append(Point(position, snapshot))

    def _snapshot(self) -> Snapshot | None:
        """A snapshot of the session, in the place of the oldest point if there is no other; None: there is no room."""
        assert self._session is not None
        if self._points and len(self._points) >= self._engine.program.capacity.snapshots:
            self._points.pop(0).snapshot.close()
        try:
            return self._with_room(self._session.snapshot)
        except CapacityError:
            return None

    def _with_room(self, operation: Callable[[], Returned]) -> Returned:
        """Run the operation; while there is no room for it, give up points, which hold pages: the oldest first."""
        while True:
            try:
                return operation()
            except CapacityError:
                if not self._points:
                    raise
                self._points.pop(0).snapshot.close()

    def _forget_points(self) -> None:
        while self._points:
            self._points.pop().snapshot.close()


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
