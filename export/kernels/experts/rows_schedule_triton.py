# mypy: allow-untyped-defs
"""The schedule of `rows_triton` (which program takes which rows of which expert), and the sum of the experts' outputs.

A *choice* is one expert of one row. A *block* is up to BLOCK rows that take the same expert. The shared expert's blocks come
first, then the blocks of the routed experts, in the order of experts. A *place* is the index of a choice's inner activations
in `hidden`; the places of a block are consecutive. A *part* is the index of a choice's output in `parts`, which is
[R, k (+ 1)], with the shared expert's output last.

All kernels start early (`early_start_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.linear.rows_tiles_triton import INTERPRETED

from .blocks_triton import expert_of_block

# Rows per word of `members`: each has one bit.
WORD = tl.constexpr(32)
# Integers per block in a schedule. The first is the expert: EXPERTS for the shared one, -1 for an unused block. The second is
# the block's first place. The third, which the shared expert's blocks do not have, is the number of used blocks. Then come
# two lists, the rows and the parts, both filled up with -1.
RECORD = tl.constexpr(32)
RECORD_USED = tl.constexpr(2)
RECORD_ROWS = tl.constexpr(8)
RECORD_PARTS = tl.constexpr(16)
# Rows of a block, at most.
BLOCK = tl.constexpr(8)


@triton.jit
def schedule_rows_early(
    members,
    ranks,
    schedule,
    rows,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write schedule [blocks, RECORD], one block per program. ROWS and WIDTH are powers of two, at least as many as rows and
    EXPERTS."""
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
        # The loads are not in a function: if it returned their values, torch would take `members` as written.
        for i in tl.static_range(ROWS // WORD):
            here = (every < EXPERTS) & (i * WORD < rows)
            count += _bits(tl.load(members + i * EXPERTS + every, mask=here, other=0))
        expert, index, place = expert_of_block(count, block - shared_blocks, BLOCK, tl.int32)
        row = tl.arange(0, ROWS)
        word = tl.load(members + row // WORD * EXPERTS + expert, mask=(row < rows) & (expert >= 0), other=0)
        member = word >> (row % WORD) & 1
        rank = tl.cumsum(member, 0) - member - index * BLOCK
        mine = (member > 0) & (rank >= 0) & (rank < BLOCK)
        order = tl.load(ranks + row * EXPERTS + expert, mask=mine, other=0).to(tl.int32)
        tl.store(record, expert)
        tl.store(record + 1, place)
        tl.store(record + RECORD_USED, shared_blocks + tl.sum((count + BLOCK - 1) // BLOCK, 0))
        tl.store(record + RECORD_ROWS + rank, row, mask=mine)
        tl.store(record + RECORD_PARTS + rank, row * (TOP_K + 1 if SHARED else TOP_K) + order, mask=mine)
        empty = number >= tl.sum(member, 0) - index * BLOCK
        tl.store(record + RECORD_ROWS + number, -1, mask=empty)
        tl.store(record + RECORD_PARTS + number, -1, mask=empty)


@triton.jit
def _bits(words):
    """The number of set bits in each int32."""
    if INTERPRETED:
        words = words - (words >> 1 & 0x55555555)
        words = (words & 0x33333333) + (words >> 2 & 0x33333333)
        count = ((words + (words >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24
    else:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return count


@triton.jit
def of_expert(routed, shared, expert, COUNT: tl.constexpr, EXPERTS: tl.constexpr):
    """Pointer to the COUNT numbers of an expert; the numbers of expert EXPERTS, the shared one, are at `shared`."""
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
    """Write out [R, SIZE] = residual + each row's PARTS parts times their shares. Program (COLUMNS columns, row)."""
    start_next(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1)
    inside = column < SIZE
    wait_for_previous(EARLY)
    # The parts of padding were never written.
    here = inside & (tl.load(slots + row) >= 0) if SLOTS else inside
    total = tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    first = parts + row.to(tl.int64) * (PARTS * SIZE) + column
    for i in tl.static_range(PARTS):
        share = tl.load(shares + row * PARTS + i)
        total += share * tl.load(first + i * SIZE, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=inside)
