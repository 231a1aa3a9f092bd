# mypy: allow-untyped-defs
"""Up to FOUR_ROWS rows times int4 weights in groups of 128, in fixed point: from memory directly into operands of `mma`.

One kernel prepares the rows (`rows_prepare_triton`), and beside them computes a delta-net's gates. The other has the product
and the operations behind it. A program has some weight rows, and each of its warps a stretch of four blocks of them. All
weights are loaded before the wait, 16 bytes of a row per lane. Bytes of weights and of inputs are operands as they stand: no
byte moves to another lane.

A block's sum is an exact integer, the sums of the warps are added in one order, and no row sees another. So a row has the
same bits for every number of rows, and whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import at_most, launcher, pointers, starts_early
from ostinato.export.kernels.operands import FOUR_ROWS, Convolution, Norm, RowIndex, Weight

from .rows_direct_conv_triton import load_past, load_taps, offset_in_run, store_convolved
from .rows_fixed_triton import with_bias
from .rows_prepare_triton import prepare_rows_early
from .rows_tiles_triton import BLOCK, ROUNDING_BITS, unpack_bytes
from .scales_triton import of_pair
from .step_fixed_point_triton import ROUNDING
from .step_kernels_triton import store_gates

# Rows of a call: the columns of a product, for each of the two planes. With eight, inputs in registers would leave no room
# for the programs of the kernel behind this one, which start early.
COLUMNS = tl.constexpr(FOUR_ROWS)
# Neighbouring blocks that a warp has; their scales are loaded as one number.
STRETCH = tl.constexpr(4)
MAX_WARPS = 8
# Rows of gates per program.
GATE_ROWS = 4
# Most weight rows. More are more programs than a GPU has room for at once: for 2 rows 248,320 x 2,048 takes 124 us, and in
# `rows_fixed_triton`, whose programs load weights all the time, 101 (one H100, 2026-11-27).
MOST_ROWS = 32768


def takes_direct(x: Tensor, weight: Weight) -> bool:
    """Whether the kernels take rows x [R, K] and a weight [N, K]."""
    form, k, size = weight.format, weight.columns, STRETCH.value * BLOCK.value
    int4 = isinstance(form, Int4) and form.group_size == BLOCK.value and k % size == 0 and k <= MAX_WARPS * size
    # SwiGLU has two weight rows for an output.
    return int4 and x.dtype == torch.bfloat16 and at_most(x.shape[0], FOUR_ROWS) and weight.rows <= MOST_ROWS


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes, and `takes_direct`.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graphs/nodes.py`).
    """
    values, scale, _, bias, form = weight.arguments
    assert scale is not None
    of_conv = conv.weight, conv.state, index.positions, index.slots
    return _norm_linear_conv(x, norm.weight, norm.eps, values, scale, bias, form, gates, *of_conv)


@torch.library.triton_op("ostinato::rows_norm_linear_conv", mutates_args={"conv_state"})
def _norm_linear_conv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    form: str,
    gates: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    weight = Weight.of(values, scale, None, bias, form)
    gated = torch.empty((x.shape[0], gates.shape[0]), dtype=torch.float32, device=x.device)
    convolution = conv_weight, conv_state, positions, slots
    product = DirectProduct(weight, gates=gates, gated=gated, convolution=convolution)
    return product.of(x, x.dtype, norm=norm, eps=eps), gated


@dataclass(frozen=True)
class DirectProduct:
    """A product with the operations around it; see `direct_rows_early`.

    Attributes:
        gated: the tensor that gets the products with `gates`.
        convolution: its weight and state, and the rows' positions and slots.
    """

    weight: Weight
    swiglu: bool = False
    residual: Tensor | None = None
    gates: Tensor | None = None
    gated: Tensor | None = None
    convolution: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def of(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        norm: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        heads: int = 0,
    ) -> Tensor:
        """x [R, K] in bfloat16 -> [R, outputs] in `out_dtype`."""
        rows, k, weight = x.shape[0], x.shape[1], self.weight
        planes = torch.empty((rows, 2, k), dtype=torch.int8, device=x.device)
        factors = torch.empty((rows, k // BLOCK.value), dtype=torch.float32, device=x.device)
        gates = 0 if self.gates is None else self.gates.shape[0]
        # `store_gates` has up to eight warps.
        warps = min(8 if gates else 16, max(4, triton.next_power_of_2(k // 256)))
        launcher(prepare_direct_rows_early)[(rows * (1 + triton.cdiv(gates, GATE_ROWS)),)](
            *pointers(x, norm, squares, self.gates, self.gated),
            planes,
            factors,
            rows,
            EPS=eps,
            K=k,
            NORM=norm is not None,
            HEADS=heads,
            PARTS=0 if squares is None else squares.shape[1],
            GATES=gates,
            GATE_ROWS=GATE_ROWS,
            WARPS=warps,
            EARLY=starts_early(),
            num_warps=warps,
        )
        outputs = weight.rows // 2 if self.swiglu else weight.rows
        warps = triton.next_power_of_2(k // (STRETCH.value * BLOCK.value))
        tile = 32 if outputs > 4096 else 16
        conv, state, positions, slots = self.convolution or (None, None, None, None)
        out = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
        optional = weight.bias, self.residual, conv, state, positions, slots
        launcher(direct_rows_early)[(triton.cdiv(outputs, tile // 2 if self.swiglu else tile),)](
            planes,
            *pointers(factors, weight.values, weight.scale, *optional),
            out,
            rows,
            N=outputs,
            K=k,
            BIAS=weight.bias is not None,
            RESIDUAL=self.residual is not None,
            SWIGLU=self.swiglu,
            CHANNELS=0 if state is None else state.shape[2],
            TAPS=0 if conv is None else conv.shape[2],
            ROWS=tile,
            WARPS=warps,
            EARLY=starts_early(),
            num_warps=warps,
        )
        return out


@triton.jit
def prepare_direct_rows_early(
    x_ptr,
    norm_ptr,
    squares_ptr,
    gates_ptr,
    gated_ptr,
    planes_ptr,
    factors_ptr,
    rows,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    GATES: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`prepare_rows_early`. Behind its programs are others, each of which multiplies one normed row with GATE_ROWS rows of
    gates [GATES, K]."""
    if GATES > 0:
        rows = tl.cast(rows, tl.int32)
        if tl.program_id(0) >= rows:
            start_next(EARLY)
            of_row = tl.program_id(0) % rows
            gate = (tl.program_id(0) // rows - 1) * GATE_ROWS
            store_gates(
                gated_ptr + of_row * GATES, x_ptr + of_row * K, norm_ptr, gates_ptr, gate, EPS, GATES, K, GATE_ROWS, WARPS,
                256 * WARPS, 8, EARLY,
            )  # fmt: skip
            return
    prepare_rows_early(
        x_ptr, norm_ptr, squares_ptr, x_ptr, x_ptr, planes_ptr, factors_ptr, EPS, K, NORM, HEADS, PARTS, False, COLUMNS, 0,
        EARLY,
    )  # fmt: skip


@triton.jit
def direct_rows_early(
    planes_ptr,
    factors_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of rows in fixed point with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these.

    Args:
        planes, factors: see `rows_prepare_triton`.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_convolved`. 0: none is.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * OUTPUTS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, OUTPUTS)
    tiles, scales = load_weights(weight_ptr, scale_ptr, first, N, K, SWIGLU, ROWS, WARPS)
    if CHANNELS > 0:
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    following = load_inputs(planes_ptr, factors_ptr, rows, 0, K, WARPS)
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    for turn in tl.static_range(STRETCH):
        low_x, high_x, factor = following
        if turn + 1 < STRETCH:
            following = load_inputs(planes_ptr, factors_ptr, rows, turn + 1, K, WARPS)
        low, high = unpack_bytes(tiles[turn])
        start = tl.full([WARPS, ROWS, 2 * COLUMNS], ROUNDING_BITS, tl.int32)
        integers = multiply(low, low_x, start, ROWS, WARPS)
        integers = multiply(high, high_x, integers, ROWS, WARPS)
        of_line = of_pair(scales >> (32 * (turn // 2)), turn % 2 == 1, SCALE)
        sums += joined_planes(integers) * (of_line[:, :, None] * factor[:, None, :])
    total = tl.sum(sums, 0)
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTPUTS, COLUMNS]), (1, 2, 0)))
        gate = with_bias(gate, bias_ptr, output, N, BIAS)
        results = gate * tl.sigmoid(gate) * with_bias(up, bias_ptr + N, output, N, BIAS)
    else:
        results = with_bias(total, bias_ptr, output, N, BIAS)
    inside = (output < N)[:, None] & (row < rows)[None, :]
    offsets = row[None, :] * N + output[:, None]
    if RESIDUAL:
        results += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if CHANNELS > 0:
        # The state was read before the warps met to add their sums: no lane still needs what is overwritten.
        store_convolved(
            results, taps, past, out_ptr, state_ptr, slots_ptr, slot, offset, output, row, rows, N, CHANNELS, TAPS
        )
    else:
        tl.store(out_ptr + offsets, results.to(out_ptr.dtype.element_ty), mask=inside)


# --- weights


@triton.jit
def load_weights(
    weight_ptr,
    scale_ptr,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load the warps' stretches: a tuple of tiles of bytes, one for each block, and the blocks' scales [WARPS, ROWS], four in
    an int64. Zeros for warps without a stretch.

    A tile of bytes is [8, WARPS, ROWS / 8, 64]. So a lane has 16 bytes of a row, and four lanes have the block.
    """
    STRETCHES: tl.constexpr = K // (STRETCH * BLOCK)
    line = tl.arange(0, ROWS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    line = stored_lines(line, first, N, SWIGLU, ROWS)
    warp = tl.arange(0, WARPS)[None, :, None, None]
    byte = warp * (STRETCH * 64) + tl.arange(0, 64)[None, None, None, :]
    at = weight_ptr + first.to(tl.int64) * (K // 2) + (line * (K // 2) + byte)
    inside = (warp < STRETCHES) | (STRETCHES == WARPS)
    tiles = ()
    for turn in tl.static_range(STRETCH):
        tiles = tiles + (tl.load(at + turn * 64, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    warp = tl.arange(0, WARPS)[:, None]
    line = stored_lines(tl.arange(0, ROWS)[None, :], first, N, SWIGLU, ROWS)
    fours = scale_ptr.to(tl.pointer_type(tl.int64)) + first.to(tl.int64) * STRETCHES
    inside = (warp < STRETCHES) | (STRETCHES == WARPS)
    return tiles, tl.load(fours + (line * STRETCHES + warp), mask=inside, other=0)


@triton.jit
def stored_lines(line, first, N: tl.constexpr, SWIGLU: tl.constexpr, ROWS: tl.constexpr):
    """A tile's rows, as rows of the weight from `first` on. Rows past the last read the last row again."""
    if SWIGLU:
        HALF: tl.constexpr = ROWS // 2
        lines = line % HALF
        if N % HALF != 0:
            lines = tl.minimum(lines, N - 1 - first)
        lines += line // HALF * N
    elif N % ROWS != 0:
        lines = tl.minimum(line, N - 1 - first)
    else:
        lines = line
    return lines


# --- products


@triton.jit
def load_inputs(planes_ptr, factors_ptr, rows, TURN: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr):
    """Load the inputs of block TURN of each warp's stretch: the bytes that low nibbles multiply and those that high ones do,
    [2 COLUMNS, WARPS, 1, 64], the rows' upper bytes first, and the blocks' factors [WARPS, COLUMNS].

    Zeros past the last row and for warps without a stretch.
    """
    STRETCHES: tl.constexpr = K // (STRETCH * BLOCK)
    column = tl.arange(0, 2 * COLUMNS)[:, None, None, None]
    row = column % COLUMNS
    warp = tl.arange(0, WARPS)[None, :, None, None]
    inside = (row < rows) & (warp < STRETCHES)
    at = planes_ptr + (row * 2 + column // COLUMNS) * K + warp * (STRETCH * BLOCK) + TURN * BLOCK
    at += tl.arange(0, 64)[None, None, None, :]
    of_row = tl.arange(0, COLUMNS)[None, :]
    of_warp = tl.arange(0, WARPS)[:, None]
    known = (of_row < rows) & (of_warp < STRETCHES)
    factor = tl.load(factors_ptr + of_row * (K // BLOCK) + (of_warp * STRETCH + TURN), mask=known, other=0.0)
    return tl.load(at, mask=inside, other=0), tl.load(at + 64, mask=inside, other=0), factor


@triton.jit
def multiply(weights, inputs, sums, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """sums [WARPS, ROWS, 2 COLUMNS] + weights [8, WARPS, ROWS / 8, 64] times inputs [2 COLUMNS, WARPS, 1, 64], int8."""
    columns = tl.permute(operand_of(inputs, 2 * COLUMNS, WARPS), (0, 2, 1))
    return tl.dot(operand_of(weights, ROWS, WARPS), columns, sums, out_dtype=tl.int32)


@triton.jit
def operand_of(tile, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """A tile [8, WARPS, ROWS / 8, 64] -> [WARPS, ROWS, 64], the left operand of a product; the right one must be transposed.

    See `rows_tiles_triton.operand`.
    """
    tile = tl.reshape(tl.permute(tile, (1, 2, 0, 3)), [WARPS, ROWS, 4, 4, 4])
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4)), [WARPS, ROWS, 64])


@triton.jit
def joined_planes(sums):
    """[WARPS, ROWS, 2 COLUMNS] int32, which started from ROUNDING_BITS -> upper * 256 + lower, [WARPS, ROWS, COLUMNS]."""
    values = sums.to(tl.float32, bitcast=True) - ROUNDING
    planes = tl.reshape(values, [sums.shape[0], sums.shape[1], 2, COLUMNS])
    upper, lower = tl.split(tl.permute(planes, (0, 1, 3, 2)))
    return upper * 256.0 + lower
