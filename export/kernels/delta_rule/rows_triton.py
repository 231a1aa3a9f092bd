"""The gated delta rule for R rows of several sessions. R is not known before the kernels are launched.

A program has a row and a block of a head's values. For a run of one row it writes the row's update, and the state only in
every eighth step (pending_triton.py). The programs of a short run's rows share the values of their block: each takes spans of
them through all rows, one after another, and is the only one that reads and writes their state, once. Where there may be long
runs, other kernels take these in chunks (rows_chunk_triton.py): chunks need many registers, which the programs here need for
states on their way from memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import is_one, launcher, row_vector, starts_early
from ostinato.export.kernels.operands import Decay, RecurrentState, RowIndex

from . import step_triton
from .limits import check_delta_rule
from .math_triton import add_pairs, add_triples, inverse_length, log_decay, write_strength
from .pending_triton import (
    add_pending,
    count_cell,
    keys_of,
    load_pending,
    pending_products,
    state_cells,
    store_count,
    updates_of,
)
from .rows_chunk_triton import FACTORS, delta_run_rows_early, delta_solve_rows_early
from .rows_configs import config_for

# The most programs that take short runs, for each block of values of a head.
MAX_PROGRAMS = 64


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`. One row goes to `step_triton.delta_step`, several rows go to `delta_rows`; so does one row
    whose state is in bfloat16, which is rounded less often if updates are kept beside it.

    Raises:
        ExportError: see `check_delta_rule`.
    """
    alone = is_one(mixed.shape[0]) and state.stored.dtype == torch.float32
    form = step_triton.delta_step if alone else delta_rows
    return form(mixed, gates, decay, state, index, norm_weight, key_heads)


def delta_rows(
    mixed: Tensor,
    gates: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`; all tensors contiguous, R <= MAX_ROWS, P = V / `DeltaConfig.span`.

    Positions, slots and the state with its pending updates are read before the kernel ahead has ended (rule R2 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_delta_rule`.
    """
    check_delta_rule(key_heads, *state.stored.shape[1:])
    return _delta_rows(
        mixed, gates, decay.a_log, decay.dt_bias, *state.arguments, index.positions, index.slots, norm_weight, key_heads
    )


@torch.library.triton_op("ostinato::delta_rows", mutates_args={"state", "pending_keys", "pending"})
def _delta_rows(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    pending_keys: Tensor,
    pending: Tensor,
    positions: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    _, heads, key_dim, value_dim = state.shape
    rows, updates = mixed.shape[0], pending_keys.shape[2]
    config = config_for(rows, heads, state.dtype)
    values = min(config.values, value_dim)
    blocks = value_dim // values
    span = min(config.span, values)
    out = torch.empty((rows, heads * value_dim), dtype=mixed.dtype, device=mixed.device)
    squares = torch.empty((rows * heads, value_dim // span), dtype=torch.float32, device=mixed.device)
    common = {"HEADS": heads, "KEY_HEADS": key_heads, "K": key_dim, "V": value_dim, "ROWS": row_vector(rows)}
    common["EARLY"] = starts_early()
    of_gates, of_state = (gates, a_log, dt_bias), (state, pending_keys, pending, positions, slots, norm_weight)
    runs = config.runs
    if runs is not None:
        parts = 2 if mixed.dtype == torch.bfloat16 else 1
        solved = torch.empty((parts, rows, heads, runs.chunk), dtype=mixed.dtype, device=mixed.device)
        pairs = torch.empty_like(solved)
        factors = torch.empty((rows, heads, FACTORS.value), dtype=torch.float32, device=mixed.device)
        in_chunks = common | {"LONG": runs.long, "CHUNK": runs.chunk, "PARTS": parts}
        launcher(delta_solve_rows_early)[(heads, runs.solving_programs)](
            mixed, *of_gates, slots, solved, pairs, factors, rows, num_warps=runs.solving_warps, **in_chunks
        )
        grid = blocks, heads, runs.programs
        launcher(delta_run_rows_early)[grid](
            mixed,
            *of_state,
            solved,
            pairs,
            factors,
            out,
            squares,
            rows,
            BLOCK=values,
            P=updates,
            SPAN=span,
            num_warps=runs.warps,
            **in_chunks,
        )
    # Launched after the kernels for long runs: programs that have only rows of long runs end while those kernels still work.
    grid = blocks, heads, torch.sym_min(rows, MAX_PROGRAMS)
    long = 0 if runs is None else runs.long
    launcher(delta_rows_early)[grid](
        mixed,
        *of_gates,
        *of_state,
        out,
        squares,
        rows,
        BLOCK=values,
        P=updates,
        LONG=long,
        SPAN=span,
        num_warps=config.warps,
        **common,
    )
    return out, squares


@triton.jit
def delta_rows_early(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    pending_keys: tl.tensor,
    pending: tl.tensor,
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
    P: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of values, head, z) takes the rows z, z + Z, ..., Z being the size of the grid: a run's only row, or
    spans of SPAN values of all rows of its run.

    It takes runs of less than LONG rows, where LONG is at least 2; all if LONG is 0.
    """
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    head = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK
    values = begin + tl.arange(0, BLOCK)
    # What does not change from run to run is computed anew: there are no registers in which to keep it.
    for row in tl.range(tl.program_id(2), rows, tl.num_programs(2), num_stages=1, disable_licm=True):
        slot = tl.load(slots + row)
        # No slot is -2.
        starts = tl.load(slots + tl.maximum(row - 1, 0), mask=row > 0, other=-2) != slot
        ends = tl.load(slots + tl.minimum(row + 1, rows - 1), mask=row + 1 < rows, other=-2) != slot
        position = tl.load(positions + row)
        filled = slot >= 0
        rate = tl.load(a_log + head)
        bias = tl.load(dt_bias + head)
        keys = keys_of(pending_keys, slot, head, HEADS, KEY_HEADS, K, P)
        updates = updates_of(pending, slot, head, HEADS, V, P)
        of_head = state + (tl.maximum(slot, 0) * HEADS + head) * (K * V)
        # The first row is always taken, even if it is padding: one program must wait (rule R1).
        if starts & (ends | (filled == 0)):
            # A session's first row writes the state: what is stored there is another session's.
            old = filled & (position != 0)
            # All that the slot has is on its way before the first of it is looked at. Many rows hide each other's latency,
            # and load only the updates that count.
            stored = tl.load(count_cell(updates, begin, V, P))
            count = tl.where(old, stored, 0.0).to(tl.int32)
            cells = state_cells(of_head, values, K, V)
            s = tl.load(cells, mask=filled, other=0.0)
            held = load_pending(keys, updates, count, values, K, V, P, LONG == 0)
            norm = tl.load(norm_weight + values)
            wait_for_previous(EARLY)
            inputs = load_row(mixed, gates, row, head, values, HEADS, KEY_HEADS, K, V)
            s = tl.where(old, s.to(tl.float32), 0.0)
            if old & (count < P):
                _, k, u, g = take_row(
                    s, inputs, out, squares, row, head, begin, rate, bias, norm, HEADS, K, V, SPAN, held
                )
                # Programs of other values and other heads read the same keys and decays, but use none past the count.
                one = tl.program_id(0) == 0
                tl.store(updates + count * V + values, u)
                tl.store(updates + P * V + count, g, mask=one)
                tl.store(keys + count * K + tl.arange(0, K), k, mask=one & (head % (HEADS // KEY_HEADS) == 0))
                store_count(updates, begin, count + 1, filled, BLOCK, V, P)
            elif filled:
                s = add_pending(s, keys, updates, count, values, K, V, P)
                s = take_row(s, inputs, out, squares, row, head, begin, rate, bias, norm, HEADS, K, V, SPAN)[0]
                tl.store(cells, s)
                store_count(updates, begin, 0, filled, BLOCK, V, P)
        elif filled:
            every = tl.arange(0, ROWS)
            # A slot has one run.
            same = tl.load(slots + every, mask=every < rows, other=-1) == slot
            length, offset = tl.reduce((same.to(tl.int32), (same & (every < row)).to(tl.int32)), 0, add_pairs)
            if (length < LONG) | (LONG == 0):
                first = row - offset
                end = first + length
                # The programs of the run's rows share its values.
                for part in tl.range(offset, BLOCK // SPAN, length, num_stages=1):
                    take_short_run(
                        mixed, gates, out, squares, of_head, keys, updates, tl.load(positions + first) != 0, first, end, head,
                        begin + part * SPAN, rate, bias, norm_weight, HEADS, KEY_HEADS, K, V, P, SPAN, EARLY,
                    )  # fmt: skip
            else:
                wait_for_previous(EARLY)


@triton.jit
def take_short_run(
    mixed: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    squares: tl.tensor,
    of_head: tl.tensor,
    keys: tl.tensor,
    updates: tl.tensor,
    old: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    begin: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Take the rows of a run from `first` to `end` for SPAN values of a head, from `begin` on, one after another.

    of_head: the head's state. old: whether the session has it from an earlier call.
    """
    values = begin + tl.arange(0, SPAN)
    count = tl.load(count_cell(updates, begin, V, P), mask=old, other=0.0).to(tl.int32)
    cells = state_cells(of_head, values, K, V)
    s = tl.load(cells, mask=old, other=0.0)
    norm = tl.load(norm_weight + values)
    s = add_pending(s.to(tl.float32), keys, updates, count, values, K, V, P)
    wait_for_previous(EARLY)
    # A row's inputs are under way while the row before it is taken.
    following = load_row(mixed, gates, first, head, values, HEADS, KEY_HEADS, K, V)
    for row in range(first, end):
        inputs = following
        after = tl.minimum(row + 1, end - 1)
        following = load_row(mixed, gates, after, head, values, HEADS, KEY_HEADS, K, V)
        s = take_row(s, inputs, out, squares, row, head, begin, rate, bias, norm, HEADS, K, V, SPAN)[0]
    tl.store(cells, s)
    store_count(updates, begin, 0, True, SPAN, V, P)


@triton.jit
def load_row(
    mixed: tl.tensor,
    gates: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
) -> tl.tuple:
    """Load what a row has for a head: its query and key [K], values and their gates [BLOCK], write strength and decay."""
    keys = tl.arange(0, K)
    key_head = head // (HEADS // KEY_HEADS)
    of_row = mixed + tl.cast(row, tl.int64) * (2 * KEY_HEADS * K + 2 * HEADS * V)
    of_gates = gates + tl.cast(row, tl.int64) * (2 * HEADS) + head
    q = tl.load(of_row + key_head * K + keys)
    k = tl.load(of_row + (KEY_HEADS + key_head) * K + keys)
    v = tl.load(of_row + 2 * KEY_HEADS * K + head * V + values)
    z = tl.load(of_row + 2 * KEY_HEADS * K + HEADS * V + head * V + values)
    return q, k, v, z, tl.load(of_gates), tl.load(of_gates + HEADS)


@triton.jit
def take_row(
    s: tl.tensor,
    inputs: tl.tuple,
    out: tl.tensor,
    squares: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    begin: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    held: tl.tuple | None = None,
) -> tl.tuple:
    """Store the outputs of a row, for the values that `s` has, from `begin` on.

    Args:
        s: the state [K, values], but for the pending updates `held`, if there may be some (`load_pending`).
        inputs: the row's, as `load_row` returns them.

    Returns:
        (s after the row, only without `held`; the key, values and log decay of the row's update).
    """
    SIZE: tl.constexpr = s.shape[1]
    q, key, v, z, b, a = inputs
    q = q.to(tl.float32)
    k = key.to(tl.float32)
    z = z.to(tl.float32)
    g = log_decay(a, rate, bias)
    decay = tl.exp(g)
    # Lengths and decay are factors of the sums, as in `step_triton`: no sum waits for another.
    q_square, k_square, both = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    if held is not None:
        # Ahead of the sums over the state, which may still be on its way.
        more_keys, more_queries, so_far = pending_products(held, k, q)
    of_keys, of_queries = tl.reduce((s * k[:, None], s * q[:, None]), 0, add_pairs)
    if held is not None:
        of_keys = of_keys * so_far + more_keys
        of_queries = of_queries * so_far + more_queries
    q_length = inverse_length(q_square) * K**-0.5
    k_length = inverse_length(k_square)
    delta = (v.to(tl.float32) - of_keys * (decay * k_length)) * (write_strength(b) * k_length)
    o = (of_queries * decay + both * delta) * q_length
    of_head = tl.cast(row, tl.int64) * HEADS + head
    values = begin + tl.arange(0, SIZE)
    tl.store(out + of_head * V + values, (o * norm * z * tl.sigmoid(z)).to(out.dtype.element_ty))
    # All in the first span that the program has: zeros for the others.
    span = tl.arange(0, SIZE // SPAN)
    tl.store(squares + of_head * (V // SPAN) + begin // SPAN + span, tl.where(span == 0, tl.sum(o * o, 0), 0.0))
    return s * decay + k[:, None] * delta[None, :], key, delta, g
