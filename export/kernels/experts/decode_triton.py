# mypy: allow-untyped-defs
"""The routed experts of one token as two Triton kernels.

One token is limited by the memory that its k experts are in, so nothing is staged: every thread loads 16 bytes of packed
weights at a time, all loads of a program are in flight together, and the products are formed in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher

# Output rows per program. At [8 of 256, 2048, 512] the kernels have 512 and 256 programs of 16 KB: all resident at once.
ROWS = 8
# Words of four bytes, or elements of floating weights, of a row that a program takes at once: four warps, 16 bytes per
# thread.
WORDS = 512
ELEMENTS = 1024
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@torch.library.triton_op("ostinato::experts_decode", mutates_args={})
def decode(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
) -> Tensor:
    """`experts` for contiguous x [1, H], weights [1, k] and chosen [1, k]."""
    top_k, size, inner = chosen.shape[1], x.shape[1], down.shape[2] * (1 if down_scale is None else 2)
    hidden = torch.empty(top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(1, size, dtype=x.dtype, device=x.device)
    gate_up_rows, down_rows = (triton.cdiv(inner, ROWS), top_k), (triton.cdiv(size, ROWS),)
    if gate_up_scale is None or down_scale is None:
        block = min(ELEMENTS, max(16, triton.next_power_of_2(size)))
        launcher(_gate_up_float_kernel)[gate_up_rows](x, chosen, gate_up, hidden, size, inner, ROWS, block, num_warps=4)
        block = min(ELEMENTS, max(16, triton.next_power_of_2(inner)))
        launcher(_down_float_kernel)[down_rows](
            hidden, weights, chosen, down, out, size, inner, top_k, ROWS, block, num_warps=4
        )
        return out
    group_size = size // gate_up_scale.shape[2]
    block = min(WORDS, triton.next_power_of_2(size // 8))
    launcher(_gate_up_int4_kernel)[gate_up_rows](
        x, chosen, gate_up, gate_up_scale, hidden, size, inner, group_size, ROWS, block, num_warps=4
    )
    block = min(WORDS, triton.next_power_of_2(top_k * inner // 8))
    launcher(_down_int4_kernel)[down_rows](
        hidden, weights, chosen, down, down_scale, out, size, inner, top_k, group_size, ROWS, block, num_warps=4
    )
    return out


@triton.jit
def _nibble(words, AT: tl.constexpr):
    """The four bits from bit `AT`, 0 to 16, minus 8, as float32: in a float's mantissa they need no conversion."""
    magic: tl.constexpr = (150 - AT) << 23
    if INTERPRETED:
        bits = (words & (15 << AT)) | magic
    else:
        # Written as two operators it would be two instructions, since both constants would be immediates.
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, 15 << AT, magic], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - AT) + 8.0)


@triton.jit
def _four_elements(x, fours, mask):
    """Elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 of `x` for i in `fours`, each [W] float32."""
    if x.dtype.element_ty == tl.bfloat16:
        bits = tl.load(x.to(tl.pointer_type(tl.int64)) + fours, mask=mask, other=0)
        low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
        x0 = (low << 16).to(tl.float32, bitcast=True)
        x1 = (low & -0x10000).to(tl.float32, bitcast=True)
        x2 = (high << 16).to(tl.float32, bitcast=True)
        x3 = (high & -0x10000).to(tl.float32, bitcast=True)
    else:
        x0 = tl.load(x + fours * 4, mask=mask, other=0).to(tl.float32)
        x1 = tl.load(x + fours * 4 + 1, mask=mask, other=0).to(tl.float32)
        x2 = tl.load(x + fours * 4 + 2, mask=mask, other=0).to(tl.float32)
        x3 = tl.load(x + fours * 4 + 3, mask=mask, other=0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _two_scales(scales, mask, GROUP: tl.constexpr):
    """The scales of a span's low and high nibbles, from pointers to the low nibbles' group."""
    low = tl.load(scales, mask=mask, other=0).to(tl.float32)
    high = low
    if GROUP == 32:
        high = tl.load(scales + 1, mask=mask, other=0).to(tl.float32)
    return low, high


@triton.jit
def _products(words, low, high, scales, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Packed words [ROWS, BLOCK] times their inputs, summed over four words and scaled: [ROWS, BLOCK / 4].

    `low` and `high` are the inputs of the words' low and high nibbles, four [BLOCK] each; `scales` are those of the low
    and of the high nibbles, [ROWS, BLOCK / 4] each.
    """
    shifted = words >> 16
    lows = _nibble(words, 0) * low[0][None, :]
    lows += _nibble(words, 8) * low[1][None, :]
    lows += _nibble(words, 16) * low[2][None, :]
    lows += _nibble(shifted, 8) * low[3][None, :]
    highs = _nibble(words, 4) * high[0][None, :]
    highs += _nibble(words, 12) * high[1][None, :]
    highs += _nibble(shifted, 4) * high[2][None, :]
    highs += _nibble(shifted, 12) * high[3][None, :]
    lows = tl.sum(lows.reshape(ROWS, BLOCK // 4, 4), 2)
    highs = tl.sum(highs.reshape(ROWS, BLOCK // 4, 4), 2)
    return lows * scales[0] + highs * scales[1]


@triton.jit
def _gate_up_int4_kernel(
    x,
    chosen,
    weight,
    scale,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hidden [k, I] = silu(gate) * up. Program (i, j): ROWS gate rows and the same up rows of the j-th chosen expert."""
    ROW: tl.constexpr = SIZE // 8
    GROUPS: tl.constexpr = SIZE // GROUP
    slot = tl.program_id(1)
    expert = tl.load(chosen + slot).to(tl.int64)
    weight = weight.to(tl.pointer_type(tl.int32)) + expert * (2 * INNER * ROW)
    scale = scale + expert * (2 * INNER * GROUPS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gates = tl.zeros([ROWS, BLOCK // 4], tl.float32)
    ups = tl.zeros([ROWS, BLOCK // 4], tl.float32)
    for start in tl.static_range(0, ROW, BLOCK):
        word = start + tl.arange(0, BLOCK)
        chunk = start // 4 + tl.arange(0, BLOCK // 4)
        here = (word < ROW)[None, :]
        fours = word // 8 * 16 + word % 8
        low = _four_elements(x, fours, word < ROW)
        high = _four_elements(x, fours + 8, word < ROW)
        pointers = weight + rows[:, None] * ROW + word[None, :]
        gate_words = tl.load(pointers, mask=here, other=0)
        up_words = tl.load(pointers + INNER * ROW, mask=here, other=0)
        pointers = scale + rows[:, None] * GROUPS + (chunk // 2 * 64 // GROUP)[None, :]
        here = (chunk * 4 < ROW)[None, :]
        gate_scales = _two_scales(pointers, here, GROUP)
        up_scales = _two_scales(pointers + INNER * GROUPS, here, GROUP)
        gates += _products(gate_words, low, high, gate_scales, ROWS, BLOCK)
        ups += _products(up_words, low, high, up_scales, ROWS, BLOCK)
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    tl.store(hidden + slot * INNER + rows, (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty))


@triton.jit
def _down_int4_kernel(
    hidden,
    weights,
    chosen,
    weight,
    scale,
    out,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [1, H], ROWS elements per program. The k experts' rows count as one long row, so that all are loaded together."""
    ROW: tl.constexpr = INNER // 8
    GROUPS: tl.constexpr = INNER // GROUP
    weight = weight.to(tl.pointer_type(tl.int32))
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, BLOCK // 4], tl.float32)
    for start in tl.static_range(0, TOP_K * ROW, BLOCK):
        word = start + tl.arange(0, BLOCK)
        chunk = start // 4 + tl.arange(0, BLOCK // 4)
        here, chunk_here = word < TOP_K * ROW, chunk * 4 < TOP_K * ROW
        # A row is a multiple of eight words: eight neighbours belong to one expert. Without the hint, loads would be of
        # one word.
        expert = tl.max_constancy(tl.load(chosen + word // ROW, mask=here, other=0), [8]).to(tl.int64)
        fours = word // 8 * 16 + word % 8
        low = _four_elements(hidden, fours, here)
        high = _four_elements(hidden, fours + 8, here)
        pointers = weight + (expert * (SIZE * ROW) + word % ROW)[None, :] + rows[:, None] * ROW
        words = tl.load(pointers, mask=here[None, :], other=0)
        slot = chunk * 4 // ROW
        expert = tl.load(chosen + slot, mask=chunk_here, other=0).to(tl.int64)
        share = tl.load(weights + slot, mask=chunk_here, other=0)
        group = chunk % (ROW // 4) // 2 * 64 // GROUP
        pointers = scale + (expert * (SIZE * GROUPS) + group)[None, :] + rows[:, None] * GROUPS
        scales = _two_scales(pointers, chunk_here[None, :], GROUP)
        sums += _products(words, low, high, scales, ROWS, BLOCK) * share[None, :]
    tl.store(out + rows, tl.sum(sums, 1).to(out.dtype.element_ty))


@triton.jit
def _gate_up_float_kernel(
    x,
    chosen,
    weight,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_gate_up_int4_kernel` for weights in a floating dtype."""
    slot = tl.program_id(1)
    weight += tl.load(chosen + slot).to(tl.int64) * (2 * INNER * SIZE)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gates = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    ups = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = (rows < INNER)[:, None] & (column < SIZE)[None, :]
        pointers = weight + rows[:, None] * SIZE + column[None, :]
        gate = tl.load(pointers, mask=here, other=0).to(tl.float32)
        up = tl.load(pointers + INNER * SIZE, mask=here, other=0).to(tl.float32)
        inputs = tl.load(x + column, mask=column < SIZE, other=0).to(tl.float32)[None, :]
        gates += tl.sum((gate * inputs).reshape(ROWS, BLOCK // 8, 8), 2)
        ups += tl.sum((up * inputs).reshape(ROWS, BLOCK // 8, 8), 2)
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    results = (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty)
    tl.store(hidden + slot * INNER + rows, results, mask=rows < INNER)


@triton.jit
def _down_float_kernel(
    hidden,
    weights,
    chosen,
    weight,
    out,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_down_int4_kernel` for weights in a floating dtype, one expert after another."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    for slot in range(TOP_K):
        share = tl.load(weights + slot)
        expert = weight + tl.load(chosen + slot).to(tl.int64) * (SIZE * INNER)
        for start in tl.static_range(0, INNER, BLOCK):
            column = start + tl.arange(0, BLOCK)
            here = (rows < SIZE)[:, None] & (column < INNER)[None, :]
            tile = tl.load(expert + rows[:, None] * INNER + column[None, :], mask=here, other=0).to(tl.float32)
            inputs = tl.load(hidden + slot * INNER + column, mask=column < INNER, other=0).to(tl.float32) * share
            sums += tl.sum((tile * inputs[None, :]).reshape(ROWS, BLOCK // 8, 8), 2)
    tl.store(out + rows, tl.sum(sums, 1).to(out.dtype.element_ty), mask=rows < SIZE)
