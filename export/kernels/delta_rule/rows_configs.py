"""Sizes of the delta rule's programs for R rows (`rows_triton`), by rows, heads and the dtype of states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.export.kernels.launch import at_most
from ostinato.export.kernels.operands import FEW_ROWS


@dataclass(frozen=True)
class RunsConfig:
    """Sizes of the two kernels for long runs. One solves chunks, which does not need the state; the other moves the state.

    Attributes:
        long: the fewest rows of a run that is taken in chunks, at least 2.
        chunk: rows of a chunk.
        warps: warps of a program that moves the state.
        programs: programs that move the state, for each block of values of a head.
        solving_warps: warps of a program that solves chunks.
        solving_programs: programs that solve chunks, for each head.
    """

    long: int
    chunk: int
    warps: int
    programs: int
    solving_warps: int
    solving_programs: int


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of one program of the delta rule.

    Attributes:
        values: columns of a head's state per program, at most, also in the kernel that moves the state by long runs.
        span: values that a program takes at once of a short run; their squares have a sum of their own.
        warps: warps of a program.
        runs: sizes of the kernels for long runs. None if no run is long.
    """

    values: int
    span: int
    warps: int
    runs: RunsConfig | None = None


RUNS = RunsConfig(long=6, chunk=16, warps=4, programs=4, solving_warps=1, solving_programs=16)
# In us, with the flagship's shape, by values and warps of a program. On an H200, 2026-11-23, with the linear layers around
# the kernel, 32, 64 and 128 single rows take 63.2, 110.6 and 213.9 with 32 and two; 62.2, 106.5 and 205.8 with 64 and two
# (255 registers, nothing spilled); 65.3, 113.2 and 200.0 with 128 and four. The kernel alone, for runs of 64 and 128, takes
# 33.0 and 46.1 with 32 and two; 23.5 and 36.0 with 64 and four. Whole layers of 2, 4, 8 and 16 single rows take 34.6, 47.3,
# 75.3 and 117.4 with 32 and two; 34.1, 47.8, 76.0 and 117.6 with 32 and four; 36.1, 47.8, 73.1 and 115.1 with 16 and one; a
# run of 16 takes 118.5 and 113.8 with the first and the last (one H100, 2026-11-27). Of a smaller model, with half as
# many heads, 2 rows take 24.3 and 23.7 with the first two, and 8 rows 31.9 and 34.3 with the first and the last.
# Layers of a run of 2, 4, 8 and 16 rows take 30.9, 38.6, 56.8 and 97.9, in the company of others 29.9, 37.6, 56.5 and 98.3.
# When a run's first program took all values, a run took 31.6, 40.1, 58.2 and 100.2. Taken by twos, rows need more registers
# (41.6 for 4 rows, or 40.3 with inputs loaded ahead); 32, 64 and 128 single rows take 150, 212 and 298 with 64 and two, but
# 154, 232 and 341 with 16 and one, 159, 226 and 325 with 32 and two, 161, 231 and 337 with 64 and four (one H200,
# 2026-11-28).
# With 16 heads, layers of 2, 4 and 8 single rows take 18.7, 21.5 and 24.2 with CONFIGS, and 18.4, 20.9 and 24.1 with
# SMALL_CONFIGS; of a run 19.8, 23.0 and 27.0, and 19.1, 22.5 and 26.8 (one H200, 2026-11-30).
# Up to FEW_ROWS rows CONFIGS, or SMALL_CONFIGS up to SMALL_HEADS heads, by the most rows times heads, and FEW for more of
# these; MANY for more rows.
CONFIGS = {64: DeltaConfig(values=32, span=16, warps=4), 128: DeltaConfig(values=32, span=16, warps=2)}
SMALL_HEADS = 16
SMALL_CONFIGS = {32: DeltaConfig(values=16, span=16, warps=2), 128: DeltaConfig(values=16, span=16, warps=1)}
FEW, MANY = DeltaConfig(values=16, span=8, warps=1), DeltaConfig(values=64, span=16, warps=2, runs=RUNS)
# In place of CONFIGS and FEW for states in bfloat16, which need half of the registers on their way. Layers of the flagship
# with 1, 2, 4, 8 and 16 single rows take 23.0, 27.6, 34.6, 51.0 and 84.3 us with CONFIGS and FEW; 22.0, 27.0, 34.3, 48.4 and
# 80.0 with one warp and 16 values for one row, else 32; but runs of 2 and 4 rows 30.7 and 39.2, not 29.0 and 36.7. With MANY
# 32, 64 and 128 single rows take 146, 198 and 272; with 32 and two warps 157, 218 and 310; 32 and one 147, 205 and 285; 64
# and four 165, 238 and 350 (one H200, 2026-12-01).
NARROW_CONFIGS = {32: DeltaConfig(values=16, span=16, warps=1)} | CONFIGS
NARROW_FEW = DeltaConfig(values=32, span=16, warps=1)


def config_for(rows: int | torch.SymInt, heads: int, stored: torch.dtype) -> DeltaConfig:
    """The configuration for so many rows, at most, of so many heads, whose states are stored in this dtype."""
    if not at_most(rows, FEW_ROWS):
        return MANY
    configs, more = (CONFIGS, FEW) if stored == torch.float32 else (NARROW_CONFIGS, NARROW_FEW)
    if heads <= SMALL_HEADS:
        configs = SMALL_CONFIGS
    return next((config for most, config in configs.items() if at_most(rows * heads, most)), more)
