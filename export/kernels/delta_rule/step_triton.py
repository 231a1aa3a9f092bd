"""One decode step of the gated delta rule and its gated norm, in one kernel that loads the state ahead of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, starts_early
from ostinato.export.kernels.operands import Decay, RecurrentState, RowIndex

from .limits import check_delta_rule
from .math_triton import inverse_length, log_decay, write_strength
from .pending_triton import add_pending_in_turn, count_cell, keys_of, store_count, updates_of


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of one program.

    Attributes:
        values: columns of a head's state.
        warps: warps of the program. With one, the sums over keys need no barrier.
    """

    values: int
    warps: int


CONFIG = DeltaConfig(values=8, warps=1)


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.delta_step`; R = 1, all tensors contiguous, P = V / CONFIG.values.

    Positions and slots are read before the kernel ahead has ended, so no marked kernel may write them (rule R2 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_delta_rule`.
    """
    check_delta_rule(key_heads, *state.stored.shape[1:])
    return _delta_step(
        mixed, gates, decay.a_log, decay.dt_bias, *state.arguments, index.positions, index.slots, norm_weight, key_heads
    )


@torch.library.triton_op("ostinato::delta_step", mutates_args={"state", "pending"})
def _delta_step(
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
    blocks = value_dim // CONFIG.values
    out = torch.empty((1, heads * value_dim), dtype=mixed.dtype, device=mixed.device)
    squares = torch.empty((heads, blocks), dtype=torch.float32, device=mixed.device)
    launcher(delta_step_early)[(blocks, heads)](
        mixed,
        gates,
        a_log,
        dt_bias,
        state,
        pending_keys,
        pending,
        positions,
        slots,
        norm_weight,
        out,
        squares,
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK=CONFIG.values,
        P=pending_keys.shape[2],
        EARLY=starts_early(),
        num_warps=CONFIG.warps,
    )
    return out, squares


@triton.jit
def delta_step_early(
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
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of values, head) moves its block of the state by one token, and stores the outputs."""
    start_next(EARLY)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    keys = tl.arange(0, K)
    begin = tl.program_id(0) * BLOCK
    values = begin + tl.arange(0, BLOCK)
    slot = tl.load(slots)
    cells = state + (tl.maximum(slot, 0) * HEADS + head) * K * V + keys[:, None] * V + values[None, :]
    # The state is read even if position 0 discards it: looking at the position first would mean to wait for memory twice.
    before = tl.load(cells)
    held_keys = keys_of(pending_keys, slot, head, HEADS, KEY_HEADS, K, P)
    updates = updates_of(pending, slot, head, HEADS, V, P)
    count = tl.load(count_cell(updates, begin, V, P))
    position = tl.load(positions)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    norm = tl.load(norm_weight + values)

    wait_for_previous(EARLY)
    # All loads are issued before any result is used: the compiler keeps the order of loads and of exchanges through shared
    # memory.
    offsets = head * V + values
    q = tl.load(mixed + key_head * K + keys)
    k = tl.load(mixed + (KEY_HEADS + key_head) * K + keys)
    v = tl.load(mixed + 2 * KEY_HEADS * K + offsets)
    z = tl.load(mixed + 2 * KEY_HEADS * K + HEADS * V + offsets)
    b = tl.load(gates + head)
    a = tl.load(gates + HEADS + head)

    q = q.to(tl.float32)
    k = k.to(tl.float32)
    z = z.to(tl.float32)
    count = tl.where((position > 0) & (slot >= 0), count, 0.0).to(tl.int32)
    before = add_pending_in_turn(before, held_keys, updates, count, values, K, V, P)
    # Behind the branch: ahead of it, the compiler has loads wait for the state.
    before = tl.where(position == 0, 0.0, before)
    decay = tl.exp(log_decay(a, rate, bias))
    # Lengths and decay are factors of the sums, so that no sum waits for another. S^T q of the new state is computed from
    # the old state.
    q_length = inverse_length(tl.sum(q * q, 0)) * K**-0.5
    k_length = inverse_length(tl.sum(k * k, 0))
    predicted = tl.sum(before * k[:, None], 0) * (decay * k_length)
    delta = (v.to(tl.float32) - predicted) * (write_strength(b) * k_length)
    tl.store(cells, before * decay + k[:, None] * delta[None, :], mask=slot >= 0)
    store_count(updates, begin, 0, slot >= 0, BLOCK, V, P)
    o = (tl.sum(before * q[:, None], 0) * decay + tl.sum(q * k, 0) * delta) * q_length
    tl.store(out + offsets, (o * norm * z * tl.sigmoid(z)).to(out.dtype.element_ty))
    tl.store(squares + head * tl.num_programs(0) + tl.program_id(0), tl.sum(o * o, 0))
