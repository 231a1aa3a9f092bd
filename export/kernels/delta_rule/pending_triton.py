"""Pending updates of recurrent states: `operands.RecurrentState` describes them.

A state of 128 x 128 has 64 KB, an update 0.6 KB. A row that is a run of its own among others reads the state, and keeps its
update in place of writing the state. The products of a state with the row's key and query are those of the stored matrix and
those of the updates. When there is no room for one more update, or where a run has several rows, all are added to the stored
matrix. Log decays are added up anew in each call, from the newest on: a sum that began at the oldest would lose what is slow
behind what is fast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .math_triton import add_pairs, multiply_add

# Updates that kernels look at together, by products without and with tensor cores: powers of two, at least P.
TILE = tl.constexpr(8)
WIDE_TILE = tl.constexpr(16)


@triton.jit
def state_cells(of_head: tl.tensor, values: tl.tensor, K: tl.constexpr, V: tl.constexpr) -> tl.tensor:
    """Return where a block of a head's state is, [K, BLOCK].

    A lane takes four neighbouring values, as it would of float32, of a state in bfloat16, too. Of these it would load eight:
    then it would have fewer keys and more sums.
    """
    return tl.max_contiguous(of_head + tl.arange(0, K)[:, None] * V + values[None, :], [1, 4])


# Two functions: torch's analysis would take a tuple of pointers for written wherever one of them is.
@triton.jit
def keys_of(
    keys: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Return where the pending keys of a slot's head are, [P, K]. Padding has those of slot 0."""
    return keys + (tl.maximum(slot, 0).to(tl.int64) * KEY_HEADS + head // (HEADS // KEY_HEADS)) * (P * K)


@triton.jit
def updates_of(
    updates: tl.tensor, slot: tl.tensor, head: tl.tensor, HEADS: tl.constexpr, V: tl.constexpr, P: tl.constexpr
) -> tl.tensor:
    """Return where the pending updates of a slot's head are, [P + 1, V]. Padding has those of slot 0."""
    return updates + (tl.maximum(slot, 0).to(tl.int64) * HEADS + head) * ((P + 1) * V)


@triton.jit
def count_cell(updates: tl.tensor, begin: tl.tensor, V: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Return where the first count is that belongs to a block of values which begins with `begin`, a multiple of eight."""
    return updates + (P * V + V - V // 8) + begin // 8


@triton.jit
def store_count(
    updates: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Store all counts that belong to a block of values from `begin` on, where `filled`."""
    tl.static_assert(BLOCK % 8 == 0, "a program has counts of its own for eight values at a time")
    cells = count_cell(updates, begin, V, P) + tl.arange(0, BLOCK // 8)
    tl.store(cells, tl.zeros((BLOCK // 8,), tl.float32) + count, mask=filled)


@triton.jit
def load_pending(
    keys: tl.tensor,
    updates: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    ALL: tl.constexpr,
) -> tl.tuple:
    """Return updates for `pending_products`: keys [TILE, K], values [TILE, BLOCK], log decays [TILE], and `count`, the number
    of those that count.

    ALL: whether no load waits for `count`. Then all updates are loaded; what does not count may be anything.
    """
    known = P if ALL else count
    update = tl.arange(0, TILE)[:, None]
    k = tl.load(keys + update * K + tl.arange(0, K)[None, :], mask=update < known, other=0.0)
    u = tl.load(updates + update * V + values[None, :], mask=update < known, other=0.0)
    return k, u, load_decays(updates, known, V, P, TILE), count


@triton.jit
def pending_products(held: tl.tuple, k: tl.tensor, q: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what pending updates add to the products of a state with k and with q, and the decay of the stored matrix."""
    keys, u, g, count = held
    counts = tl.arange(0, TILE) < count
    # What does not count may be NaN.
    keys = tl.where(counts[:, None], keys.to(tl.float32), 0.0)
    u = tl.where(counts[:, None], u, 0.0)
    decay, later = decays_of(tl.where(counts, g, 0.0))
    of_k, of_q = tl.reduce((keys * k[None, :], keys * q[None, :]), 1, add_pairs)
    of_k, of_q = tl.reduce((u * (of_k * later)[:, None], u * (of_q * later)[:, None]), 0, add_pairs)
    return of_k, of_q, decay


@triton.jit
def load_decays(
    updates: tl.tensor, count: tl.tensor, V: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Return the log decays of the first `count` updates, [SIZE], zeros behind them."""
    update = tl.arange(0, SIZE)
    return tl.load(updates + P * V + update, mask=update < count, other=0.0)


@triton.jit
def decays_of(g: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the decay of the stored matrix by updates with log decays g, and that of each of these by later ones, [SIZE]."""
    update = tl.arange(0, g.shape[0])
    later = tl.sum(tl.where(update[None, :] > update[:, None], g[None, :], 0.0), 1)
    return tl.exp(tl.sum(g, 0)), tl.exp(later)


@triton.jit
def add_pending(
    s: tl.tensor,
    keys: tl.tensor,
    updates: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Return a block of the state, [K, BLOCK], with its first `count` updates; exactly s if there are none."""
    if count > 0:
        # All are loaded before the first is used.
        k = ()
        u = ()
        g = ()
        for update in tl.static_range(P):
            here = update < count
            k += (tl.load(keys + update * K + tl.arange(0, K), mask=here, other=0.0),)  # type: ignore[assignment]
            u += (tl.load(updates + update * V + values, mask=here, other=0.0),)  # type: ignore[assignment]
            g += (tl.load(updates + P * V + update, mask=here, other=0.0),)  # type: ignore[assignment]
        decay, _ = decays_of(load_decays(updates, count, V, P, TILE))
        s *= decay
        left = tl.full((), 0.0, tl.float32)
        for back in tl.static_range(P):
            s += k[P - 1 - back].to(tl.float32)[:, None] * (u[P - 1 - back] * tl.exp(left))[None, :]
            left += g[P - 1 - back]
    return s


@triton.jit
def add_pending_in_turn(
    s: tl.tensor,
    keys: tl.tensor,
    updates: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """`add_pending` with fewer registers, for a kernel that rarely finds pending updates: each is loaded when it is added."""
    if count > 0:
        decay, _ = decays_of(load_decays(updates, count, V, P, TILE))
        s *= decay
        left = tl.full((), 0.0, tl.float32)
        for back in tl.range(0, count, num_stages=1):
            update = count - 1 - back
            k = tl.load(keys + update * K + tl.arange(0, K)).to(tl.float32)
            u = tl.load(updates + update * V + values)
            s += k[:, None] * (u * tl.exp(left))[None, :]
            left += tl.load(updates + P * V + update)
    return s


@triton.jit
def add_pending_columns(
    s: tl.tensor,
    keys: tl.tensor,
    updates: tl.tensor,
    count: tl.tensor,
    values: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """`add_pending` for a transposed block, [BLOCK, K], by tensor cores: an update keeps the bits that `math_triton` says."""
    decay, later = decays_of(load_decays(updates, count, V, P, WIDE_TILE))
    update = tl.arange(0, WIDE_TILE)
    k = tl.load(keys + update[:, None] * K + tl.arange(0, K)[None, :], mask=(update < count)[:, None], other=0.0)
    u = tl.load(updates + update[None, :] * V + values[:, None], mask=(update < count)[None, :], other=0.0)
    # Added to the product, not the product to it: registers are free for the product as long as the state is on its way.
    return s * decay + multiply_add(u * later[None, :], k, tl.zeros((u.shape[0], K), tl.float32))
