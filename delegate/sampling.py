"""Sampling of the next token from logits: the meaning of `SamplingParams`, in plain PyTorch.

This is the one definition that export and runner share. An export compiles `sample` into programs that sample on the device
(their kernels for GPUs are tested against it). The runner calls `sample` for programs that return logits. So the same seed,
position and logits give the same token on either side.

A token is sampled by the Gumbel-max trick: the largest of `logits / temperature + noise`, where the noise of a token comes
from a generator without state, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling_params import SamplingTensors

# Multipliers and key increments of Philox 4x32.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def sample(logits: Tensor, position: Tensor, params: SamplingTensors) -> Tensor:
    """Sample the token at `position`.

    A NaN logit counts as the lowest float32, an infinite one as the lowest or the highest. Of equal ones the first is taken.

    Args:
        logits: [V] float32.
        position: [1] int64, the position of the token to sample, from 0.
        params: parameters, on the device of the logits.

    Returns:
        Token id, [1] int64.
    """
    x = finite(logits)
    kept = x >= _lowest_kept(x, params)
    scores = x / params.temperature + gumbel_noise(params.seed, position, x.shape[0])
    sampled = scores.masked_fill(~kept, -torch.inf).argmax(0)
    return torch.where(params.temperature > 0, sampled, x.argmax(0))


def most_likely(logits: Tensor) -> Tensor:
    """Return the token that `sample` gives at temperature 0, with less work: [V] float32 -> [] int64."""
    return finite(logits).argmax(0)


def finite(logits: Tensor) -> Tensor:
    """Return logits with NaN as the lowest float32, and infinite ones as the lowest or the highest."""
    return logits.nan_to_num(nan=torch.finfo(torch.float32).min)


def _lowest_kept(x: Tensor, params: SamplingTensors) -> Tensor:
    """Lowest logit that is kept, [1]; x is finite."""
    vocab = x.shape[0]
    ordered = x.sort(descending=True).values
    rank = torch.where(params.top_k > 0, params.top_k, vocab).clamp(max=vocab) - 1
    first_k = ordered >= ordered.gather(0, rank)
    mass = ((ordered - ordered[0]) / params.temperature).exp().masked_fill(~first_k, 0).double()
    ahead = mass.cumsum(0) - mass
    # The token that crosses top_p is kept, so at least one token is kept.
    kept = first_k & ((ahead < params.top_p.double() * mass.sum()) | (params.top_p >= 1))
    least = ordered[0] + params.temperature * params.min_p.log()
    return ordered.masked_fill(~kept, torch.inf).amin(0, keepdim=True).maximum(least)


def gumbel_noise(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Gumbel noise for tokens 0 to count - 1 at `position`: [count] float32, finite.

    Token i has word i % 4 of the four words that Philox gives for the counter (i // 4, position) and the key `seed`.
    """
    quads = torch.arange((count + 3) // 4, device=seed.device)
    counter = (quads, torch.zeros_like(quads), position & WORD, position >> 32 & WORD)
    words = torch.stack(philox(counter, (seed & WORD, seed >> 32 & WORD)), 1).flatten()[:count]
    # The middle of the word's interval, so neither 0 nor 1.
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform)).log().float()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four words from a counter of four words and a key of two. All are int64, 0 to 2^32 - 1, broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(MULTIPLIERS[0], c0), _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + INCREMENTS[0] & WORD, k1 + INCREMENTS[1] & WORD
    return c0, c1, c2, c3


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product, computed in two steps: the whole product does not fit int64."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
