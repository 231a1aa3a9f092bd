# mypy: allow-untyped-defs
"""Up to FEW_ROWS rows: their experts, the blocks of `rows_plan_triton` and the rows as the experts take them, in one kernel.

With so few rows each block's program can choose the experts of all of them, which costs less than a kernel more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.operands import FEW_ROWS

from .rows_plan_triton import BLOCK, PLAN, expert_of_block, plan_routed_block, plan_shared_block
from .rows_route_triton import choose_row, prepare_row
from .step_route_triton import key_of

# The most rows.
ALL_ROWS = tl.constexpr(FEW_ROWS)


@triton.jit
def choose_few_rows_early(
    x,
    norm,
    shared_gate,
    logits,
    squares,
    slots,
    prepared,
    x_scale,
    shares,
    plan,
    rows,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    FIXED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What `choose_rows_early` and `plan_rows_early` write together. Two programs for each row, then one for each block."""
    start_next(EARLY)
    NARROW: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    shared_blocks = (rows + BLOCK - 1) // BLOCK if SHARED else 0
    block = program - 2 * rows
    record = plan + block * PLAN
    if program < rows:
        prepare_row(
            x, norm, shared_gate, squares, prepared, x_scale, shares, program, rows, EPS, SIZE, TOP_K, SHARED, SLICES,
            GROUPS, FIXED, EARLY,
        )  # fmt: skip
    elif block < 0:
        choose_row(
            logits, squares, slots, shares, shares, shares, program - rows, rows, NARROW, False, EPS, SIZE, EXPERTS, TOP_K,
            SHARED, SLICES, SLOTS, EARLY,
        )  # fmt: skip
    elif block < shared_blocks:
        wait_for_previous(EARLY)
        plan_shared_block(record, block, rows, EXPERTS, TOP_K)
    else:
        # [rows, parts of the experts, PART]: a warp has all experts of its rows, so only the counts go from warp to warp.
        PART: tl.constexpr = min(WIDTH, 128)
        row = tl.arange(0, ALL_ROWS)
        part = tl.arange(0, triton.next_power_of_2(SLICES))[None, :]
        expert = tl.arange(0, WIDTH // PART)[None, :, None] * PART + tl.arange(0, PART)[None, None, :]
        wait_for_previous(EARLY)
        filled = row < rows
        if SLOTS:
            filled = tl.load(slots + row, mask=filled, other=-1) >= 0
        here = filled[:, None, None] & (expert < EXPERTS)
        # Loads stand here and not in a function: with what it returns, torch would take what they read as written.
        sums = tl.load(squares + part * rows + row[:, None], mask=filled[:, None] & (part < SLICES), other=0.0)
        factor = tl.rsqrt(tl.sum(sums, 1) / SIZE + EPS)
        value = tl.zeros([ALL_ROWS, WIDTH // PART, PART], tl.float32)
        for slice in tl.static_range(SLICES):
            value += tl.load(logits + (slice * rows + row[:, None, None]) * EXPERTS + expert, mask=here, other=0.0)
        key = key_of((value * factor[:, None, None]).to(tl.bfloat16 if NARROW else tl.float32), expert)
        key = tl.where(here, key, 0)
        least = tl.max(tl.max(key, 1), 1)
        for _ in tl.static_range(1, TOP_K):
            least = tl.max(tl.max(tl.where(key < least[:, None, None], key, 0), 1), 1)
        count = tl.sum(((key >= least[:, None, None]) & here).to(tl.int32), 0)
        mine, index, place = expert_of_block(tl.reshape(count, [WIDTH]), block - shared_blocks)
        own = tl.max(tl.max(tl.where(expert == mine, key, 0), 1), 1)
        member = ((own >= least) & filled & (mine >= 0)).to(tl.int32)
        order = tl.sum(tl.sum((key > own[:, None, None]).to(tl.int32), 1), 1)
        plan_routed_block(record, mine, index, place, row, member, order, TOP_K + 1 if SHARED else TOP_K)
