"""Perplexity of a model over a text, in sliding windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.runner.sessions.sessions import Sessions


@dataclass(frozen=True)
class Perplexity:
    """A measured perplexity.

    Attributes:
        nats: sum of the negative logarithms of the tokens' probabilities.
        tokens: number of tokens that were predicted.
        windows: number of windows.
    """

    nats: float
    tokens: int
    windows: int

    @property
    def value(self) -> float:
        """The exponential of the mean."""
        return math.exp(self.nats / self.tokens)


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over `count` tokens: the first token, the end, and the first token that this window predicts.

    As transformers' documentation has it ("Perplexity of fixed-length models"): a window begins every `stride` tokens, and
    each token is predicted in the first window that has it, but for a window's first token, which nothing stands before.
    """
    done = 0
    for begin in range(0, count, stride):
        end = min(begin + window, count)
        yield begin, end, max(done, begin + 1)
        done = end
        if end == count:
            return


def perplexity(
    sessions: Sessions,
    tokens: Sequence[int],
    window: int,
    stride: int,
    on_tokens: Callable[[int], object] | None = None,
) -> Perplexity:
    """Measure the perplexity of a model over `tokens`, 2 or more.

    Args:
        window: tokens of a window, from 2 to max_seq_len.
        stride: tokens from one window's beginning to the next one's, from 1 to `window`.
        on_tokens: function that gets the number of tokens that were predicted since its last call.
    """
    nats, predicted, count = 0.0, 0, 0
    for begin, end, first in windows(len(tokens), window, stride):
        count += 1
        if first == end:
            continue
        with sessions.open() as session:
            session.prefill(tokens[begin:first])
            records = session.prompt_logprobs(tokens[first:end])
        nats -= math.fsum(one.logprob for one in records if one is not None)
        predicted += len(records)
        if on_tokens is not None:
            on_tokens(len(records))
    return Perplexity(nats, predicted, count)
