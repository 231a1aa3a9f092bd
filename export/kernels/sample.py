"""From logits to a token, in plain PyTorch: greedy, temperature, top-k, top-p, and noise that can be drawn again.

A token is drawn by the Gumbel-max trick: the largest of `logits / temperature + noise`, where the noise of a token comes from
a generator without state, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). So the same
seed, place and logits give the same token, whichever way the sequence was produced and on whichever device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A kernel runs as at most PROGRAMS programs, which tell each other CANDIDATES numbers at a time.
PROGRAMS = 128
CANDIDATES = 16
# The counter of those that have arrived has a sector of its own, of 32 bytes.
HEADER = 4

# Multipliers and key increments of Philox 4x32.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def workspace_size() -> int:
    """Elements of the workspace: int64, zeros before its first use."""
    return HEADER + 2 * PROGRAMS * CANDIDATES


def sample(
    logits: Tensor,
    position: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    workspace: Tensor,
) -> Tensor:
    """The token that stands at `position`.

    NaN logits count as the lowest number, infinite ones as the lowest and the highest; of equals the first is taken.

    Args:
        logits: [1, V] float32.
        position: [1] int64, the place of the token to draw, from 0.
        temperature: [1] float32; logits are divided by it, and 0 takes the most likely token.
        top_k: [1] int64; keeps the k most likely tokens and those as likely as the k-th; 0 keeps all.
        top_p: [1] float32, more than 0; keeps the smallest set of the most likely among the tokens that top_k keeps whose
            share of their probability reaches top_p, and those as likely as its last one; 1 keeps all.
        seed: [1] int64, its 64 bits.
        workspace: [workspace_size()] int64, not used here; the kernel leaves in it what its next launch needs.

    Returns:
        [1, 1] int64.
    """
    x = logits[0].nan_to_num(nan=torch.finfo(torch.float32).min)
    kept = x >= _lowest_kept(x, temperature, top_k, top_p)
    scores = x / temperature + gumbel_noise(seed, position, x.shape[0])
    drawn = scores.masked_fill(~kept, -torch.inf).argmax(0)
    return torch.where(temperature > 0, drawn, x.argmax(0)).unsqueeze(0)


def sample_next(
    logits: Tensor,
    position: Tensor,
    token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    workspace: Tensor,
) -> Tensor:
    """`sample` for the place after `position`, then the step to it: `position` grows by one, `token` is the drawn one.

    Args:
        position: [1] int64, mutated: the place of the token that gave the logits.
        token: [1, 1] int64, mutated.

    Returns:
        [1, 1] int64, the drawn token.
    """
    position.add_(1)
    drawn = sample(logits, position, temperature, top_k, top_p, seed, workspace)
    token.copy_(drawn)
    return drawn


def _lowest_kept(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logit from which on tokens are kept, [1]; x is finite."""
    vocab = x.shape[0]
    ordered = x.sort(descending=True).values
    rank = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1
    first_k = ordered >= ordered.gather(0, rank)
    mass = ((ordered - ordered[0]) / temperature).exp().masked_fill(~first_k, 0).double()
    ahead = mass.cumsum(0) - mass
    # The token that crosses the sum stays, so at least one does.
    kept = first_k & ((ahead < top_p.double() * mass.sum()) | (top_p >= 1))
    return ordered.masked_fill(~kept, torch.inf).amin(0, keepdim=True)


def gumbel_noise(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Noise of tokens 0 to count - 1 at `position`: [count] float32, finite.

    Token i has word i % 4 of the four words that Philox gives for the counter (i // 4, position) and the key `seed`.
    """
    quads = torch.arange((count + 3) // 4, device=seed.device)
    counter = (quads, torch.zeros_like(quads), position & WORD, position >> 32 & WORD)
    words = torch.stack(philox(counter, (seed & WORD, seed >> 32 & WORD)), 1).flatten()[:count]
    # The middle of the word's interval, so neither 0 nor 1.
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform)).log().float()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four words, from a counter of four and a key of two; all int64, 0 to 2^32 - 1, broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(MULTIPLIERS[0], c0), _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + INCREMENTS[0] & WORD, k1 + INCREMENTS[1] & WORD
    return c0, c1, c2, c3


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product, in two steps: in one it would not fit int64."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
