# mypy: allow-untyped-defs
"""The routed experts on the GPU, for any number of tokens.

They sort the tokens by expert, then multiply blocks of one expert's tokens with tensor cores. A *choice* is one expert of
one token, `t * k + j`; there are C = T k of them. Nothing here counts with atomics: the order of choices, and so every sum,
is the same in each run.

In a product the weights are the left operand: a tile [weight rows, K] is unpacked in the registers from which the tensor
cores read it, and the block of tokens is the narrow side, so that 16 tokens per expert (512 tokens, 8 of 256) waste
little. A lane reads neighbouring bytes of int4 weights with one load; which elements of a product these are decides the order
in which the tokens' elements must be (`in_order`). A scale multiplies the sum of its group and not the weights, which stay
exact; in groups of 32 it multiplies them. On an H200, 2026-11-23, a layer of the flagship's experts takes 200, 208, 279 and
465 us for 300, 512, 1,024 and 2,048 tokens; with tokens as they are and weights times scales 226, 233, 322 and 532.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, SMALL, fitting, launcher
from ostinato.export.kernels.linear.prefill_triton import without_panels
from ostinato.export.kernels.operands import ExpertWeights

from .limits import check_experts

# Choices of one expert per program: an expert that has more is unpacked once for every BLOCK_CHOICES.
BLOCK_CHOICES = 32
# Weight rows per program, of gate and of up each, and of the down projection. 64 rows are what four warps multiply at once.
BLOCK_GATE_UP = 64
BLOCK_DOWN = 128
# Choices that the sorting kernel looks at together.
BLOCK_SORT = 4096
STAGES = 3
# Tokens and columns per program of the kernel that adds the experts' parts up.
SUM_TOKENS = 2
SUM_COLUMNS = 512
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    """See `reference.experts`; all sums are float32, in an order that does not change.

    Raises:
        ExportError: see `check_experts`.
    """
    gate_up, down = without_panels(routed.gate_up), without_panels(routed.down)
    count, top_k = gate_up.values.shape[0], chosen.shape[1]
    check_experts(x.shape[1], gate_up.rows // 2, count, top_k, gate_up.group_size)
    if gate_up.group_size is not None:
        x = in_order(x, _step(gate_up.group_size, x.dtype))
    arguments = (x.contiguous(), weights.contiguous(), chosen.contiguous())
    return _experts(*arguments, gate_up.values, gate_up.scale, down.values, down.scale)


def in_order(x: Tensor, step: int) -> Tensor:
    """x [T, H] as products with int4 weights of `step` bytes a step read it: `_stands_at` says which element stands where."""
    bytes_of = x.reshape(x.shape[0], -1, step // 32, 2, 32).transpose(2, 3)
    lanes = bytes_of.reshape(x.shape[0], -1, 2, 4, step // 16, 4).unflatten(5, (2, 2))
    return lanes.permute(0, 1, 2, 4, 5, 3, 6).reshape(x.shape)


@torch.library.triton_op("ostinato::experts", mutates_args={})
def _experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
) -> Tensor:
    """`experts` for contiguous x [T, H], weights [T, k] and chosen [T, k]; for int4 weights x is `in_order`."""
    tokens, size = x.shape
    count, top_k, inner = gate_up.shape[0], chosen.shape[1], gate_up.shape[1] // 2
    choices = tokens * top_k
    blocks = (choices + BLOCK_CHOICES - 1) // BLOCK_CHOICES + count
    order = torch.empty(choices, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    schedule = torch.empty(blocks, 3, dtype=torch.int32, device=x.device)
    launcher(_sort_kernel)[(count,)](chosen, order, counts, choices, BLOCK_SORT, num_warps=8)
    padded = max(32, triton.next_power_of_2(count))
    launcher(_schedule_kernel)[(blocks,)](counts, schedule, count, padded, BLOCK_CHOICES, num_warps=1)

    hidden = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    group_size = 0 if gate_up_scale is None else size // gate_up_scale.shape[2]
    down_group_size = 0 if down_scale is None else inner // down_scale.shape[2]
    down_step = _step(down_group_size, x.dtype)
    launcher(_gate_up_kernel)[(blocks, triton.cdiv(inner, BLOCK_GATE_UP))](
        x,
        order,
        schedule,
        gate_up,
        gate_up if gate_up_scale is None else gate_up_scale,
        hidden,
        size,
        inner,
        top_k,
        group_size,
        BLOCK_CHOICES,
        BLOCK_GATE_UP,
        _step(group_size, x.dtype),
        down_step if down_group_size else 0,
        num_warps=4,
        num_stages=STAGES,
    )
    parts = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    block = BLOCK_DOWN if size % BLOCK_DOWN == 0 else BLOCK_DOWN // 2
    launcher(_down_kernel)[(blocks, triton.cdiv(size, block))](
        hidden,
        weights,
        order,
        schedule,
        down,
        down if down_scale is None else down_scale,
        parts,
        size,
        inner,
        down_group_size,
        BLOCK_CHOICES,
        block,
        down_step,
        num_warps=4,
        num_stages=STAGES,
    )
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    grid = ((tokens + SUM_TOKENS - 1) // SUM_TOKENS, triton.cdiv(size, SUM_COLUMNS))
    launcher(_sum_kernel)[grid](parts, chosen, out, tokens, count, size, top_k, SUM_TOKENS, SUM_COLUMNS, num_warps=4)
    return out


def _step(group_size: int, dtype: torch.dtype) -> int:
    """What a step takes of a row of K: elements, or packed bytes whose low nibbles share a scale and whose high ones do."""
    if 0 < group_size < 128:
        return 32
    # Before Hopper, float32 products of 64 bytes per step spill 1 to 7 KB per thread; those of 64 elements take 104 KB of
    # shared memory with triton 3.8 (80 KB with 3.6), and compute capability 8.9 has 99.
    return 64 if dtype == torch.bfloat16 else fitting({LARGE: 64, SMALL: 32})


@triton.jit
def _sort_kernel(chosen, order, counts, choices, BLOCK: tl.constexpr):
    """Program e: writes to order [C] the choices of expert e, ascending, after those of lower experts; counts [E].

    Choices of no expert, whose index is E, are in neither.
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
    """Program b: schedule[b] = the b-th block's expert, or -1, its first place in `order` and where that expert's places
    end."""
    block = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    blocks = (count + BLOCK_CHOICES - 1) // BLOCK_CHOICES
    mine = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    earlier = block - tl.sum(tl.where(expert < mine, blocks, 0), 0)
    start = tl.sum(tl.where(expert < mine, count, 0), 0)
    end = start + tl.sum(tl.where(expert == mine, count, 0), 0)
    tl.store(schedule + block * 3, tl.where(mine < EXPERTS, mine, -1))
    tl.store(schedule + block * 3 + 1, start + earlier * BLOCK_CHOICES)
    tl.store(schedule + block * 3 + 2, end)


@triton.jit
def _unpack(packed, dtype: tl.constexpr):
    """Packed bytes [N, B] -> the weights of their low and of their high nibbles, without scales: each [N, B], exact in the
    dtype."""
    if INTERPRETED or dtype != tl.bfloat16:
        low = (packed & 15).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
        return low.to(dtype), high.to(dtype)
    else:
        # A nibble as the low bits of 128's mantissa gives the bfloat16 128 + nibble. Four bytes at a time: Triton's own code
        # takes bytes apart one by one.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, mask, magic, one, offset;
            mov.b32 mask, 0x000f000f;
            mov.b32 magic, 0x43004300;
            mov.b32 one, 0x3f803f80;
            mov.b32 offset, 0xc308c308;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 $0, first, mask, magic, 0xEA;
            lop3.b32 $1, second, mask, magic, 0xEA;
            shr.u32 first, first, 4;
            shr.u32 second, second, 4;
            lop3.b32 $2, first, mask, magic, 0xEA;
            lop3.b32 $3, second, mask, magic, 0xEA;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _in_lanes(weights):
    """[N, B] -> the same with each row's elements in the order in which `_stands_at` has inputs: moves nothing."""
    B: tl.constexpr = weights.shape[1]
    parts = tl.reshape(weights, [weights.shape[0], 4, B // 16, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), [weights.shape[0], B])


@triton.jit
def _stands_at(element, STEP: tl.constexpr):
    """Where an element of a row stands in the order in which the products read inputs, and weights of STEP bytes a step.

    A tensor core's operand has, in lane c of four, elements 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16. Four lanes that have
    neighbouring STEP / 4 bytes of a weight row each read them with one load if those elements are where they are.
    """
    byte = element // 64 % (STEP // 32) * 32 + element % 32
    lane = byte // (STEP // 4)
    inside = byte % (STEP // 4)
    return (
        element // (2 * STEP) * (2 * STEP) + element // 32 % 2 * STEP + inside // 4 * 16 + inside // 2 % 2 * 8 + lane * 2
        + inside % 2
    )  # fmt: skip


@triton.jit
def _add_product(weights, inputs, sums):
    """sums [N, M] + weights [N, K] @ inputs [K, M]."""
    return tl.dot(weights, inputs, sums, input_precision="tf32x3")


@triton.jit
def _scaled(weights, scale):
    """weights [N, B] times scale [N], in their dtype. The interpreter has no products of bfloat16."""
    if INTERPRETED:
        product = weights.to(tl.float32) * scale.to(tl.float32)[:, None]
        return product.to(weights.dtype)
    else:
        return weights * scale.to(weights.dtype)[:, None]


@triton.jit
def _add_step(packed, low_scale, high_scale, low_inputs, high_inputs, sums, GROUP: tl.constexpr):
    """sums [N, M] + the weights of packed bytes [N, B], times their scales [N], @ inputs [B, M] of low and high nibbles."""
    low, high = _unpack(packed, low_inputs.dtype)
    if GROUP == 32:
        # Its two groups have two scales: with a product for each, a step takes 278 instructions, not 237.
        low, high = _scaled(low, low_scale), _scaled(high, high_scale)
        return _add_product(_in_lanes(high), high_inputs, _add_product(_in_lanes(low), low_inputs, sums))
    else:
        product = _add_product(_in_lanes(low), low_inputs, tl.zeros(sums.shape, tl.float32))
        product = _add_product(_in_lanes(high), high_inputs, product)
        return sums + product * low_scale.to(tl.float32)[:, None]


@triton.jit
def _scale_pair(scale, first, GROUP: tl.constexpr):
    """The scales [N] of the step that begins at element `first`: of its low nibbles and of its high ones."""
    low = tl.load(scale + first // GROUP)
    high = low
    if GROUP == 32:
        high = tl.load(scale + first // GROUP + 1)
    return low, high


@triton.jit
def _gate_up_kernel(
    x,
    order,
    schedule,
    weight,
    scale,
    hidden,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NEXT_STEP: tl.constexpr,
):
    """hidden [C, I] = silu(gate) * up, in the order of `order`. Program (block of the schedule, BLOCK_ROWS columns of
    hidden).

    NEXT_STEP is that of the down projection; it reads hidden's columns in the order of x. 0: as they are.
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
            gates = _add_product(tl.load(tiles + start, mask=here, other=0), tokens, gates)
            ups = _add_product(tl.load(tiles + start + INNER * SIZE, mask=here, other=0), tokens, ups)
    else:
        inputs = x + token[None, :] * SIZE + column[:, None]
        tiles = weight + expert * (INNER * SIZE) + row[:, None] * (SIZE // 2) + column[None, :]
        gate_scale = scale + expert * (2 * INNER * (SIZE // GROUP)) + row * (SIZE // GROUP)
        up_scale = gate_scale + INNER * (SIZE // GROUP)
        # Scales are too narrow for an asynchronous copy, but those of a row are adjacent and come from L1 after the first
        # step. Loaded a step ahead, they made Triton pass the tiles through shared memory: 553 instructions per step, not
        # 421.
        for start in range(0, SIZE // 2, STEP):
            gate_pair = _scale_pair(gate_scale, 2 * start, GROUP)
            up_pair = _scale_pair(up_scale, 2 * start, GROUP)
            low_tokens = tl.load(inputs + 2 * start, mask=filled[None, :], other=0)
            high_tokens = tl.load(inputs + 2 * start + STEP, mask=filled[None, :], other=0)
            packed = tl.load(tiles + start)
            gates = _add_step(packed, gate_pair[0], gate_pair[1], low_tokens, high_tokens, gates, GROUP)
            packed = tl.load(tiles + start + INNER * (SIZE // 2))
            ups = _add_step(packed, up_pair[0], up_pair[1], low_tokens, high_tokens, ups, GROUP)
    results = (gates * tl.sigmoid(gates) * ups).to(hidden.dtype.element_ty)
    here = filled[None, :] & (row < INNER)[:, None]
    to = row if NEXT_STEP == 0 else _stands_at(row, NEXT_STEP)
    tl.store(hidden + place.to(tl.int64)[None, :] * INNER + to[:, None], results, mask=here)


@triton.jit
def _down_kernel(
    hidden,
    weights,
    order,
    schedule,
    weight,
    scale,
    parts,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """parts [C, H]: each choice's output times its weight. Program (block of the schedule, BLOCK_ROWS columns)."""
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
            sums = _add_product(tl.load(tiles + start, mask=here, other=0), tokens, sums)
    else:
        inputs = hidden + place.to(tl.int64)[None, :] * INNER + column[:, None]
        tiles = weight + expert * (SIZE * (INNER // 2)) + row[:, None] * (INNER // 2) + column[None, :]
        row_scale = scale + expert * (SIZE * (INNER // GROUP)) + row * (INNER // GROUP)
        for start in range(0, INNER // 2, STEP):
            pair = _scale_pair(row_scale, 2 * start, GROUP)
            low_tokens = tl.load(inputs + 2 * start, mask=filled[None, :], other=0)
            high_tokens = tl.load(inputs + 2 * start + STEP, mask=filled[None, :], other=0)
            sums = _add_step(tl.load(tiles + start), pair[0], pair[1], low_tokens, high_tokens, sums, GROUP)
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
    """out [T, H]: each token's parts added up. Left to the compiler, its speed would be what it tries out at export."""
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    here = (token < tokens)[:, None] & (column < SIZE)[None, :]
    first = parts + token[:, None] * (TOP_K * SIZE) + column[None, :]
    total = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        # What nobody computed may be anything.
        known = tl.load(chosen + token * TOP_K + choice, mask=token < tokens, other=EXPERTS) < EXPERTS
        total += tl.load(first + choice * SIZE, mask=here & known[:, None], other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * SIZE + column[None, :], total.to(out.dtype.element_ty), mask=here)
