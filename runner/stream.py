"""`Stream` and `AsyncStream`: an answer as it comes, and its `Result`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from ostinato.delegate.sampling_params import TokenLogprobs

DEFAULT_MAX_NEW_TOKENS = 256

Piece = TypeVar("Piece")


@dataclass
class Result:
    """An answer, as far as it has come.

    `finish_reason`: "stop" (end-of-sequence token, one of `stop_token_ids`, or a stop string), "length" (`max_new_tokens`),
    "max_seq_len", "kv_tokens" (no more pages), "cancelled", "error" (then `error` says which, and `error_type` is the name of
    its class) or "interrupted". `tokens` ends with the token that ended the answer, and `text` leaves it out. `logprobs` has
    a record for each of `tokens`, and `prompt_logprobs` one for each of the prompt's tokens and None for the first, if the
    parameters asked for them. Prefill times include the sampling of the first token; decode times are of every token after
    it. In an answer of `AsyncEngine` they begin when the request is sent: its time in the queue is in the first of the two.
    `reused_tokens`: how many of the `prompt_tokens` a session or the prefix cache had, so that they were not computed.
    `queue_seconds`: how long it waited for a session.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "interrupted"
    error: str | None = None
    error_type: str | None = None
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    @property
    def prefilled_tokens(self) -> int:
        """How many of the `prompt_tokens` were computed for this answer."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["logprobs"] = [one._asdict() for one in self.logprobs]
        data["prompt_logprobs"] = [one and one._asdict() for one in self.prompt_logprobs]
        data["prefill_tokens_per_second"] = self.prefill_tokens_per_second
        data["decode_tokens_per_second"] = self.decode_tokens_per_second
        return data


class Stream(Iterator[Piece], Generic[Piece]):
    """The pieces of one answer, each computed when it is taken: texts, or token ids. Made by `Engine`.

    Args:
        pieces: the pieces.
        source: what `pieces` reads, and `close` closes: not every interpreter drops it with a closed generator. None:
            `pieces` reads nothing that is to be closed.

    Attributes:
        result: the answer so far. Its times and counters are complete when the last piece was taken, or at `close`.
    """

    def __init__(
        self,
        pieces: Generator[Piece, None, None],
        result: Result,
        source: Generator[Any, None, None] | Stream[Any] | None = None,
    ) -> None:
        self._pieces = pieces
        self._source = pieces if source is None else source
        self.result = result

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer here, and give its session back. Closing twice is fine."""
        self._source.close()


class AsyncStream(AsyncIterator[str]):
    """The text of one answer, as it comes. Made by `AsyncEngine.stream`.

    Attributes:
        result: the answer so far; complete when the last piece was taken.
    """

    def __init__(self, pieces: AsyncIterator[str], result: Result) -> None:
        self._pieces = pieces
        self.result = result

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """End the answer here. Its session is given back."""
        await self._pieces.aclose()  # type: ignore[attr-defined]
