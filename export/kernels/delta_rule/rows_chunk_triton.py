"""Long runs of rows in the gated delta rule, in chunks. `prefill_triton` has the formulas.

A first kernel solves all chunks side by side, as far as they do not depend on the state: each chunk is a chain of small
products. A second kernel then takes the state from chunk to chunk. Products are those of `math_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

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
from .pending_triton import add_pending_columns, count_cell, keys_of, store_count, updates_of

# Bytes of a key that are loaded at once to solve chunks.
PIECE = tl.constexpr(64)
# The size of `factors` for one row and head.
FACTORS = tl.constexpr(4)


@triton.jit
def delta_solve_rows_early(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    slots: tl.tensor,
    solved: tl.tensor,
    pairs: tl.tensor,
    factors: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (head, z) solves the chunks z, z + Z, ... of all long runs, Z being the size of the grid.

    It stores the results of `solve_chunk`: solved and pairs [PARTS, R, HEADS, CHUNK], factors [R, HEADS, FACTORS] float32.
    """
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    head = tl.program_id(0)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    every = tl.arange(0, ROWS)
    slot_of = tl.load(slots + every, mask=every < rows, other=-1).to(tl.int32)
    before = tl.load(slots + every - 1, mask=(every > 0) & (every < rows), other=-2)
    later = tl.load(slots + every + (LONG - 1), mask=every + (LONG - 1) < rows, other=-2)
    starts = (slot_of != before) | (slot_of < 0)
    is_long = (slot_of >= 0) & (slot_of == later)
    # For each row: twice the first row of its run, plus one if that run is long.
    marks = tl.associative_scan(tl.where(starts, 2 * every + is_long.to(tl.int32), 0), 0, larger)
    of_run = marks // 2
    begins = (marks % 2 == 1) & ((every - of_run) % CHUNK == 0) & (every < rows)
    numbers = tl.cumsum(begins.to(tl.int32), 0)
    count = tl.max(numbers, 0)
    # One program must wait (rule R1). Others with nothing to do end, and leave their room to the next kernel.
    if (tl.program_id(1) >= count) & (head + tl.program_id(1) > 0):
        return
    wait_for_previous(EARLY)
    size = tl.cast(rows, tl.int64) * (HEADS * CHUNK)
    for number in range(tl.program_id(1) + 1, count + 1, tl.num_programs(1)):
        here = begins & (numbers == number)
        start = tl.sum(tl.where(here, every, 0), 0)
        slot = tl.sum(tl.where(here, slot_of, 0), 0)
        # A slot has one run.
        end = tl.max(tl.where(slot_of == slot, every + 1, 0), 0)
        x, p, f = solve_chunk(mixed, gates, start, end, head, rate, bias, HEADS, KEY_HEADS, K, V, CHUNK, PARTS)
        row = start + tl.arange(0, CHUNK)
        inside = row < end
        of_head = row.to(tl.int64) * HEADS + head
        cells = of_head[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        store_parts(solved + cells, x, size, PARTS, inside[:, None])
        store_parts(pairs + cells, p, size, PARTS, inside[:, None])
        for i in tl.static_range(FACTORS):
            tl.store(factors + of_head * FACTORS + i, f[i], mask=inside)


@triton.jit
def delta_run_rows_early(
    mixed: tl.tensor,
    state: tl.tensor,
    pending_keys: tl.tensor,
    pending: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    norm_weight: tl.tensor,
    solved: tl.tensor,
    pairs: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of values, head, z) moves the state by the long runs z, z + Z, ..., Z being the size of the grid.

    `delta_solve_rows_early` has solved the chunks of these runs. The state for the first run is loaded before the wait.
    """
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    head = tl.program_id(1)
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    norm = tl.load(norm_weight + values)
    every = tl.arange(0, ROWS)
    slot_of = tl.load(slots + every, mask=every < rows, other=-1).to(tl.int32)
    before = tl.load(slots + every - 1, mask=(every > 0) & (every < rows), other=-2)
    later = tl.load(slots + every + (LONG - 1), mask=every + (LONG - 1) < rows, other=-2)
    begins = (slot_of >= 0) & (slot_of != before) & (slot_of == later)
    numbers = tl.cumsum(begins.to(tl.int32), 0)
    count = tl.max(numbers, 0)
    # One program must wait (rule R1). Others with nothing to do end, and leave their room to the next kernel.
    if (tl.program_id(2) >= count) & (tl.program_id(0) + head + tl.program_id(2) > 0):
        return
    if count == 0:
        wait_for_previous(EARLY)
    for number in tl.range(tl.program_id(2) + 1, count + 1, tl.num_programs(2), disable_licm=True):
        here = begins & (numbers == number)
        first = tl.sum(tl.where(here, every, 0), 0)
        slot = tl.sum(tl.where(here, slot_of, 0), 0)
        end = first + tl.sum((slot_of == slot).to(tl.int32), 0)
        fresh = tl.load(positions + first) == 0
        keys = keys_of(pending_keys, slot, head, HEADS, KEY_HEADS, K, P)
        updates = updates_of(pending, slot, head, HEADS, V, P)
        count = tl.load(count_cell(updates, tl.program_id(0) * BLOCK, V, P), mask=fresh == 0, other=0.0).to(tl.int32)
        take_run(
            state + (slot.to(tl.int64) * HEADS + head) * (K * V), keys, updates, count, fresh, mixed, solved, pairs,
            factors, out, squares, rows, first, end, head, values, norm, HEADS, KEY_HEADS, K, V, P, CHUNK, PARTS, SPAN, EARLY,
        )  # fmt: skip


@triton.jit
def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def take_run(
    state: tl.tensor,
    pending_keys: tl.tensor,
    updates: tl.tensor,
    count: tl.tensor,
    fresh: tl.tensor,
    mixed: tl.tensor,
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
    norm: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Moves a head's state [K, V] by the rows from `first` to `end`, and stores their outputs.

    Args:
        pending_keys, updates, count: what `keys_of` and `updates_of` return, and how many updates are pending; none is after
            this.
        fresh: whether the old state counts as zeros.
        solved, pairs, factors: see `delta_solve_rows_early`.
        EARLY: whether to wait for the kernel ahead, once the state is on its way.
    """
    size = tl.cast(rows, tl.int64) * (HEADS * CHUNK)
    cells = state + tl.arange(0, K)[None, :] * V + values[:, None]
    s = tl.load(cells, mask=fresh == 0, other=0.0)
    s = add_pending_columns(s.to(tl.float32), pending_keys, updates, count, values, K, V, P)
    wait_for_previous(EARLY)
    store_count(updates, tl.program_id(0) * values.shape[0], 0, True, values.shape[0], V, P)
    for start in tl.range(first, end, CHUNK, num_stages=3):
        s = take_chunk(
            s, mixed, solved, pairs, factors, out, squares, size, start, end, head, values, norm, HEADS, KEY_HEADS, K, V,
            CHUNK, PARTS, SPAN,
        )  # fmt: skip
    tl.store(cells, s)


@triton.jit
def solve_chunk(
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
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Solve the CHUNK rows from `start` on, as far as they do not depend on the state.

    Rows from `end` on have q = k = 0: they decay nothing and write nothing.

    Returns:
        (x, p, factors). x [CHUNK, CHUNK] is the inverse of the chunk's triangular system, times the write strengths. p
        [CHUNK, CHUNK] is what each row's output takes of the rows up to it. factors are FACTORS vectors [CHUNK]: the decay so
        far, the factor of the state's product with the row's key, the same with its query, and what the row's write is worth
        at the end of the chunk.
    """
    WIDE: tl.constexpr = PIECE * 8 // mixed.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = K if K < WIDE else WIDE
    ROW: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    token = tl.arange(0, CHUNK)
    row = start + token
    inside = row < end
    row = row.to(tl.int64)
    queries = mixed + row[:, None] * ROW + (head // (HEADS // KEY_HEADS) * K + tl.arange(0, WIDTH))[None, :]
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    k_square = tl.zeros((CHUNK,), tl.float32)
    q_square = tl.zeros((CHUNK,), tl.float32)
    for piece in tl.static_range(K // WIDTH):
        q = tl.load(queries + piece * WIDTH, mask=inside[:, None], other=0.0)
        k = tl.load(queries + (KEY_HEADS * K + piece * WIDTH), mask=inside[:, None], other=0.0)
        kk = tl.dot(k, tl.trans(k), kk, input_precision="tf32x3")
        qk = tl.dot(q, tl.trans(k), qk, input_precision="tf32x3")
        k_square += sum_of_squares(k, 1)
        q_square += sum_of_squares(q, 1)
    b = tl.load(gates + row * (2 * HEADS) + head, mask=inside, other=0.0)
    a = tl.load(gates + row * (2 * HEADS) + HEADS + head, mask=inside, other=0.0)
    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    beta = tl.where(inside, write_strength(b), 0.0)
    d = tl.cumsum(g, 0)
    # The decay from each row to the end of the chunk. Only rounding could make a difference positive.
    left = tl.exp(tl.minimum(tl.sum(g, 0) - d, 0.0))
    so_far = tl.exp(d)
    k_length = inverse_length(k_square)
    q_length = inverse_length(q_square) * K**-0.5
    # Above the diagonal, exponents are positive and could overflow, so they are cut to 0. These results are not used.
    decay = tl.exp(tl.minimum(d[:, None] - d[None, :], 0.0)) * k_length[None, :]
    below = token[:, None] > token[None, :]
    x = inverse(tl.where(below, kk * decay * (beta * k_length)[:, None], 0.0), PARTS) * beta[None, :]
    p = tl.where(below | (token[:, None] == token[None, :]), qk * decay * q_length[:, None], 0.0)
    return x, p, (so_far, so_far * k_length, so_far * q_length, k_length * left)


@triton.jit
def take_chunk(
    s: tl.tensor,
    mixed: tl.tensor,
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
    norm: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Return the state s [BLOCK, K] after CHUNK rows from `start` on, and store the outputs of the rows."""
    ROW: tl.constexpr = 2 * KEY_HEADS * K + 2 * HEADS * V
    token = tl.arange(0, CHUNK)
    inside = start + token < end
    row = (start + token).to(tl.int64)
    of_head = row * HEADS + head
    # The chunk's keys, and below them its queries, so that one product serves both.
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
    k_factor = tl.load(factors + of_head * FACTORS + 1, mask=inside, other=0.0)
    q_factor = tl.load(factors + of_head * FACTORS + 2, mask=inside, other=0.0)
    written = tl.load(factors + of_head * FACTORS + 3, mask=inside, other=0.0)
    kept = tl.load(factors + ((tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * HEADS + head) * FACTORS)
    # [CHUNK, CHUNK], transposed: a row of `solved` is a column
    cells = of_head[None, :] * CHUNK + token[:, None]
    nothing = tl.zeros((values.shape[0], CHUNK), tl.float32)
    delta = multiply_parts(v - of_keys * k_factor[None, :], solved + cells, size, nothing, PARTS, inside[None, :])
    o = multiply_parts(delta, pairs + cells, size, of_queries * q_factor[None, :], PARTS, inside[None, :])
    result = o * norm[:, None] * z * tl.sigmoid(z)
    tl.store(out + of_head[None, :] * V + values[:, None], result.to(out.dtype.element_ty), mask=inside[None, :])
    SPANS: tl.constexpr = values.shape[0] // SPAN
    span = tl.arange(0, SPANS)
    sums = tl.where((span == 0)[:, None], tl.sum(o * o, 0)[None, :], 0.0)
    to = squares + of_head[None, :] * (V // SPAN) + (tl.program_id(0) * SPANS + span)[:, None]
    tl.store(to, sums, mask=inside[None, :])
    return multiply_add(delta * written[None, :], keys, s * kept)


@triton.jit
def inverse(below: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Inverse of `I + below` [CHUNK, CHUNK], as in `prepare_triton.invert`. below: strictly lower; CHUNK: a power of two."""
    SIZE: tl.constexpr = below.shape[0]
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (i % 2 == 1), below, 0.0)
    # Levels: blocks of two rows, of four rows, and so on.
    for level in tl.static_range(1, 5):
        if 1 << level < SIZE:
            corner = ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)
            x -= multiply(multiply(x, tl.where(corner, below, 0.0), PARTS), x, PARTS)
    return x
