"""The linear layers of a decode step, of one row or two, as Triton kernels that start early: they load weights while the
kernel ahead still runs.

A program computes a few rows of the output. Its warps lie along K, with 16 bytes of each row per thread, so that the rows
share the cost of preparing x. The warps' sums are added once, with one barrier. A norm's 1 / rms is one factor for all of x.
So it is multiplied after the product, and the squares are summed beside the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ostinato.export.kernels.launch import is_one, launcher, pointers, starts_early
from ostinato.export.kernels.operands import TWO_ROWS, Convolution, HeadSquares, Norm, RowIndex, Weight

from .limits import check_weight, heads_of
from .step_kernels_triton import linear_add_early, norm_linear_conv_early, norm_linear_early, norm_swiglu_early


def units_per_lane(dtype: torch.dtype) -> int:
    """Units per 16 bytes of a weight whose values have this dtype. See `step_tiles_triton` for units."""
    return 16 // dtype.itemsize if dtype.is_floating_point else 4


def bits_of(weight: Weight) -> int:
    """Bits of an integer of the weight; 4, which no kernel reads, for a floating dtype."""
    return 4 if weight.format is None else 8 // weight.format.per_value


@dataclass(frozen=True)
class StepConfig:
    """How much of a weight one program takes, and how it multiplies.

    Attributes:
        rows: weight rows per program, a power of two up to 32, or to 16 for two inputs.
        warps: warps per program, all along K: 1, 2, 4 or 8.
        runs: stretches of 16 bytes of each row that a lane takes at once, a power of two; 1 for int4.
        integer: whether inputs in bfloat16 are multiplied by int4 weights in fixed point (see `step_fixed_point_triton`).
            Float32 inputs never are.
        gate_rows: rows of `gates` per program that multiplies by `gates`, a power of two up to 32.
    """

    rows: int
    warps: int
    runs: int = 1
    integer: bool = True
    gate_rows: int = 4


def config_for(n: int, k: int, group: int, dtype: torch.dtype, bits: int = 4, inputs: int = 1) -> StepConfig:
    """The configuration for a weight [n, k] of integers of `bits` bits in groups of `group`; if `group` is 0, in `dtype`.

    Args:
        dtype: that of the inputs.
        inputs: rows of the inputs, 1 or 2. A program has at most 32 sums, one for each lane of a warp.

    There are enough warps for one tile to hold a whole row, so a program loads all its weights before the wait. There are as
    many rows as registers hold: in int4, 32 if a row is one tile with one scale per lane, else 16; in other dtypes, rows that
    fill 64 registers. Rows of eight-bit integers are twice as long, so there are 8. But enough programs must remain: for
    integers, 768 warps in all (about six per multiprocessor of an H200), in other dtypes 320 programs. A small weight of
    integers has 8 warps, though some of their lanes may have nothing to do; above 2,048 rows 4, so that all programs have
    room at once, but for one row of eight-bit integers, whose rows are longer: 4,096 x 4,096 in int4 g32 takes 5.7 us among a
    layer's kernels, not 8.0, and in int8 g32 7.1, not 5.7 (one H100, 2026-11-27).

    On an H200, 12,288 x 2,048 in int4 takes 4.6 us with 32 rows, 5.3 with 16 and 6.3 with 8. 2,048 x 4,096 takes 2.6 us with
    8 rows and 8 warps, and 3.4 with 4 warps; 1,024 x 2,048 takes 1.9, and 2.2 with 4 warps. In bfloat16, 7,168 x 1,024 takes
    3.9 us with 16 rows and 4.2 with 8; 1,024 x 2,048 takes 2.3 us with 2 rows, 2.6 with 4 and 2.7 with 8.
    """
    words = k * bits // 32
    if group == 0:
        pieces = triton.cdiv(k, 32 * units_per_lane(dtype))
        warps = min(8, triton.next_power_of_2(pieces))
        runs = min(4, triton.next_power_of_2(triton.cdiv(pieces, warps)))
        rows = 16 // runs
        while rows > 1 and n < 320 * rows:
            rows //= 2
    elif n <= 4096:
        rows, warps, runs = 8, 8 if n <= 2048 or (bits == 8 and inputs == 1) else 4, 1
    else:
        warps = max(1, min(8, triton.next_power_of_2(words) // 128))
        runs = 1
        single = group == 128 and dtype == torch.bfloat16 and words <= 128 * warps
        rows = 8 if bits == 8 else 32 if single else 16
        while rows > 1 and n * warps < 768 * rows:
            rows //= 2
    if inputs > 1 and group > 0 and (dtype == torch.float32 or (n > 4096 and words > 128 * warps)):
        # Registers run short.
        rows = max(1, rows // (4 if dtype == torch.float32 else 2))
    return StepConfig(min(rows, 32 // inputs), warps, runs)


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """See `reference.norm_linear`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_weight`.
    """
    check_weight(weight, x.dtype)
    return _norm_linear(x, norm.weight, norm.eps, *weight.arguments, out_dtype)


@torch.library.triton_op("ostinato::norm_linear", mutates_args={})
def _norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> Tensor:
    weight = Weight.of(values, scale, minimum, bias, form)
    n, k = weight.rows, weight.columns
    config = config_for(n, k, weight.group_size or 0, x.dtype, bits_of(weight), inputs_of(x))
    out = torch.empty((x.shape[0], n), dtype=out_dtype, device=x.device)
    launcher(norm_linear_early)[((n + config.rows - 1) // config.rows,)](
        x,
        norm_weight,
        *_pointers(weight),
        out,
        x.shape[0],
        EPS=eps,
        N=n,
        **_constants(weight, config, x),
    )
    return out


def norm_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """See `reference.norm_swiglu`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_weight`.
    """
    check_weight(weight, x.dtype)
    return _norm_swiglu(x, norm.weight, norm.eps, *weight.arguments)


@torch.library.triton_op("ostinato::norm_swiglu", mutates_args={})
def _norm_swiglu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
) -> Tensor:
    weight = Weight.of(values, scale, minimum, bias, form)
    n, k = weight.rows // 2, weight.columns
    config = config_for(2 * n, k, weight.group_size or 0, x.dtype, bits_of(weight), inputs_of(x))
    # Half of a program's rows are gates, and no program has rows past the last gate.
    config = replace(config, rows=max(1, min(config.rows // 2, n & -n)))
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    launcher(norm_swiglu_early)[(n // config.rows,)](
        x,
        norm_weight,
        *_pointers(weight),
        out,
        x.shape[0],
        EPS=eps,
        N=n,
        **_constants(weight, config, x),
    )
    return out


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes.

    Positions and slots are read before the kernel ahead has ended, so no marked kernel may write them (rule R2 in
    `delegate/graphs/nodes.py`).

    Raises:
        ExportError: see `check_weight`.
    """
    check_weight(weight, x.dtype)
    return _norm_linear_conv(
        x, norm.weight, norm.eps, *weight.arguments, gates, conv.weight, conv.state, index.positions, index.slots
    )


@torch.library.triton_op("ostinato::norm_linear_conv", mutates_args={"conv_state"})
def _norm_linear_conv(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    gates: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    weight = Weight.of(values, scale, minimum, bias, form)
    n, k, gate_count = weight.rows, weight.columns, gates.shape[0]
    config = config_for(n, k, weight.group_size or 0, x.dtype, bits_of(weight), inputs_of(x))
    mixed = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    gated = torch.empty((x.shape[0], gate_count), dtype=torch.float32, device=x.device)
    constants = _constants(weight, config, x)
    blocks = (n + config.rows - 1) // config.rows
    gate_blocks = (gate_count + config.gate_rows - 1) // config.gate_rows
    launcher(norm_linear_conv_early)[(blocks + gate_blocks,)](
        x,
        norm_weight,
        *_pointers(weight),
        gates,
        conv_weight,
        conv_state,
        positions,
        slots,
        mixed,
        gated,
        x.shape[0],
        EPS=eps,
        N=n,
        GATES=gate_count,
        CHANNELS=conv_state.shape[2],
        TAPS=conv_weight.shape[2],
        GATE_ROWS=config.gate_rows,
        # As many elements as the other programs' tiles have.
        GATE_UNITS=constants["UNITS"] * (1 if scale is None else 32 // constants["BITS"]),
        GATE_LANE=units_per_lane(gates.dtype),
        **constants,
    )
    return mixed, gated


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """See `reference.linear_add`; all tensors contiguous and aligned to 16 bytes.

    Raises:
        ExportError: see `check_weight`; also if K is not a multiple of the number of heads.
    """
    check_weight(weight, x.dtype)
    sums, eps = (None, 0.0) if squares is None else (squares.sums, squares.eps)
    return _linear_add(x, *weight.arguments, residual, sums, eps, 0 if squares is None else heads_of(x, squares))


@torch.library.triton_op("ostinato::linear_add", mutates_args={})
def _linear_add(
    x: Tensor,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    residual: Tensor,
    squares: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    weight = Weight.of(values, scale, minimum, bias, form)
    n, k = weight.rows, weight.columns
    config = config_for(n, k, weight.group_size or 0, x.dtype, bits_of(weight), inputs_of(x))
    out = torch.empty_like(residual)
    launcher(linear_add_early)[((n + config.rows - 1) // config.rows,)](
        x,
        *_pointers(weight),
        residual,
        # Not read if there are no heads.
        residual if squares is None else squares,
        out,
        x.shape[0],
        EPS=eps,
        N=n,
        HEADS=heads,
        PARTS=0 if squares is None else squares.shape[1],
        **_constants(weight, config, x),
    )
    return out


def tile_constants(weight: Weight, dtype: torch.dtype, warps: int, runs: int, integer: bool) -> dict[str, Any]:
    """Compile-time constants of kernels that take a weight in tiles; see `StepConfig` for `warps`, `runs` and `integer`.

    dtype: the inputs' dtype.
    """
    lane = units_per_lane(weight.values.dtype)
    return {
        "GROUP": weight.group_size or 0,
        "WARPS": warps,
        "UNITS": 32 * warps * runs * lane,
        "LANE": lane,
        "INTEGER": integer and dtype == torch.bfloat16,
        "num_warps": warps,
    }


def _pointers(weight: Weight) -> tuple[Tensor, ...]:
    """Values, scale, minimum and bias, as the kernels here take them."""
    return pointers(weight.values, weight.scale, weight.minimum, weight.bias)


def inputs_of(x: Tensor) -> int:
    """Rows that the kernels' code for x has room for."""
    return 1 if is_one(x.shape[0]) else TWO_ROWS


def _constants(weight: Weight, config: StepConfig, x: Tensor) -> dict[str, Any]:
    """Compile-time constants of the kernels here."""
    return {
        "K": weight.columns,
        "BITS": bits_of(weight),
        "MINIMUM": weight.minimum is not None,
        "BIAS": weight.bias is not None,
        "ROWS": config.rows,
        "INPUTS": inputs_of(x),
        "EARLY": starts_early(),
        **tile_constants(weight, x.dtype, config.warps, config.runs, config.integer),
    }
