"""A load test: callers that send requests to an engine in a process of its own, or to a server, and what each of them sees.

Lengths are drawn as `vllm bench serve` draws them, and the figures are those that it and SGLang's `bench_serving` print.
Every request counts, from the first one sent to the end of the last. `steady_speed` alone leaves out the begin and the end.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.async_engine import AsyncEngine, EngineProcessError
from ostinato.runner.scheduler.messages import Request

# Requests of a run whose number is not given: so many per caller that is held, but at least so many.
_REQUESTS_PER_CALLER, _LEAST_REQUESTS = 4, 16
# The same for a rate: what comes in so many seconds.
_SECONDS_OF_RATE = 30
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 2, 4


class EndpointError(OstinatoError, RuntimeError):
    """The endpoint of a load test has gone, or does not give what the test needs."""


class Arrival(NamedTuple):
    """A part of an answer, as its caller gets it.

    Attributes:
        tokens: number of the answer's tokens so far.
        brings: whether some of them came with this part.
        token_ids: the ids of those that came with it. Empty if they are not told.
        reused_tokens: number of the prompt's tokens that were not computed, as far as it is known.
    """

    tokens: int
    brings: bool
    token_ids: Sequence[int]
    reused_tokens: int


class Endpoint(Protocol):
    """Engine or server that answers the requests of a load test."""

    def send(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Arrival]:
        """Yield an answer of so many tokens as it comes.

        Raises:
            EndpointError, EngineProcessError: no request can be answered from now on.
            OstinatoError: this request has failed.
        """
        ...

    async def counts(self) -> Mapping[str, float | None]:
        """Return counts since its begin, as `Engine.describe()["scheduler"]` has them. Empty if it has none."""
        ...


class EngineEndpoint:
    """`Endpoint` that is an engine in a process of its own.

    Args:
        engine: it, running.
        sampling: fields of all requests' `SamplingParams`.
    """

    def __init__(self, engine: AsyncEngine, sampling: Mapping[str, Any]) -> None:
        self._engine, self._params = engine, SamplingParams(**sampling)

    async def send(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Arrival]:
        request = Request(
            id=self._engine.new_id(),
            tokens=list(prompt),
            max_tokens=max_tokens,
            sampling_params=self._params,
            ignore_eos=True,
        )
        tokens = reused_tokens = 0
        async with aclosing(self._engine.outputs(request)) as outputs:
            async for output in outputs:
                tokens += len(output.tokens)
                reused_tokens += output.reused_tokens
                yield Arrival(tokens, bool(output.tokens), output.tokens, reused_tokens)
                if output.error is not None:
                    raise output.error.error()

    async def counts(self) -> Mapping[str, float | None]:
        counts: dict[str, float | None] = (await self._engine.describe())["scheduler"]
        return counts


@dataclass(frozen=True)
class Load:
    """How requests come: `concurrency` callers, each of which sends its next request when its last one has ended; or `rate`
    requests per second, at random times (a Poisson process). One of the two is None."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class LoadSpec:
    """Requests of callers, all of random tokens.

    Attributes:
        loads: measured one after the other.
        prompt, answer: mean numbers of tokens of a request and of its answer.
        range_ratio: each of these is drawn uniformly from mean * (1 - range_ratio) to mean * (1 + range_ratio).
        requests: number of requests for each load. None: 4 per caller, but at least 16; or those of 30 seconds.
        duration: seconds after which no conversation begins; without `requests`, any number does until then.
        turns: requests of a conversation. Each has all that was said before at its begin, as a chat's requests have.
        shared_prefix: number of tokens before the prompt of each conversation, the same for all.
        seed: of lengths, tokens and times.
        sampling: fields of all requests' `SamplingParams`.

    Raises:
        OptionError: a number out of range.
    """

    loads: tuple[Load, ...]
    prompt: int
    answer: int
    range_ratio: float = 0.0
    requests: int | None = None
    duration: float | None = None
    turns: int = 1
    shared_prefix: int = 0
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, value, least in (
            ("-p", self.prompt, 1),
            ("-n", self.answer, 1),
            ("--turns", self.turns, 1),
            ("--shared-prefix", self.shared_prefix, 0),
            ("--requests", self.requests, 1),
        ):
            if value is not None and value < least:
                raise OptionError(f"{option} must be {least} or more, got {value}")
        if not 0 <= self.range_ratio < 1:
            raise OptionError(f"--range-ratio must be at least 0 and below 1, got {self.range_ratio:g}")
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise OptionError(f"--duration must be a number of seconds above 0, got {self.duration:g}")
        if not self.loads:
            raise OptionError("--load needs --concurrency or --rate")
        for load in self.loads:
            if load.concurrency is not None and load.concurrency < 1:
                raise OptionError(f"--concurrency takes numbers of callers from 1 on, got {load.concurrency}")
            if load.rate is not None and not 0 < load.rate < math.inf:
                raise OptionError(f"--rate takes requests per second, above 0, got {load.rate:g}")

    @property
    def max_concurrency(self) -> int:
        """The most callers of a load; 0 if all loads are rates."""
        return max(load.concurrency or 0 for load in self.loads)

    @property
    def positions(self) -> int:
        """The most positions that a conversation needs."""
        return self.shared_prefix + self.turns * (self.range_of(self.prompt)[1] + self.range_of(self.answer)[1])

    def range_of(self, mean: int) -> tuple[int, int]:
        """The least and the most tokens that are drawn."""
        low, high = mean * (1 - self.range_ratio), mean * (1 + self.range_ratio)
        return max(1, math.floor(low)), math.ceil(high)

    def conversations(self, load: Load) -> float:
        """Number of conversations of a load; infinite if only the duration ends it."""
        if self.requests is not None:
            return math.ceil(self.requests / self.turns)
        if self.duration is not None:
            return math.inf
        many = _SECONDS_OF_RATE * load.rate if load.rate else _REQUESTS_PER_CALLER * (load.concurrency or 0)
        return math.ceil(max(_LEAST_REQUESTS, many) / self.turns)


@dataclass
class Sample:
    """One request, as its caller saw it. Times in seconds since the first one was sent.

    Attributes:
        caller, turn: who sent it, and which request of its conversation it is, from 0 on.
        prompt_tokens, max_tokens: tokens sent, and tokens asked for.
        sent: when it was sent.
        arrivals: when each output came.
        tokens: number of tokens that came.
        reused_tokens: how many of the prompt's tokens were not computed.
        error: why there are not `max_tokens`; None: there are.
    """

    caller: int
    turn: int
    prompt_tokens: int
    max_tokens: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    reused_tokens: int = 0
    error: str | None = None

    @property
    def end(self) -> float:
        return self.arrivals[-1] if self.arrivals else self.sent

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token."""
        return 1e3 * (self.arrivals[0] - self.sent)

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: milliseconds between one output and the next."""
        return [1e3 * (b - a) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None if there is just one."""
        return 1e3 * (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class LoadMeasurement:
    """Result of one load.

    Attributes:
        load: the load.
        samples: all requests, by the time at which they were sent.
        seconds: from the first request to the end of the last.
        client_share: share of a core that the callers' process took.
        counts: differences of `Endpoint.counts` over the run; None where there is no number.
    """

    load: Load
    samples: tuple[Sample, ...]
    seconds: float
    client_share: float
    counts: Mapping[str, float | None]

    @property
    def done(self) -> list[Sample]:
        """Requests that did not fail."""
        return [sample for sample in self.samples if sample.error is None]

    @property
    def failed(self) -> int:
        return len(self.samples) - len(self.done)

    @property
    def prompt_tokens(self) -> int:
        return sum(sample.prompt_tokens for sample in self.done)

    @property
    def reused_tokens(self) -> int:
        return sum(sample.reused_tokens for sample in self.done)

    @property
    def output_tokens(self) -> int:
        return sum(sample.tokens for sample in self.done)

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def steady_speed(self) -> float | None:
        """Output tokens per second from when every caller has a token until the first caller has nothing more to send. None
        for a rate, or if there is no such time."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for sample in self.done:
            first.setdefault(sample.caller, sample.arrivals[0])
            last[sample.caller] = sample.end
        if len(first) != self.load.concurrency:
            return None
        begin, end = max(first.values()), min(last.values())
        if begin >= end:
            return None
        each = ((sample, sum(begin < time <= end for time in sample.arrivals)) for sample in self.done)
        return sum(count * sample.tokens / len(sample.arrivals) for sample, count in each) / (end - begin)

    @property
    def in_flight(self) -> float:
        """Mean number of requests that were sent and had not ended."""
        return sum(sample.end - sample.sent for sample in self.samples) / self.seconds

    def per_step(self, counted: str) -> float | None:
        """One of `counts`, for each step of the model; None if it is not known."""
        value, steps = self.counts.get(counted), self.counts.get("steps")
        return value / steps if value is not None and steps else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which so many percent lie, linear between two values; None if there are none."""
    return float(np.percentile(values, percent)) if values else None


async def measure_loads(
    endpoint: Endpoint, spec: LoadSpec, vocabulary: int, say: Callable[[LoadMeasurement], None]
) -> list[LoadMeasurement]:
    """Measure all loads with one endpoint, after a warm-up. `say` gets each measurement.

    Raises:
        EndpointError, EngineProcessError: no request can be answered any more.
    """
    drawn = random.Random(spec.seed)
    short = replace(spec, answer=_WARM_UP_TOKENS, range_ratio=0.0, requests=_WARM_UP_REQUESTS, duration=None, turns=1)
    await _measure(endpoint, short, Load(_WARM_UP_REQUESTS), drawn, vocabulary, [])
    prefix = _tokens(drawn, vocabulary, spec.shared_prefix)
    found = []
    for load in spec.loads:
        found.append(await _measure(endpoint, spec, load, drawn, vocabulary, prefix))
        say(found[-1])
    return found


@dataclass(frozen=True)
class _Conversation:
    """Prompts of a conversation's requests, and the numbers of tokens of their answers."""

    prompts: list[list[int]]
    answers: list[int]


async def _measure(
    endpoint: Endpoint, spec: LoadSpec, load: Load, drawn: random.Random, vocabulary: int, prefix: list[int]
) -> LoadMeasurement:
    count = spec.conversations(load)
    # Drawn before the clock starts, where their number is known.
    ready = [_conversation(spec, drawn, vocabulary, prefix) for _ in range(int(count) if count < math.inf else 0)]
    ready.reverse()
    before = await endpoint.counts()
    begin, cpu = time.perf_counter(), time.process_time()
    samples: list[Sample] = []

    def take() -> _Conversation | None:
        if spec.duration is not None and time.perf_counter() - begin >= spec.duration:
            return None
        if count == math.inf:
            return _conversation(spec, drawn, vocabulary, prefix)
        return ready.pop() if ready else None

    async def caller(number: int) -> None:
        while (conversation := take()) is not None:
            await _converse(endpoint, conversation, number, begin, samples)

    if load.rate is None:
        await asyncio.gather(*(caller(number) for number in range(load.concurrency or 0)))
    else:
        going_on: list[asyncio.Task[None]] = []
        due = begin
        while (conversation := take()) is not None:
            # Times are counted from the begin, so that one that is late does not make the others late.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += drawn.expovariate(load.rate)
            going_on.append(asyncio.create_task(_converse(endpoint, conversation, len(going_on), begin, samples)))
        await asyncio.gather(*going_on)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    after = await endpoint.counts()
    counts = {key: None if value is None else value - (before[key] or 0) for key, value in after.items()}
    return LoadMeasurement(load, tuple(samples), seconds, cpu / seconds, counts)


def _conversation(spec: LoadSpec, drawn: random.Random, vocabulary: int, prefix: list[int]) -> _Conversation:
    lengths = [[drawn.randint(*spec.range_of(mean)) for mean in (spec.prompt, spec.answer)] for _ in range(spec.turns)]
    prompts = [_tokens(drawn, vocabulary, prompt) for prompt, _ in lengths]
    return _Conversation([prefix + prompts[0], *prompts[1:]], [answer for _, answer in lengths])


def _tokens(drawn: random.Random, vocabulary: int, count: int) -> list[int]:
    return drawn.choices(range(vocabulary), k=count)


async def _converse(
    endpoint: Endpoint, conversation: _Conversation, caller: int, begin: float, samples: list[Sample]
) -> None:
    """Send the requests of a conversation one after the other, until one fails."""
    told: list[int] = []
    for turn, (prompt, answer) in enumerate(zip(conversation.prompts, conversation.answers, strict=True)):
        told += prompt
        sample = Sample(caller, turn, len(told), answer, time.perf_counter() - begin)
        samples.append(sample)
        told += await _send(endpoint, told, sample, begin)
        if sample.error is not None:
            break


async def _send(endpoint: Endpoint, prompt: Sequence[int], sample: Sample, begin: float) -> list[int]:
    """Send a request, note what comes, and return its tokens, if they are told."""
    token_ids: list[int] = []
    try:
        async for arrival in endpoint.send(prompt, sample.max_tokens):
            if arrival.brings:
                sample.arrivals.append(time.perf_counter() - begin)
                token_ids += arrival.token_ids
            sample.tokens, sample.reused_tokens = arrival.tokens, arrival.reused_tokens
    except (EndpointError, EngineProcessError):
        raise
    except OstinatoError as error:
        sample.error = str(error)
    if sample.error is None and sample.tokens != sample.max_tokens:
        sample.error = f"{sample.tokens} of {sample.max_tokens} tokens came"
    return token_ids
