"""Messages between a scheduler and its callers, in one process or between two.

Requests and commands go in, outputs and replies come out. Between processes they are MessagePack, encoded by `encode` and
decoded by `decode_to_engine` and `decode_from_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ostinato.delegate import errors
from ostinato.delegate.errors import OptionError, OstinatoError, StepError, first_line
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs


class QueueFullError(OstinatoError, RuntimeError):
    """As many requests wait as may wait. Ask again later."""


class CancelledError(OstinatoError, RuntimeError):
    """The answer was cancelled."""


_ERRORS: dict[str, type[OstinatoError]] = {
    **{kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)},
    **{kind.__name__: kind for kind in (QueueFullError, CancelledError)},
}


class Request(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """A request for answers to one prompt.

    Attributes:
        id: name of the request, unique among those that have not ended.
        tokens: the prompt's token ids. With `session`, they follow its history, and there may be none.
        max_tokens: the most tokens of an answer, the one that ends it included.
        sampling_params: how to sample, and which log-probabilities to give. With a seed, answer i has the seed + i.
        ignore_eos: whether to go on past the model's end-of-sequence tokens.
        n: number of answers.
        session: the kept session to go on from. None: a new one.
        keep: name under which the first answer's session is kept. If it is `session`, that one goes on itself; else it stays
            as it is, and a fork of it goes on.
        shared: numbers of tokens of the prompt, up to which a later prompt is likely to be the same: the prefix cache keeps
            state there. None: nothing is known, and it keeps that of the whole prompt.
        goes_on: whether a later prompt is likely to go on behind the answer.
        state_file: a file in which there may be more of the prompt's state than the prefix cache has. None: there is none.

    Raises:
        OptionError: a value out of range.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    sampling_params: SamplingParams = SamplingParams()
    ignore_eos: bool = False
    n: int = 1
    session: str | None = None
    keep: str | None = None
    shared: list[int] | None = None
    goes_on: bool = True
    state_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{name} must be 1 or more, got {value!r}")


class Cancel(msgspec.Struct, tag=True):
    """End the answers of a request, or one of them. They end with the finish_reason "cancelled"."""

    id: str
    index: int | None = None


class Rewind(msgspec.Struct, tag=True):
    """Take a kept session back to its first `position` tokens."""

    id: str
    session: str
    position: int


class Save(msgspec.Struct, tag=True):
    """Write a kept session to a file."""

    id: str
    session: str
    path: str


class Load(msgspec.Struct, tag=True):
    """Keep the session in a file under a name."""

    id: str
    session: str
    path: str


class Close(msgspec.Struct, tag=True):
    """Close a kept session."""

    id: str
    session: str


class SaveState(msgspec.Struct, tag=True):
    """Write what the prefix cache has of a conversation to a file. See `PrefixCache.stand`."""

    id: str
    path: str
    tokens: list[int]
    lasting: int


class KeepState(msgspec.Struct, tag=True):
    """Write the same when the prefix cache has no more room for it."""

    id: str
    path: str
    tokens: list[int]
    lasting: int


class LeaveState(msgspec.Struct, tag=True):
    """Write nothing to a file any more. The reply comes when nothing is written to it."""

    id: str
    path: str


class LoadState(msgspec.Struct, tag=True):
    """Have the prefix cache keep the state of the session in a file."""

    id: str
    path: str


class Describe(msgspec.Struct, tag=True):
    """Ask for `Engine.describe()`, with the scheduler's `stats`."""

    id: str


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all beginnings of prompts."""

    id: str


class Start(msgspec.Struct, tag=True):
    """Load an artifact: the first message. `options`: as `Engine.load` has. The reply has the
    attributes of `EngineLimits`."""

    id: str
    path: str
    options: dict[str, Any]


class Swap(msgspec.Struct, tag=True):
    """Put another artifact in the place of the loaded one, when all requests have ended. See Start."""

    id: str
    path: str
    options: dict[str, Any]


class Ended(msgspec.Struct, omit_defaults=True):
    """Error of a request or a command: the name of its class, and its message."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Ended:
        known = isinstance(error, OstinatoError)
        return cls(type(error).__name__ if known else StepError.__name__, str(error) if known else first_line(error))

    def error(self) -> OstinatoError:
        """The exception that a caller raises."""
        return _ERRORS.get(self.type, StepError)(self.message)


class Output(msgspec.Struct, tag=True, omit_defaults=True, array_like=True):
    """Tokens that a step has given an answer, and why the answer has ended.

    Attributes:
        id, index: the request, and the number of its answer.
        tokens: new tokens.
        logprobs: of each of them, if they were asked for.
        finish_reason: why the answer has ended; None: it goes on. "stop": its last token ended it. "length": `max_tokens`.
            "max_seq_len" and "kv_tokens": there is no more room. "cancelled". "error".
        error: what went wrong, with "error".
        prompt_logprobs: with the first output of an answer, if they were asked for; None for the history's first token.
        reused_tokens: with the first output of an answer, number of tokens before it that were not computed for it.
        queue_seconds: the same, time from when the request came until the answer had a session.
    """

    id: str
    index: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    error: Ended | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    reused_tokens: int = 0
    queue_seconds: float | None = None


@dataclass
class SchedulerStats:
    """Counts of a scheduler: what it has to do, and what it has done.

    Attributes:
        waiting, prefilling, decoding: answers in each of these states.
        kept_sessions: sessions that are kept.
        steps: calls of `step` that ran the model.
        prompt_tokens, output_tokens: tokens that were run as prompts, and tokens that were sampled and taken.
        reused_tokens: tokens of prompts that the prefix cache had.
        put_back: how often an answer lost its place on the device.
        finished: answers that have ended, for whatever reason.
        refused: requests that found too many others waiting.
    """

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    kept_sessions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: int = 0
    put_back: int = 0
    finished: int = 0
    refused: int = 0


class Reply(msgspec.Struct, tag=True, omit_defaults=True):
    """Result of a command: what it asked for, or an error."""

    id: str
    value: Any = None
    error: Ended | None = None


class Loading(msgspec.Struct, tag=True):
    """Bytes of constants that were loaded, of so many."""

    done: int
    total: int


Command = (
    Rewind | Save | Load | Close | SaveState | KeepState | LeaveState | LoadState | Describe | ResetPrefixCache | Swap
)
ToEngine = Request | Cancel | Start | Command
FromEngine = list[Output] | Reply | Loading

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
