# mypy: allow-untyped-defs
"""The router of `step_triton`: the kernel that computes the logits, and functions that choose experts in later kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

# Lanes of a warp. Every warp holds all of a tensor with LANES elements, so each warp reduces it by itself.
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
    SEVERAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write logits [R, COUNT], ROWS of a token per program: products of the normed h with the rows of `gate`, then of
    `shared_gate`. Program (rows, token)."""
    start_next(EARLY)
    token = token_of(SEVERAL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the last read the last row again.
    read = tl.minimum(row, COUNT - 1)
    first = tl.where(read < EXPERTS, gate + read * SIZE, shared_gate)
    tile = tl.load(first[:, None] + column[None, :], mask=inside[None, :], other=0.0)
    factor = tl.load(norm_weight + column, mask=inside, other=0.0)
    wait_for_previous(EARLY)
    x = tl.load(h + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    products = tile.to(tl.float32) * (x * factor)[None, :]
    squares = tl.broadcast_to((x * x)[None, :], (ROWS, BLOCK))
    sums, squares = tl.reduce((products, squares), 1, add_pairs)
    to = logits + token * COUNT + row
    tl.store(to, (sums * tl.rsqrt(squares / SIZE + EPS)).to(logits.dtype.element_ty), mask=row < COUNT)


@triton.jit
def token_of(SEVERAL: tl.constexpr):
    """The program's token: the grid's last dimension, by which `delegate/graphs/nodes.py` knows a launch of several rows.

    Without SEVERAL there is one token, and the code is as if there were no number.
    """
    return tl.program_id(2) if SEVERAL else 0


@triton.jit
def add_pairs(a, b, c, d):
    """Add two pairs. With this, `tl.reduce` sums two tensors in one pass."""
    return a + c, b + d


@triton.jit
def load_keys(logits, EXPERTS: tl.constexpr, CACHE: tl.constexpr):
    """The experts' sort keys, unsigned integers in the order of the logits: a tuple of tensors [LANES].

    The upper half of a key has the logit's bits, changed so that integers compare as the logits do. The lower half has the
    index, inverted: of two equal logits, the one with the lower index has the larger key. Logits in bfloat16 have keys of 32
    bits, others of 64. No expert's key is 0.

    CACHE: the cache modifier of the loads. ".cg" reads past the first-level cache, for a kernel that reads before its wait
        (R4 in `delegate/graphs/nodes.py`). The warps of all programs then read the same few lines of L2, which costs a
        microsecond, so other kernels do not use it.
    """
    keys = ()
    for start in tl.static_range(0, EXPERTS, LANES):
        expert = start + tl.arange(0, LANES)
        value = tl.load(logits + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=CACHE)
        keys = keys + (tl.where(expert < EXPERTS, key_of(value, expert), 0),)  # type: ignore[assignment]  # noqa: RUF005
    return keys


@triton.jit
def key_of(value, expert):
    """The key of an expert with the logit `value`; see `load_keys`."""
    # Adding 0 turns -0 into 0.
    bits = (value.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    if value.dtype == tl.bfloat16:
        bits ^= ((bits >> 31) & 0x7FFF0000) | -0x80000000
        # The lower half is 0, but for NaN, where the addition above sets all its bits on a GPU.
        key = ((bits | 0xFFFF) - expert).to(tl.uint32, bitcast=True)
    else:
        bits ^= (bits >> 31) | -0x80000000
        key = (bits.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | (0xFFFF - expert).to(tl.uint64)
    return key


@triton.jit
def largest_key(keys, rank):
    """The key with this rank: exactly `rank` keys are larger."""
    best = tl.full([], 0, keys[0].dtype)
    for _ in range(rank + 1):
        best = next_largest(keys, best)
    return best


@triton.jit
def largest_keys(keys, COUNT: tl.constexpr):
    """The COUNT largest keys in falling order: a tuple of numbers."""
    ranked = (next_largest(keys, tl.full([], 0, keys[0].dtype)),)
    for rank in tl.static_range(1, COUNT):
        ranked = ranked + (next_largest(keys, ranked[rank - 1]),)  # type: ignore[assignment]  # noqa: RUF005
    return ranked


@triton.jit
def next_largest(keys, best):
    """The largest key below `best`; if `best` is 0, the largest of all keys.

    Keys are compared by `key - best`, which is unsigned. The difference of a key below `best` wraps around and becomes large;
    the next key has the largest difference. That is an addition and a maximum per key, which are one instruction.
    """
    step = keys[0] - best
    for chunk in tl.static_range(1, len(keys)):
        step = tl.maximum(step, keys[chunk] - best)
    return best + tl.max(step, 0)


@triton.jit
def expert_of(key):
    """The expert of a key of `load_keys`."""
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
def softmax_of(keys):
    """The softmax over the logits of `keys`, a tuple with the largest first: a tuple of numbers."""
    largest = logit_of(keys[0])
    powers = ()
    total = 0.0
    for rank in tl.static_range(len(keys)):
        power = tl.exp(logit_of(keys[rank]) - largest)
        powers = powers + (power,)  # type: ignore[assignment]  # noqa: RUF005
        total += power
    shares = ()
    for rank in tl.static_range(len(keys)):
        shares = shares + (powers[rank] / total,)  # type: ignore[assignment]  # noqa: RUF005
    return shares
