"""Prompts on their way to the engine, and its outputs as text on their way back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.delegate.errors import ArtifactError, InputError, OptionError
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs
from ostinato.runner.answer_reader import AnswerReader
from ostinato.runner.async_engine import AsyncEngine
from ostinato.runner.chat_history import ChatHistory
from ostinato.runner.prompt_lines import with_options
from ostinato.runner.scheduler.messages import Output, Request
from ostinato.runner.stream import Result
from ostinato.runner.text.prompts import ContextLengthError, Prompt, encode_prompt
from ostinato.runner.text.reasoning import Divided, ReasoningSplitter
from ostinato.runner.text.stop_strings import checked_stop
from ostinato.runner.text.tokenizer import Message, Tokenizer
from ostinato.runner.text_request import TextRequest

from .metrics import Metrics
from .protocol import MAX_CHOICES, ChatBody, ChatMessage, CompletionBody, GenerationBody
from .sessions import Turn

# OpenAI's default for completions.
_COMPLETION_TOKENS = 16
_CONFIGURED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Threads that render and encode: tokenizers let others run meanwhile. Texts of some characters have others, so that short
# ones do not wait for them: a million characters take up to a second.
_THREADS, _LONG_THREADS, _LONG_CHARACTERS = 4, 2, 1 << 17
# Up to so many characters or token ids there is no thread, whose two hand-overs take 0.3 ms: they are encoded in 0.5 ms.
_SHORT_CHARACTERS = 1 << 11


@dataclass
class Piece:
    """Text and tokens that outputs which came together give one choice.

    Attributes:
        text, reasoning: new text.
        tokens, logprobs: new tokens, the one that ended the answer included, and records of them if they were asked for.
        ended: whether the choice is complete.
    """

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False


class Choice:
    """One answer of a request.

    Attributes:
        index: its number among the request's choices.
        request, number: the engine's request, and which of its answers this is.
        prompt: the prompt's text; "" where nobody needs it.
        result: the answer so far.
        reasoning, content: the two parts of its text.
        last: when its last tokens came; None: none have.
    """

    def __init__(
        self, index: int, request: Request, number: int, prompt: str, reader: AnswerReader, splits: bool, takes: bool
    ) -> None:
        self.index, self.request, self.number, self.prompt = index, request, number, prompt
        self.reasoning = self.content = ""
        self.last: float | None = None
        self._reader = reader
        self._splitter = ReasoningSplitter(prompt) if splits else None
        # Whether its tokens count: those of a request for none do not.
        self._takes = takes

    @property
    def result(self) -> Result:
        return self._reader.result

    @property
    def ended(self) -> bool:
        return self._reader.ended

    @property
    def output_tokens(self) -> int:
        return len(self.result.tokens) if self._takes else 0

    def read(self, outputs: Sequence[Output]) -> Piece:
        """Add outputs, and return what they give. Raises OstinatoError: the error that the answer has ended with."""
        reader, piece = self._reader, Piece()
        text = ""
        for output in outputs:
            if reader.ended:
                break
            text += reader.read(output)
            piece.tokens += output.tokens
            piece.logprobs += output.logprobs
        piece.ended = reader.ended
        if not self._takes:
            return Piece(ended=piece.ended)
        divided = self._divided(text)
        piece.reasoning, piece.text = divided
        self.reasoning += divided.reasoning
        self.content += divided.content
        return piece

    def _divided(self, text: str) -> Divided:
        if self._splitter is None:
            return Divided(content=text)
        found = self._splitter.push(text) if text else Divided()
        if not self.ended:
            return found
        rest = self._splitter.flush()
        return Divided(found.reasoning + rest.reasoning, found.content + rest.content)


class Generation:
    """The choices of one request, whose times are counted in the server's metrics.

    Attributes:
        id: name of the request, for the client.
        turn: the session that its one choice goes on with, and what it is asked; None: no session.
        created: when it came, in seconds since 1970.
        choices: `n` for each prompt, one prompt after the other.
        begun: when it was sent to the engine, by `time.perf_counter`.
    """

    def __init__(
        self, engine: AsyncEngine, metrics: Metrics, name: str, requests: Sequence[Request], choices: Sequence[Choice]
    ) -> None:
        self.id, self.created, self.choices = name, int(time.time()), choices
        self.begun = time.perf_counter()
        self.turn: tuple[Turn, list[Message], Prompt] | None = None
        self._engine, self._metrics, self._requests = engine, metrics, requests
        self._by_place = {(choice.request.id, choice.number): choice for choice in choices}
        self._left = len(choices)
        # What is known of a prompt is known of its first choice.
        self._firsts = [choice for choice in choices if choice.number == 0]

    def go_on(self, turn: Turn, asked: list[Message], prompt: Prompt) -> None:
        """Have the one choice be a turn of a session, see `turn`."""
        self.turn = turn, asked, prompt
        (request,) = self._requests
        request.state_file = str(turn.state_file)

    async def pieces(self) -> AsyncGenerator[list[tuple[Choice, Piece]], None]:
        """Yield what is new, all that is ready together. If it is closed before the end, the engine drops the rest.

        Raises:
            OstinatoError: what an answer has ended with.
        """
        for request in self._requests:
            self._metrics.begin(len(request.tokens))
        try:
            async with aclosing(self._engine.arrivals(self._requests)) as arrivals:
                async for outputs in arrivals:
                    ready = self._read(outputs)
                    if not self._left and self.turn is not None:
                        # Before the client knows that the answer is complete: it may go on at once.
                        await self._complete(*self.turn)
                    if ready:
                        yield ready
                    if not self._left:
                        return
        finally:
            if self.turn is not None:
                self.turn[0].release()

    def _read(self, outputs: Sequence[Output]) -> list[tuple[Choice, Piece]]:
        """Read outputs. Returns the new pieces of choices that had not ended."""
        now = time.perf_counter()
        mine: dict[Choice, list[Output]] = {}
        for output in outputs:
            mine.setdefault(self._by_place[output.id, output.index], []).append(output)
        ready = []
        for choice, some in mine.items():
            if choice.ended:
                continue
            piece = choice.read(some)
            self._count(choice, piece, now)
            if piece.ended:
                self._left -= 1
                if some[-1].finish_reason is None:
                    # A stop string has ended it.
                    self._engine.cancel(choice.request, choice.number)
            ready.append((choice, piece))
        return ready

    async def _complete(self, turn: Turn, asked: list[Message], prompt: Prompt) -> None:
        (choice,) = self.choices
        said: Message = {"role": "assistant", "content": choice.content}
        if choice.reasoning:
            said["reasoning_content"] = choice.reasoning
        await turn.complete(asked, prompt, choice.result, said)
        turn.release()

    def _count(self, choice: Choice, piece: Piece, now: float) -> None:
        metrics, result = self._metrics, choice.result
        if piece.tokens and choice.last is None:
            metrics.first(now - self.begun, result.queue_seconds)
            result.prefill_seconds = now - self.begun
        elif piece.tokens:
            metrics.more(now - (choice.last or now), len(piece.tokens))
        if piece.tokens:
            choice.last = now
        if piece.ended:
            result.decode_seconds = now - self.begun - result.prefill_seconds
            metrics.end(now - self.begun, result.decode_seconds, len(result.tokens), result.finish_reason)

    async def run(self) -> None:
        """Wait until all choices are complete."""
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens so far, as OpenAI's `usage`."""
        prompt = sum(choice.result.prompt_tokens for choice in self._firsts)
        completion = sum(choice.output_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.result.reused_tokens for choice in self._firsts)},
        }


class Answering:
    """Makes generations of requests' bodies.

    Args:
        engine: answers them.
        metrics: counts them.

    Raises:
        ArtifactError: the model's `generation_config.json` has a value that is out of range.
    """

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._pool = ThreadPoolExecutor(_THREADS, "prompts")
        self._long_pool = ThreadPoolExecutor(_LONG_THREADS, "long-prompts")
        self.tokenizer: Tokenizer = engine.tokenizer
        self._defaults = default_params(self.tokenizer.generation_config)
        self._chat_tokens = default_max_tokens(self.tokenizer.generation_config)

    async def chat(self, body: ChatBody, turn: Turn | None = None) -> Generation:
        """`turn`: of a session that the messages follow. Raises InputError, OptionError: the body cannot be done."""
        characters = _characters(body.messages)
        # What the chat template gets besides may be of any size.
        more = turn is not None or body.chat_template_kwargs or any(one.model_extra for one in body.messages)
        if characters <= _SHORT_CHARACTERS and not more:
            return self._chat(body, turn)
        return await self._in_thread(characters, self._chat, body, turn)

    async def completion(self, body: CompletionBody) -> Generation:
        """Raises InputError, OptionError: what the body asks for cannot be done."""
        characters = _characters(_prompts_of(body))
        if characters <= _SHORT_CHARACTERS:
            return self._completion(body)
        return await self._in_thread(characters, self._completion, body)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        with_texts: bool,
    ) -> dict[str, Any]:
        """The token ids of a text, or of a chat, and their texts if these are wanted, by the names that an answer has."""

        def encode() -> dict[str, Any]:
            text = prompt
            if not isinstance(text, str):
                text = self.tokenizer.render(messages_of(text), kwargs, add_generation_prompt)
            tokens = self.tokenizer.encode(text)
            found = {"count": len(tokens), "tokens": tokens}
            if with_texts:
                found["token_strs"] = [self.tokenizer.decode([token]) for token in tokens]
            return found

        return await self._in_thread(_characters([prompt] if isinstance(prompt, str) else prompt), encode)

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return await self._in_thread(len(tokens), self.tokenizer.decode, tokens)

    async def _in_thread(self, characters: int, function: Any, *arguments: Any) -> Any:
        """Call a function in a thread, one of those for texts of so many characters."""
        pool = self._pool if characters < _LONG_CHARACTERS else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def _chat(self, body: ChatBody, turn: Turn | None) -> Generation:
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                kwargs.setdefault("enable_thinking", False)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.max_tokens is not None and limit != body.max_tokens:
            raise OptionError("max_tokens and max_completion_tokens mean the same: give one of them")
        if limit == 0:
            raise OptionError("max_tokens must be 1 or more, got 0")
        if turn is not None and body.n > 1:
            raise OptionError(f"one answer goes on with a session, got n {body.n}")
        asked = self._asked(body, limit or self._chat_tokens or self._engine.limits.max_seq_len, logprobs)
        history = turn.session.history if turn is not None else ChatHistory()
        messages = [*history.messages, *messages_of(body.messages)]
        prompt = history.prompt(self.tokenizer, messages, kwargs, self._engine.limits.max_seq_len)
        text = "".join(piece.text for piece in prompt.pieces)
        generation = self._generation("chatcmpl", body, asked, [(prompt, text)])
        if turn is not None:
            generation.go_on(turn, messages, prompt)
        return generation

    def _completion(self, body: CompletionBody) -> Generation:
        limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            raise OptionError("max_tokens must be 1 or more without echo, got 0")
        asked = self._asked(body, limit, body.logprobs)
        if body.echo and body.logprobs is not None:
            params = asked.sampling_params
            assert params is not None
            asked = replace(asked, sampling_params=replace(params, prompt_logprobs=body.logprobs))
        prompts = _prompts_of(body)
        if len(prompts) * body.n > MAX_CHOICES:
            raise OptionError(f"{len(prompts)} prompts times n {body.n} are more than {MAX_CHOICES} choices")
        return self._generation("cmpl", body, asked, [self._raw(one, body.echo) for one in prompts], takes=limit > 0)

    def _raw(self, given: str | list[int], echo: bool) -> tuple[Prompt, str]:
        """A prompt as it is, and its text if that is given back."""
        if isinstance(given, str):
            prompt = encode_prompt(self.tokenizer, given, raw=True, max_tokens=self._engine.limits.max_seq_len)
            return prompt, given if echo else ""
        if not given:
            raise InputError("the prompt is empty")
        return Prompt([], given, None, True), self.tokenizer.decode(given) if echo else ""

    def _asked(self, body: GenerationBody, limit: int, logprobs: int | None) -> TextRequest:
        """The request in a body, but for its prompts. Raises OptionError: values that do not go together."""
        given = _with_all_tokens({name: getattr(body, name) for name in _OPTIONS})
        if given["seed"] is not None:
            given["seed"] %= 1 << 64
        if given["min_tokens"] is not None and given["min_tokens"] > limit:
            raise OptionError(f"min_tokens {given['min_tokens']} is more than max_tokens {limit}")
        vocab, last = self._engine.limits.vocab, max(given["stop_token_ids"] or (), default=0)
        if last >= vocab:
            raise OptionError(f"stop_token_ids takes tokens of 0 to {vocab - 1}, got {last}")
        # The engine gives one token at least.
        defaults = TextRequest(prompt="", max_new_tokens=max(limit, 1), sampling_params=self._defaults)
        return with_options(defaults, given | {"logprobs": logprobs})

    def _generation(
        self,
        kind: str,
        body: GenerationBody,
        asked: TextRequest,
        prompts: Sequence[tuple[Prompt, str]],
        takes: bool = True,
    ) -> Generation:
        """The generation of prompts and their texts. Raises InputError: a prompt leaves no room for an answer."""
        requests: list[Request] = []
        choices: list[Choice] = []
        most = self._engine.limits.max_seq_len
        splits = kind == "chatcmpl" and self.tokenizer.may_reason
        for prompt, text in prompts:
            if len(prompt.tokens) >= most:
                raise ContextLengthError(f"{len(prompt.tokens):,}", most)
            request = replace(asked, prompt=prompt).for_scheduler(self._engine.new_id(), self.tokenizer)
            requests.append(request)
            for number in range(body.n):
                reader = AnswerReader(len(request.tokens), self.tokenizer, checked_stop(asked.stop))
                choices.append(Choice(len(choices), request, number, text, reader, splits, takes))
        return Generation(self._engine, self._metrics, f"{kind}-{secrets.token_hex(12)}", requests, choices)


_OPTIONS = (
    *("n", "stop", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)


def messages_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages as the chat template takes them."""
    found: list[Message] = []
    for message in messages:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        # As they are: `model_dump` would copy all that is in them, and hold Python's lock for as long.
        more = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
        found.append({"role": message.role, "content": content, **more})
    return found


def _characters(texts: Sequence[str | list[int] | ChatMessage]) -> int:
    """Number of characters of prompts, or of messages; and of token ids."""
    found = 0
    for text in texts:
        content = text.content if isinstance(text, ChatMessage) else text
        if isinstance(content, str) or (content and isinstance(content[0], int)):
            found += len(content)
        else:
            found += sum(len(part.text) for part in content if not isinstance(part, int))
    return found


def default_params(config: Mapping[str, Any]) -> SamplingParams:
    """Parameters of requests that do not say them: those of the model's `generation_config.json`, else OpenAI's.

    Raises:
        ArtifactError: a value that is out of range.
    """
    given = _with_all_tokens({name: config[name] for name in _CONFIGURED if config.get(name) is not None})
    try:
        return replace(SamplingParams(temperature=1.0), **given)
    except OptionError as error:
        raise ArtifactError(f"generation_config.json: {error}") from error


def default_max_tokens(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a chat's answer if the request does not say: `max_new_tokens` of `generation_config.json`. None: as
    many as there is room for. Raises ArtifactError: no number of tokens."""
    value: int | None = config.get("max_new_tokens")
    if value is not None and (type(value) is not int or value < 1):
        raise ArtifactError(
            f"generation_config.json: max_new_tokens must be a whole number of 1 or more, got {value!r}"
        )
    return value


def _with_all_tokens(given: dict[str, Any]) -> dict[str, Any]:
    """The options with 0 in the place of a top_k of -1, which means all tokens, too."""
    return given | {"top_k": 0} if given.get("top_k") == -1 else given


def _prompts_of(body: CompletionBody) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InputError("the prompt is empty")
    return [prompt] if isinstance(prompt[0], int) else prompt  # type: ignore[list-item, return-value]
