"""`step_linear` as Triton kernels that start early: weights are on their way while the kernel ahead still runs.

A program makes a few rows of the output. Its warps lie along K, 16 bytes of each row a thread, so that what it costs to
prepare x is shared by the rows; the rows' sums meet once, behind one barrier. A norm's 1 / rms is one factor for all of x, so
it comes after the product, and the squares are summed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...delegate.errors import ExportError
from .int4_triton import check_shapes
from .launch import launcher, starts_early
from .step_linear_kernels_triton import linear_add_early, norm_linear_conv_early, norm_linear_early
from .step_linear_math_triton import LANE


@dataclass(frozen=True)
class StepConfig:
    """What one program does.

    Attributes:
        rows: outputs it makes, a power of two up to 32.
        warps: warps it has, all along K: 1, 2, 4 or 8. They take `words` of each row at a time.
        integer: whether inputs in bfloat16 are multiplied in fixed point: `step_linear_integer_triton`. Float32 ones are not.
        extra_rows: rows in a floating dtype that a program makes which makes those, a power of two up to 32.
    """

    rows: int
    warps: int
    integer: bool = True
    extra_rows: int = 4

    @property
    def words(self) -> int:
        """32-bit words of a row in a tile."""
        return 32 * LANE.value * self.warps


def config_for(n: int, k: int, group: int, dtype: torch.dtype) -> StepConfig:
    """For a weight [n, k] in groups of `group`, and inputs of `dtype`.

    Warps for all of a row in one tile, so that all weights of a program are on their way before the wait. As many rows as
    leave 768 warps, about six for each of an H200's multiprocessors, and no more than registers hold: 32 in one tile with a
    scale a lane. 12,288 x 2,048 takes 4.6 us there with 32 rows, 5.3 with 16 and 6.3 with 8; 2,048 x 4,096 takes 3.5 with
    16 and 3.4 with 8.
    """
    warps = max(1, min(8, triton.next_power_of_2(k // 8) // (32 * LANE.value)))
    rows = 32 if group == 128 and dtype == torch.bfloat16 and k // 8 <= 32 * LANE.value * warps else 16
    while rows > 1 and n * warps < 768 * rows:
        rows //= 2
    return StepConfig(rows, warps)


@torch.library.triton_op("ostinato::norm_linear", mutates_args={})
def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See `step_linear.norm_linear`; all contiguous and aligned to 16 bytes.

    Raises:
        ExportError: `int4_triton.check_shapes`.
    """
    n, k, group = _shape(weight, scale, x)
    config = config_for(n, k, group, x.dtype)
    out = torch.empty((1, n), dtype=out_dtype, device=x.device)
    launcher(norm_linear_early)[((n + config.rows - 1) // config.rows,)](
        x,
        norm_weight,
        weight,
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


@torch.library.triton_op("ostinato::norm_linear_conv", mutates_args={"conv_state"})
def norm_linear_conv(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    extra: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `step_linear.norm_linear_conv`; all contiguous and aligned to 16 bytes.

    Raises:
        ExportError: `int4_triton.check_shapes`.
    """
    n, k, group = _shape(weight, scale, x)
    extras = extra.shape[0]
    config = config_for(n, k, group, x.dtype)
    mixed = torch.empty((1, n), dtype=x.dtype, device=x.device)
    gates = torch.empty((1, extras), dtype=torch.float32, device=x.device)
    blocks = (n + config.rows - 1) // config.rows
    extra_blocks = (extras + config.extra_rows - 1) // config.extra_rows
    launcher(norm_linear_conv_early)[(blocks + extra_blocks,)](
        x,
        norm_weight,
        weight,
        scale,
        extra,
        conv_weight,
        conv_state,
        positions,
        mixed,
        gates,
        EPS=eps,
        N=n,
        K=k,
        GROUP=group,
        EXTRA=extras,
        CHANNELS=conv_state.shape[1],
        TAPS=conv_weight.shape[2],
        ROWS=config.rows,
        EXTRA_ROWS=config.extra_rows,
        WARPS=config.warps,
        WORDS=config.words,
        INTEGER=config.integer and x.dtype == torch.bfloat16,
        EARLY=starts_early(),
        num_warps=config.warps,
    )
    return mixed, gates


@torch.library.triton_op("ostinato::linear_add", mutates_args={})
def linear_add(
    x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, squares: Tensor | None, eps: float
) -> Tensor:
    """See `step_linear.linear_add`; all contiguous and aligned to 16 bytes.

    Raises:
        ExportError: `int4_triton.check_shapes`, or K is not a multiple of the number of heads.
    """
    n, k, group = _shape(weight, scale, x)
    heads, parts = (0, 0) if squares is None else (squares.shape[0], squares.shape[1])
    if heads and k % heads:
        raise ExportError(f"an input of {k} elements does not divide into {heads} heads")
    config = config_for(n, k, group, x.dtype)
    out = torch.empty_like(residual)
    launcher(linear_add_early)[((n + config.rows - 1) // config.rows,)](
        x,
        weight,
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


def _shape(weight: Tensor, scale: Tensor, x: Tensor) -> tuple[int, int, int]:
    """N, K and the group size."""
    n, k = weight.shape[0], weight.shape[1] * 2
    check_shapes(n, k, scale.shape[1], x.dtype)
    return n, k, k // scale.shape[1]
