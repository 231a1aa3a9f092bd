# mypy: allow-untyped-defs
"""Rows in fixed point times int4 weights in groups of 128: products of bytes on tensor cores.

The two planes of a row (`rows_prepare_triton`) are two neighbouring columns of the product, so that a thread holds both.
Weights are the left operand, unpacked in registers with three instructions for eight weights. The sums over a group are exact
integers. A row's result depends on that row alone, and its sums always have the same order. So the result is the same bits,
whatever stands in the other rows, and in whichever column the row stands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_tiles_triton import BLOCK, load_scale_pairs, unpack_bytes
from .scales_triton import of_pair

# Rows of `gates` per program: the smallest number that tensor cores multiply.
GATE_ROWS = tl.constexpr(16)


@triton.jit
def fixed_rows_early(
    planes_ptr,
    factors_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    gates_ptr,
    normed_ptr,
    gated_ptr,
    counters_ptr,
    parts_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N]: the product of rows in fixed point with a weight, and the operations behind it.

    A program has COLUMNS input rows and ROWS weight rows; with SWIGLU, ROWS gate rows and ROWS up rows. K is a multiple of
    256. Program (block of input rows, part of K, tile of weight rows): programs that read the same weights are neighbours.
    The first tiles are rows of gates [GATES, K]; the other programs need not wait for them.

    The kernel is a *late* one (R3 in `delegate/graphs/nodes.py`): the next kernel starts after this kernel's wait.
    12,288 x 2,048 then takes 7.9, 8.0 and 8.4 us with 2, 8 and 16 rows. It takes 10.0 to 10.9 us if the next kernel starts at
    the beginning, and 8.5 to 8.8 if the next kernel starts after the loop. With COLUMNS of more than 16 it starts after the
    loop: the products of a layer 4,096 and 14,336 wide take 102 us with 32 rows, not 107 (H100, 2026-11-26).

    planes and factors have room for all COLUMNS of the last block. With COLUMNS of 16 or fewer, columns past the last row are
    not read.
    """
    rows = tl.cast(rows, tl.int32)
    GATE_TILES: tl.constexpr = (GATES + GATE_ROWS - 1) // GATE_ROWS
    tile = tl.program_id(2) - GATE_TILES
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if GATES > 0 and tile < 0:
        wait_for_previous(EARLY)
        start_next(EARLY)
        if tl.program_id(1) == 0:
            write_gates(normed_ptr, gates_ptr, gated_ptr, rows, row, tl.program_id(2) * GATE_ROWS, GATES, K, COLUMNS)
    else:
        output = tile * ROWS + tl.arange(0, ROWS)
        sums, ups = multiply_part(
            planes_ptr, factors_ptr, weight_ptr, scale_ptr, output, row, rows, N, K, SWIGLU, ROWS, COLUMNS,
            SPLITS, EARLY,
        )  # fmt: skip
        write_outputs(
            sums, ups, bias_ptr, residual_ptr, counters_ptr, parts_ptr, out_ptr, output, row, rows, tile, N, BIAS,
            RESIDUAL, SWIGLU, GATE_TILES, COLUMNS, SPLITS,
        )  # fmt: skip


@triton.jit
def write_outputs(
    sums,
    ups,
    bias_ptr,
    residual_ptr,
    counters_ptr,
    parts_ptr,
    out_ptr,
    output,
    row,
    rows,
    tile,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    GATE_TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Write out [R, N] for outputs [ROWS] and rows [COLUMNS]: their products, and the operations behind these."""
    inside = (output < N)[:, None] & (row < rows)[None, :]
    begin = tl.program_id(0).to(tl.int64) * (COLUMNS * N)
    offsets = tl.arange(0, COLUMNS)[None, :] * N + output[:, None]
    if SPLITS > 1:
        counter = counters_ptr + tl.program_id(0) * (tl.num_programs(2) - GATE_TILES) + tile
        sums, inside = sum_of_parts(sums, parts_ptr + begin, counter, offsets, inside, rows, N, SPLITS)
    sums = with_bias(sums, bias_ptr, output, N, BIAS)
    if SWIGLU:
        sums *= tl.sigmoid(sums) * with_bias(ups, bias_ptr + N, output, N, BIAS)
    if RESIDUAL:
        sums += tl.load(residual_ptr + begin + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + begin + offsets, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def multiply_part(
    planes_ptr,
    factors_ptr,
    weight_ptr,
    scale_ptr,
    output,
    row,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products of outputs [ROWS] and rows [COLUMNS] over this program's part of K; with SWIGLU also those of outputs + N."""
    # Masks for more than 16 columns would take registers that a third program on a multiprocessor needs.
    MASKED: tl.constexpr = COLUMNS <= 16
    PAIRS: tl.constexpr = K // 256
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    AT_ONCE: tl.constexpr = (PAIRS + SPLITS - 1) // SPLITS
    begin = tl.program_id(1) * AT_ONCE
    end = tl.minimum(begin + AT_ONCE, PAIRS)
    first = tl.minimum(begin, PAIRS - 1)
    # Rows past the last read the last row again.
    at = output if N % ROWS == 0 else tl.minimum(output, N - 1)
    scales = load_scale_pairs(scale_ptr, at, first, K)
    up_scales = scales
    if SWIGLU:
        up_scales = load_scale_pairs(scale_ptr, at + N, first, K)
    wait_for_previous(EARLY)
    if MASKED:
        start_next(EARLY)
    factors = load_factors(factors_ptr, row, first, rows, K, MASKED)
    weights_at = weight_ptr + at[:, None] * (K // 2) + tl.arange(0, BLOCK // 2)[None, :]
    column = tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
    planes_at = planes_ptr + column[None, :] * K + tl.arange(0, BLOCK)[:, None]
    filled = (column < 2 * rows)[None, :]
    sums = tl.zeros([output.shape[0], COLUMNS], tl.float32)
    ups = sums
    for pair in range(begin, end):
        # The next pair's scales are loaded while this pair is multiplied.
        following = tl.minimum(pair + 1, PAIRS - 1)
        next_scales = load_scale_pairs(scale_ptr, at, following, K)
        next_factors = load_factors(factors_ptr, row, following, rows, K, MASKED)
        next_up_scales = next_scales
        if SWIGLU:
            next_up_scales = load_scale_pairs(scale_ptr, at + N, following, K)
        for half in tl.static_range(2):
            block = pair * 2 + half
            planes = tl.load(planes_at + block * BLOCK, mask=filled if MASKED else None, other=0 if MASKED else None)
            factor = of_float_pair(factors, half)[None, :]
            weights = tl.load(weights_at + block * (BLOCK // 2))
            sums += products(weights, planes) * (of_pair(scales, half, SCALE)[:, None] * factor)
            if SWIGLU:
                weights = tl.load(weights_at + (N * (K // 2) + block * (BLOCK // 2)))
                ups += products(weights, planes) * (of_pair(up_scales, half, SCALE)[:, None] * factor)
        scales, up_scales, factors = next_scales, next_up_scales, next_factors
    if not MASKED:
        start_next(EARLY)
    return sums, ups


@triton.jit
def products(weights, planes):
    """Packed weights [ROWS, 64] times both planes [128, 2 COLUMNS] -> [ROWS, COLUMNS] float32."""
    low, high = unpack_bytes(weights)
    # [ROWS, 64, 2] -> [ROWS, 128]: first the low nibbles, then the high nibbles, which stay in their registers.
    unpacked = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (weights.shape[0], BLOCK))
    sums = tl.dot(unpacked, planes, out_dtype=tl.int32)
    upper, lower = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
    return (upper * 256 + lower).to(tl.float32)


@triton.jit
def load_factors(factors_ptr, row, pair, rows, K: tl.constexpr, MASKED: tl.constexpr):
    """The rows' scales [COLUMNS] of two neighbouring blocks, as one int64."""
    pointers = factors_ptr.to(tl.pointer_type(tl.int64)) + row * (K // 256) + pair
    return tl.load(pointers, mask=row < rows, other=0) if MASKED else tl.load(pointers)


@triton.jit
def of_float_pair(pairs, SECOND: tl.constexpr):
    """The first or the second float32 of each int64."""
    return ((pairs >> 32) if SECOND else pairs).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_parts(sums, parts_ptr, counter, offsets, inside, rows, N: tl.constexpr, SPLITS: tl.constexpr):
    """Write this program's sums [ROWS, COLUMNS] to parts [SPLITS, R, N] float32, and add up all parts if it is the last.

    Args:
        counter: the tile's counter, 0 at first: how many of the tile's programs have written.
        offsets: offsets of the sums in [R, N], from `parts_ptr` on.
        inside: mask of the sums that belong to an output and a row.

    Returns:
        The sum of the parts, always added in the same order, and `inside`, all false unless this program is the last.
    """
    every = tl.cast(rows, tl.int64) * N
    tl.store(parts_ptr + tl.program_id(1) * every + offsets, sums, mask=inside)
    tl.debug_barrier()
    last = inside & (tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1)
    total = tl.zeros(sums.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        # Read past the first-level cache, which other programs' writes do not reach.
        total += tl.load(parts_ptr + split * every + offsets, mask=last, other=0.0, cache_modifier=".cg")
    return total, last


@triton.jit
def with_bias(sums, bias_ptr, output, N: tl.constexpr, BIAS: tl.constexpr):
    """sums [ROWS, COLUMNS] + the bias of the outputs [ROWS]."""
    return sums + tl.load(bias_ptr + output, mask=output < N, other=0.0).to(tl.float32)[:, None] if BIAS else sums


@triton.jit
def write_gates(
    normed_ptr, gates_ptr, gated_ptr, rows, row, first, GATES: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write gated [R, GATES] float32: normed rows [R, K] times GATE_ROWS rows of gates [GATES, K]. Four warps divide K."""
    gate = first + tl.arange(0, GATE_ROWS)
    part = tl.arange(0, 4)[:, None, None] * 64
    along = tl.arange(0, 64)
    sums = tl.zeros([4, GATE_ROWS, COLUMNS], tl.float32)
    weights_at = gates_ptr + gate[None, :, None] * K + part + along[None, None, :]
    normed_at = normed_ptr + row[None, None, :].to(tl.int64) * K + part + along[None, :, None]
    # The stages take no more shared memory than the products do.
    for start in tl.range(0, K, 256, num_stages=4 if COLUMNS <= 16 else 2):
        known = (gate < GATES)[None, :, None]
        filled = (row < rows)[None, None, :]
        if K % 256 != 0:
            # The last part of K may be no warp's, or that of some.
            known &= start + part + along[None, None, :] < K
            filled &= start + part + along[None, :, None] < K
        weights = tl.load(weights_at + start, mask=known, other=0.0)
        normed = tl.load(normed_at + start, mask=filled, other=0.0)
        sums = tl.dot(weights, normed, sums)
    inside = (gate < GATES)[:, None] & (row < rows)[None, :]
    tl.store(gated_ptr + row[None, :].to(tl.int64) * GATES + gate[:, None], tl.sum(sums, 0), mask=inside)
