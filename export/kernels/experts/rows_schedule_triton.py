# mypy: allow-untyped-defs
"""Which programs of `rows_triton` take which rows of which expert, and the sum of what they made.

A *choice* is one expert of one row. A *block* is BLOCK rows, or fewer, that one expert has; the shared expert's blocks come
first, then those of the routed ones in the order of experts. A *place* is where `hidden` has the inner activations of a
choice: those of a block stand side by side. A *part* is where `parts` has its output, [R, k (+ 1)], the shared expert's last.

All kernels start early (`early_start_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_tiles_triton import INTERPRETED
from ostinato.export.kernels.operands import MAX_ROWS

from .step_route_triton import add_pairs

# The most rows of a step.
ALL_ROWS = tl.constexpr(MAX_ROWS)
# Rows that have one bit each in a word of `members`.
WORD = tl.constexpr(32)
# Integers per block in a schedule: the expert, EXPERTS for the shared one, -1 for none; the first place; and two lists, of
# the rows and of the parts, each -1 where there are no more.
RECORD = tl.constexpr(32)
RECORD_ROWS = tl.constexpr(8)
RECORD_PARTS = tl.constexpr(16)
# The most rows of a block.
BLOCK = tl.constexpr(8)


@triton.jit
def schedule_rows_early(
    members,
    ranks,
    schedule,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """schedule [blocks, RECORD], a block per program. WIDTH: EXPERTS or more, a power of two."""
    start_next(EARLY)
    block = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    record = schedule + block * RECORD
    shared_blocks = (rows + BLOCK - 1) // BLOCK if SHARED else 0
    wait_for_previous(EARLY)
    if block < shared_blocks:
        own = block * BLOCK + number
        tl.store(record, EXPERTS)
        tl.store(record + 1, rows * TOP_K + block * BLOCK)
        tl.store(record + RECORD_ROWS + number, tl.where(own < rows, own, -1))
        tl.store(record + RECORD_PARTS + number, tl.where(own < rows, own * (TOP_K + 1) + TOP_K, -1))
    else:
        every = tl.arange(0, WIDTH)
        count = tl.zeros([WIDTH], tl.int32)
        # Not in a function: with what it returns, torch would take `members` as written.
        for i in tl.static_range(ALL_ROWS // WORD):
            here = (every < EXPERTS) & (i * WORD < rows)
            count += _bits(tl.load(members + i * EXPERTS + every, mask=here, other=0))
        expert, index, place = _expert_of_block(count, block - shared_blocks)
        row = tl.arange(0, ALL_ROWS)
        word = tl.load(members + row // WORD * EXPERTS + expert, mask=(row < rows) & (expert >= 0), other=0)
        member = word >> (row % WORD) & 1
        rank = tl.cumsum(member, 0) - member - index * BLOCK
        mine = (member > 0) & (rank >= 0) & (rank < BLOCK)
        order = tl.load(ranks + row * EXPERTS + expert, mask=mine, other=0).to(tl.int32)
        tl.store(record, expert)
        tl.store(record + 1, place)
        tl.store(record + RECORD_ROWS + rank, row, mask=mine)
        tl.store(record + RECORD_PARTS + rank, row * (TOP_K + 1 if SHARED else TOP_K) + order, mask=mine)
        empty = number >= tl.sum(member, 0) - index * BLOCK
        tl.store(record + RECORD_ROWS + number, -1, mask=empty)
        tl.store(record + RECORD_PARTS + number, -1, mask=empty)


@triton.jit
def _expert_of_block(count, block):
    """Whose block it is, -1 for nobody's; the how many-th of that expert's it is; its first place.

    count: rows of each expert, a power of two of them.
    """
    expert = tl.arange(0, count.shape[0])
    # An expert's blocks and places in one number: there are fewer than 2 ** 15 of either.
    both = ((count + BLOCK - 1) // BLOCK << 16) + count
    before = tl.cumsum(both, 0) - both
    hit = (before >> 16 <= block) & (block < (before + both) >> 16)
    mine, before = tl.reduce((tl.where(hit, expert + 1, 0), tl.where(hit, before, 0)), 0, add_pairs)
    index = block - (before >> 16)
    return mine - 1, index, (before & 0xFFFF) + index * BLOCK


@triton.jit
def _bits(words):
    """How many bits of each int32 are set."""
    if INTERPRETED:
        words = words - (words >> 1 & 0x55555555)
        words = (words & 0x33333333) + (words >> 2 & 0x33333333)
        count = ((words + (words >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24
    else:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return count


@triton.jit
def of_expert(routed, shared, expert, COUNT: tl.constexpr, EXPERTS: tl.constexpr):
    """Where an expert's COUNT numbers begin; those of the expert EXPERTS are `shared`."""
    return tl.where(expert == EXPERTS, shared, routed + expert.to(tl.int64) * COUNT)


@triton.jit
def sum_rows_early(
    parts,
    shares,
    slots,
    residual,
    out,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [R, SIZE] = residual + each row's PARTS parts times their shares. Program (COLUMNS, row)."""
    start_next(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1)
    inside = column < SIZE
    wait_for_previous(EARLY)
    # Nobody wrote the parts of padding.
    here = inside & (tl.load(slots + row) >= 0) if SLOTS else inside
    total = tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    first = parts + row.to(tl.int64) * (PARTS * SIZE) + column
    for i in tl.static_range(PARTS):
        share = tl.load(shares + row * PARTS + i)
        total += share * tl.load(first + i * SIZE, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=inside)
