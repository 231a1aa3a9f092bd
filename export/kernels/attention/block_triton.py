"""Code that the attention kernels share: pages, norms and rotation, and the online softmax, one block of keys at a time.

The kernels go through the keys with a running maximum and a running sum, in powers of two (online softmax, in the order of
FlashAttention-2, arXiv:2307.08691). Several programs may go through splits of the keys; their sums are then brought to one
maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

# About one program for each of an H200's 132 multiprocessors.
PROGRAMS = 128


@dataclass(frozen=True)
class TileConfig:
    """Queries and keys of a tile, and how the compiler spreads the work over warps and overlaps loads with it."""

    queries: int
    keys: int
    warps: int
    stages: int


def score_scale(head_dim: int) -> float:
    """Factor that turns scores into exponents of two."""
    return head_dim**-0.5 * math.log2(math.e)


def padded_group(group: int) -> int:
    """Number of rows of one token in a tile of queries: the heads of the group, rounded up to a power of two."""
    return triton.next_power_of_2(group)


@triton.jit
def pages_of(
    table: tl.tensor, start: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr
) -> tl.tensor:
    """Pages of the positions `start` to `start + KEYS`, int64: [KEYS], or a scalar if all lie in one page.

    Args:
        table: row of the block table for one slot.
        end: first position whose page is not looked up.
        ALIGNED: whether `start` is a multiple of KEYS.
    """
    if ALIGNED and PAGE >= KEYS:
        page = tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, KEYS)
        page = tl.load(table + position // PAGE, mask=position < end, other=0)
    return page.to(tl.int64)


@triton.jit
def offsets_in(
    pages: tl.tensor, start: tl.tensor, SIZE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """Offsets of a key head's elements at the positions `start` to `start + KEYS`, [KEYS, D].

    Args:
        pages: pages of these positions, see `pages_of`.
        SIZE: elements of a page, for all key heads together.
    """
    inside = (start + tl.arange(0, KEYS)) % PAGE
    return (pages * SIZE + inside * D)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    """The first position that a row at `position` sees, rounded down to a multiple of KEYS.

    Args:
        WINDOW: number of positions that a row sees, its own included; 0: all before it.
    """
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    else:
        return 0


@triton.jit
def attend_block(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    offsets: tl.tensor,
    start: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    visible: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the positions `start` to `start + KEYS`, which are at `offsets` [KEYS, D], to (total [M, D], weight [M], peak [M]).

    If MASKED, positions from `end` on are not read, and row m sees the positions up to visible[m], which may be none of
    these; if there is a WINDOW too, not 0, positions before `begin` are not read, and row m sees the last WINDOW positions
    up to visible[m]. Else every row sees all of these positions.
    """
    position = start + tl.arange(0, KEYS)
    inside = (position < end)[:, None] | (not MASKED)
    if WINDOW > 0:
        inside = inside & (position >= begin)[:, None]
    scores = multiply(
        q, tl.trans(tl.load(keys + offsets, mask=inside, other=0.0)), tl.zeros([q.shape[0], KEYS], tl.float32)
    )
    if MASKED:
        scores = tl.where(position[None, :] <= visible[:, None], scores, float("-inf"))
    if WINDOW > 0:
        scores = tl.where(position[None, :] > visible[:, None] - WINDOW, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    # A row that has seen nothing yet has a peak of -inf, and -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    shrink = tl.exp2(peak - base)
    shares = tl.exp2(scores * SCALE - base[:, None])
    # Zeros for values that are not read: a weight of zero times NaN would be NaN.
    total = multiply(shares, tl.load(values + offsets, mask=inside, other=0.0), total * shrink[:, None])
    return total, weight * shrink + tl.sum(shares, 1), new_peak


@triton.jit
def attend_range(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    visible: tl.tensor,
    first: tl.tensor,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(total [M, D], weight [M], peak [M]) of queries q [M, D] over the positions `begin` to `end` of a slot.

    Args:
        keys, values: the cache of one key head.
        table: row of the block table for the slot.
        begin: a multiple of KEYS.
        visible: row m sees the positions up to visible[m], or the last WINDOW of them.
        first: visible[0]; the rows are of TOKENS tokens at neighbouring positions.
        SIZE: see `offsets_in`.
        WINDOW: see `first_seen`.
    """
    total = tl.zeros(q.shape, tl.float32)
    weight = tl.zeros([q.shape[0]], tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    # Every row sees all positions before `middle` that are in the window.
    middle = tl.minimum(tl.maximum((first + 1) // KEYS * KEYS, begin), end // KEYS * KEYS)
    # The pages of a block are looked up while the block before it is worked on.
    pages = pages_of(table, begin, end, PAGE, KEYS, True)
    if WINDOW > 0:
        # The last row sees the positions from `edge` on.
        unseen = first - WINDOW + 1
        edge = tl.cdiv(tl.maximum(unseen + TOKENS - 1, begin), KEYS) * KEYS
        for start in range(begin, tl.minimum(edge, end), KEYS):
            offsets = offsets_in(pages, start, SIZE, PAGE, q.shape[1], KEYS)
            pages = pages_of(table, start + KEYS, end, PAGE, KEYS, True)
            total, weight, peak = attend_block(
                q, keys, values, offsets, start, unseen, end, visible, total, weight, peak, SCALE, KEYS, True, WINDOW
            )
        begin = edge
        middle = tl.maximum(middle, edge)
    for start in range(begin, middle, KEYS):
        offsets = offsets_in(pages, start, SIZE, PAGE, q.shape[1], KEYS)
        pages = pages_of(table, start + KEYS, end, PAGE, KEYS, True)
        total, weight, peak = attend_block(
            q, keys, values, offsets, start, begin, end, visible, total, weight, peak, SCALE, KEYS, False, 0
        )
    for start in range(middle, end, KEYS):
        offsets = offsets_in(pages, start, SIZE, PAGE, q.shape[1], KEYS)
        pages = pages_of(table, start + KEYS, end, PAGE, KEYS, True)
        total, weight, peak = attend_block(
            q, keys, values, offsets, start, begin, end, visible, total, weight, peak, SCALE, KEYS, True, 0
        )
    return total, weight, peak


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a @ b in float32, a rounded to b's dtype. For float32, three TF32 products give float32's precision."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32x3")


@triton.jit
def take(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    SCALE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add keys and values [KEYS, D] of the positions from `start` on to (total [D, M], weight [M], peak [M]).

    Positions from `end` on do not count; their keys and values are zeros. At least position `start` counts. query: [D, M].
    """
    KEYS: tl.constexpr = keys.shape[0]
    scores = multiply(keys, query, tl.zeros([KEYS, query.shape[1]], tl.float32)) * SCALE
    scores = tl.where((start + tl.arange(0, KEYS) < end)[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    shrink = tl.exp2(peak - new_peak)
    shares = tl.exp2(scores - new_peak[None, :])
    total = tl.dot(tl.trans(values), shares.to(values.dtype), total * shrink[None, :], input_precision="tf32x3")
    return total, weight * shrink + tl.sum(shares, 0), new_peak


@triton.jit
def norm_weights(
    norm: tl.tensor, every: tl.tensor, other: tl.tensor, rotated: tl.tensor, NORMED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Weights of a norm for the elements `every` of heads and for their partners `other`; ones if not NORMED."""
    if NORMED:
        return tl.load(norm + every), tl.load(norm + other, mask=rotated, other=0.0)
    else:
        return 1.0, 1.0


@triton.jit
def normed_and_rotated(
    x: tl.tensor,
    other: tl.tensor,
    norm: tl.tensor,
    other_norm: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:
    """RMS norm, if NORMED, and rotation of each row of x [M, D], float32. `other` has the partner of each element in the
    rotation."""
    x = x.to(tl.float32)
    if not NORMED:
        return x * cosine + other.to(tl.float32) * sine
    length = tl.rsqrt(tl.sum(x * x, 1) / x.shape[1] + EPS)
    rotated = x * norm * cosine + other.to(tl.float32) * other_norm * sine
    return rotated * length[:, None]
