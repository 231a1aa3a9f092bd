"""The gated delta rule on the GPU for any number of tokens, in chunks of 64.

In a chunk, D is the running sum of the log decays, S is the state before the chunk, and i and j are tokens::

    A[i, j] = beta_i (k_i . k_j) exp(D_i - D_j), j < i      X = (I + A)^-1
    u = X (beta v)      w = -X (beta exp(D) k)              P[i, j] = (q_i . k_j) exp(D_i - D_j), j <= i
    v' = u + w S        o = exp(D) q S + P v'               S <- exp(D_last) S + (exp(D_last - D) k)^T v'

`prepare_kernel` computes u, w and P of every chunk; `scan_kernel` goes through the chunks with a block of S in registers.
The lengths of q and k are factors of rows, like beta and exp(D), so q and k enter products as they are stored.

Precision: sums are float32 everywhere. In a float32 model, each product is three TF32 products. In a bfloat16 model, q, k
and v are exact as they are. Their factors and intermediate results have two bfloat16 parts, with 16 bits together. That gives
errors of 1e-5, where the output's rounding is 2e-3, in 40 % of the tensor cores' time for three TF32 products.

No product has more than 32 rows. From 64 rows on, Triton 3.6 uses Hopper's warp-group instructions: with these, triple
TF32 products spill registers, and Triton is known to miscompile them where one product follows another
(flash-linear-attention's issues 640 and 984).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, MEDIUM, SMALL, fitting, launcher
from ostinato.export.kernels.operands import Decay, RecurrentState, RowIndex

from .limits import check_delta_rule
from .math_triton import multiply_add, multiply_parts, token_count
from .pending_triton import add_pending_columns, count_cell, keys_of, store_count, updates_of
from .prepare_triton import prepare_kernel

CHUNK = 64
PREPARE_WARPS, SCAN_WARPS = 4, 8


@dataclass(frozen=True)
class ScanConfig:
    """Sizes of `scan_kernel` that depend on the GPU's shared memory.

    Attributes:
        block: values of a head per program. With 32 heads, four blocks of 32 values per head are 128 programs, for the H200's
            132 multiprocessors.
        stages: stages of the loop. With three, the operands of one chunk are loaded while those of another are used.
    """

    block: int
    stages: int


@dataclass(frozen=True)
class Config:
    """Sizes that depend on the model's dtype.

    Attributes:
        parts: number of parts in which a float32 operand is stored.
        columns: width of the blocks in which `prepare_kernel` reads q, k and v.
        scan: sizes of `scan_kernel`, by the shared memory that they are made for. At K = V = 128, bfloat16 takes 193, 104 and
            92 KB, float32 152, 132 and 32.
    """

    parts: int
    columns: int
    scan: dict[int, ScanConfig]


CONFIGS = {
    torch.bfloat16: Config(
        parts=2, columns=64, scan={LARGE: ScanConfig(32, 3), MEDIUM: ScanConfig(32, 2), SMALL: ScanConfig(16, 2)}
    ),
    torch.float32: Config(
        parts=1, columns=16, scan={LARGE: ScanConfig(32, 2), MEDIUM: ScanConfig(16, 2), SMALL: ScanConfig(16, 1)}
    ),
}


def gated_delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    key_heads: int,
    max_tokens: int,
) -> Tensor:
    """See `reference.gated_delta_rule`.

    `mixed`, `a` and `b` may be slices of wider tensors if each row is contiguous. `max_tokens` is not needed: the kernel
    loops over chunks.

    Raises:
        ExportError: see `check_delta_rule`.
    """
    check_delta_rule(key_heads, *state.stored.shape[1:])
    return _gated_delta_rule(
        mixed, a, b, decay.a_log, decay.dt_bias, *state.arguments, index.positions, index.slots, key_heads
    )


@torch.library.triton_op("ostinato::gated_delta_rule", mutates_args={"state", "pending"})
def _gated_delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    pending_keys: Tensor,
    pending: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_heads: int,
) -> Tensor:
    """`gated_delta_rule` for T tokens, where T is symbolic; returns [T, H, V]."""
    _, heads, key_dim, value_dim = state.shape
    tokens = mixed.shape[0]
    chunks = (tokens + CHUNK - 1) // CHUNK
    rows = chunks * CHUNK
    config = CONFIGS[mixed.dtype]
    scan = fitting(config.scan)
    device, dtype = mixed.device, mixed.dtype
    w = torch.empty((config.parts, rows, heads, key_dim), dtype=dtype, device=device)
    pairs = torch.empty((config.parts, rows, heads, CHUNK), dtype=dtype, device=device)
    u = torch.empty((rows, heads, value_dim), dtype=torch.float32, device=device)
    factors = torch.empty((3, heads, rows), dtype=torch.float32, device=device)
    out = torch.empty((tokens, heads, value_dim), dtype=dtype, device=device)
    block = min(scan.block, value_dim)
    launcher(prepare_kernel)[(chunks, heads)](
        mixed,
        a,
        b,
        a_log,
        dt_bias,
        slots,
        w,
        pairs,
        u,
        factors,
        tokens,
        rows,
        MIXED_STRIDE=mixed.stride(0),
        A_STRIDE=a.stride(0),
        B_STRIDE=b.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        HALF=CHUNK // 2,
        COLUMNS=min(config.columns, key_dim, value_dim),
        PARTS=config.parts,
        num_warps=PREPARE_WARPS,
    )
    launcher(scan_kernel)[(value_dim // block, heads)](
        mixed,
        w,
        pairs,
        u,
        factors,
        state,
        pending_keys,
        pending,
        positions,
        slots,
        out,
        tokens,
        rows,
        MIXED_STRIDE=mixed.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        CHUNK=CHUNK,
        BLOCK=block,
        P=pending_keys.shape[2],
        PARTS=config.parts,
        num_warps=SCAN_WARPS,
        num_stages=scan.stages,
    )
    return out


@triton.jit
def scan_kernel(
    mixed: tl.tensor,
    w: tl.tensor,
    pairs: tl.tensor,
    u: tl.tensor,
    factors: tl.tensor,
    state: tl.tensor,
    pending_keys: tl.tensor,
    pending: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    padded: tl.tensor,
    MIXED_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Program (block of values, head) takes its state through all chunks.

    All tiles are transposed, [values, ...], so that no product has more rows than the block has values.
    """
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    padded = tl.cast(padded, tl.int64)
    keys = tl.arange(0, K)
    begin = tl.program_id(0) * BLOCK
    values = begin + tl.arange(0, BLOCK)
    token = tl.arange(0, CHUNK)
    slot = tl.load(slots)
    cells = state + (tl.maximum(slot, 0) * HEADS + head) * K * V + keys[None, :] * V + values[:, None]
    s = tl.load(cells)
    fresh = tl.load(positions) == 0
    s = tl.where(fresh, 0.0, s.to(tl.float32))
    held_keys = keys_of(pending_keys, slot, head, HEADS, KEY_HEADS, K, P)
    updates = updates_of(pending, slot, head, HEADS, V, P)
    count = tl.load(count_cell(updates, begin, V, P), mask=(slot >= 0) & (fresh == 0), other=0.0).to(tl.int32)
    s = add_pending_columns(s, held_keys, updates, count, values, K, V, P)
    q_factors = factors + head * padded
    k_factors = q_factors + HEADS * padded
    decays = k_factors + HEADS * padded
    nothing = tl.zeros((BLOCK, CHUNK), tl.float32)
    length = token_count(slots, tokens)
    for chunk in range(tl.cdiv(length, CHUNK)):
        rows = tl.cast(chunk, tl.int64) * CHUNK + token
        inside = rows < length
        places = rows * HEADS + head
        # The pipeline does not prefetch these. Loaded here, they arrive while the first products are computed.
        written = tl.load(u + places[None, :] * V + values[:, None])
        q_factor = tl.load(q_factors + rows)
        k_factor = tl.load(k_factors + rows)
        decay = tl.load(decays + chunk * CHUNK + CHUNK - 1)

        w_cells = w + places[None, :] * K + keys[:, None]
        new = multiply_parts(s, w_cells, padded * HEADS * K, nothing, PARTS) + written

        q_cells = mixed + rows[None, :] * MIXED_STRIDE + key_head * K + keys[:, None]
        output = multiply_add(s, tl.load(q_cells, mask=inside[None, :], other=0.0), nothing) * q_factor[None, :]
        p_cells = pairs + places[None, :] * CHUNK + token[:, None]
        output = multiply_parts(new, p_cells, padded * HEADS * CHUNK, output, PARTS)
        out_cells = out + places[None, :] * V + values[:, None]
        tl.store(out_cells, output.to(out.dtype.element_ty), mask=inside[None, :])

        k_cells = mixed + rows[:, None] * MIXED_STRIDE + (KEY_HEADS + key_head) * K + keys[None, :]
        k = tl.load(k_cells, mask=inside[:, None], other=0.0)
        s = multiply_add(new * k_factor[None, :], k, s * decay)
    tl.store(cells, s, mask=slot >= 0)
    store_count(updates, begin, 0, slot >= 0, BLOCK, V, P)
