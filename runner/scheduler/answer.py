"""An answer to a request: its session, and what it still needs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs
from ostinato.runner.model.steps import TokenBitmask, asked_bitmask
from ostinato.runner.sessions.offloaded import OnHost
from ostinato.runner.sessions.prefix import Hit, Known
from ostinato.runner.sessions.prefix_tree import Node
from ostinato.runner.sessions.session import Session

from .kept_sessions import KeptSession
from .messages import Output, Request


@dataclass(eq=False, slots=True)
class Answer:
    """One of a request's answers.

    Attributes:
        request, index: the request, and the number of this answer to it.
        order: number of the request among all; the youngest has the largest.
        tokens: all tokens that the session gets before it steps: a kept session's history, the prompt, and outputs that there
            were when the answer was put back.
        prompt_end: number of tokens before the first output.
        ends: tokens that end the answer.
        left: number of tokens that it may still have.
        limit: why it ends when there are none left.
        params: how to sample.
        bitmask: which tokens may follow, see `Session.token_bitmask`.
        session: its session; None while it waits, unless its state is on the host.
        fed: number of `tokens` that the session has.
        source: the kept session that it goes on from, until it has a session.
        kept: the kept session that its own becomes when it ends.
        further: number of the request's further answers, which are made when the prompt is complete.
        prompt_logprobs: of the tokens that the session has so far; None if they were not asked for.
        stops: numbers of tokens, ascending, after which the prefix cache keeps the state of the session.
        reused: number of tokens that the session had from the prefix cache.
        awaited: the answer whose prompt has the same beginning, and the number of tokens after which this one goes on from
            it; None: it waits for no other one.
        hit: what the prefix cache was found to have of its tokens.
        node: its prompt's node in the prefix cache, from when it begins until it ends.
        added, begun: when it came, and when it was first given a session, by `time.perf_counter`.
        told: whether an output has said what is known from the begin.
        put_back: how often it lost its place on the device.
        error: what its bitmask raised.
        reading: when the state that it goes on from is read from its file; None: it is not.
        looked: how many of its tokens the prefix cache had when that file was looked for last; None: it was not.
    """

    request: Request
    index: int
    order: int
    tokens: list[int]
    prompt_end: int
    ends: frozenset[int]
    left: int
    limit: str
    params: SamplingParams
    bitmask: TokenBitmask | None = None
    session: Session | None = None
    fed: int = 0
    source: KeptSession | None = None
    kept: KeptSession | None = None
    further: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stops: list[int] = field(default_factory=list)
    reused: int = 0
    awaited: tuple[Answer, int] | None = None
    hit: Hit | None = None
    node: Node[Known] | None = None
    added: float = field(default_factory=perf_counter)
    begun: float | None = None
    told: bool = False
    put_back: int = 0
    error: Exception | None = None
    reading: Future[OnHost | None] | None = None
    looked: int | None = None

    @property
    def rest(self) -> int:
        """Number of tokens that the session must get before it steps."""
        return len(self.tokens) - self.fed

    @property
    def part(self) -> int:
        """Number of tokens that it may get in one step."""
        return (self.stops[0] if self.stops else len(self.tokens)) - self.fed

    @property
    def scores_prompt(self) -> bool:
        """Whether the next tokens of the prompt need log-probabilities of their own."""
        return self.prompt_logprobs is not None and self.fed < self.prompt_end

    @property
    def needs_logits(self) -> bool:
        """Whether it needs the logits after its session's last token, which a step that has gone ahead does not leave."""
        return self.prompt_logprobs is not None or not self.request.tokens

    @property
    def has_outputs(self) -> bool:
        """Whether it has had a token."""
        position = self.session.position if self.session is not None else 0
        return max(len(self.tokens), position) > self.prompt_end

    def tell(self, output: Output) -> None:
        """Have the first output say what is known from the begin."""
        self.told = True
        output.reused_tokens = self.reused
        if self.begun is not None:
            output.queue_seconds = self.begun - self.added
        if self.prompt_logprobs is not None:
            # Without those of a history that was computed again.
            output.prompt_logprobs = self.prompt_logprobs[len(self.prompt_logprobs) - len(self.request.tokens) :]
            self.prompt_logprobs = None

    def leave_device(self, offload: bool) -> None:
        """Have its state leave the device: to the host's memory, if it `offload`s and there is some; else it is computed
        again from its tokens."""
        session = self.session
        assert session is not None
        self.put_back += 1
        if self.fed == len(self.tokens):
            self.tokens = list(session.tokens)
            self.fed = len(self.tokens)
        if offload:
            with suppress(Exception):
                session.offload()
        if not session.is_offloaded:
            session.close()
            self.session, self.fed = None, 0
            if self.prompt_logprobs:
                self.prompt_logprobs = []

    def allowed(self, vocab: int) -> TokenBitmask:
        """Return a function that gives what the bitmask does. Where that raises, this answer alone must end: the error is
        kept, and any token may follow."""
        bitmask = self.bitmask
        assert bitmask is not None

        def allowed(history: Sequence[int]) -> torch.Tensor | None:
            try:
                return asked_bitmask(bitmask, history, vocab)
            except Exception as error:
                self.error = error
                return None

        return allowed

    def others(self) -> list[Answer]:
        """The request's further answers, which go on from a fork of this one's session."""
        return [
            replace(
                self,
                index=index,
                params=seeded(self.request.sampling_params, index),
                session=None,
                kept=None,
                stops=[],
                hit=None,
                node=None,
                reused=self.prompt_end,
                further=0,
            )
            for index in range(1, self.further + 1)
        ]


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer number `index`: it has a seed of its own if the request has one."""
    if params.seed is None or not index:
        return params
    return replace(params, seed=(params.seed + index) % 2**64)
