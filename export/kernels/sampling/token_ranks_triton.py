# mypy: allow-untyped-defs
"""Numbers of single tokens, which all kernels of sampling compute alike: keys, weights, noise and ranks.

A *key* is an int32 that orders as logits do. A *weight* is a token's probability relative to the most likely one's. A *rank*
is an int64 that orders tokens as sampling does: by score, and of equal scores the earlier token first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# LOWEST is the key of -LARGEST. No number has the key OUTSIDE, no token has the rank NOTHING.
LOWEST = tl.constexpr(-0x7F800000)
OUTSIDE = tl.constexpr(-0x80000000)
NOTHING = tl.constexpr(-0x8000000000000000)
FIRST = tl.constexpr(0x7FFFFFFF)
# Logits of a piece, of which the largest one is stored. They are 128 bytes, as much as a warp reads from memory at once.
PIECE = tl.constexpr(32)
QUADS = tl.constexpr(PIECE.value // 4)


@triton.jit
def key_of(x):
    """An int32 that orders as x does. Both zeros have the same key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    return tl.where(x != x, -LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))


@triton.jit
def read_quads(x_row, quads, listed, VOCAB: tl.constexpr):
    """(finite logits of quads of tokens, their keys), [quads, 4] each. The key of a token that does not exist is OUTSIDE."""
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    present = listed[:, None] & (tokens < VOCAB)
    x = tl.load(x_row + tokens, mask=present, other=0.0)
    x = finite(x)
    return x, tl.where(present, key_of(x), OUTSIDE)


@triton.jit
def store_peaks(peaks_row, block, keys, BLOCK: tl.constexpr):
    """Store the key of the largest logit of each piece of a block, and return that of the block. keys: [BLOCK / 4, 4]."""
    largest = tl.max(tl.max(keys, 1).reshape(BLOCK // PIECE, QUADS), 1)
    tl.store(peaks_row + block * (BLOCK // PIECE) + tl.arange(0, BLOCK // PIECE), largest)
    return tl.max(largest, 0)


@triton.jit
def weights_of(x, keys, low, peak, temperature):
    """Weight of each token, where a logit of `peak` weighs 1; 0 for keys below `low`."""
    return tl.where(keys >= low, tl.exp(tl.div_rn(x - peak, temperature)), 0.0)


@triton.jit
def least_key(peak, temperature, min_p):
    """The lowest key that min-p keeps. If min_p is 0, its logarithm keeps all tokens."""
    return key_of(tl.maximum(peak + temperature * tl.log(min_p), -LARGEST))


@triton.jit
def gumbel_noise(seed, position, quads):
    """`gumbel_noise` of `delegate.sampling`, for the four tokens of each quad: [quads, 4]."""
    zeros = quads * 0
    low = zeros + (position & 0xFFFFFFFF).to(tl.int32)
    high = zeros + (position >> 32).to(tl.int32)
    word0, word1, word2, word3 = tl.philox(seed, quads, zeros, low, high)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3)).reshape(quads.shape[0], 4)
    # -log(1 - u), exact also where u is small, since small u decide the token: the GPU's log of a number close to 1 has few
    # exact digits. For u below 1/2, the series of 2 atanh(s), exact to 2^-26.
    words = words.to(tl.int32, bitcast=True)
    upper = words < 0
    half = (words ^ (words >> 31)).to(tl.float32)
    u = (half + 0.5) * 2.3283064365386963e-10
    s = u / (2.0 - u)
    t = s * s
    series = 1.0 / 13
    for n in tl.static_range(5, -1, -1):
        series = series * t + 1.0 / (2 * n + 1)
    exponential = tl.where(upper, -tl.log(u), 2.0 * s * series)
    return -tl.log(exponential)


@triton.jit
def best_of(scores, keys, quads, low):
    """The highest rank of the tokens with a key from `low` on."""
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    ranks = (key_of(scores).to(tl.int64) << 32) + (FIRST - tokens)
    return tl.max(tl.max(tl.where(keys >= low, ranks, NOTHING), 1), 0)


@triton.jit
def token_of(rank):
    return (rank & FIRST) ^ FIRST


@triton.jit
def key_of_token(x_row, rank, VOCAB: tl.constexpr):
    """Key of a rank's token.

    A rank of no token, which there is when an export tries the kernel on zeros, has the highest key: that ends each search.
    """
    token = token_of(rank)
    return tl.where(token < VOCAB, key_of(finite(tl.load(x_row + token, mask=token < VOCAB, other=0.0))), FIRST)
