# mypy: allow-untyped-defs
"""Routing and the routed experts as Triton kernels: one for routing, two for one token; more is in `experts_prefill_triton`.

One token is bound by the memory that its k experts lie in, so nothing is staged: every thread loads 16 bytes of packed
weights at a time, all of a program's loads are in flight together, and the products are formed in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...delegate.errors import ExportError
from .experts_prefill_triton import prefill
from .int4 import GROUP_SIZES, SPAN
from .launch import launcher

MAX_EXPERTS = 1024
# Output rows a program. At [8 of 256, 2048, 512] both kernels have 512 and 256 programs of 16 KB: all resident at once.
ROWS = 8
# Words of four bytes, or elements of floating weights, that a program takes of a row at once: four warps, 16 bytes a thread.
WORDS = 512
ELEMENTS = 1024
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def check_shapes(hidden: int, intermediate: int, experts: int, top_k: int, group_size: int | None) -> None:
    """Refuses what the kernels cannot take.

    Args:
        hidden: H, the model's size.
        intermediate: I, an expert's inner size.
        experts: E.
        top_k: experts a token.
        group_size: elements a scale, None for weights in a floating dtype.

    Raises:
        ExportError: names the limit.
    """
    if not 1 <= experts <= MAX_EXPERTS:
        raise ExportError(f"the CUDA kernels route among 1 to {MAX_EXPERTS} experts, not {experts}")
    if not 1 <= top_k <= experts:
        raise ExportError(f"experts a token must be 1 to {experts}, the number of experts, not {top_k}")
    if group_size is None:
        return
    if group_size not in GROUP_SIZES:
        raise ExportError(f"int4 group size must be one of {GROUP_SIZES}, not {group_size}")
    step = max(SPAN, group_size)
    for name, size in (("hidden size", hidden), ("experts' intermediate size", intermediate)):
        if size <= 0 or size % step:
            raise ExportError(
                f"the {name} must be a multiple of {step} for int4 experts with group size {group_size}, not {size}"
            )


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """See `experts.route`; indices are int32, in order of falling weight, the lower index first where logits are equal."""
    weights, chosen = _route(logits.contiguous(), top_k)
    return weights, chosen


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
) -> Tensor:
    """See `experts.experts`; everything that is summed is summed in float32, in an order that does not change.

    Raises:
        ExportError: `check_shapes`.
    """
    size = gate_up.shape[1] // 2
    group_size = None if gate_up_scale is None else x.shape[1] // gate_up_scale.shape[2]
    check_shapes(x.shape[1], size, gate_up.shape[0], chosen.shape[1], group_size)
    op = _decode if x.shape[0] == 1 else prefill
    arguments = (x.contiguous(), weights.contiguous(), chosen.contiguous())
    return op(*arguments, gate_up, gate_up_scale, down, down_scale)


@torch.library.triton_op("ostinato::route", mutates_args={})
def _route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    padded = max(32, triton.next_power_of_2(count))
    launcher(_route_kernel)[(tokens,)](
        logits, weights, chosen, count, padded, top_k, triton.next_power_of_2(top_k), num_warps=1
    )
    return weights, chosen


@torch.library.triton_op("ostinato::experts_decode", mutates_args={})
def _decode(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
) -> Tensor:
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
def _route_kernel(
    logits,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    """One program a token. Integers that order as the floats do: a warp finds the largest of those in one instruction."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    values = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    # Negative floats order backwards as integers, so all their bits but the sign are turned over; doing it again undoes it.
    keys = values.to(tl.int32, bitcast=True)
    keys = tl.where(expert < EXPERTS, keys ^ ((keys >> 31) & 0x7FFFFFFF), -0x80000000)
    place = tl.arange(0, PADDED_K)
    best_keys = tl.full([PADDED_K], -0x80000000, tl.int32)
    best_experts = tl.zeros([PADDED_K], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        index = tl.min(tl.where(keys == best, expert, PADDED), 0)
        best_keys = tl.where(place == i, best, best_keys)
        best_experts = tl.where(place == i, index, best_experts)
        keys = tl.where(expert == index, -0x80000000, keys)
    best_values = (best_keys ^ ((best_keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    largest = tl.max(tl.where(place == 0, best_values, float("-inf")), 0)
    shares = tl.where(place < TOP_K, tl.exp(best_values - largest), 0.0)
    shares = shares / tl.sum(shares, 0)
    tl.store(weights + token * TOP_K + place, shares, mask=place < TOP_K)
    tl.store(chosen + token * TOP_K + place, best_experts, mask=place < TOP_K)


@triton.jit
def _nibble(words, AT: tl.constexpr):
    """The four bits from bit `AT`, 0 to 16, less 8, as float32: put into a float's mantissa they need no conversion."""
    magic: tl.constexpr = (150 - AT) << 23
    if INTERPRETED:
        bits = (words & (15 << AT)) | magic
    else:
        # Written as two operators it costs two instructions, since both constants are then immediates.
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
    """Packed words [ROWS, BLOCK] times what they meet, summed over four words and scaled: [ROWS, BLOCK / 4].

    `low` and `high` are the elements, four [BLOCK] each, that the words' low and high nibbles meet; `scales` likewise two
    [ROWS, BLOCK / 4].
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
    """out [1, H], ROWS of it a program. The k experts' rows count as one long row, so that all are loaded together."""
    ROW: tl.constexpr = INNER // 8
    GROUPS: tl.constexpr = INNER // GROUP
    weight = weight.to(tl.pointer_type(tl.int32))
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, BLOCK // 4], tl.float32)
    for start in tl.static_range(0, TOP_K * ROW, BLOCK):
        word = start + tl.arange(0, BLOCK)
        chunk = start // 4 + tl.arange(0, BLOCK // 4)
        here, chunk_here = word < TOP_K * ROW, chunk * 4 < TOP_K * ROW
        # A row is a multiple of eight words: eight neighbours belong to one expert. Unhinted, loads would be of one word.
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
    """`_down_int4_kernel` for weights in a floating dtype; expert after expert."""
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
