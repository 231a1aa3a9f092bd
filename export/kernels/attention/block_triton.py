"""What the attention kernels share: the online softmax, one block of keys at a time.

The kernels walk over the keys with a running maximum and a running sum, in powers of two (online softmax, in the order of
FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class TileConfig:
    """Queries and keys of a tile, and how the compiler spreads the work over warps and overlaps loads with it."""

    queries: int
    keys: int
    warps: int
    stages: int


def score_scale(head_dim: int) -> float:
    """What scores are multiplied by before they become exponents of two."""
    return head_dim**-0.5 * math.log2(math.e)


@triton.jit
def attend_block(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    visible: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the slots `start` to `start + KEYS` to (total [M, D], weight [M], peak [M]).

    With MASKED, slots from `end` on are not read, and row m sees the slots up to visible[m]. Every row must see at least one
    slot of its first block.
    """
    slot = start + tl.arange(0, KEYS)
    place = slot[:, None] * q.shape[1] + tl.arange(0, q.shape[1])[None, :]
    inside = (slot < end)[:, None] | (not MASKED)
    scores = multiply(
        q, tl.trans(tl.load(keys + place, mask=inside, other=0.0)), tl.zeros([q.shape[0], KEYS], tl.float32)
    )
    if MASKED:
        scores = tl.where(slot[None, :] <= visible[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    shrink = tl.exp2(peak - new_peak)
    shares = tl.exp2(scores * SCALE - new_peak[:, None])
    # Zeros for values that are not read: a weight of zero times NaN would be NaN.
    total = multiply(shares, tl.load(values + place, mask=inside, other=0.0), total * shrink[:, None])
    return total, weight * shrink + tl.sum(shares, 1), new_peak


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a @ b in float32, a rounded to b's dtype. For float32, three TF32 products give float32's precision."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32x3")
