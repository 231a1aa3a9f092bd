"""Attention of one decode step, of one row or a few, in two kernels: one over splits of the cache, one that combines their
sums.

Where there is a window, the splits are of the earlier positions in it.

The first kernel starts to load the earlier keys and values before the projection ahead of it has ended. The queries and the
keys and values of the row's *own positions* come from that projection: its position and, where it stands in a run, those of
the rows before it in this call. Other programs write these to the cache, so they and later positions are not read from it.

Each program has one row: the pages of a run are read for each of its rows, from L2 if at the same time. Among several rows, a
row that is a run by itself has the same bits, whatever rows stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import is_one, launcher, starts_early
from ostinato.export.kernels.operands import STEP_ROWS, Heads, KVCache, RowIndex

from .block_triton import (
    PROGRAMS,
    first_seen,
    norm_weights,
    normed_and_rotated,
    offsets_in,
    pages_of,
    score_scale,
    take,
)
from .limits import check_step

# The most programs of one row that stands beside others, for all key heads together: two rows have as many as one by itself,
# and eight 512. Behind a short context most of them have nothing to do, but wait for room.
SEVERAL_PROGRAMS = PROGRAMS // 2
# The positions of one split are a multiple of STEP, so that a few thousand tokens spread evenly.
STEP = 16


@dataclass(frozen=True)
class SplitConfig:
    """Positions that a program holds at a time, and how the compiler spreads work over warps and overlaps loads with it.

    Attributes:
        least: the fewest positions of a split, so that a short context has few sums to combine.
    """

    keys: int
    warps: int
    stages: int
    least: int = 64


@dataclass(frozen=True)
class CombineConfig:
    """Elements of a head that one program computes, and its warps."""

    width: int
    warps: int


# At D = 256 these take 70 and 49 KB of shared memory. In float32 a tile of 16 positions spills 192 bytes per thread;
# one of 32 would spill 272.
SPLIT = {
    torch.bfloat16: SplitConfig(keys=64, warps=8, stages=2),
    torch.float32: SplitConfig(keys=16, warps=8, stages=2),
}
# With several rows programs are more than there is room for, so two fit on a multiprocessor. In a layer of the flagship 2, 4
# and 8 rows behind 200 tokens then take 34.7, 48.1 and 69.7 us, behind 3,900 41.9, 60.5 and 93.3; with the tiles of one row
# 32.9, 45.1 and 66.8, and 41.6, 66.5 and 100.2 (one H100, 2026-11-27). With splits of 32 positions at least a short context
# has one tile for each program: behind 200 tokens they take 27.7, 34.6 and 48.9 us, with 64 29.5, 36.8 and 49.9, and behind
# 3,900 2 and 8 rows take 35.0 and 69.9 with both (one H200, 2026-11-29).
SEVERAL_SPLIT = SPLIT | {torch.bfloat16: SplitConfig(keys=32, warps=4, stages=2, least=32)}
COMBINE = CombineConfig(width=32, warps=1)


def splits_for(kv_heads: int, positions: int, programs: int, least: int) -> int:
    """Number of programs that share the positions of a row and a key head: `programs` for all key heads together, fewer if a
    program would have fewer than `least` positions."""
    return max(1, min(programs // kv_heads, triton.cdiv(positions, least)))


def attend_step(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """See `reference.attend_step`; at most STEP_ROWS rows; all tensors contiguous. The cost grows with the position, but not
    beyond the window, and not with the pages of a session. With several rows the result has zeros for padding.

    `index` and the table are read before the kernel ahead has ended, so no marked kernel may write them (rule R2 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_step`.
    """
    check_step(heads, index, cache)
    return _attend_step(qkv, *heads.arguments, *index, *cache.arguments)


@torch.library.triton_op("ostinato::attend_step", mutates_args={"keys", "values"})
def _attend_step(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    gated: bool,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    window: int,
) -> Tensor:
    rows, (kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape[1:]
    rotary = cos.shape[1]
    group = heads // kv_heads
    capacity = table.shape[1] * page_size
    # The most own positions of a row.
    own, programs = (1, PROGRAMS) if is_one(rows) else (STEP_ROWS, SEVERAL_PROGRAMS)
    split = (SPLIT if own == 1 else SEVERAL_SPLIT)[keys.dtype]
    splits = splits_for(kv_heads, min(capacity, window) if window else capacity, programs, split.least)
    sums = torch.empty((rows, splits, heads, head_dim), dtype=torch.float32, device=qkv.device)
    # For each sum: the peak of its scores, and the sum of its weights. Between them: the scores of the own positions.
    scales = torch.empty((rows, 2 * splits + own, heads), dtype=torch.float32, device=qkv.device)
    out = torch.empty((rows, heads * head_dim), dtype=keys.dtype, device=qkv.device)
    # As many programs for own positions as there are rows.
    launcher(attend_split_early)[(kv_heads, splits + 1) if own == 1 else (kv_heads, rows, rows + splits)](
        qkv,
        # Without norms, any tensor stands in their places.
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        positions,
        slots,
        cos,
        sin,
        keys,
        values,
        table,
        sums,
        scales,
        PAGES=table.shape[1],
        PAGE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        ROTARY=rotary,
        NORMED=q_norm is not None,
        GATED=gated,
        EPS=eps,
        SCALE=score_scale(head_dim),
        SPLITS=splits,
        STEP=STEP,
        MIN_SPLIT=split.least,
        WINDOW=window,
        ROWS=max(8, triton.next_power_of_2(group)),
        KEYS=split.keys,
        OWN=own,
        EARLY=starts_early(),
        num_warps=split.warps,
        num_stages=split.stages,
    )
    width = min(head_dim, COMBINE.width)
    launcher(attend_combine_early)[(heads, head_dim // width, rows)](
        qkv,
        sums,
        scales,
        positions,
        slots,
        out,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        GATED=gated,
        SPLITS=splits,
        PLACES=triton.next_power_of_2(splits),
        STEP=STEP,
        MIN_SPLIT=split.least,
        WINDOW=window,
        WIDTH=width,
        OWN=own,
        EARLY=starts_early(),
        num_warps=COMBINE.warps,
    )
    return out


@triton.jit
def attend_split_early(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (key head, split): attention of the key head's queries over one split of the earlier positions, not normalised.

    The last program of a key head takes the row's position instead: it writes key and value, and stores the score.

    If OWN is not 1, there are several rows, and programs (key head, row, number). The first numbers, as many as there are
    rows, take own positions: the row's, which is written, and those 1, 2, ... before it. Splits follow.
    """
    start_next(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SIZE: tl.constexpr = KV_HEADS * PAGE * D
    ALIGNED: tl.constexpr = STEP % KEYS == 0 and WINDOW == 0
    QUERY: tl.constexpr = 2 * D if GATED else D
    WHOLE: tl.constexpr = HEADS * QUERY + 2 * KV_HEADS * D
    kv_head = tl.program_id(0)
    token = tl.program_id(1) if OWN > 1 else 0
    number = tl.program_id(2) if OWN > 1 else 0
    rows = tl.num_programs(1) if OWN > 1 else 1
    split = tl.where(number < rows, SPLITS, number - rows) if OWN > 1 else tl.program_id(1)
    row = tl.arange(0, ROWS)
    cell = tl.arange(0, D)[None, :]
    # Norms and angles are loaded once per row of queries, so that they are spread over the threads like the queries.
    every = tl.zeros([ROWS, D], tl.int32) + cell
    slot = tl.load(slots + token)
    # Padding sees no earlier position.
    position = tl.where(slot < 0, 0, tl.load(positions + token)).to(tl.int32)
    table += tl.maximum(slot, 0) * PAGES
    origin = first_seen(position, WINDOW, 1)
    # Own positions are those from `limit` on.
    limit = position
    if OWN > 1:
        each = tl.arange(0, OWN)
        before = rows_before(tl.load(slots + each, mask=each < token, other=-1), slot)
        limit = tl.maximum(position - before, origin)
        qkv += tl.cast(token, tl.int64) * WHOLE
        scales += token * ((2 * SPLITS + OWN) * HEADS)
    share = share_for(limit - origin, SPLITS, STEP, MIN_SPLIT)
    first = origin + split * share
    last = tl.minimum(first + share, limit)
    last = tl.where(split < SPLITS, last, first)
    if OWN > 1:
        # Programs of the rows themselves always wait (rule R1). Others with nothing to do end, and leave their room.
        idle = (first >= last) & ((split < SPLITS) | (number > position - limit))
        if idle:
            return
    k_cache += kv_head * PAGE * D
    v_cache += kv_head * PAGE * D
    pages = pages_of(table, first, last, PAGE, KEYS, ALIGNED)
    own_page = tl.load(table + position // PAGE).to(tl.int64)
    offsets = offsets_in(pages, first, SIZE, PAGE, D, KEYS)
    former = (first + tl.arange(0, KEYS) < last)[:, None]
    keys = tl.load(k_cache + offsets, mask=former, other=0.0)
    values = tl.load(v_cache + offsets, mask=former, other=0.0)
    pages = pages_of(table, first + KEYS, last, PAGE, KEYS, ALIGNED)
    rotated = every < ROTARY
    # Element i is rotated with the element that is ROTARY / 2 after or before it.
    other = tl.where(every < ROTARY // 2, every + ROTARY // 2, every - ROTARY // 2)
    norm, other_norm = norm_weights(q_norm, every, other, rotated, NORMED)
    cosine = tl.load(cos + token * ROTARY + every, mask=rotated, other=1.0)
    sine = tl.load(sin + token * ROTARY + every, mask=rotated, other=0.0)

    wait_for_previous(EARLY)
    start = (kv_head * GROUP + row[:, None]) * QUERY
    real = (row < GROUP)[:, None]
    query = tl.load(qkv + start + every, mask=real, other=0.0)
    other_query = tl.load(qkv + start + other, mask=real & rotated, other=0.0)
    sine = tl.where(every < ROTARY // 2, -sine, sine)
    at = split * HEADS + kv_head * GROUP + row
    if split == SPLITS:
        norm_of_key, other_norm_of_key = norm_weights(k_norm, every, other, rotated, NORMED)
        own = HEADS * QUERY + kv_head * D - number * WHOLE
        key = tl.load(qkv + own + every)
        other_key = tl.load(qkv + own + other, mask=rotated, other=0.0)
        value = tl.load(qkv + own + KV_HEADS * D + every)
        key_cosine = cosine
        key_sine = sine
        if OWN > 1:
            key_cosine = tl.load(cos + (token - number) * ROTARY + every, mask=rotated, other=1.0)
            key_sine = tl.load(sin + (token - number) * ROTARY + every, mask=rotated, other=0.0)
            key_sine = tl.where(every < ROTARY // 2, -key_sine, key_sine)
        q = normed_and_rotated(query, other_query, norm, other_norm, cosine, sine, NORMED, EPS).to(keys.dtype)
        k = normed_and_rotated(key, other_key, norm_of_key, other_norm_of_key, key_cosine, key_sine, NORMED, EPS).to(
            keys.dtype
        )
        new = own_page * SIZE + position % PAGE * D + every
        kept = ((row == 0) & (slot >= 0) & (number == 0))[:, None]
        tl.store(k_cache + new, k, mask=kept)
        tl.store(v_cache + new, value.to(values.dtype), mask=kept)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * SCALE
        tl.store(scales + number * HEADS + at, score, mask=row < GROUP)
    if first < last:
        x = tl.trans(normed_and_rotated(query, other_query, norm, other_norm, cosine, sine, NORMED, EPS).to(keys.dtype))
        total = tl.zeros([D, ROWS], tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        first_keys = hold(keys, EARLY)
        first_values = hold(values, EARLY)
        total, weight, peak = take(x, first_keys, first_values, first, last, total, weight, peak, SCALE)
        for begin in range(first + KEYS, last, KEYS):
            next_offsets = offsets_in(pages, begin, SIZE, PAGE, D, KEYS)
            next_former = (begin + tl.arange(0, KEYS) < last)[:, None]
            next_keys = tl.load(k_cache + next_offsets, mask=next_former, other=0.0)
            next_values = tl.load(v_cache + next_offsets, mask=next_former, other=0.0)
            # Pages are looked up one block ahead.
            pages = pages_of(table, begin + KEYS, last, PAGE, KEYS, ALIGNED)
            total, weight, peak = take(x, next_keys, next_values, begin, last, total, weight, peak, SCALE)
        tl.store(sums + (token * (SPLITS * HEADS) + at)[:, None] * D + cell, tl.trans(total), mask=real)
        tl.store(scales + at, peak, mask=row < GROUP)
        tl.store(scales + (SPLITS + OWN) * HEADS + at, weight, mask=row < GROUP)


@triton.jit
def attend_combine_early(
    qkv: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACES: tl.constexpr,
    STEP: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    OWN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (head, block of D, row): brings the sums of the splits and the new value to one peak, and applies the gate.

    If OWN is not 1, there are several rows: the values of a row's other own positions are added too.
    """
    start_next(EARLY)
    QUERY: tl.constexpr = 2 * D if GATED else D
    WHOLE: tl.constexpr = HEADS * QUERY + 2 * KV_HEADS * D
    head = tl.program_id(0)
    cell = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, PLACES)
    token = tl.program_id(2) if OWN > 1 else 0
    slot = tl.load(slots + token)
    position = tl.where(slot < 0, 0, tl.load(positions + token)).to(tl.int32)
    earlier = position - first_seen(position, WINDOW, 1)
    if OWN > 1:
        back = tl.arange(0, OWN)
        before = rows_before(tl.load(slots + back, mask=back < token, other=-1), slot)
        count = tl.minimum(before, earlier)
        earlier -= before
        qkv += tl.cast(token, tl.int64) * WHOLE
        sums += token * (SPLITS * HEADS * D)
        scales += token * ((2 * SPLITS + OWN) * HEADS)
        out += token * (HEADS * D)
    used = split * share_for(earlier, SPLITS, STEP, MIN_SPLIT) < earlier
    at = split * HEADS + head

    wait_for_previous(EARLY)
    total = tl.load(sums + at[:, None] * D + cell[None, :], mask=used[:, None], other=0.0)
    peak = tl.load(scales + at, mask=used, other=float("-inf"))
    weight = tl.load(scales + (SPLITS + OWN) * HEADS + at, mask=used, other=0.0)
    score = tl.load(scales + SPLITS * HEADS + head)
    of_value = qkv + HEADS * QUERY + (KV_HEADS + head // (HEADS // KV_HEADS)) * D + cell
    value = tl.load(of_value)
    if GATED:
        gate = tl.load(qkv + head * QUERY + D + cell)
    highest = tl.maximum(tl.max(peak, 0), score)
    if OWN > 1:
        # Only a run's later rows have other own positions, and most steps have no run.
        of_others, share_of_others, top = tl.zeros([WIDTH], tl.float32), 0.0, float("-inf")
        if count > 0:
            others = (back > 0) & (back <= count)
            other_scores = tl.load(scales + (SPLITS + back) * HEADS + head, mask=others, other=float("-inf"))
            values = tl.load(of_value[None, :] - back[:, None] * WHOLE, mask=others[:, None], other=0.0)
            top = tl.max(other_scores, 0)
            shares = tl.exp2(other_scores - top)
            of_others = tl.sum(values.to(out.dtype.element_ty).to(tl.float32) * shares[:, None], 0)
            share_of_others = tl.sum(shares, 0)
        highest = tl.maximum(highest, top)
    factor = tl.exp2(peak - highest)
    own = tl.exp2(score - highest)
    # The value is rounded as the cache stores it.
    value = value.to(out.dtype.element_ty).to(tl.float32)
    result = tl.sum(total * factor[:, None], 0) + value * own
    whole = tl.sum(weight * factor, 0) + own
    if OWN > 1:
        others_factor = tl.exp2(top - highest)
        result += of_others * others_factor
        whole += share_of_others * others_factor
    result = result / whole
    if GATED:
        result *= tl.sigmoid(gate.to(tl.float32))
    if OWN > 1:
        result = tl.where(slot >= 0, result, 0.0)
    tl.store(out + head * D + cell, result.to(out.dtype.element_ty))


@triton.jit
def hold(x: tl.tensor, EARLY: tl.constexpr) -> tl.tensor:
    """Return x unchanged. The compiler does nothing with x before this call.

    Without this call, the compiler puts x into shared memory at once. So it waits for x before it starts the next loads.
    """
    if EARLY:
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@triton.jit
def share_for(tokens: tl.tensor, SPLITS: tl.constexpr, STEP: tl.constexpr, MIN_SPLIT: tl.constexpr) -> tl.tensor:
    """Positions of one split, enough for SPLITS splits to hold all tokens."""
    return tl.maximum(tl.cdiv(tokens, SPLITS * STEP) * STEP, MIN_SPLIT)


@triton.jit
def rows_before(ahead: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """Number of rows of a row's run before it; means nothing for padding. A slot has one run.

    ahead: the slots of the rows ahead of it, -1 elsewhere.
    """
    return tl.sum((ahead == slot).to(tl.int32), 0)
