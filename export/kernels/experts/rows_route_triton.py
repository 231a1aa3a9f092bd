# mypy: allow-untyped-defs
"""The router of `rows_triton`: the logits, the choice of experts, and the rows in the form that the experts take.

Both kernels start early (`early_start_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_grouped_triton import PIECE, element_at
from ostinato.export.kernels.linear.rows_tiles_triton import nibble_order

from .rows_fixed_triton import store_planes
from .rows_schedule_triton import WORD
from .step_route_triton import LANES, expert_of, key_of, largest_keys, softmax_of


@triton.jit
def route_rows_early(
    x,
    norm,
    gate,
    logits,
    squares,
    members,
    rows,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write the logits in parts: a program multiplies a slice of WORD rows of `x * norm` by a slice of TILE gate rows.

    A slice is SLICE of the SIZE elements of a row.

    Args:
        logits: [slices, R, EXPERTS] float32: the products of each slice, without the rows' factors 1 / rms.
        squares: [slices, R] float32: the sums of x^2 over each slice.
        members: [R / WORD, EXPERTS] int32: set to zeros for `choose_rows_early`.
    """
    start_next(EARLY)
    SLICES: tl.constexpr = (SIZE + SLICE - 1) // SLICE
    part = tl.program_id(0)
    expert = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.program_id(2)
    row = word * WORD + tl.arange(0, WORD)
    column = part * SLICE + tl.arange(0, SLICE)
    inside = column < SIZE
    here = inside[:, None] & (expert < EXPERTS)[None, :]
    weights = tl.load(gate + expert[None, :] * SIZE + column[:, None], mask=here, other=0.0)
    factor = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(EARLY)
    values = tl.load(x + row[:, None] * SIZE + column[None, :], mask=inside[None, :] & (row < rows)[:, None], other=0.0)
    values = values.to(tl.float32)
    products = tl.dot((values * factor[None, :]).to(weights.dtype), weights, input_precision="tf32x3")
    first = logits + (part * rows + row) * EXPERTS
    tl.store(first[:, None] + expert[None, :], products, mask=(row < rows)[:, None] & (expert < EXPERTS)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares + part * rows + row, tl.sum(values * values, 1), mask=row < rows)
    if part == SLICES - 1:
        tl.store(members + word * EXPERTS + expert, tl.zeros([TILE], tl.int32), mask=expert < EXPERTS)


@triton.jit
def choose_rows_early(
    x,
    norm,
    shared_gate,
    logits,
    squares,
    slots,
    prepared,
    x_scale,
    x_sums,
    members,
    ranks,
    shares,
    rows,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    FIXED: tl.constexpr,
    GROUPED: tl.constexpr,
    SUMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Choose each row's experts in one program, and prepare the normed row for them in another.

    Args:
        prepared: with FIXED, [R, 2, SIZE] int8: the upper and lower bytes of the normed rows, in `nibble_order`. Otherwise
            [R, SIZE] in x's dtype: the normed rows, with GROUPED in the order of `element_at`.
        x_scale: with FIXED, [R, SIZE / 128] float32: the scales of `prepared`. Otherwise not used.
        x_sums: with SUMS, [R, SIZE / PIECE] float32: the sums of the pieces of `prepared`. Otherwise not used.
        members: [R / WORD, EXPERTS] int32: bit r % WORD of [r // WORD, e] is set if row r takes expert e.
        ranks: [R, EXPERTS] uint8. Where a row takes an expert: the expert's rank among the row's logits, 0 for the largest.
        shares: [R, k (+ 1)] float32: the chosen experts' softmax weights, and with SHARED the shared expert's weight.
        SLOTS: whether `slots` is given; without it no row is padding.
        GROUPS: number of groups of 128 elements, a power of two; they cover SIZE.
    """
    start_next(EARLY)
    row = tl.program_id(0)
    # The loads are not in a function of their own: if it returned their values, torch would take `squares` as written.
    part = tl.arange(0, triton.next_power_of_2(SLICES))
    if tl.program_id(1) == 0:
        NARROW: tl.constexpr = x.dtype.element_ty == tl.bfloat16
        wait_for_previous(EARLY)
        filled = tl.load(slots + row) >= 0 if SLOTS else row < rows
        sums = tl.load(squares + part * rows + row, mask=part < SLICES, other=0.0)
        factor = tl.rsqrt(tl.sum(sums, 0) / SIZE + EPS)
        _choose(logits, factor, filled, members, ranks, shares, row, rows, EXPERTS, TOP_K, SHARED, SLICES, NARROW)
    else:
        # Elements have two dimensions from the start. If they were reshaped to two, they would be stored byte by byte.
        group = tl.arange(0, GROUPS)
        element = tl.arange(0, 128)[None, :]
        place = group[:, None] * 128 + element
        column = element_at(place) if GROUPED else place
        inside = column < SIZE
        weight = tl.load(norm + column, mask=inside, other=0.0)
        gate = weight
        if SHARED:
            gate = tl.load(shared_gate + column, mask=inside, other=0.0).to(tl.float32)
        wait_for_previous(EARLY)
        sums = tl.load(squares + part * rows + row, mask=part < SLICES, other=0.0)
        normed = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        normed *= tl.rsqrt(tl.sum(sums, 0) / SIZE + EPS) * weight
        if FIXED:
            to = prepared + row * (2 * SIZE) + group[:, None] * 128 + nibble_order(element)
            scales = x_scale + row * (SIZE // 128) + group
            store_planes(to, scales, normed, 1, inside, group < SIZE // 128, SIZE)
        else:
            rounded = normed.to(prepared.dtype.element_ty)
            tl.store(prepared + row * SIZE + place, rounded, mask=inside)
            if SUMS:
                sums_of_pieces = tl.sum(tl.reshape(rounded.to(tl.float32), [GROUPS * (128 // PIECE), PIECE]), 1)
                piece = tl.arange(0, GROUPS * (128 // PIECE))
                tl.store(x_sums + row * (SIZE // PIECE) + piece, sums_of_pieces, mask=piece < SIZE // PIECE)
        if SHARED:
            share = tl.sigmoid(tl.sum(tl.sum(normed * gate, 1), 0))
            tl.store(shares + row * (TOP_K + 1) + TOP_K, share)


@triton.jit
def _choose(
    logits,
    factor,
    filled,
    members,
    ranks,
    shares,
    row,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SLICES: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Choose the experts of one row. NARROW: whether logits are rounded to bfloat16, as in a step of one token."""
    keys = ()
    for start in tl.static_range(0, EXPERTS, LANES):
        expert = start + tl.arange(0, LANES)
        value = tl.zeros([LANES], tl.float32)
        for part in tl.static_range(SLICES):
            value += tl.load(logits + (part * rows + row) * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
        key = key_of((value * factor).to(tl.bfloat16 if NARROW else tl.float32), expert)
        keys = keys + (tl.where(expert < EXPERTS, key, 0),)  # type: ignore[assignment]  # noqa: RUF005
    chosen = largest_keys(keys, TOP_K)
    weights = softmax_of(chosen)
    for i in tl.static_range(TOP_K):
        expert = expert_of(chosen[i])
        # Each row sets a bit of its own, so the order of the rows does not matter.
        tl.atomic_or(members + row // WORD * EXPERTS + expert, 1 << row % WORD, mask=filled, sem="relaxed")
        tl.store(ranks + row * EXPERTS + expert, i, mask=filled)
        tl.store(shares + row * (TOP_K + 1 if SHARED else TOP_K) + i, weights[i])
