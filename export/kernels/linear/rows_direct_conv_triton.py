# mypy: allow-untyped-defs
"""The short convolution behind a product of few rows, in the program that has the channel's weight row.

A row's inputs are its own product (`rows_direct_triton`) and those of TAPS - 1 tokens before it: of rows before it in its
run, else of the slot's state. `slot` is the slot of each row, -2 behind the last; `offset` is how many rows of its run stand
before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_taps(conv_ptr, channel, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The factors [OUTPUTS] of a row's input, of the one before, and so on, float32: a tuple."""
    taps = ()
    for tap in tl.static_range(TAPS):
        factor = tl.load(conv_ptr + channel * TAPS + (TAPS - 1 - tap), mask=channel < CHANNELS, other=0.0)
        taps = taps + (factor.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return taps


@triton.jit
def offset_in_run(slots_ptr, slot, row, rows):
    """How many rows of each row's run stand before it [COLUMNS]."""
    others = tl.load(slots_ptr + row, mask=row < rows, other=-2)
    before = (others[:, None] == slot[None, :]) & (row[:, None] < row[None, :])
    return tl.sum(before.to(tl.int32), 0)


@triton.jit
def load_past(state_ptr, positions_ptr, slot, offset, channel, row, rows, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Inputs [OUTPUTS, COLUMNS] that were 1, 2, ... tokens before each row, where its slot's state has them: a tuple.

    Zeros for those that rows of this call have, and where the slot begins anew.
    """
    position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    known = (slot >= 0) & (position > offset)
    cells = state_ptr + tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS) + (TAPS - 1 + offset) * CHANNELS
    past = ()
    for tap in tl.static_range(1, TAPS):
        inside = (channel < CHANNELS)[:, None] & (known & (offset < tap))[None, :]
        value = tl.load(cells[None, :] + (channel[:, None] - tap * CHANNELS), mask=inside, other=0.0)
        past = past + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return past


@triton.jit
def store_convolved(
    product,
    taps,
    past,
    out_ptr,
    state_ptr,
    slots_ptr,
    slot,
    offset,
    channel,
    row,
    rows,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Store SiLU of the convolution of product [OUTPUTS, COLUMNS] over the rows of each run, and the new states.

    Outputs behind the channels are stored as they are.
    """
    convolved = (channel < CHANNELS)[:, None]
    newest = product.to(out_ptr.dtype.element_ty).to(tl.float32)
    ends = (slot >= 0) & (tl.load(slots_ptr + row + 1, mask=row + 1 < rows, other=-2) != slot)
    cells = state_ptr + tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS)
    cells = cells[None, :] + channel[:, None]
    mixed = newest * taps[0][:, None]
    for tap in tl.static_range(TAPS):
        value = newest
        if tap > 0:
            before = tl.broadcast_to(tl.maximum(row - tap, 0)[None, :], newest.shape)
            value = tl.where((offset >= tap)[None, :], tl.gather(newest, before, 1), past[tap - 1].to(tl.float32))
            mixed += value * taps[tap][:, None]
        if tap < TAPS - 1:
            moved = value.to(state_ptr.dtype.element_ty)
            tl.store(cells + (TAPS - 2 - tap) * CHANNELS, moved, mask=convolved & ends[None, :])
    mixed = tl.where(convolved, mixed * tl.sigmoid(mixed), newest)
    inside = (channel < N)[:, None] & (row < rows)[None, :]
    tl.store(out_ptr + (row[None, :] * N + channel[:, None]), mixed.to(out_ptr.dtype.element_ty), mask=inside)
