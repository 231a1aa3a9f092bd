# mypy: allow-untyped-defs
"""The kernels of `step_moe_triton`, over weights in the layout of `int4`, multiplied as `int4_triton` says."""

from __future__ import annotations

import triton
import triton.language as tl

from .early_triton import start_next, wait_for_previous
from .int4_triton import SHIFT

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
def add_pairs(a, b, c, d):
    """For a reduction of two tensors in one pass."""
    return a + c, b + d


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
    """Eight inputs with their `place_factor`, then what the 8s in the low and in the high nibbles add: -8 2^-149 sum(x 2^p)."""
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
