"""A gated delta-net's convolution and delta rule for rows of several sessions, R of them, known when kernels are launched.

A program of the delta rule keeps a few columns of a head's state in registers while it goes through the rows of a run, one
after another, so the state is read and written once, however long the run is. The next row is loaded meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import is_one, launcher, starts_early
from ostinato.export.kernels.operands import Convolution, Decay, Place
from ostinato.export.kernels.runs_triton import MOST_ROWS, numbers_of_runs, run_at

from . import step_triton
from .limits import check_delta_rule
from .math_triton import inverse_length, log_decay, write_strength


@dataclass(frozen=True)
class DeltaConfig:
    """What one program of the delta rule does.

    Attributes:
        values: columns of a head's state.
        warps: with one, the sums over keys need no barrier.
        programs: that an H200 runs at once, about; each goes through runs.
    """

    values: int
    warps: int
    programs: int


@dataclass(frozen=True)
class ConvConfig:
    """Rows and channels of a program of the convolution, and its warps."""

    rows: int
    channels: int
    warps: int


DELTA = DeltaConfig(values=8, warps=1, programs=132 * 16)
CONV = ConvConfig(rows=32, channels=64, warps=4)


def delta_step(
    mixed: Tensor, gates: Tensor, decay: Decay, state: Tensor, place: Place, norm_weight: Tensor, key_heads: int
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`, and `delta_rows` for what it takes. One row is `step_triton`'s.

    Raises:
        ExportError: see `check_delta_rule`.
    """
    form = step_triton.delta_step if is_one(mixed.shape[0]) else delta_rows
    return form(mixed, gates, decay, state, place, norm_weight, key_heads)


def delta_rows(
    mixed: Tensor, gates: Tensor, decay: Decay, state: Tensor, place: Place, norm_weight: Tensor, key_heads: int
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`; all tensors contiguous, R <= MOST_ROWS, P = V / DELTA.values.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graph_nodes.py`).

    Raises:
        ExportError: see `check_delta_rule`.
    """
    check_delta_rule(key_heads, *state.shape[1:])
    return _delta_rows(
        mixed, gates, decay.a_log, decay.dt_bias, state, place.positions, place.slots, norm_weight, key_heads
    )


@torch.library.triton_op("ostinato::delta_rows", mutates_args={"state"})
def _delta_rows(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    _, heads, key_dim, value_dim = state.shape
    rows, blocks = mixed.shape[0], value_dim // DELTA.values
    out = torch.empty((rows, heads * value_dim), dtype=mixed.dtype, device=mixed.device)
    squares = torch.empty((rows * heads, blocks), dtype=torch.float32, device=mixed.device)
    launcher(delta_rows_early)[(blocks, heads, max(1, DELTA.programs // (blocks * heads)))](
        mixed,
        gates,
        a_log,
        dt_bias,
        state,
        positions,
        slots,
        norm_weight,
        out,
        squares,
        rows,
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK=DELTA.values,
        ROWS=MOST_ROWS,
        EARLY=starts_early(),
        num_warps=DELTA.warps,
    )
    return out, squares


@triton.jit
def delta_rows_early(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of values, head, z): the runs z, z + Z, ..., Z being the size of the grid."""
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    head = tl.program_id(1)
    keys = tl.arange(0, K)
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cells = state + head * K * V + keys[:, None] * V + values[None, :]
    every = tl.arange(0, ROWS)
    slot_of = tl.load(slots + every, mask=every < rows, other=-1).to(tl.int32)
    slot_ahead = tl.load(slots + every - 1, mask=(every > 0) & (every < rows), other=-1).to(tl.int32)
    numbers, runs = numbers_of_runs(slot_of, slot_ahead, rows)
    run = tl.program_id(2)
    first, length, slot = run_at(run, numbers, slot_of)
    s = tl.load(cells + tl.maximum(slot, 0).to(tl.int64) * (HEADS * K * V), mask=slot >= 0, other=0.0)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    norm = tl.load(norm_weight + values)

    wait_for_previous(EARLY)
    while run < runs:
        s = tl.where(tl.load(positions + first) == 0, 0.0, s)
        q, k, v, z, b, a = row_of(mixed, gates, first, head, values, HEADS, KEY_HEADS, K, V)
        last = tl.where(slot < 0, first, first + length) - 1
        for row in range(first, last + 1):
            ahead = row_of(mixed, gates, tl.minimum(row + 1, last), head, values, HEADS, KEY_HEADS, K, V)
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            z = z.to(tl.float32)
            decay = tl.exp(log_decay(a, rate, bias))
            # As in `step_triton`: no sum waits for another.
            q_length = inverse_length(tl.sum(q * q, 0)) * K**-0.5
            k_length = inverse_length(tl.sum(k * k, 0))
            predicted = tl.sum(s * k[:, None], 0) * (decay * k_length)
            delta = (v.to(tl.float32) - predicted) * (write_strength(b) * k_length)
            o = (tl.sum(s * q[:, None], 0) * decay + tl.sum(q * k, 0) * delta) * q_length
            s = s * decay + k[:, None] * delta[None, :]
            of_head = tl.cast(row, tl.int64) * HEADS + head
            tl.store(out + of_head * V + values, (o * norm * z * tl.sigmoid(z)).to(out.dtype.element_ty))
            tl.store(squares + of_head * tl.num_programs(0) + tl.program_id(0), tl.sum(o * o, 0))
            q, k, v, z, b, a = ahead
        tl.store(cells + tl.maximum(slot, 0).to(tl.int64) * (HEADS * K * V), s, mask=slot >= 0)
        run += tl.num_programs(2)
        first, length, slot = run_at(run, numbers, slot_of)
        s = tl.load(cells + tl.maximum(slot, 0).to(tl.int64) * (HEADS * K * V), mask=slot >= 0, other=0.0)


@triton.jit
def row_of(
    mixed: tl.tensor,
    gates: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A row's q and k [K], v and z [BLOCK], b and a, as a head takes them."""
    keys = tl.arange(0, K)
    key_head = head // (HEADS // KEY_HEADS)
    mixed += tl.cast(row, tl.int64) * (2 * KEY_HEADS * K + 2 * HEADS * V)
    gates += tl.cast(row, tl.int64) * (2 * HEADS)
    q = tl.load(mixed + key_head * K + keys)
    k = tl.load(mixed + (KEY_HEADS + key_head) * K + keys)
    v = tl.load(mixed + 2 * KEY_HEADS * K + head * V + values)
    z = tl.load(mixed + 2 * KEY_HEADS * K + HEADS * V + head * V + values)
    return q, k, v, z, tl.load(gates + head), tl.load(gates + HEADS + head)


def conv_rows(product: Tensor, conv: Convolution, place: Place) -> Tensor:
    """See `linear.reference.conv_rows`; all tensors contiguous, R <= MOST_ROWS.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graph_nodes.py`).
    """
    return _conv_rows(product, conv.weight, conv.state, place.positions, place.slots)


@torch.library.triton_op("ostinato::conv_rows", mutates_args={"state"})
def _conv_rows(product: Tensor, weight: Tensor, state: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    rows, columns = product.shape
    channels, _, taps = weight.shape
    mixed = torch.empty_like(product)
    # Each tile overlaps with the next one by as many rows as read what a run's first row replaces.
    step = CONV.rows - (taps - 2)
    launcher(conv_rows_early)[((columns + CONV.channels - 1) // CONV.channels, (rows + step - 1) // step)](
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
        TILE=CONV.rows,
        BLOCK=CONV.channels,
        ROWS=MOST_ROWS,
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
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of columns, tile of rows). With a run's first row a program has all rows that need the old state, and so
    it alone reads and writes that."""
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    STEP: tl.constexpr = TILE - (TAPS - 2)
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tl.program_id(1) * STEP + tl.arange(0, TILE)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    # Rows of its run ahead of each row, as far as its taps reach.
    ahead = tl.zeros([TILE], tl.int32)
    for tap in tl.static_range(1, TAPS):
        before = tl.load(slots + row - tap, mask=(row >= tap) & (row < rows), other=-2)
        ahead += ((before == slot) & (ahead == tap - 1)).to(tl.int32)
    anchor = tl.where(ahead < TAPS - 1, row - ahead, row)
    mine = (row < rows) & (anchor >= tl.program_id(1) * STEP) & (anchor < tl.program_id(1) * STEP + STEP)
    old = mine & (slot >= 0) & (tl.load(positions + row, mask=row < rows, other=0) > ahead)
    convolved = column < CHANNELS
    state += (tl.maximum(slot, 0) * (TAPS - 1) * CHANNELS)[:, None] + column
    taps = weight + column * TAPS
    total = tl.zeros([TILE, BLOCK], tl.float32)
    # Inputs of the sessions before this call: the last one is at TAPS - 2.
    for tap in tl.static_range(1, TAPS):
        place = ((TAPS - 1 - tap + ahead) * CHANNELS)[:, None]
        past = tl.load(state + place, mask=(old & (ahead < tap))[:, None] & convolved, other=0.0)
        factor = tl.load(taps + (TAPS - 1 - tap), mask=convolved, other=0.0)
        total += past.to(tl.float32) * factor.to(tl.float32)
    # Rows of its run behind each row; a slot has one run.
    every = tl.arange(0, ROWS)
    others = tl.load(slots + every, mask=every < rows, other=-1)
    behind = tl.sum((slot[:, None] == others[None, :]).to(tl.int32), 1) - 1
    begins = mine & (slot >= 0) & (ahead == 0)

    wait_for_previous(EARLY)
    here = product + row[:, None].to(tl.int64) * N + column
    newest = tl.load(here, mask=mine[:, None] & (column < N), other=0.0)
    for tap in tl.static_range(0, TAPS):
        inputs = tl.load(here - tap * N, mask=(mine & (ahead >= tap))[:, None] & convolved, other=0.0)
        factor = tl.load(taps + (TAPS - 1 - tap), mask=convolved, other=0.0)
        total += inputs.to(tl.float32) * factor.to(tl.float32)
    total = tl.where(convolved, total * tl.sigmoid(total), newest.to(tl.float32))
    out = mixed + row[:, None].to(tl.int64) * N + column
    tl.store(out, total.to(mixed.dtype.element_ty), mask=mine[:, None] & (column < N))

    # The new state: the inputs of the run's last row, and of the rows ahead of that, be they of this call or older.
    moved = ()
    for tap in tl.static_range(0, TAPS - 1):
        of_call = (begins & (tap <= behind))[:, None] & convolved
        inputs = tl.load(here + ((behind - tap) * N)[:, None], mask=of_call, other=0.0)
        place = ((TAPS - 1 - tap + behind) * CHANNELS)[:, None]
        past = tl.load(state + place, mask=(begins & old & (tap > behind))[:, None] & convolved, other=0.0)
        moved += (tl.where((tap <= behind)[:, None], inputs, past),)  # type: ignore[assignment]
    # Before all rows of the tile have read the old one, none is replaced.
    tl.debug_barrier()
    for tap in tl.static_range(0, TAPS - 1):
        tl.store(state + (TAPS - 2 - tap) * CHANNELS, moved[tap], mask=begins[:, None] & convolved)
