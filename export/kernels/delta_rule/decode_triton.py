"""One token of the gated delta rule in one kernel: the state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher

from .math_triton import inverse_length, log_decay, sum_of_squares, write_strength

# One warp per program, so that its sums over keys need no barrier (four warps would have 18). With 32 heads these are 256
# programs, and all of the state is loaded at once: 16 loads of 16 bytes per thread.
BLOCK_V = 16
WARPS = 1


@torch.library.triton_op("ostinato::gated_delta_decode", mutates_args={"state"})
def decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    positions: Tensor,
    key_heads: int,
) -> Tensor:
    """`gated_delta_rule` for one token: mixed [1, ...], a and b [1, H], positions [1] -> [1, H, V]."""
    heads, key_dim, value_dim = state.shape
    out = torch.empty((1, heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    launcher(decode_kernel)[(value_dim // BLOCK_V, heads)](
        mixed,
        a,
        b,
        a_log,
        dt_bias,
        state,
        positions,
        out,
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK=BLOCK_V,
        num_warps=WARPS,
    )
    return out


@triton.jit
def decode_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block of values, head)."""
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    keys = tl.arange(0, K)
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cells = state + head * K * V + keys[:, None] * V + values[None, :]
    # All loads come first, to wait for memory once. So the state is read even where position 0 discards it.
    before = tl.load(cells)
    position = tl.load(positions)
    q = tl.load(mixed + key_head * K + keys)
    k = tl.load(mixed + (KEY_HEADS + key_head) * K + keys)
    v = tl.load(mixed + 2 * KEY_HEADS * K + head * V + values)
    decay = tl.exp(log_decay(tl.load(a + head), tl.load(a_log + head), tl.load(dt_bias + head)))
    beta = write_strength(tl.load(b + head))

    before = tl.where(position == 0, 0.0, before)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    v = v.to(tl.float32)
    q *= inverse_length(sum_of_squares(q, 0)) * K**-0.5
    k *= inverse_length(sum_of_squares(k, 0))
    before *= decay
    delta = (v - tl.sum(before * k[:, None], 0)) * beta
    # S^T q of the new state is computed from the old one, so that the two sums over keys do not wait for each other.
    output = tl.sum(before * q[:, None], 0) + tl.sum(q * k, 0) * delta
    tl.store(cells, before + k[:, None] * delta[None, :])
    tl.store(out + head * V + values, output.to(out.dtype.element_ty))
