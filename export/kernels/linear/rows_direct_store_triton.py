# mypy: allow-untyped-defs
"""Parts that the direct products of few rows have in common: the order of operands, and the operations behind a product.

A program has all rows of its outputs, so the short convolution of a delta-net stands behind the product too. A row's inputs
are its own product and those of TAPS - 1 tokens before it: of rows before it in its run, else of the slot's state. `slot` is
the slot of each row, -2 behind the last; `offset` is how many rows of its run stand before it. Each kernel loads them itself:
if one function returned them together, torch's analysis would take all that they are loaded from for written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows_fixed_triton import with_bias
from .rows_tiles_triton import BLOCK

# The most warps of a program.
MAX_WARPS = 8
# Weight rows of most programs, the fewest that tensor cores take on the left.
TILE = 16


@triton.jit
def stored_lines(line, first, N: tl.constexpr, SWIGLU: tl.constexpr, ROWS: tl.constexpr):
    """A tile's rows, as rows of the weight from `first` on. Rows past the last read the last row again."""
    if SWIGLU:
        HALF: tl.constexpr = ROWS // 2
        lines = line % HALF
        if N % HALF != 0:
            lines = tl.minimum(lines, N - 1 - first)
        lines += line // HALF * N
    elif N % ROWS != 0:
        lines = tl.minimum(line, N - 1 - first)
    else:
        lines = line
    return lines


@triton.jit
def multiply(weights, inputs, sums):
    """sums [WARPS, ROWS, COLUMNS] + weights [8, WARPS, ROWS / 8, 64 bytes] times inputs [8, WARPS, COLUMNS / 8, 64 bytes]."""
    columns = tl.permute(operand_of(inputs), (0, 2, 1))
    return tl.dot(operand_of(weights), columns, sums, out_dtype=sums.dtype)


@triton.jit
def operand_of(tile):
    """A tile [8, WARPS, ROWS / 8, 64 bytes] -> [WARPS, ROWS, 64 bytes], the left operand of a product; the right one must be
    transposed.

    A lane has loaded 16 neighbouring bytes of a row, and four lanes 64. In a product, a lane holds four groups of four bytes,
    at four places along the inner dimension. The 16 loaded bytes are used as these four groups. So the inner dimension has
    another order, but the same in both operands: the product is right, and no byte moves to another lane.
    """
    WARPS: tl.constexpr = tile.shape[1]
    ROWS: tl.constexpr = tile.shape[2] * 8
    SIZE: tl.constexpr = tile.shape[3]
    tile = tl.reshape(tl.permute(tile, (1, 2, 0, 3)), [WARPS, ROWS, 4, 4, SIZE // 16])
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4)), [WARPS, ROWS, SIZE])


@triton.jit
def load_factors(
    squares_ptr,
    rows,
    EPS: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """1 / rms of the head of each of a warp's BLOCKS blocks, 1, 2 or 4: a tuple of [WARPS, COLUMNS].

    squares: sums of squares [R, HEADS, PARTS]. Each block lies in one head.
    """
    SIZE: tl.constexpr = K // HEADS
    row = tl.arange(0, COLUMNS)[:, None, None, None]
    block = tl.arange(0, BLOCKS)[None, :, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None]
    part = tl.arange(0, triton.next_power_of_2(PARTS))[None, None, None, :]
    head = (warp * BLOCKS + block) * BLOCK // SIZE
    known = (row < rows) & (head < HEADS) & (part < PARTS)
    squares = tl.load(squares_ptr + (row * HEADS + head) * PARTS + part, mask=known, other=0.0)
    factors = tl.permute(tl.rsqrt(tl.sum(squares, 3) / SIZE + EPS), (2, 0, 1))
    if BLOCKS == 1:
        return (tl.reshape(factors, [WARPS, COLUMNS]),)
    elif BLOCKS == 2:
        return tl.split(factors)
    else:
        pairs = tl.split(tl.permute(tl.reshape(factors, [WARPS, COLUMNS, 2, 2]), (0, 1, 3, 2)))
        return tl.split(pairs[0]) + tl.split(pairs[1])


@triton.jit
def store_direct(
    total,
    residual,
    bias_ptr,
    state_ptr,
    slots_ptr,
    out_ptr,
    taps,
    past,
    slot,
    offset,
    output,
    row,
    rows,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Store a product [ROWS, COLUMNS] of weight rows and rows, and what is behind it.

    Args:
        residual: see `load_residual`.
        taps, past, slot, offset: see `load_taps`, `load_past` and `offset_in_run`; `slot` has each row's slot.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones. 0: none is.
    """
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, output.shape[0], row.shape[0]]), (1, 2, 0)))
        gate = with_bias(gate, bias_ptr, output, N, BIAS)
        results = gate * tl.sigmoid(gate) * with_bias(up, bias_ptr + N, output, N, BIAS)
    else:
        results = with_bias(total, bias_ptr, output, N, BIAS)
    inside = (output < N)[:, None] & (row < rows)[None, :]
    out = out_ptr + (row[None, :] * N + output[:, None])
    if RESIDUAL:
        results += residual.to(tl.float32)
    if CHANNELS > 0:
        # The state was read before the warps met to add their sums: no lane still needs what is overwritten.
        newest = results.to(out_ptr.dtype.element_ty).to(tl.float32)
        # Without runs, which most steps are, no row needs what another lane has.
        if tl.max(offset, 0) > 0:
            of_runs = with_run(newest, past, out, inside, offset, N, TAPS)
            store_convolved(
                newest, taps, of_runs, state_ptr, slots_ptr, out, inside, slot, output, row, rows, CHANNELS, TAPS
            )
        else:
            store_convolved(
                newest, taps, past, state_ptr, slots_ptr, out, inside, slot, output, row, rows, CHANNELS, TAPS
            )
    else:
        tl.store(out, results.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_residual(residual_ptr, output, row, rows, N: tl.constexpr):
    """Residual [OUTPUTS, COLUMNS] that is added to the results. It is loaded beside the inputs: loaded when the results are
    there, it would keep the program waiting once more."""
    inside = (output < N)[:, None] & (row < rows)[None, :]
    return tl.load(residual_ptr + (row[None, :] * N + output[:, None]), mask=inside, other=0.0)


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
    """Number of rows of each row's run before it [COLUMNS]."""
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
def with_run(newest, past, out, inside, offset, N: tl.constexpr, TAPS: tl.constexpr):
    """`past`, with the products of a run's earlier rows in their place: a tuple of [OUTPUTS, COLUMNS].

    They go through `out`, where the results are stored later. To get them from other lanes would take shared memory, and an
    order of lanes of its own, in which a step without runs would have its results, too.
    """
    tl.store(out, newest.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    values = ()
    for tap in tl.static_range(1, TAPS):
        of_run = (offset >= tap)[None, :]
        before = tl.load(out - tap * N, mask=inside & of_run, other=0.0).to(tl.float32)
        values = values + (tl.where(of_run, before, past[tap - 1].to(tl.float32)),)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    return values


@triton.jit
def store_convolved(
    newest,
    taps,
    past,
    state_ptr,
    slots_ptr,
    out,
    written,
    slot,
    channel,
    row,
    rows,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Store SiLU of the convolution of products [OUTPUTS, COLUMNS] with those before them, and the new states.

    Outputs behind the channels stay as they are. Operands are arguments one by one: torch's analysis would take all that is
    in a tuple with the state for written.
    """
    inside = (channel < CHANNELS)[:, None]
    ends = (slot >= 0) & (tl.load(slots_ptr + row + 1, mask=row + 1 < rows, other=-2) != slot)
    cells = state_ptr + tl.maximum(slot, 0) * ((TAPS - 1) * CHANNELS)
    cells = cells[None, :] + channel[:, None]
    mixed = newest * taps[0][:, None]
    for tap in tl.static_range(TAPS):
        value = newest
        if tap > 0:
            value = past[tap - 1].to(tl.float32)
            mixed += value * taps[tap][:, None]
        if tap < TAPS - 1:
            moved = value.to(state_ptr.dtype.element_ty)
            tl.store(cells + (TAPS - 2 - tap) * CHANNELS, moved, mask=inside & ends[None, :])
    results = tl.where(inside, mixed * tl.sigmoid(mixed), newest)
    tl.store(out, results.to(out.dtype.element_ty), mask=written)
