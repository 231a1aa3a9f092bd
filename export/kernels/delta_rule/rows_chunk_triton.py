"""A chunk of a run's rows in the gated delta rule: `prefill_triton` says what is computed, here by one program.

All that does not depend on the state is computed again by each program that has some of the head's values: another kernel
would cost more. Products are those of `math_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .math_triton import inverse_length, log_decay, multiply, multiply_add, sum_of_squares, write_strength

# Rows of a chunk, 2^LEVELS.
LEVELS = tl.constexpr(4)
CHUNK = tl.constexpr(16)


@triton.jit
def take_chunk(
    s: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    values: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The state s [BLOCK, K], transposed, after CHUNK rows from `start` on; stores their outputs.

    Rows from `end` on have q = k = v = 0: they decay nothing and write nothing.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    key_head = head // (HEADS // KEY_HEADS)
    token = tl.arange(0, CHUNK)
    inside = start + token < end
    row = (start + token).to(tl.int64)
    keys = key_head * K + tl.arange(0, K)
    q = tl.load(mixed + row[:, None] * WIDTH + keys[None, :], mask=inside[:, None], other=0.0)
    k = tl.load(mixed + row[:, None] * WIDTH + (KEY_HEADS * K + keys)[None, :], mask=inside[:, None], other=0.0)
    wide = tl.zeros((s.shape[0], CHUNK), tl.float32)
    of_keys = multiply_add(s, tl.trans(k), wide)
    of_queries = multiply_add(s, tl.trans(q), wide)
    of_head = mixed + row[None, :] * WIDTH + (2 * KEY_HEADS * K + head * V + values)[:, None]
    v = tl.load(of_head, mask=inside[None, :], other=0.0).to(tl.float32)
    z = tl.load(of_head + HEADS * V, mask=inside[None, :], other=0.0).to(tl.float32)
    b = tl.load(gates + row * (2 * HEADS) + head, mask=inside, other=0.0)
    a = tl.load(gates + row * (2 * HEADS) + HEADS + head, mask=inside, other=0.0)

    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    beta = tl.where(inside, write_strength(b), 0.0)
    d = tl.cumsum(g, 0)
    so_far = tl.exp(d)
    # Those of the last token for all of them: a sum of the same terms, and below it none is positive.
    left = tl.exp(tl.minimum(tl.sum(g, 0) - d, 0.0))
    k_length = inverse_length(sum_of_squares(k, 1))
    q_length = inverse_length(sum_of_squares(q, 1)) * K**-0.5
    nothing = tl.zeros((CHUNK, CHUNK), tl.float32)
    # Above the diagonal exponents are positive and could overflow. Those results are not used.
    decay = tl.exp(tl.minimum(d[:, None] - d[None, :], 0.0)) * k_length[None, :]
    below = token[:, None] > token[None, :]
    kk = tl.dot(k, tl.trans(k), nothing, input_precision="tf32x3")
    qk = tl.dot(q, tl.trans(k), nothing, input_precision="tf32x3")
    x = inverse(tl.where(below, kk * decay * (beta * k_length)[:, None], 0.0), PARTS)
    pairs = tl.where(below | (token[:, None] == token[None, :]), qk * decay * q_length[:, None], 0.0)

    delta = multiply((v - of_keys * (so_far * k_length)[None, :]) * beta[None, :], tl.trans(x), PARTS)
    o = of_queries * (so_far * q_length)[None, :] + multiply(delta, tl.trans(pairs), PARTS)
    result = o * norm[:, None] * z * tl.sigmoid(z)
    place = (row * HEADS + head)[None, :] * V + values[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside[None, :])
    tl.store(squares + (row * HEADS + head) * tl.num_programs(0) + tl.program_id(0), tl.sum(o * o, 0), mask=inside)
    return multiply_add(delta * (k_length * left)[None, :], k, s * tl.exp(tl.sum(g, 0)))


@triton.jit
def inverse(below: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Inverse of `I + below`, strictly lower, of 16 rows: as `prepare_triton.invert`, of one matrix."""
    i = tl.arange(0, below.shape[0])[:, None]
    j = tl.arange(0, below.shape[0])[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (i % 2 == 1), below, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)
        x -= multiply(multiply(x, tl.where(corner, below, 0.0), PARTS), x, PARTS)
    return x
