"""A gated delta-net's convolution for R rows of several sessions. R is not known before the kernel is launched.

A program has a block of channels. Only the program of a run's first row reads and writes the state of these channels, once,
however long the run is. The same program takes the next rows of the run, if they need the old state, too. All
other rows have programs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, row_vector, starts_early
from ostinato.export.kernels.operands import Convolution, RowIndex


@dataclass(frozen=True)
class ConvConfig:
    """Channels and warps of one program."""

    channels: int
    warps: int


# 8/16/64/128 single rows take 1.5/1.8/5.6/9.1 us, a run of 128 takes 6.4; with 2 warps 1.9/2.8/8.2/12.9 and 10.9.
CONV = ConvConfig(channels=512, warps=4)


def conv_rows(product: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
    """See `reference.conv_rows`; all tensors contiguous, R <= MAX_ROWS.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graphs/nodes.py`).
    """
    return _conv_rows(product, conv.weight, conv.state, index.positions, index.slots)


@torch.library.triton_op("ostinato::conv_rows", mutates_args={"state"})
def _conv_rows(product: Tensor, weight: Tensor, state: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    rows, columns = product.shape
    channels, _, taps = weight.shape
    mixed = torch.empty_like(product)
    blocks = triton.cdiv(channels, CONV.channels) + triton.cdiv(columns - channels, CONV.channels)
    launcher(conv_rows_early)[(blocks, rows)](
        product,
        weight,
        state,
        positions,
        slots,
        mixed,
        rows,
        N=columns,
        CHANNELS=channels,
        TAPS=taps,
        BLOCK=CONV.channels,
        ROWS=row_vector(rows),
        EARLY=starts_early(),
        num_warps=CONV.warps,
    )
    return mixed


@triton.jit
def conv_rows_early(
    product: tl.tensor,
    weight: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    mixed: tl.tensor,
    rows: tl.tensor,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of columns, row). The program of a run's first row takes all rows that need the old state, and writes
    the new state. Blocks of columns behind the channels are copied."""
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    CONVOLVED: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = tl.program_id(1)
    product += row.to(tl.int64) * N
    mixed += row.to(tl.int64) * N
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) >= CONVOLVED:
        column += CHANNELS - CONVOLVED * BLOCK
        wait_for_previous(EARLY)
        tl.store(mixed + column, tl.load(product + column, mask=column < N, other=0.0), mask=column < N)
        return
    slot = tl.load(slots + row)
    # Number of rows of the same run ahead of this row, as far as the taps reach.
    ahead = 0
    for tap in tl.static_range(1, TAPS):
        before = tl.load(slots + tl.maximum(row - tap, 0), mask=row >= tap, other=-2)
        ahead += ((before == slot) & (ahead == tap - 1)).to(tl.int32)
    if (ahead > 0) & (ahead < TAPS - 1):
        return
    inside = column < CHANNELS
    taps = weight + column * TAPS
    factors = ()
    for tap in tl.static_range(0, TAPS):
        # The factor of the input `tap` rows ago.
        factors += (tl.load(taps + (TAPS - 1 - tap), mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    if ahead == 0:
        every = tl.arange(0, ROWS)
        others = tl.load(slots + every, mask=every < rows, other=-2)
        # A slot has one run, padding may have several: only rows of a slot are counted.
        length = tl.where(slot >= 0, tl.sum((others == slot).to(tl.int32), 0), 1)
        old = inside & (slot >= 0) & (tl.load(positions + row) > 0)
        cells = state + tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS) + column
        past = ()
        for tap in tl.static_range(1, TAPS):
            past += (tl.load(cells + (TAPS - 1 - tap) * CHANNELS, mask=old, other=0.0),)  # type: ignore[assignment]
        wait_for_previous(EARLY)
        inputs = ()
        for index in tl.static_range(0, TAPS - 1):
            here = inside & (index < length)
            inputs += (tl.load(product + index * N + column, mask=here, other=0.0),)  # type: ignore[assignment]
        last = ()
        for back in tl.static_range(1, TAPS):
            here = inside & (back <= length)
            last += (tl.load(product + (length - back) * N + column, mask=here, other=0.0),)  # type: ignore[assignment]
        for index in tl.static_range(0, TAPS - 1):
            total = tl.zeros([BLOCK], tl.float32)
            for tap in tl.static_range(TAPS - 1, -1, -1):
                value = inputs[index - tap] if tap <= index else past[tap - index - 1]  # type: ignore[var-annotated]
                total += value.to(tl.float32) * factors[tap]
            result = (total * tl.sigmoid(total)).to(mixed.dtype.element_ty)
            tl.store(mixed + index * N + column, result, mask=inside & (index < length))
        for back in tl.static_range(1, TAPS):
            newest = last[back - 1]  # type: ignore[var-annotated]
            # If the run has too few rows, this input of the new state comes from the old state.
            for fewer in tl.static_range(1, back):
                newest = tl.where(length == fewer, past[back - fewer - 1], newest)
            tl.store(cells + (TAPS - 1 - back) * CHANNELS, newest, mask=inside & (slot >= 0))
    else:
        wait_for_previous(EARLY)
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS - 1, -1, -1):
            total += tl.load(product - tap * N + column, mask=inside, other=0.0).to(tl.float32) * factors[tap]
        tl.store(mixed + column, (total * tl.sigmoid(total)).to(mixed.dtype.element_ty), mask=inside)
