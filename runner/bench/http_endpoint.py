"""A server with OpenAI's interface, as what answers the requests of a load test. Needs aiohttp, an optional extra.

Prompts are token ids, for `POST /v1/completions`. Beyond OpenAI's interface, all names are vLLM's: `ignore_eos`, so that an
answer has its length; `continuous_usage_stats`, the number of tokens so far in each event; `return_token_ids`. A server does
without those that it does not know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from ostinato.delegate.errors import OptionError, OstinatoError, first_line

from .load_bench import Arrival, EndpointError

_CONNECT_SECONDS = 30
# Characters of an error's body that is not JSON.
_MOST_CHARACTERS = 300


class ServerError(OstinatoError, RuntimeError):
    """A server has answered a request with an error, or not to the end."""


# The fields that are needed of what a server sends; msgspec skips all others.


class _LlamaMeta(msgspec.Struct):
    n_vocab: int | None = None
    n_ctx: int | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    # llama.cpp has its numbers here.
    meta: _LlamaMeta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_models = msgspec.json.Decoder(_Models).decode
_decode_event = msgspec.json.Decoder(_Event).decode


class HttpEndpoint:
    """`Endpoint` that is a server's model. An async context manager: its connections are open within it.

    Args:
        url: begin of the server's addresses, before /v1.
        model: name of the model. None: the first one that the server has.
        api_key: what the server wants as a bearer token. None: nothing.
        sampling: fields of all requests' `SamplingParams`.
        wants_token_ids: whether arrivals must have their tokens' ids.

    Attributes:
        model: name of the model.
        vocab_size, max_model_len: number of its token ids, and the most tokens of prompt and answer. None if the server does
            not say.

    Raises:
        EndpointError: on entering, the server cannot be reached, or does not list its models.
        OptionError: on entering, it does not have the model.
    """

    vocab_size: int | None
    max_model_len: int | None

    def __init__(
        self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any], wants_token_ids: bool
    ) -> None:
        self._url, self._wanted_model, self._wants_token_ids = url, model, wants_token_ids
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._body = {
            "temperature": 0,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            **({"return_token_ids": True} if wants_token_ids else {}),
        }

    async def __aenter__(self) -> HttpEndpoint:
        self._session = aiohttp.ClientSession(
            # A connection for each request: llama.cpp's server closes one after an answer without having said so, others
            # close an idle one after some seconds, and the request that is sent just then would be lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
        )
        try:
            self._take(await self._models())
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def _models(self) -> list[_Model]:
        where = f"{self._url}/v1/models"
        try:
            async with self._session.get(where) as response:
                body = await response.read()
            if response.status != 200:
                raise EndpointError(f"{where}: status {response.status}: {_message(body)}")
            models = _decode_models(body).data
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EndpointError(f"{where} cannot be read: {first_line(error)}") from error
        except msgspec.MsgspecError as error:
            raise EndpointError(f"{where} is no list of models: {error}") from error
        if not models:
            raise EndpointError(f"{where} lists no model")
        return models

    def _take(self, models: Sequence[_Model]) -> None:
        found = next((one for one in models if self._wanted_model in (None, one.id)), None)
        if found is None:
            names = ", ".join(one.id for one in models)
            raise OptionError(f"{self._url} does not have the model {self._wanted_model!r}, but {names}")
        meta = found.meta or _LlamaMeta()
        self.model = found.id
        self.vocab_size = found.vocab_size or meta.n_vocab
        self.max_model_len = found.max_model_len or meta.n_ctx

    async def send(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Arrival]:
        body = msgspec.json.encode({"model": self.model, "prompt": prompt, "max_tokens": max_tokens, **self._body})
        answer = _Answer()
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise ServerError(f"status {response.status}: {_message(await response.read())}")
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                            yield answer.take(_decode_event(data))
        except aiohttp.ClientConnectorError as error:
            raise EndpointError(f"{self._url} cannot be reached any more: {first_line(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(f"the connection broke: {first_line(error)}") from error
        except msgspec.MsgspecError as error:
            raise ServerError(f"an event of the stream cannot be read: {error}") from error
        if self._wants_token_ids and answer.told < answer.tokens:
            raise EndpointError(
                f"--turns needs the token ids of answers, which {self._url} does not give: it knows no return_token_ids"
            )

    async def counts(self) -> Mapping[str, float | None]:
        return {}


class _Answer:
    """Sum of the events of a stream.

    Attributes:
        tokens: number of tokens so far. By the usage where an event has one, else an event with a choice has one, or its
            token ids. The usage at the end corrects what was counted.
        told: number of token ids so far.
        reused_tokens: number of the prompt's tokens that the server had in a cache.
    """

    def __init__(self) -> None:
        self.tokens = self.told = self.reused_tokens = 0
        self._has_usage = False

    def take(self, event: _Event) -> Arrival:
        if event.error is not None:
            raise ServerError(f"an error in the stream: {_text(event.error)}")
        before, token_ids, shows = self.tokens, [], False
        if event.choices:
            choice = event.choices[0]
            token_ids = choice.token_ids or []
            # The event that ends an answer may bring no token.
            shows = bool(choice.text or token_ids or choice.finish_reason is None)
            self.told += len(token_ids)
            self.tokens += len(token_ids) or shows
            self._has_usage |= event.usage is not None and choice.finish_reason is None
        if event.usage is not None:
            self.tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            if details is not None:
                self.reused_tokens = details.cached_tokens or 0
        # A server that says the number only at the end may say more than it has shown: then nothing comes at that time.
        brings = self.tokens > before and (shows or self._has_usage or before == 0)
        return Arrival(self.tokens, brings, token_ids, self.reused_tokens)


def _message(body: bytes) -> str:
    """The message in the body of an error."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:_MOST_CHARACTERS].decode(errors="replace").strip() or "no message"
    return _text(found.get("error", found) if isinstance(found, dict) else found)


def _text(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
