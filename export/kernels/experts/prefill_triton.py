# mypy: allow-untyped-defs
"""The routed experts on the GPU, for any number of tokens.

The kernels sort the tokens by expert, then multiply blocks of one expert's tokens on tensor cores. A *choice* is one expert
of one token, `t * k + j`; there are C = T k choices. No kernel counts with atomics: the order of choices, and so of every
sum, is the same each time.

In a product the weights are the left operand. A tile [weight rows, K] is unpacked in the registers from which the tensor
cores read it. The block of tokens is the narrow side, so that little is wasted with 16 tokens per expert (512 tokens, 8 of
256 experts). A lane reads neighbouring bytes of integer weights with one load. The elements in these bytes decide the order
in which the tokens' elements must stand (`in_order`). A scale multiplies the sum of its group and not the weights, which stay
exact; in groups of 32 it multiplies the weights, and minima are added to them (`prefill_products_triton`). On an H200,
2026-11-23, a layer of the flagship's experts takes 200, 208, 279 and 465 us for 300, 512, 1,024 and 2,048 tokens. With tokens
in their own order and weights times scales, it takes 226, 233, 322 and 532 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, SMALL, fitting, launcher, pointers
from ostinato.export.kernels.linear.limits import check_weight
from ostinato.export.kernels.linear.prefill_triton import without_panels
from ostinato.export.kernels.linear.step_triton import bits_of
from ostinato.export.kernels.operands import ExpertWeights, Weight, unbiased

from .blocks_triton import expert_of_block
from .limits import check_routing
from .prefill_products_triton import add_product, add_step, load_packed, load_pair, load_second, stands_at

# Choices of one expert per program. An expert's weights are unpacked once for every BLOCK_CHOICES of its choices.
BLOCK_CHOICES = 32
# Weight rows per program: of gate and of up (each), and of the down projection. Four warps multiply 64 rows at once.
BLOCK_GATE_UP = 64
BLOCK_DOWN = 128
# Choices per loop iteration of the sorting kernel.
BLOCK_SORT = 4096
STAGES = 3
# Tokens and columns per program of the kernel that adds up the experts' parts.
SUM_TOKENS = 2
SUM_COLUMNS = 512


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    """See `reference.experts`; all sums are float32, in an order that does not change.

    Raises:
        ExportError: see `check_routing` and `check_weight`.
    """
    gate_up, down = without_panels(routed.gate_up), without_panels(routed.down)
    check_routing(gate_up.values.shape[0], chosen.shape[1])
    for weight in (gate_up, down):
        check_weight(weight, x.dtype)
    if gate_up.format is not None:
        x = in_order(x, step_of(gate_up, x.dtype))
    arguments = (x.contiguous(), weights.contiguous(), chosen.contiguous())
    return _experts(*arguments, *unbiased(gate_up), *unbiased(down))


def in_order(x: Tensor, step: int) -> Tensor:
    """x [T, H] in the order in which products with integer weights read it, `step` bytes per iteration; see `stands_at`."""
    bytes_of = x if step == 32 else x.reshape(x.shape[0], -1, step // 32, 2, 32).transpose(2, 3)
    lanes = bytes_of.reshape(x.shape[0], -1, 4, step // 16, 4).unflatten(4, (2, 2))
    return lanes.permute(0, 1, 3, 4, 2, 5).reshape(x.shape)


@torch.library.triton_op("ostinato::experts", mutates_args={})
def _experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    gate_up_minimum: Tensor | None,
    gate_up_form: str,
    down: Tensor,
    down_scale: Tensor | None,
    down_minimum: Tensor | None,
    down_form: str,
) -> Tensor:
    """`experts` for contiguous x [T, H], weights [T, k] and chosen [T, k]; for integer weights x is `in_order`."""
    tokens, size = x.shape
    count, top_k, inner = gate_up.shape[0], chosen.shape[1], gate_up.shape[1] // 2
    first, second = (
        Weight.of(gate_up, gate_up_scale, gate_up_minimum, None, gate_up_form),
        Weight.of(down, down_scale, down_minimum, None, down_form),
    )
    choices = tokens * top_k
    blocks = (choices + BLOCK_CHOICES - 1) // BLOCK_CHOICES + count
    order = torch.empty(choices, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    schedule = torch.empty(blocks, 3, dtype=torch.int32, device=x.device)
    launcher(_sort_kernel)[(count,)](chosen, order, counts, choices, BLOCK_SORT, num_warps=8)
    padded = max(32, triton.next_power_of_2(count))
    launcher(_schedule_kernel)[(blocks,)](counts, schedule, count, padded, BLOCK_CHOICES, num_warps=1)

    hidden = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    launcher(_gate_up_kernel)[(blocks, triton.cdiv(inner, BLOCK_GATE_UP))](
        x,
        order,
        schedule,
        *pointers(gate_up, gate_up_scale, gate_up_minimum),
        hidden,
        size,
        inner,
        top_k,
        BLOCK_CHOICES=BLOCK_CHOICES,
        BLOCK_ROWS=BLOCK_GATE_UP,
        NEXT_STEP=0 if second.format is None else step_of(second, x.dtype),
        num_stages=STAGES,
        **_constants(first, x.dtype),
    )
    parts = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    launcher(_down_kernel)[(blocks, triton.cdiv(size, BLOCK_DOWN if size % BLOCK_DOWN == 0 else BLOCK_DOWN // 2))](
        hidden,
        weights,
        order,
        schedule,
        *pointers(down, down_scale, down_minimum),
        parts,
        size,
        inner,
        BLOCK_CHOICES=BLOCK_CHOICES,
        BLOCK_ROWS=BLOCK_DOWN if size % BLOCK_DOWN == 0 else BLOCK_DOWN // 2,
        num_stages=STAGES,
        **_constants(second, x.dtype),
    )
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    grid = ((tokens + SUM_TOKENS - 1) // SUM_TOKENS, triton.cdiv(size, SUM_COLUMNS))
    launcher(_sum_kernel)[grid](parts, chosen, out, tokens, count, size, top_k, SUM_TOKENS, SUM_COLUMNS, num_warps=4)
    return out


def _constants(weight: Weight, dtype: torch.dtype) -> dict[str, int | bool]:
    """Compile-time constants of the products with a weight; `dtype` is the inputs' dtype."""
    return {
        "GROUP": weight.group_size or 0,
        "BITS": bits_of(weight),
        "MINIMUM": weight.minimum is not None,
        "STEP": step_of(weight, dtype),
        "num_warps": 4,
    }


def step_of(weight: Weight, dtype: torch.dtype) -> int:
    """Elements of a row per loop iteration; of integers, packed bytes, or half of its bytes where each has one integer.

    A packed tile's low nibbles share a scale, and so do its high ones; or the bytes of each half.
    """
    if weight.format is not None and (weight.format.per_value == 1 or weight.format.group_size < 128):
        return 32
    # Before Hopper, float32 products of 64 bytes per iteration spill 1 to 7 KB per thread. Products of 64 elements take
    # 104 KB of shared memory with triton 3.8 (80 KB with 3.6), and compute capability 8.9 has 99 KB.
    return 64 if dtype == torch.bfloat16 else fitting({LARGE: 64, SMALL: 32})


@triton.jit
def _sort_kernel(chosen, order, counts, choices, BLOCK: tl.constexpr):
    """Write the choices of expert e (program e) to order [C], ascending, behind the choices of lower experts.

    counts [E] gets their number. Choices whose expert index is E (no expert) are in neither tensor.
    """
    expert = tl.program_id(0)
    lower = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        found = tl.load(chosen + choice, mask=choice < choices, other=0x7FFFFFFF)
        lower += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(counts + expert, tl.sum(equal, 0))
    for start in range(0, choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        found = tl.load(chosen + choice, mask=choice < choices, other=0x7FFFFFFF)
        hit = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(hit, 0) - 1, choice, mask=hit > 0)
        place += tl.sum(hit, 0)


@triton.jit
def _schedule_kernel(counts, schedule, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_CHOICES: tl.constexpr):
    """Write schedule[b] (program b): the expert of block b (-1 for an unused block), the block's first place in `order`, and
    the end of the expert's places."""
    block = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    mine, index, place = expert_of_block(count, block, BLOCK_CHOICES, tl.int64)
    tl.store(schedule + block * 3, mine)
    tl.store(schedule + block * 3 + 1, place)
    tl.store(schedule + block * 3 + 2, place - index * BLOCK_CHOICES + tl.sum(tl.where(expert == mine, count, 0), 0))


@triton.jit
def _gate_up_kernel(
    x,
    order,
    schedule,
    weight,
    scale,
    minimum,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NEXT_STEP: tl.constexpr,
):
    """Write hidden [C, I] = silu(gate) * up, its rows in the order of `order`.

    Program (block of the schedule, BLOCK_ROWS columns of hidden). NEXT_STEP is STEP of the down projection, which reads
    hidden's columns in the order of `stands_at`; with 0 they stand in their own order.
    """
    block = tl.program_id(0)
    expert = tl.load(schedule + block * 3).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(schedule + block * 3 + 1) + tl.arange(0, BLOCK_CHOICES)
    filled = place < tl.load(schedule + block * 3 + 2)
    token = tl.load(order + place, mask=filled, other=0).to(tl.int64) // TOP_K
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    gates = tl.zeros([BLOCK_ROWS, BLOCK_CHOICES], tl.float32)
    ups = tl.zeros([BLOCK_ROWS, BLOCK_CHOICES], tl.float32)
    column = tl.arange(0, STEP)
    if GROUP == 0:
        inputs = x + token[None, :] * SIZE + column[:, None]
        tiles = weight + expert * (2 * INNER * SIZE) + row[:, None] * SIZE + column[None, :]
        for start in range(0, SIZE, STEP):
            inside = start + column < SIZE
            tokens = tl.load(inputs + start, mask=inside[:, None] & filled[None, :], other=0)
            here = (row < INNER)[:, None] & inside[None, :]
            gates = add_product(tl.load(tiles + start, mask=here, other=0), tokens, gates)
            ups = add_product(tl.load(tiles + start + INNER * SIZE, mask=here, other=0), tokens, ups)
    else:
        inputs = x + token[None, :] * SIZE + column[:, None]
        # Bytes of a row. Rows past the last read the last row again.
        ROW: tl.constexpr = SIZE * BITS // 8
        WHOLE: tl.constexpr = SIZE % 64 == 0
        line = row if INNER % BLOCK_ROWS == 0 else tl.minimum(row, INNER - 1)
        tiles = weight + expert * (2 * INNER * ROW) + line[:, None] * ROW + column[None, :]
        gate_scale = scale + expert * (2 * INNER * (SIZE // GROUP)) + line * (SIZE // GROUP)
        up_scale = gate_scale + INNER * (SIZE // GROUP)
        if MINIMUM:
            gate_minimum = minimum + expert * (2 * INNER * (SIZE // GROUP)) + line * (SIZE // GROUP)
            up_minimum = gate_minimum + INNER * (SIZE // GROUP)
        # Scales are too narrow for an asynchronous copy, but a row's scales are adjacent and come from L1 after the first
        # iteration. Loaded one iteration ahead, they made Triton pass the tiles through shared memory: 553 instructions per
        # iteration, not 421.
        for start in range(0, ROW, STEP * BITS // 4):
            first = start * (8 // BITS)
            rest = first + STEP < SIZE
            gate_pair = load_pair(gate_scale, first, rest, GROUP, WHOLE)
            up_pair = load_pair(up_scale, first, rest, GROUP, WHOLE)
            gate_minima, up_minima = gate_pair, up_pair
            if MINIMUM:
                gate_minima = load_pair(gate_minimum, first, rest, GROUP, WHOLE)
                up_minima = load_pair(up_minimum, first, rest, GROUP, WHOLE)
            low_tokens = tl.load(inputs + first, mask=filled[None, :], other=0)
            high_tokens = load_second(inputs + first + STEP, filled, rest, WHOLE)
            packed = load_packed(tiles + start, rest, BITS, WHOLE)
            gates = add_step(packed, gate_pair, gate_minima, low_tokens, high_tokens, gates, GROUP, BITS, MINIMUM)
            packed = load_packed(tiles + start + INNER * ROW, rest, BITS, WHOLE)
            ups = add_step(packed, up_pair, up_minima, low_tokens, high_tokens, ups, GROUP, BITS, MINIMUM)
    results = (gates * tl.sigmoid(gates) * ups).to(hidden.dtype.element_ty)
    here = filled[None, :] & (row < INNER)[:, None]
    to = row if NEXT_STEP == 0 else stands_at(row, NEXT_STEP)
    tl.store(hidden + place.to(tl.int64)[None, :] * INNER + to[:, None], results, mask=here)


@triton.jit
def _down_kernel(
    hidden,
    weights,
    order,
    schedule,
    weight,
    scale,
    minimum,
    parts,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write parts [C, H]: each choice's output times its weight. Program (block of the schedule, BLOCK_ROWS columns)."""
    block = tl.program_id(0)
    expert = tl.load(schedule + block * 3).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(schedule + block * 3 + 1) + tl.arange(0, BLOCK_CHOICES)
    filled = place < tl.load(schedule + block * 3 + 2)
    choice = tl.load(order + place, mask=filled, other=0).to(tl.int64)
    share = tl.load(weights + choice, mask=filled, other=0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_CHOICES], tl.float32)
    column = tl.arange(0, STEP)
    if GROUP == 0:
        inputs = hidden + place.to(tl.int64)[None, :] * INNER + column[:, None]
        tiles = weight + expert * (SIZE * INNER) + row[:, None] * INNER + column[None, :]
        for start in range(0, INNER, STEP):
            inside = start + column < INNER
            tokens = tl.load(inputs + start, mask=inside[:, None] & filled[None, :], other=0)
            here = (row < SIZE)[:, None] & inside[None, :]
            sums = add_product(tl.load(tiles + start, mask=here, other=0), tokens, sums)
    else:
        inputs = hidden + place.to(tl.int64)[None, :] * INNER + column[:, None]
        ROW: tl.constexpr = INNER * BITS // 8
        WHOLE: tl.constexpr = INNER % 64 == 0
        line = row if SIZE % BLOCK_ROWS == 0 else tl.minimum(row, SIZE - 1)
        tiles = weight + expert * (SIZE * ROW) + line[:, None] * ROW + column[None, :]
        row_scale = scale + expert * (SIZE * (INNER // GROUP)) + line * (INNER // GROUP)
        if MINIMUM:
            row_minimum = minimum + expert * (SIZE * (INNER // GROUP)) + line * (INNER // GROUP)
        for start in range(0, ROW, STEP * BITS // 4):
            first = start * (8 // BITS)
            rest = first + STEP < INNER
            pair = load_pair(row_scale, first, rest, GROUP, WHOLE)
            minima = pair
            if MINIMUM:
                minima = load_pair(row_minimum, first, rest, GROUP, WHOLE)
            low_tokens = tl.load(inputs + first, mask=filled[None, :], other=0)
            high_tokens = load_second(inputs + first + STEP, filled, rest, WHOLE)
            packed = load_packed(tiles + start, rest, BITS, WHOLE)
            sums = add_step(packed, pair, minima, low_tokens, high_tokens, sums, GROUP, BITS, MINIMUM)
    here = filled[None, :] & (row < SIZE)[:, None]
    results = (sums * share[None, :]).to(parts.dtype.element_ty)
    tl.store(parts + choice[None, :] * SIZE + row[:, None], results, mask=here)


@triton.jit
def _sum_kernel(
    parts,
    chosen,
    out,
    tokens,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Write out [T, H]: the sum of each token's parts.

    Not left to Inductor: the speed of its kernel depends on what it tries out at export.
    """
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    here = (token < tokens)[:, None] & (column < SIZE)[None, :]
    first = parts + token[:, None] * (TOP_K * SIZE) + column[None, :]
    total = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        # Parts that no program computed hold arbitrary values.
        known = tl.load(chosen + token * TOP_K + choice, mask=token < tokens, other=EXPERTS) < EXPERTS
        total += tl.load(first + choice * SIZE, mask=here & known[:, None], other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * SIZE + column[None, :], total.to(out.dtype.element_ty), mask=here)
