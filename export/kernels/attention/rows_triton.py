"""Attention of several rows, of any sessions, in three kernels: place, attend, combine.

A call that never has more than STEP_ROWS rows takes the two kernels of `step_triton`.

The first kernel writes each row's key and value to their page, and norms and rotates its queries. The second kernel works on
*tiles*. A tile is up to ROWS rows of one run, with the heads that share a key head, so that pages are read once for all of
them. The positions that a tile sees are split over several programs. The third kernel brings the sums of the splits to one
peak, and applies the gate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import (
    LARGE,
    MEDIUM,
    SMALL,
    at_most,
    fitting,
    launcher,
    row_class,
    row_vector,
    starts_early,
)
from ostinato.export.kernels.operands import FEW_ROWS, MAX_ROWS, STEP_ROWS, Heads, KVCache, RowIndex

from . import step_triton
from .block_triton import TileConfig, attend_range, first_seen, padded_group, score_scale
from .limits import check_step
from .place_triton import place_rows
from .prefill_triton import config_for as prompt_config

# Tiles for bfloat16, by the most rows and by the GPU's shared memory. For few rows they are as small as tensor cores take, so
# the kernel has no second copy of its code for single rows (see FEWEST). With tiles of 32 queries it has one, and a prompt of
# 16 tokens of the flagship took 90 us more of 4,350: in a step, code comes from memory (H100, 2026-11-26).
CONFIGS = {
    FEW_ROWS: {
        MEDIUM: TileConfig(16, keys=64, warps=4, stages=2),
        SMALL: TileConfig(64, keys=32, warps=8, stages=2),
    },
    MAX_ROWS: {
        LARGE: TileConfig(64, keys=64, warps=4, stages=3),
        MEDIUM: TileConfig(64, keys=64, warps=8, stages=2),
        SMALL: TileConfig(64, keys=32, warps=8, stages=2),
    },
}
# Queries that tensor cores take at least. A tile with so few, as a session's single row is, is worked on with no more.
FEWEST = tl.constexpr(16)
# Heads of this size have two stages: then three programs have room on a multiprocessor, and with three stages two. 32 rows at
# depth 192 with 8 key heads take 19.1 us, not 24.3 (H200, 2026-11-26).
TWO_STAGES_DIM = 128
# The fewest positions of a split, by the most rows; see `split_size`. With 128 for more rows, too, 64 rows take 34.3 us, not
# 28.6 (H200, 2026-11-26).
MIN_SPLIT = {FEW_ROWS: 64, MAX_ROWS: 256}
# The most programs of all rows and key heads together, if there are no more rows. Programs without positions end at once, but
# wait for room: with 8 key heads, 32 rows at depth 192 take 28 us with 2,048 programs, not 24.
PROGRAMS = 1024
# The most splits of all rows together, and of one row: so many sums have room.
PARTS = 1024
MAX_SPLITS = 64
COMBINE_WARPS = 1
# Splits whose sums are loaded at once. A short context has only one split.
SUMS_TOGETHER = 4


def config_for(max_rows: int, head_dim: int) -> TileConfig:
    """The tile for bfloat16 and at most `max_rows` rows."""
    config = fitting(CONFIGS[max_rows])
    return replace(config, stages=2) if head_dim == TWO_STAGES_DIM else config


def attend_step(qkv: Tensor, heads: Heads, index: RowIndex, cache: KVCache) -> Tensor:
    """See `reference.attend_step`; all tensors contiguous. Few rows have kernels of their own.

    Raises:
        ExportError: see `step_triton.check_step`.
    """
    if at_most(qkv.shape[0], STEP_ROWS):
        return step_triton.attend_step(qkv, heads, index, cache)
    check_step(heads, index, cache)
    return _attend_rows(qkv, *heads.arguments, *index, *cache.arguments)


@torch.library.triton_op("ostinato::attend_rows", mutates_args={"keys", "values"})
def _attend_rows(
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
    rows = qkv.shape[0]
    kv_heads, page_size, head_dim = keys.shape[1:]
    group = padded_group(heads // kv_heads)
    max_rows = row_class(rows)
    config = config_for(max_rows, head_dim) if keys.dtype == torch.bfloat16 else prompt_config(head_dim, keys.dtype)
    together = max(1, config.queries // group)
    programs = max(1, PROGRAMS // kv_heads)
    # Programs of one row and one key head, and splits for whose sums a row has room.
    of_row = programs // torch.sym_min(torch.sym_max(rows, max(1, programs // MAX_SPLITS)), programs)
    splits = PARTS // torch.sym_max(rows, PARTS // MAX_SPLITS)
    query = place_rows(qkv, q_norm, k_norm, eps, heads, gated, positions, slots, cos, sin, keys, values, table)
    sums = torch.empty((rows, splits, heads, head_dim), dtype=torch.float32, device=qkv.device)
    # For each sum: the peak of its scores, and the sum of its weights.
    scales = torch.empty((rows, splits, heads, 2), dtype=torch.float32, device=qkv.device)
    out = torch.empty((rows, heads * head_dim), dtype=keys.dtype, device=qkv.device)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "EARLY": starts_early()}
    pages = {"PAGES": table.shape[1], "PAGE": page_size}
    least = MIN_SPLIT[max_rows]
    tiles = {"ROWS": together, "KEYS": config.keys, "MIN_SPLIT": least, "MAX_ROWS": row_vector(rows), "WINDOW": window}
    launcher(attend_rows_early)[(kv_heads, rows, of_row)](
        query,
        keys,
        values,
        table,
        positions,
        slots,
        sums,
        scales,
        rows,
        of_row,
        splits,
        GROUP=group,
        SCALE=score_scale(head_dim),
        num_warps=config.warps,
        num_stages=config.stages,
        **pages,
        **tiles,
        **sizes,
    )
    launcher(combine_rows_early)[(rows, heads)](
        qkv,
        positions,
        slots,
        sums,
        scales,
        out,
        rows,
        of_row,
        splits,
        GATED=gated,
        SPLITS=MAX_SPLITS,
        TOGETHER=SUMS_TOGETHER,
        num_warps=COMBINE_WARPS,
        **tiles,
        **sizes,
    )
    return out


@triton.jit
def attend_rows_early(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    of_row: tl.tensor,
    splits: tl.tensor,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (key head, row, number): one split of the row's tile. The programs of all rows of a tile share its splits. Does
    nothing if there is no split left."""
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    of_row = tl.cast(of_row, tl.int32)
    splits = tl.cast(splits, tl.int32)
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    each = tl.arange(0, MAX_ROWS)
    slot, known = tl.load(slots + row), tl.load(slots + each, mask=each < rows, other=-1)
    first, count, origin, seen, share = tile_of(
        row, slot, known, tl.load(positions + row), rows, of_row, splits, ROWS, KEYS, MIN_SPLIT, KV_HEADS, WINDOW
    )
    split = (row - first) * of_row + tl.program_id(2)
    begin = origin + split * share
    # One program must wait (rule R1). Other programs with nothing to do end, and leave their room.
    nothing = (slot < 0) | (begin >= seen)
    if nothing & (row + kv_head + tl.program_id(2) > 0):
        return
    wait_for_previous(EARLY)
    if nothing == 0:
        of_key = k_cache + kv_head * PAGE * D, v_cache + kv_head * PAGE * D, table + slot * PAGES
        begin_end = begin, tl.minimum(begin + share, seen)
        if ROWS * GROUP > FEWEST and count * GROUP <= FEWEST:
            attend_tile(
                query, of_key, sums, scales, first, count, seen - count, begin_end, split, splits, FEWEST, PAGE, KEYS, HEADS,
                KV_HEADS, D, GROUP, SCALE, WINDOW,
            )  # fmt: skip
        else:
            attend_tile(
                query, of_key, sums, scales, first, count, seen - count, begin_end, split, splits, ROWS * GROUP, PAGE, KEYS,
                HEADS, KV_HEADS, D, GROUP, SCALE, WINDOW,
            )  # fmt: skip


@triton.jit
def attend_tile(
    query: tl.tensor,
    of_key: tl.tuple,
    sums: tl.tensor,
    scales: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    begin_end: tl.tuple,
    split: tl.tensor,
    splits: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Write the sums and scales of one split of a tile: the `count` rows from `first` on, of which the first has position
    `start`.

    Args:
        of_key: keys and values of one key head, and the slot's row of the block table.
        begin_end: the positions of split number `split`, of at most `splits`.
        QUERIES: queries of the tile, GROUP for each row.
    """
    HEADS_OF_KEY: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, QUERIES)
    row = first + member // GROUP
    head = member % GROUP
    real = (member // GROUP < count) & (head < HEADS_OF_KEY)
    cell = tl.arange(0, D)[None, :]
    of_row = row.to(tl.int64) * HEADS + tl.program_id(0) * HEADS_OF_KEY + head
    q = tl.load(query + of_row[:, None] * D + cell, mask=real[:, None], other=0.0)
    total, weight, peak = attend_range(
        q,
        of_key[0],
        of_key[1],
        of_key[2],
        begin_end[0],
        begin_end[1],
        start + member // GROUP,
        start,
        SCALE,
        KV_HEADS * PAGE * D,
        PAGE,
        KEYS,
        QUERIES // GROUP,
        WINDOW,
    )
    part = (row * splits + split) * HEADS + tl.program_id(0) * HEADS_OF_KEY + head
    tl.store(sums + part[:, None] * D + cell, total, mask=real[:, None])
    tl.store(scales + part * 2, peak, mask=real)
    tl.store(scales + part * 2 + 1, weight, mask=real)


@triton.jit
def combine_rows_early(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    of_row: tl.tensor,
    splits: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row, head): brings the sums of its tile's splits to one peak, and applies the gate. Zeros for padding."""
    start_next(EARLY)
    QUERY: tl.constexpr = 2 * D if GATED else D
    rows = tl.cast(rows, tl.int32)
    of_row = tl.cast(of_row, tl.int32)
    splits = tl.cast(splits, tl.int32)
    row = tl.program_id(0)
    head = tl.program_id(1)
    each = tl.arange(0, MAX_ROWS)
    slot, known = tl.load(slots + row), tl.load(slots + each, mask=each < rows, other=-1)
    _, _, origin, seen, share = tile_of(
        row, slot, known, tl.load(positions + row), rows, of_row, splits, ROWS, KEYS, MIN_SPLIT, KV_HEADS, WINDOW
    )
    used = tl.where(slot >= 0, tl.cdiv(seen - origin, share), 0)
    split = tl.arange(0, SPLITS)
    few = tl.arange(0, TOGETHER)
    cell = tl.arange(0, D)

    wait_for_previous(EARLY)
    first = row.to(tl.int64) * splits * HEADS + head
    peak = tl.load(scales + (first + split * HEADS) * 2, mask=split < used, other=float("-inf"))
    weight = tl.load(scales + (first + split * HEADS) * 2 + 1, mask=split < used, other=0.0)
    # The first sums are under way before it is known what to multiply them by.
    part = first + few * HEADS
    peaks = tl.load(scales + part * 2, mask=few < used, other=float("-inf"))
    of_splits = tl.load(sums + part[:, None] * D + cell[None, :], mask=(few < used)[:, None], other=0.0)
    if GATED:
        gate = tl.load(qkv + row.to(tl.int64) * (HEADS * QUERY + 2 * KV_HEADS * D) + head * QUERY + D + cell)
    # Every token sees its own position, so the highest peak is finite.
    highest = tl.where(slot >= 0, tl.max(peak, 0), 0.0)
    whole = tl.where(slot >= 0, tl.sum(weight * tl.exp2(peak - highest), 0), 1.0)
    total = tl.sum(of_splits * tl.exp2(peaks - highest)[:, None], 0)
    for begin in range(TOGETHER, used, TOGETHER):
        here = begin + few < used
        part = first + (begin + few) * HEADS
        peaks = tl.load(scales + part * 2, mask=here, other=float("-inf"))
        of_splits = tl.load(sums + part[:, None] * D + cell[None, :], mask=here[:, None], other=0.0)
        total += tl.sum(of_splits * tl.exp2(peaks - highest)[:, None], 0)
    result = total / whole
    if GATED:
        result *= tl.sigmoid(gate.to(tl.float32))
    result = tl.where(slot >= 0, result, 0.0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * D + cell, result.to(out.dtype.element_ty))


@triton.jit
def tile_of(
    row: tl.tensor,
    slot: tl.tensor,
    known: tl.tensor,
    position: tl.tensor,
    rows: tl.tensor,
    of_row: tl.tensor,
    splits: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Describe the tile of a row: up to ROWS rows of its run.

    It takes what was loaded, no pointers: where a sum is stored depends on it, and torch would take the memory behind its
    pointers as written.

    Args:
        slot, position: of the row.
        known: slots of all rows, -1 behind them.
        of_row: programs of one row.
        splits: the most splits of a tile.

    Returns:
        (first row of the tile, number of its rows, first position of the splits, end of the positions that its last row sees,
        positions of one split).
    """
    each = tl.arange(0, known.shape[0])
    # A slot has one run.
    mine = known == slot
    before = tl.sum((mine & (each < row)).to(tl.int32), 0)
    place = before % ROWS
    count = tl.minimum(ROWS, tl.sum(mine.to(tl.int32), 0) - before + place)
    start = position.to(tl.int32) - place
    origin, seen = first_seen(start, WINDOW, KEYS), start + count
    most = tl.minimum(count * of_row, splits)
    share = split_size(seen - origin, rows // count * KV_HEADS, most, KEYS, MIN_SPLIT)
    return row - place, count, origin, seen, share


@triton.jit
def split_size(
    seen: tl.tensor, tiles: tl.tensor, splits: tl.tensor, KEYS: tl.constexpr, MIN_SPLIT: tl.constexpr
) -> tl.tensor:
    """Positions of one split of `seen` positions: at least MIN_SPLIT, and so many that at most `splits` are needed.

    Each split costs a program, and its sums a way through memory. So splits grow with the root of `seen`, unless the `tiles`
    of all rows and key heads would then leave multiprocessors idle; small tiles have splits so small that more programs run.
    8 rows of 2 key heads of 256 take 14.4 us at depth 1,024 in splits of 256, and 18.2 in splits of 128; 29.8 us at depth
    4,096 in splits of 512, and 42.9 in splits of 128 (H200, 2026-11-26).
    """
    # 256 programs in splits of 64, 64 in those of 256.
    ENOUGH: tl.constexpr = 16384 // MIN_SPLIT
    grown = tl.sqrt(seen.to(tl.float32) * MIN_SPLIT)
    wanted = tl.minimum(grown.to(tl.int32), tl.cdiv(seen, ENOUGH) * tiles)
    fewest = tl.maximum(wanted, tl.cdiv(seen, splits))
    return tl.maximum(tl.cdiv(fewest, KEYS) * KEYS, MIN_SPLIT)
