"""The linear layers of a decode step as Triton kernels that start early: they load weights while the kernel ahead still runs.

A program computes a few rows of the output. Its warps lie along K, with 16 bytes of each row per thread, so that the rows
share the cost of preparing x; the warps' sums meet once, with one barrier. A norm's 1 / rms is one factor for all of x,
so it comes after the product, and the squares are summed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.launch import launcher, starts_early
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, Weight

from .limits import check_int4
from .step_kernels_triton import linear_add_early, norm_linear_conv_early, norm_linear_early
from .step_tiles_triton import LANE


@dataclass(frozen=True)
class StepConfig:
    """What one program does.

    Attributes:
        rows: outputs that it computes, a power of two up to 32.
        warps: its warps, all along K: 1, 2, 4 or 8. They take `words` of each row at a time.
        integer: whether inputs in bfloat16 are multiplied in fixed point, as `step_fixed_point_triton` says. Float32 inputs
            never are.
        gate_rows: rows in a floating dtype per program, in the programs that compute those; a power of two up to 32.
    """

    rows: int
    warps: int
    integer: bool = True
    gate_rows: int = 4

    @property
    def words(self) -> int:
        """32-bit words of a row in a tile."""
        return 32 * LANE.value * self.warps


def config_for(n: int, k: int, group: int, dtype: torch.dtype) -> StepConfig:
    """For a weight [n, k] in groups of `group`, and inputs of `dtype`.

    Enough warps for all of a row in one tile, so that a program loads all its weights before the wait. As many rows as
    leave 768 warps, about six per multiprocessor of an H200, and no more than registers hold: 32 in one tile with one
    scale per lane. On an H200, 12,288 x 2,048 takes 4.6 us with 32 rows, 5.3 with 16 and 6.3 with 8; 2,048 x 4,096 takes
    3.5 with 16 and 3.4 with 8.
    """
    warps = max(1, min(8, triton.next_power_of_2(k // 8) // (32 * LANE.value)))
    rows = 32 if group == 128 and dtype == torch.bfloat16 and k // 8 <= 32 * LANE.value * warps else 16
    while rows > 1 and n * warps < 768 * rows:
        rows //= 2
    return StepConfig(rows, warps)


def packed(weight: Weight) -> tuple[Tensor, Tensor]:
    """Values and scale of a four-bit weight; ExportError for one in a floating dtype."""
    if weight.scale is None:
        raise ExportError(f"the kernels of a decode step take int4 weights, got one in {weight.values.dtype}")
    return weight.values, weight.scale


def _checked(weight: Weight, x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = packed(weight)
    check_int4(weight.rows, weight.columns, scale.shape[1], x.dtype)
    return values, scale


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """See `reference.norm_linear`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_int4`, or a weight in a floating dtype.
    """
    return _norm_linear(x, norm.weight, norm.eps, *_checked(weight, x), out_dtype)


@torch.library.triton_op("ostinato::norm_linear", mutates_args={})
def _norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, values: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    n, k, group = _sizes(values, scale)
    config = config_for(n, k, group, x.dtype)
    out = torch.empty((1, n), dtype=out_dtype, device=x.device)
    launcher(norm_linear_early)[((n + config.rows - 1) // config.rows,)](
        x,
        norm_weight,
        values,
        scale,
        out,
        EPS=eps,
        N=n,
        K=k,
        GROUP=group,
        ROWS=config.rows,
        WARPS=config.warps,
        WORDS=config.words,
        INTEGER=config.integer and x.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=config.warps,
    )
    return out


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_int4`, or a weight in a floating dtype.
    """
    return _norm_linear_conv(x, norm.weight, norm.eps, *_checked(weight, x), gates, conv.weight, conv.state, positions)


@torch.library.triton_op("ostinato::norm_linear_conv", mutates_args={"conv_state"})
def _norm_linear_conv(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    n, k, group = _sizes(values, scale)
    gate_count = gates.shape[0]
    config = config_for(n, k, group, x.dtype)
    mixed = torch.empty((1, n), dtype=x.dtype, device=x.device)
    gated = torch.empty((1, gate_count), dtype=torch.float32, device=x.device)
    blocks = (n + config.rows - 1) // config.rows
    gate_blocks = (gate_count + config.gate_rows - 1) // config.gate_rows
    launcher(norm_linear_conv_early)[(blocks + gate_blocks,)](
        x,
        norm_weight,
        values,
        scale,
        gates,
        conv_weight,
        conv_state,
        positions,
        mixed,
        gated,
        EPS=eps,
        N=n,
        K=k,
        GROUP=group,
        GATES=gate_count,
        CHANNELS=conv_state.shape[1],
        TAPS=conv_weight.shape[2],
        ROWS=config.rows,
        GATE_ROWS=config.gate_rows,
        WARPS=config.warps,
        WORDS=config.words,
        INTEGER=config.integer and x.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=config.warps,
    )
    return mixed, gated


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """See `reference.linear_add`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_int4`; a weight in a floating dtype; or K is not a multiple of the number of heads.
    """
    sums, eps = (None, 0.0) if squares is None else (squares.sums, squares.eps)
    if sums is not None and weight.columns % sums.shape[0]:
        raise ExportError(f"an input of {weight.columns} elements cannot be divided into {sums.shape[0]} heads")
    return _linear_add(x, *_checked(weight, x), residual, sums, eps)


@torch.library.triton_op("ostinato::linear_add", mutates_args={})
def _linear_add(
    x: Tensor, values: Tensor, scale: Tensor, residual: Tensor, squares: Tensor | None, eps: float
) -> Tensor:
    n, k, group = _sizes(values, scale)
    heads, parts = (0, 0) if squares is None else (squares.shape[0], squares.shape[1])
    config = config_for(n, k, group, x.dtype)
    out = torch.empty_like(residual)
    launcher(linear_add_early)[((n + config.rows - 1) // config.rows,)](
        x,
        values,
        scale,
        residual,
        # Not read where there are no heads.
        residual if squares is None else squares,
        out,
        EPS=eps,
        N=n,
        K=k,
        GROUP=group,
        HEADS=heads,
        PARTS=parts,
        ROWS=config.rows,
        WARPS=config.warps,
        WORDS=config.words,
        INTEGER=config.integer and x.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=config.warps,
    )
    return out


def _sizes(values: Tensor, scale: Tensor) -> tuple[int, int, int]:
    """N, K and the group size."""
    k = values.shape[1] * 2
    return values.shape[0], k, k // scale.shape[1]
