"""A gated delta-net's convolution of a prompt with any number of tokens.

A program has a block of channels and a block of tokens. It loads its inputs, and those of the few tokens ahead, once, 16
bytes per lane, and keeps them in registers. It starts all loads before it waits for the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher
from ostinato.export.kernels.operands import Convolution, RowIndex

from .math_triton import token_count


@dataclass(frozen=True)
class ConvConfig:
    """Channels, tokens and warps of one program."""

    channels: int
    tokens: int
    warps: int


# A lane has 16 bytes of each token. With four taps, a program loads 11 tokens, and another program loads 3 of these, too. On
# an H200, 2026-11-23, with 8,192 channels, 300/512/2,048 tokens take 4.5/5.2/19.3 us; with 4 tokens per program 4.3/5.8/21.4,
# with 16 5.1/5.6/19.8, with 32 7.5/8.1/25.6. Inductor's own kernels take 14 or 38 us for 512 tokens, depending on its tuning.
CONV = {
    torch.bfloat16: ConvConfig(channels=256, tokens=8, warps=1),
    torch.float32: ConvConfig(channels=128, tokens=16, warps=1),
}


def convolve(x: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
    """See `reference.convolve`. `x` may be a slice of a wider tensor if each row is contiguous."""
    return _convolve(x, conv.weight, conv.state, index.positions, index.slots)


@torch.library.triton_op("ostinato::convolve", mutates_args={"state"})
def _convolve(x: Tensor, weight: Tensor, state: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """`convolve` for T tokens, where T is symbolic; returns [T, C]."""
    tokens, channels = x.shape
    taps = weight.shape[2]
    config = CONV[x.dtype]
    # A block has at least as many tokens as the state. So only programs of the first block need the state, and they write it.
    block = max(config.tokens, taps - 1)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    launcher(convolve_kernel)[(triton.cdiv(channels, config.channels), (tokens + block - 1) // block)](
        x,
        weight,
        state,
        positions,
        slots,
        out,
        tokens,
        X_STRIDE=x.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        COLUMNS=triton.next_power_of_2(taps),
        BLOCK=config.channels,
        TOKENS=block,
        num_warps=config.warps,
    )
    return out


@triton.jit
def convolve_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    X_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Program (block of channels, block of tokens). Padding is convolved like tokens."""
    tokens = tl.cast(tokens, tl.int32)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    # 64 bits: a row times a stride exceeds 2^31 at about 200,000 tokens.
    start = tl.program_id(1).to(tl.int64) * TOKENS
    left = tokens - start.to(tl.int32)
    # The weights are loaded as one matrix: a load per tap would take two bytes at a time. They are loaded ahead of the
    # inputs: behind the inputs, Triton 3.6 lets the layout of this load spread, and sums go from thread to thread (38
    # barriers, not 4).
    column = tl.arange(0, COLUMNS)[None, :]
    taps = tl.load(weight + channel[:, None] * TAPS + column, mask=inside[:, None] & (column < TAPS), other=0.0)
    cells = x + start * X_STRIDE + channel
    inputs = load_rows(cells, inside, left, X_STRIDE, TOKENS)
    # A branch, not `tl.where`: with that, all programs would wait for the slot before they load most of their inputs.
    if tl.program_id(1) == 0:
        before = move_state(x, state, positions, slots, tokens, channel, inside, X_STRIDE, CHANNELS, TAPS)
    else:
        before = load_rows(cells - (TAPS - 1) * X_STRIDE, inside, TAPS - 1, X_STRIDE, TAPS - 1)
    window = before + inputs
    factors = ()
    for tap in tl.static_range(0, TAPS):
        factors += (tl.sum(tl.where(column == tap, taps.to(tl.float32), 0.0), 1),)  # type: ignore[assignment]
    results = out + start * CHANNELS + channel
    for row in tl.static_range(0, TOKENS):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(0, TAPS):
            total += window[row + tap].to(tl.float32) * factors[tap]
        # SiLU. An output takes 17 instructions; with `tl.exp`, which also gives numbers below 2^-126, it would take 21.
        result = total / (1.0 + tl.exp2(total * -1.4426950408889634))
        tl.store(results + row * CHANNELS, result.to(out.dtype.element_ty), mask=inside & (row < left))


@triton.jit
def load_rows(
    cells: tl.tensor, inside: tl.tensor, count: tl.tensor, STRIDE: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Load a tuple of ROWS rows. `cells` points into the first row; rows from `count` on are zeros."""
    rows = ()
    for row in tl.static_range(0, ROWS):
        rows += (tl.load(cells + row * STRIDE, mask=inside & (row < count), other=0.0),)  # type: ignore[assignment]
    return rows


@triton.jit
def move_state(
    x: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    X_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Write the new state, and return the old one, a tuple of TAPS - 1 rows."""
    slot = tl.load(slots)
    old = inside & (slot >= 0) & (tl.load(positions) > 0)
    length = token_count(slots, tokens)
    cells = state + tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS) + channel
    before = load_rows(cells, old, TAPS - 1, CHANNELS, TAPS - 1)
    newest = ()
    for row in tl.static_range(0, TAPS - 1):
        # The window is the old state with the tokens behind it. Its rows are counted from the first row of the old state.
        row_of_window = length + row
        kept = tl.load(cells + row_of_window * CHANNELS, mask=old & (row_of_window < TAPS - 1), other=0.0)
        token = x + (row_of_window - (TAPS - 1)).to(tl.int64) * X_STRIDE + channel
        came = tl.load(token, mask=inside & (row_of_window >= TAPS - 1), other=0.0)
        newest += (tl.where(row_of_window < TAPS - 1, kept, came),)  # type: ignore[assignment]
    # No thread writes before all threads have read the old state.
    tl.debug_barrier()
    for row in tl.static_range(0, TAPS - 1):
        tl.store(cells + row * CHANNELS, newest[row], mask=inside & (slot >= 0))
    return before
