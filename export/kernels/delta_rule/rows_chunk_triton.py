"""A long run of rows in the gated delta rule: `prefill_triton` says what is computed in chunks, here by one program.

All that does not depend on the state is computed again by each program that has some of the head's values: another kernel
would cost more. Products are those of `math_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .math_triton import inverse_length, log_decay, multiply, multiply_add, sum_of_squares, write_strength

# Keys of a piece of the state: with all of them at once, a chunk's operands would need twice the registers.
PIECE = tl.constexpr(32)


@triton.jit
def take_run(
    state: tl.tensor,
    fresh: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    first: tl.tensor,
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
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Moves a head's state [K, V] by the rows from `first` to `end`, and stores their outputs.

    fresh: the state counts as zeros.
    """
    WIDTH: tl.constexpr = K if K < PIECE else PIECE
    cells = state + tl.arange(0, WIDTH)[None, :] * V + values[:, None]
    s = ()
    for piece in tl.static_range(K // WIDTH):
        s += (tl.load(cells + piece * WIDTH * V, mask=fresh == 0, other=0.0),)  # type: ignore[assignment]
    for start in range(first, end, CHUNK):
        s = take_chunk(
            s, mixed, gates, out, squares, start, end, head, values, rate, bias, norm,
            HEADS, KEY_HEADS, K, V, WIDTH, CHUNK, PARTS,
        )  # fmt: skip
    for piece in tl.static_range(K // WIDTH):
        tl.store(cells + piece * WIDTH * V, s[piece])


@triton.jit
def take_chunk(
    s: tl.tuple,
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
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """The state after CHUNK rows from `start` on, as before in pieces [BLOCK, WIDTH]; stores the rows' outputs.

    Rows from `end` on have q = k = v = 0: they decay nothing and write nothing.
    """
    ROW: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    token = tl.arange(0, CHUNK)
    inside = start + token < end
    row = (start + token).to(tl.int64)
    queries = mixed + row[:, None] * ROW + (head // (HEADS // KEY_HEADS) * K + tl.arange(0, WIDTH))[None, :]
    of_keys = tl.zeros((values.shape[0], CHUNK), tl.float32)
    of_queries = tl.zeros((values.shape[0], CHUNK), tl.float32)
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    k_square = tl.zeros((CHUNK,), tl.float32)
    q_square = tl.zeros((CHUNK,), tl.float32)
    keys = ()
    for piece in tl.static_range(K // WIDTH):
        q = tl.load(queries + piece * WIDTH, mask=inside[:, None], other=0.0)
        k = tl.load(queries + (KEY_HEADS * K + piece * WIDTH), mask=inside[:, None], other=0.0)
        of_keys = multiply_add(s[piece], tl.trans(k), of_keys)
        of_queries = multiply_add(s[piece], tl.trans(q), of_queries)
        kk = tl.dot(k, tl.trans(k), kk, input_precision="tf32x3")
        qk = tl.dot(q, tl.trans(k), qk, input_precision="tf32x3")
        k_square += sum_of_squares(k, 1)
        q_square += sum_of_squares(q, 1)
        keys += (k,)  # type: ignore[assignment]
    of_head = mixed + row[None, :] * ROW + (2 * KEY_HEADS * K + head * V + values)[:, None]
    v = tl.load(of_head, mask=inside[None, :], other=0.0).to(tl.float32)
    b = tl.load(gates + row * (2 * HEADS) + head, mask=inside, other=0.0)
    a = tl.load(gates + row * (2 * HEADS) + HEADS + head, mask=inside, other=0.0)

    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    beta = tl.where(inside, write_strength(b), 0.0)
    d = tl.cumsum(g, 0)
    so_far = tl.exp(d)
    # Those of the last token for all of them: a sum of the same terms, and below it none is positive.
    left = tl.exp(tl.minimum(tl.sum(g, 0) - d, 0.0))
    k_length = inverse_length(k_square)
    q_length = inverse_length(q_square) * K**-0.5
    # Above the diagonal exponents are positive and could overflow. Those results are not used.
    decay = tl.exp(tl.minimum(d[:, None] - d[None, :], 0.0)) * k_length[None, :]
    below = token[:, None] > token[None, :]
    x = inverse(tl.where(below, kk * decay * (beta * k_length)[:, None], 0.0), PARTS)
    pairs = tl.where(below | (token[:, None] == token[None, :]), qk * decay * q_length[:, None], 0.0)

    delta = multiply((v - of_keys * (so_far * k_length)[None, :]) * beta[None, :], tl.trans(x), PARTS)
    o = of_queries * (so_far * q_length)[None, :] + multiply(delta, tl.trans(pairs), PARTS)
    z = tl.load(of_head + HEADS * V, mask=inside[None, :], other=0.0).to(tl.float32)
    result = o * norm[:, None] * z * tl.sigmoid(z)
    place = (row * HEADS + head)[None, :] * V + values[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside[None, :])
    tl.store(squares + (row * HEADS + head) * tl.num_programs(0) + tl.program_id(0), tl.sum(o * o, 0), mask=inside)
    delta = delta * (k_length * left)[None, :]
    kept = tl.exp(tl.sum(g, 0))
    after = ()
    for piece in tl.static_range(K // WIDTH):
        after += (multiply_add(delta, keys[piece], s[piece] * kept),)  # type: ignore[assignment]
    return after


@triton.jit
def inverse(below: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Inverse of `I + below`, strictly lower, of a power of two of rows: as `prepare_triton.invert`, of one matrix."""
    i = tl.arange(0, below.shape[0])[:, None]
    j = tl.arange(0, below.shape[0])[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (i % 2 == 1), below, 0.0)
    # Levels of two rows, four, and so on.
    for level in tl.static_range(1, 5):
        if 1 << level < below.shape[0]:
            corner = ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)
            x -= multiply(multiply(x, tl.where(corner, below, 0.0), PARTS), x, PARTS)
    return x
