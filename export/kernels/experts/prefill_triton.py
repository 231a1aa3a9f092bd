# mypy: allow-untyped-defs
"""The routed experts on the GPU, for any number of tokens.

The kernels sort the tokens by expert, then multiply blocks of one expert's tokens on tensor cores. A *choice* is one expert
of one token, `t * k + j`; there are C = T k choices. No kernel counts with atomics: the order of choices, and so of every
sum, is the same each time.

In a product the weights are the left operand. A tile [weight rows, K] is unpacked in the registers from which the tensor
cores read it. The block of tokens is the narrow side, so that little is wasted with 16 tokens per expert (512 tokens, 8 of
256 experts). A lane reads neighbouring bytes of int4 weights with one load. The elements in these bytes decide the order in
which the tokens' elements must stand (`in_order`). A scale multiplies the sum of its group and not the weights, which stay
exact; in groups of 32 it multiplies the weights. On an H200, 2026-11-23, a layer of the flagship's experts takes 200, 208,
279 and 465 us for 300, 512, 1,024 and 2,048 tokens. With tokens in their own order and weights times scales, it takes 226,
233, 322 and 532 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import LARGE, SMALL, fitting, launcher
from ostinato.export.kernels.linear.prefill_triton import without_panels
from ostinato.export.kernels.operands import ExpertWeights

from .blocks_triton import expert_of_block
from .limits import check_experts

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
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights) -> Tensor:
    """See `reference.experts`; all sums are float32, in an order that does not change.

    Raises:
        ExportError: see `check_experts`.
    """
    gate_up, down = without_panels(routed.gate_up), without_panels(routed.down)
    count, top_k = gate_up.values.shape[0], chosen.shape[1]
    for weight in (gate_up, down):
        check_experts(x.shape[1], gate_up.rows // 2, count, top_k, weight.format)
    if gate_up.group_size is not None:
        x = in_order(x, _step(gate_up.group_size, x.dtype))
    arguments = (x.contiguous(), weights.contiguous(), chosen.contiguous())
    return _experts(*arguments, gate_up.values, gate_up.scale, down.values, down.scale)


def in_order(x: Tensor, step: int) -> Tensor:
    """x [T, H] in the order in which products with int4 weights read it, `step` bytes per iteration; see `_stands_at`."""
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
    """Elements, or packed bytes, of a row per loop iteration. The bytes' low nibbles share a scale; so do their high ones."""
    if 0 < group_size < 128:
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
def _unpack(packed, dtype: tl.constexpr):
    """Packed bytes [N, B] -> the weights of their low and of their high nibbles, without scales: [N, B] each, exact in
    `dtype`."""
    if INTERPRETED or dtype != tl.bfloat16:
        low = (packed & 15).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
        return low.to(dtype), high.to(dtype)
    else:
        # A nibble in the low mantissa bits of the bfloat16 128 makes it 128 + nibble. This code unpacks four bytes at a time;
        # Triton's own would unpack them one by one.
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
    """weights [N, B] with each row's elements in the order that `_stands_at` gives inputs. This moves no data."""
    B: tl.constexpr = weights.shape[1]
    parts = tl.reshape(weights, [weights.shape[0], 4, B // 16, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), [weights.shape[0], B])


@triton.jit
def _stands_at(element, STEP: tl.constexpr):
    """The place of a row's element in the order in which products read inputs, with STEP bytes of weights per iteration.

    Four lanes share a row of a tensor core's operand; lane c has elements 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16. Each
    lane should read its STEP / 4 neighbouring bytes of a weight row with one load. So the inputs for these bytes get the
    places that lane c has.
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
    """weights [N, B] times scale [N], in the weights' dtype. Triton's interpreter has no products of bfloat16."""
    if INTERPRETED:
        product = weights.to(tl.float32) * scale.to(tl.float32)[:, None]
        return product.to(weights.dtype)
    else:
        return weights * scale.to(weights.dtype)[:, None]


@triton.jit
def _add_step(packed, low_scale, high_scale, low_inputs, high_inputs, sums, GROUP: tl.constexpr):
    """sums [N, M] + (low nibbles of packed [N, B] times low_scale [N]) @ low_inputs [B, M] + the same for high nibbles.

    Unless GROUP is 32, both have `low_scale`.
    """
    low, high = _unpack(packed, low_inputs.dtype)
    if GROUP == 32:
        # Low and high nibbles have different scales. With one product for each, an iteration takes 278 instructions, not 237.
        low, high = _scaled(low, low_scale), _scaled(high, high_scale)
        return _add_product(_in_lanes(high), high_inputs, _add_product(_in_lanes(low), low_inputs, sums))
    else:
        product = _add_product(_in_lanes(low), low_inputs, tl.zeros(sums.shape, tl.float32))
        product = _add_product(_in_lanes(high), high_inputs, product)
        return sums + product * low_scale.to(tl.float32)[:, None]


@triton.jit
def _scale_pair(scale, first, GROUP: tl.constexpr):
    """The scales [N] of the iteration that begins at element `first`: for its low nibbles and for its high nibbles."""
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
    """Write hidden [C, I] = silu(gate) * up, its rows in the order of `order`.

    Program (block of the schedule, BLOCK_ROWS columns of hidden). NEXT_STEP is STEP of the down projection, which reads
    hidden's columns in the order of `_stands_at`; with 0 they stand in their own order.
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
        # Scales are too narrow for an asynchronous copy, but a row's scales are adjacent and come from L1 after the first
        # iteration. Loaded one iteration ahead, they made Triton pass the tiles through shared memory: 553 instructions per
        # iteration, not 421.
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
