"""Long runs of rows in the gated delta rule: `prefill_triton` says what is computed in chunks, here by one program.

First what does not depend on the state, for several chunks at once, as each is a chain of small products; then the state
goes from chunk to chunk. Each program that has some of the head's values makes all of the former again: another kernel would
cost more. Products are those of `math_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .math_triton import (
    inverse_length,
    log_decay,
    multiply,
    multiply_add,
    multiply_parts,
    store_parts,
    sum_of_squares,
    write_strength,
)

# Keys that are loaded at once to solve chunks.
PIECE = tl.constexpr(32)
# Numbers of each row and head in `factors`.
FACTORS = tl.constexpr(4)


@triton.jit
def take_run(
    state: tl.tensor,
    fresh: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    solved: tl.tensor,
    pairs: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    rows: tl.tensor,
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
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Moves a head's state [K, V] by the rows from `first` to `end`, and stores their outputs.

    Args:
        fresh: the state counts as zeros.
        solved, pairs: [PARTS, R, HEADS, CHUNK], and factors [R, HEADS, FACTORS] float32: what `solve_chunks` gives, of CHUNKS
            chunks at once; not used if these are one.
    """
    size = tl.cast(rows, tl.int64) * (HEADS * CHUNK)
    if CHUNKS > 1:
        for start in tl.range(first, end, CHUNKS * CHUNK, num_stages=1):
            x, p, f = solve_chunks(
                mixed, gates, start, end, head, rate, bias, HEADS, KEY_HEADS, K, V, CHUNK, CHUNKS, PARTS
            )
            row = start + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            inside = row < end
            of_head = row.to(tl.int64) * HEADS + head
            cells = of_head[:, :, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
            store_parts(solved + cells, x, size, PARTS, inside[:, :, None])
            store_parts(pairs + cells, p, size, PARTS, inside[:, :, None])
            for i in tl.static_range(FACTORS):
                tl.store(factors + of_head * FACTORS + i, f[i], mask=inside)
        # All threads read what other threads have written.
        tl.debug_barrier()
    cells = state + tl.arange(0, K)[None, :] * V + values[:, None]
    s = tl.load(cells, mask=fresh == 0, other=0.0)
    for start in tl.range(first, end, CHUNK, num_stages=3 if CHUNKS > 1 else 1):
        s = take_chunk(
            s, mixed, gates, solved, pairs, factors, out, squares, size, start, end, head, values, rate, bias, norm,
            HEADS, KEY_HEADS, K, V, CHUNK, CHUNKS, PARTS,
        )  # fmt: skip
    tl.store(cells, s)


@triton.jit
def solve_chunks(
    mixed: tl.tensor,
    gates: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """What CHUNKS chunks of rows from `start` on do whatever the state is.

    Rows from `end` on have q = k = 0: they decay nothing and write nothing.

    Returns:
        [CHUNKS, CHUNK, CHUNK]: the inverses of the chunks' triangular systems, times the write strengths, and what each row's
        output takes of the rows up to it; and FACTORS of each row: the decay so far, what its products of the state with its
        key and with its query count, and what its write is worth at the chunk's end.
    """
    WIDTH: tl.constexpr = K if K < PIECE else PIECE
    ROW: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    token = tl.arange(0, CHUNK)
    row = start + tl.arange(0, CHUNKS)[:, None] * CHUNK + token[None, :]
    inside = row < end
    row = row.to(tl.int64)
    queries = mixed + row[:, :, None] * ROW + (head // (HEADS // KEY_HEADS) * K + tl.arange(0, WIDTH))[None, None, :]
    kk = tl.zeros((CHUNKS, CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNKS, CHUNK, CHUNK), tl.float32)
    k_square = tl.zeros((CHUNKS, CHUNK), tl.float32)
    q_square = tl.zeros((CHUNKS, CHUNK), tl.float32)
    for piece in tl.static_range(K // WIDTH):
        q = tl.load(queries + piece * WIDTH, mask=inside[:, :, None], other=0.0)
        k = tl.load(queries + (KEY_HEADS * K + piece * WIDTH), mask=inside[:, :, None], other=0.0)
        kk = tl.dot(k, tl.permute(k, (0, 2, 1)), kk, input_precision="tf32x3")
        qk = tl.dot(q, tl.permute(k, (0, 2, 1)), qk, input_precision="tf32x3")
        k_square += sum_of_squares(k, 2)
        q_square += sum_of_squares(q, 2)
    b = tl.load(gates + row * (2 * HEADS) + head, mask=inside, other=0.0)
    a = tl.load(gates + row * (2 * HEADS) + HEADS + head, mask=inside, other=0.0)
    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    beta = tl.where(inside, write_strength(b), 0.0)
    d = tl.cumsum(g, 1)
    # That of the last token for all of them: a sum of the same terms, and below it none is positive.
    left = tl.exp(tl.minimum(tl.sum(g, 1)[:, None] - d, 0.0))
    so_far = tl.exp(d)
    k_length = inverse_length(k_square)
    q_length = inverse_length(q_square) * K**-0.5
    # Above the diagonal exponents are positive and could overflow. Those results are not used.
    decay = tl.exp(tl.minimum(d[:, :, None] - d[:, None, :], 0.0)) * k_length[:, None, :]
    below = token[None, :, None] > token[None, None, :]
    x = inverse(tl.where(below, kk * decay * (beta * k_length)[:, :, None], 0.0), PARTS) * beta[:, None, :]
    p = tl.where(below | (token[None, :, None] == token[None, None, :]), qk * decay * q_length[:, :, None], 0.0)
    return x, p, (so_far, so_far * k_length, so_far * q_length, k_length * left)


@triton.jit
def take_chunk(
    s: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    solved: tl.tensor,
    pairs: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    size: tl.tensor,
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
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The state s [BLOCK, K] after CHUNK rows from `start` on; stores the rows' outputs."""
    ROW: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    token = tl.arange(0, CHUNK)
    inside = start + token < end
    row = (start + token).to(tl.int64)
    of_head = row * HEADS + head
    # The chunk's keys, and below them its queries: one product.
    both = tl.arange(0, 2 * CHUNK)
    kind = tl.where(both < CHUNK, KEY_HEADS * K, 0) + head // (HEADS // KEY_HEADS) * K
    other = start + both % CHUNK
    both = mixed + (other.to(tl.int64) * ROW + kind)[:, None] + tl.arange(0, K)[None, :]
    both = tl.load(both, mask=(other < end)[:, None], other=0.0)
    products = multiply_add(s, tl.trans(both), tl.zeros((values.shape[0], 2 * CHUNK), tl.float32))
    of_keys, of_queries = tl.split(tl.permute(tl.reshape(products, (values.shape[0], 2, CHUNK)), (0, 2, 1)))
    keys = mixed + row[:, None] * ROW + ((KEY_HEADS + head // (HEADS // KEY_HEADS)) * K + tl.arange(0, K))[None, :]
    keys = tl.load(keys, mask=inside[:, None], other=0.0)
    of_values = mixed + row[None, :] * ROW + (2 * KEY_HEADS * K + head * V + values)[:, None]
    v = tl.load(of_values, mask=inside[None, :], other=0.0).to(tl.float32)
    z = tl.load(of_values + HEADS * V, mask=inside[None, :], other=0.0).to(tl.float32)
    if CHUNKS > 1:
        k_factor = tl.load(factors + of_head * FACTORS + 1, mask=inside, other=0.0)
        q_factor = tl.load(factors + of_head * FACTORS + 2, mask=inside, other=0.0)
        written = tl.load(factors + of_head * FACTORS + 3, mask=inside, other=0.0)
        kept = tl.load(factors + ((tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * HEADS + head) * FACTORS)
        # [CHUNK, CHUNK], a row's in a column
        cells = of_head[None, :] * CHUNK + token[:, None]
        nothing = tl.zeros((values.shape[0], CHUNK), tl.float32)
        delta = multiply_parts(v - of_keys * k_factor[None, :], solved + cells, size, nothing, PARTS, inside[None, :])
        o = multiply_parts(delta, pairs + cells, size, of_queries * q_factor[None, :], PARTS, inside[None, :])
    else:
        x, p, f = solve_chunks(mixed, gates, start, end, head, rate, bias, HEADS, KEY_HEADS, K, V, CHUNK, CHUNKS, PARTS)
        x = tl.trans(tl.reshape(x, (CHUNK, CHUNK)))
        p = tl.trans(tl.reshape(p, (CHUNK, CHUNK)))
        k_factor = tl.reshape(f[1], (CHUNK,))
        q_factor = tl.reshape(f[2], (CHUNK,))
        written = tl.reshape(f[3], (CHUNK,))
        # Rows behind the last one decay nothing.
        kept = tl.sum(tl.where(token == CHUNK - 1, tl.reshape(f[0], (CHUNK,)), 0.0), 0)
        delta = multiply(v - of_keys * k_factor[None, :], x, PARTS)
        o = of_queries * q_factor[None, :] + multiply(delta, p, PARTS)
    result = o * norm[:, None] * z * tl.sigmoid(z)
    tl.store(out + of_head[None, :] * V + values[:, None], result.to(out.dtype.element_ty), mask=inside[None, :])
    tl.store(squares + of_head * tl.num_programs(0) + tl.program_id(0), tl.sum(o * o, 0), mask=inside)
    return multiply_add(delta * written[None, :], keys, s * kept)


@triton.jit
def inverse(below: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Inverses of `I + below` [CHUNKS, CHUNK, CHUNK], strictly lower, CHUNK a power of two: as `prepare_triton.invert`."""
    SIZE: tl.constexpr = below.shape[1]
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (i % 2 == 1), below, 0.0)
    # Levels of two rows, four, and so on.
    for level in tl.static_range(1, 5):
        if 1 << level < SIZE:
            corner = ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)
            x -= multiply(multiply(x, tl.where(corner, below, 0.0), PARTS), x, PARTS)
    return x
