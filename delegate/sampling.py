"""Sampling of the next token from logits: the parameters and their meaning, in plain PyTorch.

This is the one definition that export and runner share. An export compiles `sample` into programs that sample on the device
(their kernels for GPUs are tested against it). The runner calls `sample` for programs that return logits. So the same seed,
position and logits give the same token on either side.

A token is sampled by the Gumbel-max trick: the largest of `logits / temperature + noise`, where the noise of a token comes
from a generator without state, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import OptionError

# A lower temperature samples the most likely token, like 0: divided by it, large logits would be infinite, and so all equal.
MIN_TEMPERATURE = 1e-30
# More than any vocabulary has, and no more than the tensor's dtype holds.
MAX_TOP_K = 2**31 - 1
_FLOAT32 = torch.finfo(torch.float32)
# Multipliers and key increments of Philox 4x32.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def _option(default: Any, metavar: str, text: str) -> Any:
    """A field of `SamplingParams` and, with the same name, an option of the command line."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. Every field is also an option of `ostinato run`.

    Attributes:
        temperature: divisor of the logits; 0, or less than MIN_TEMPERATURE, takes the most likely token.
        top_k: number of most likely tokens to keep; tokens as likely as the last of them stay too. 0 keeps all.
        top_p: share of the probability to keep. Among the tokens that top_k keeps, the smallest set of most likely tokens
            that reaches this share of their probability stays, and tokens as likely as the last of them. 1 keeps all.
        seed: start of the noise: the same seed samples the same tokens from the same logits. None: a new seed each time.
        min_p: smallest probability to keep, as a share of the most likely token's, at this temperature. It applies to the
            tokens that top_k and top_p keep. 0 keeps all.

    Raises:
        OptionError: a value out of range.
    """

    temperature: float = _option(0.0, "T", "0 (default): most likely token")
    top_k: int = _option(0, "K", "keep the K most likely tokens; 0 (default): all")
    top_p: float = _option(1.0, "P", "keep the most likely tokens that have this share together; 1 (default): all")
    seed: int | None = _option(None, "N", "sample the same tokens again")
    min_p: float = _option(0.0, "P", "keep tokens at least P times as likely as the most likely one; 0 (default): all")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), Real if isinstance(item.default, float) else Integral
            if not isinstance(value, kind) and not (value is None and item.default is None):
                what = "a number" if kind is Real else "a whole number"
                raise OptionError(f"{item.name} must be {what}, got {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"temperature must be a number of 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be more than 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise OptionError(f"seed must be 0 to 2**64 - 1, got {self.seed}")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must be 0 (off) to 1, got {self.min_p}")

    def tensors(self) -> SamplingTensors:
        """Return the parameters as inputs of a program, on the host. Without a seed, a random one is taken.

        Values that the tensors cannot hold become the nearest ones that mean the same.
        """
        seed = secrets.randbits(63) if self.seed is None else self.seed
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["temperature"] = 0.0 if self.temperature < MIN_TEMPERATURE else min(self.temperature, _FLOAT32.max)
        values["top_k"] = min(self.top_k, MAX_TOP_K)
        # A share of 0 would keep no token.
        values["top_p"] = max(self.top_p, _FLOAT32.tiny)
        # The same 64 bits as a signed number.
        values["seed"] = seed - (1 << 64) if seed >= 1 << 63 else seed
        # The dtype follows the field's default, not the value: `SamplingParams(temperature=1)` gives float32.
        dtypes = {item.name: torch.float32 if isinstance(item.default, float) else torch.int64 for item in fields(self)}
        return SamplingTensors(**{name: torch.tensor([value], dtype=dtypes[name]) for name, value in values.items()})


class SamplingTensors(NamedTuple):
    """The fields of `SamplingParams` as inputs of a program, [1] each: floats in float32, integers in int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    min_p: Tensor


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
    x = _finite(logits)
    kept = x >= _lowest_kept(x, params)
    scores = x / params.temperature + gumbel_noise(params.seed, position, x.shape[0])
    sampled = scores.masked_fill(~kept, -torch.inf).argmax(0)
    return torch.where(params.temperature > 0, sampled, x.argmax(0))


def most_likely(logits: Tensor) -> Tensor:
    """Return the token that `sample` gives at temperature 0, with less work: [V] float32 -> [] int64."""
    return _finite(logits).argmax(0)


def _finite(logits: Tensor) -> Tensor:
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
