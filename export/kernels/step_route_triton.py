# mypy: allow-untyped-defs
"""The router of `step_moe_triton`: the kernel of its logits, and what the next kernel chooses the experts with."""

from __future__ import annotations

import triton
import triton.language as tl

from .early_triton import start_next, wait_for_previous

# A tensor of as many elements as a warp has lanes is in every warp as a whole, so each reduces it by itself.
LANES = tl.constexpr(32)


@triton.jit
def route_logits_early(
    h,
    norm_weight,
    gate,
    shared_gate,
    logits,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """logits [COUNT], ROWS of them a program: products with the rows of `gate` and then of `shared_gate`."""
    start_next(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the last one read it again.
    read = tl.minimum(row, COUNT - 1)
    first = tl.where(read < EXPERTS, gate + read * SIZE, shared_gate)
    tile = tl.load(first[:, None] + column[None, :], mask=inside[None, :], other=0.0)
    factor = 1.0 + tl.load(norm_weight + column, mask=inside, other=0.0)
    wait_for_previous(EARLY)
    x = tl.load(h + column, mask=inside, other=0.0).to(tl.float32)
    products = tile.to(tl.float32) * (x * factor)[None, :]
    squares = tl.broadcast_to((x * x)[None, :], (ROWS, BLOCK))
    sums, squares = tl.reduce((products, squares), 1, add_pairs)
    tl.store(logits + row, (sums * tl.rsqrt(squares / SIZE + EPS)).to(logits.dtype.element_ty), mask=row < COUNT)


@triton.jit
def add_pairs(a, b, c, d):
    """For a reduction of two tensors in one pass."""
    return a + c, b + d


@triton.jit
def load_keys(logits, EXPERTS: tl.constexpr):
    """Unsigned integers in the order of the logits, the lower index above where they are equal: a tuple of [LANES].

    In the upper half are the logit's bits, turned over so that they order as integers do; in the lower the index, falling.
    Logits in bfloat16 have keys of 32 bits, others of 64. No expert's key is 0.
    """
    keys = ()
    for start in tl.static_range(0, EXPERTS, LANES):
        expert = start + tl.arange(0, LANES)
        # Adding 0 makes -0 and 0 one.
        value = tl.load(logits + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32) + 0.0
        bits = value.to(tl.int32, bitcast=True)
        if logits.dtype.element_ty == tl.bfloat16:
            bits ^= ((bits >> 31) & 0x7FFF0000) | -0x80000000
            key = (bits | (0xFFFF - expert)).to(tl.uint32, bitcast=True)
        else:
            bits ^= (bits >> 31) | -0x80000000
            key = (bits.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | (0xFFFF - expert).to(tl.uint64)
        keys = keys + (tl.where(expert < EXPERTS, key, 0),)  # type: ignore[assignment]  # noqa: RUF005
    return keys


@triton.jit
def largest_keys(keys, rank, PLACES: tl.constexpr):
    """The key that has `rank` larger ones, and a [PLACES] of it and the larger ones in falling order.

    Of unsigned differences to the key found last those to smaller keys are the larger, and the next key's is the largest:
    an addition and a maximum a key, which are one instruction.
    """
    place = tl.arange(0, PLACES)
    best = tl.full([], 0, keys[0].dtype)
    ranked = tl.zeros([PLACES], keys[0].dtype)
    for i in range(rank + 1):
        step = keys[0] - best
        for chunk in tl.static_range(1, len(keys)):
            step = tl.maximum(step, keys[chunk] - best)
        best += tl.max(step, 0)
        ranked = tl.where(place == i, best, ranked)
    return best, ranked


@triton.jit
def expert_of(key):
    """The expert that a key of `load_keys` is of."""
    return 0xFFFF - (key & 0xFFFF).to(tl.int32)


@triton.jit
def logit_of(key):
    """The logit in a key of `load_keys`."""
    WIDE: tl.constexpr = key.dtype == tl.uint64
    bits = ((key >> 32) if WIDE else key & 0xFFFF0000).to(tl.uint32).to(tl.int32, bitcast=True)
    bits ^= ~(bits >> 31) | -0x80000000
    bits &= -1 if WIDE else -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_routes(
    logits,
    ranked,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The chosen experts, the softmax over their logits, and last the shared expert's weight."""
    place = tl.arange(0, PLACES)
    value = logit_of(ranked)
    largest = tl.max(tl.where(place == 0, value, float("-inf")), 0)
    share = tl.where(place < TOP_K, tl.exp(value - largest), 0.0)
    share = share / tl.sum(share, 0)
    if SHARED:
        share = tl.where(place == TOP_K, tl.sigmoid(tl.load(logits + EXPERTS).to(tl.float32)), share)
    tl.store(weights + place, share, mask=place < TOP_K + SHARED)
    tl.store(chosen + place, expert_of(ranked), mask=place < TOP_K)
