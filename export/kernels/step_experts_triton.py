# mypy: allow-untyped-defs
"""The kernels of `step_moe_triton` over the experts: weights laid out as `int4` says, multiplied as `int4_triton` does."""

from __future__ import annotations

import triton
import triton.language as tl

from .early_triton import start_next, wait_for_previous
from .int4_triton import SHIFT
from .step_route_triton import add_pairs, expert_of, largest_keys, load_keys, store_routes


@triton.jit
def experts_gate_up_early(
    h,
    norm_weight,
    logits,
    gate_up,
    gate_up_scale,
    shared,
    shared_scale,
    hidden,
    weights,
    chosen,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """hidden = silu(gate) * up, ROWS of one expert's rows a program: the shared expert's programs, then the routed ones'.

    The later a program's expert is in the order of the weights, the longer it takes to find and the earlier it starts.
    """
    start_next(EARLY)
    BLOCKS: tl.constexpr = INNER // ROWS
    SHARED_BLOCKS: tl.constexpr = SHARED_INNER // ROWS
    factors = norm_factors(norm_weight, SIZE, BLOCK)
    program = tl.program_id(0)
    element = tl.arange(0, BLOCK * 8)
    row = tl.arange(0, ROWS)
    if program < SHARED_BLOCKS:
        first = program * ROWS
        tile = load_pairs(shared, shared_scale, first, SHARED_INNER, SIZE, GROUP, ROWS, BLOCK)
        wait_for_previous(EARLY)
        x = tl.load(h + element, mask=element < SIZE, other=0.0)
        activations = swiglu(prepare(x, factors, EPS, SIZE, BLOCK), tile, GROUP)
        tl.store(hidden + TOP_K * INNER + first + row, activations.to(hidden.dtype.element_ty))
    else:
        slot = TOP_K - 1 - (program - SHARED_BLOCKS) // BLOCKS
        first = (program - SHARED_BLOCKS) % BLOCKS * ROWS
        wait_for_previous(EARLY)
        keys = load_keys(logits, EXPERTS)
        x = tl.load(h + element, mask=element < SIZE, other=0.0)
        key, ranked = largest_keys(keys, slot, PLACES)
        tile = load_pairs(gate_up, gate_up_scale, expert_of(key) * (2 * INNER) + first, INNER, SIZE, GROUP, ROWS, BLOCK)
        # In one block with the loads: the compiler knows there that the weights take longest and puts products last.
        prepared = prepare(x, factors, EPS, SIZE, BLOCK)
        if program == SHARED_BLOCKS:
            # Its rank is the last, so it knows them all.
            store_routes(logits, ranked, weights, chosen, EXPERTS, TOP_K, PLACES, SHARED_INNER > 0)
        activations = swiglu(prepared, tile, GROUP)
        tl.store(hidden + slot * INNER + first + row, activations.to(hidden.dtype.element_ty))


@triton.jit
def experts_down_early(
    hidden,
    weights,
    chosen,
    down,
    down_scale,
    shared,
    shared_scale,
    residual,
    out,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED_WORDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [SIZE] = residual + the weighted sum over the experts, ROWS of it a program, all experts' rows loaded together."""
    start_next(EARLY)
    ROW: tl.constexpr = INNER // 8
    GROUPS: tl.constexpr = INNER // GROUP
    SHARED_ROW: tl.constexpr = SHARED_INNER // 8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if SHARED_INNER > 0:
        tile = load_rows(shared, shared_scale, row, SHARED_ROW, SHARED_INNER // GROUP, GROUP, SHARED_WORDS)
    wait_for_previous(EARLY)
    slot, word, lane = tl.arange(0, SLOTS), tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    used = slot < TOP_K
    expert = tl.load(chosen + slot, mask=used, other=0).to(tl.int64)
    share = tl.load(weights + slot, mask=used, other=0.0)
    element = tl.arange(0, WORDS * 8)
    pointers = hidden + slot[:, None] * INNER + element[None, :]
    x = tl.load(pointers, mask=used[:, None] & (element < INNER)[None, :], other=0.0)
    if SHARED_INNER > 0:
        shared_element = tl.arange(0, SHARED_WORDS * 8)
        shared_x = tl.load(hidden + TOP_K * INNER + shared_element, mask=shared_element < SHARED_INNER, other=0.0)
        shared_share = tl.load(weights + TOP_K)
    total = tl.load(residual + row)
    pointers = down.to(tl.pointer_type(tl.int32)) + expert * (SIZE * ROW)
    # Experts first: the compiler then spreads them over the warps and leaves rows, which share the inputs, to a thread.
    pointers = pointers[:, None, None] + row[None, :, None] * ROW + word[None, None, :]
    words = tl.load(pointers, mask=(used[:, None] & (word < ROW)[None, :])[:, None, :], other=0)
    pointers = down_scale + expert * (SIZE * GROUPS)
    # Rows first: the sums end where the store wants them.
    pointers = pointers[None, :, None] + row[:, None, None] * GROUPS + (lane // 2 * 64 // GROUP)[None, None, :]
    scales = two_scales(pointers, (used[:, None] & (lane * 4 < ROW)[None, :])[None, :, :], GROUP)
    total = total.to(tl.float32)
    if SHARED_INNER > 0:
        shared_x = shared_x.to(tl.float32) * (place_factor(shared_element) * shared_share)
        inputs = with_offsets(by_nibble(shared_x, SHARED_WORDS))
        total += tl.sum(scaled(multiply_rows(tile[0], inputs, GROUP), tile[1], GROUP), 1) * 2.0 ** (149 - SHIFT)
    x = x.to(tl.float32) * (place_factor(element)[None, :] * share[:, None])
    inputs = with_offsets(by_nibble(tl.reshape(x, [SLOTS * WORDS * 8]), SLOTS * WORDS))
    low, high = multiply_rows(words, inputs, GROUP)
    sums = scaled((tl.permute(low, [1, 0, 2]), tl.permute(high, [1, 0, 2])), scales, GROUP)
    sums = tl.sum(tl.reshape(sums, [ROWS, SLOTS * WORDS // 4]), 1) * 2.0 ** (149 - SHIFT)
    tl.store(out + row, (total + sums).to(out.dtype.element_ty))


@triton.jit
def norm_factors(norm_weight, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(1 + norm_weight) * `place_factor` [8 BLOCK]."""
    element = tl.arange(0, BLOCK * 8)
    factor = 1.0 + tl.load(norm_weight + element, mask=element < SIZE, other=0.0)
    return factor * place_factor(element)


@triton.jit
def place_factor(element):
    """2^(SHIFT - p) for elements of a row, p being the place of the nibble that each meets."""
    place = tl.minimum(element % 4 * 8, 16) + element % 64 // 32 * 4
    return ((-place + (127 + SHIFT)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def by_nibble(x, BLOCK: tl.constexpr):
    """Elements [8 BLOCK] as eight [BLOCK]: those that the nibbles of each word meet, in the order of the nibbles."""
    # span, half, word, two bits of the byte -> word, byte, half
    words = tl.permute(tl.reshape(x, [BLOCK // 8, 2, 8, 4]), [0, 2, 3, 1])
    low, high = tl.split(tl.reshape(words, [BLOCK, 2, 2, 2]))
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    x0, x4 = tl.split(low_even)
    x2, x6 = tl.split(low_odd)
    x1, x5 = tl.split(high_even)
    x3, x7 = tl.split(high_odd)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def load_pairs(
    words,
    scales,
    first,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate rows from `first` on and the up rows INNER further on: words [ROWS, BLOCK] of both, `two_scales` of both."""
    # The place of the first is one number for the program, so that what a thread adds to it is small and known before.
    words = words.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * (SIZE // 8)
    scales += first.to(tl.int64) * (SIZE // GROUP)
    row, word, chunk = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
    offsets = row[:, None] * (SIZE // 8) + word[None, :]
    gate = tl.load(words + offsets, mask=(word < SIZE // 8)[None, :], other=0)
    up = tl.load(words + INNER * (SIZE // 8) + offsets, mask=(word < SIZE // 8)[None, :], other=0)
    row = row[:, None, None] + tl.arange(0, 2)[None, None, :] * INNER
    pointers = scales + (row * (SIZE // GROUP) + (chunk // 2 * 64 // GROUP)[None, :, None])
    return gate, up, two_scales(pointers, (chunk < SIZE // 32)[None, :, None], GROUP)


@triton.jit
def load_rows(words, scales, row, ROW: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of an int4 weight, whole: the packed words [rows, BLOCK], and `two_scales` of them."""
    word = tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK // 4)
    pointers = words.to(tl.pointer_type(tl.int32)) + row[:, None] * ROW + word[None, :]
    packed = tl.load(pointers, mask=(word < ROW)[None, :], other=0)
    pointers = scales + row[:, None] * GROUPS + (lane // 2 * 64 // GROUP)[None, :]
    return packed, two_scales(pointers, (lane * 4 < ROW)[None, :], GROUP)


@triton.jit
def two_scales(pointers, mask, GROUP: tl.constexpr):
    """The scales of four words' low and of their high nibbles, from pointers to the low ones' group."""
    low = tl.load(pointers, mask=mask, other=0.0)
    high = low
    if GROUP == 32:
        high = tl.load(pointers + 1, mask=mask, other=0.0)
    return low, high


@triton.jit
def prepare(x, factors, EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """What `multiply_rows` takes of the normed inputs, all but one factor, and that factor."""
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPS) * 2.0 ** (149 - SHIFT)
    return with_offsets(by_nibble(x * factors, BLOCK)), scale


@triton.jit
def swiglu(prepared, tile, GROUP: tl.constexpr):
    """silu(gate) * up [ROWS] of what `prepare` and `load_pairs` gave."""
    inputs, scale = prepared
    gate, up, scales = tile
    gates, ups = multiply_rows(gate, inputs, GROUP), multiply_rows(up, inputs, GROUP)
    # Joined, they pass through shared memory once.
    sums = scaled((tl.join(gates[0], ups[0]), tl.join(gates[1], ups[1])), scales, GROUP)
    is_up = (tl.arange(0, 2) == 1)[None, None, :]
    gates, ups = tl.where(is_up, 0.0, sums), tl.where(is_up, sums, 0.0)
    shape: tl.constexpr = [gate.shape[0], gate.shape[1] // 2]
    gates, ups = tl.reduce((tl.reshape(gates, shape), tl.reshape(ups, shape)), 1, add_pairs)
    gates, ups = gates * scale, ups * scale
    return gates * tl.sigmoid(gates) * ups


@triton.jit
def with_offsets(x):
    """Eight inputs with their `place_factor`, then what the 8s in the low and the high nibbles add: -8 2^-149 sum(x 2^p)."""
    # In two factors: a constant that is no normal float32 would be taken for a float64.
    low = ((x[0] + x[2] * 2.0**8) + (x[4] + x[6]) * 2.0**16) * (-8.0 * 2.0**-60)
    high = ((x[1] * 2.0**4 + x[3] * 2.0**12) + (x[5] + x[7]) * 2.0**20) * (-8.0 * 2.0**-60)
    low, high = low * 2.0**-89, high * 2.0**-89
    return x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], low, high


@triton.jit
def multiply_rows(words, x, GROUP: tl.constexpr):
    """Packed words [R, W] or [S, R, W] times what `with_offsets` gave, times 2^(SHIFT - 149), summed over four words.

    Two sums, of the low and of the high nibbles, where these have scales of their own; else the second is that of both.
    """
    shifted = words >> 8
    low = across_rows(x[8] if GROUP == 32 else x[8] + x[9], words)
    low = add_nibble(low, words, x[0], 0)
    low = add_nibble(low, words, x[2], 8)
    low = add_nibble(low, words, x[4], 16)
    low = add_nibble(low, shifted, x[6], 16)
    high = across_rows(x[9], words) if GROUP == 32 else low
    high = add_nibble(high, words, x[1], 4)
    high = add_nibble(high, words, x[3], 12)
    high = add_nibble(high, words, x[5], 20)
    high = add_nibble(high, shifted, x[7], 20)
    return sum_fours(low), sum_fours(high)


@triton.jit
def scaled(sums, scales, GROUP: tl.constexpr):
    """What `multiply_rows` gave times `two_scales`, in one sum."""
    total = sums[1] * scales[1].to(tl.float32)
    if GROUP == 32:
        total += sums[0] * scales[0].to(tl.float32)
    return total


@triton.jit
def add_nibble(total, words, x, PLACE: tl.constexpr):
    """total + 2^(SHIFT - 149) x (the nibble at bit PLACE of each word); x has its `place_factor`."""
    return total + (words & (15 << PLACE)).to(tl.float32, bitcast=True) * across_rows(x, words)


@triton.jit
def across_rows(x, words):
    """x [W] as [1, W], or x [S W] as [S, 1, W]."""
    if len(words.shape) == 2:
        return x[None, :]
    else:
        return tl.reshape(x, [words.shape[0], words.shape[2]])[:, None, :]


@triton.jit
def sum_fours(x):
    """Sums of four neighbours along the last axis: those that a thread has."""
    return tl.sum(tl.reshape(x, x.shape[:-1] + [x.shape[-1] // 4, 4]), len(x.shape))  # noqa: RUF005
