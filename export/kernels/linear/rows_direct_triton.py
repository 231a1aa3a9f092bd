# mypy: allow-untyped-defs
"""Products of few rows whose weights go from memory directly into operands of tensor cores, with all that is around them.

One kernel prepares the rows: it norms them or divides their heads, and beside this computes a delta-net's gates. The other
has the product, and behind it SwiGLU, a residual or the convolution. Rows that are multiplied as they are need only this one,
and so do mostly those whose heads are divided: that is a factor of the sums of blocks.

    weights                     rows at most   kernel
    int4 in groups of 128       STEP_ROWS      rows_direct_int4_triton, in fixed point
    small ones, without a norm  FEW_ROWS       rows_direct_unpacked_triton, of rows as they are
    other integers              STEP_ROWS      rows_direct_integers_triton, in fixed point
    bfloat16                    FEW_ROWS       rows_direct_floats_triton
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.formats.int4 import Int4
from ostinato.export.kernels.early_start_triton import start_next
from ostinato.export.kernels.launch import at_most, launcher, pointers, starts_early
from ostinato.export.kernels.operands import FEW_ROWS, FOUR_ROWS, STEP_ROWS, Convolution, Norm, RowIndex, Weight

from .rows_direct_configs import FloatsConfig, IntegersConfig, float_warps
from .rows_direct_floats_triton import TURN, direct_floats_rows_early, direct_long_floats_rows_early
from .rows_direct_int4_triton import STRETCH, direct_rows_early
from .rows_direct_integers_triton import direct_integers_rows_early, store_operands
from .rows_direct_minima_triton import GROUP
from .rows_direct_store_triton import MAX_WARPS, TILE
from .rows_direct_unpacked_triton import direct_unpacked_rows_early
from .rows_prepare_triton import prepared_blocks
from .rows_tiles_triton import BLOCK, nibble_order
from .step_kernels_triton import store_gates
from .step_triton import bits_of

# Elements of a warp's stretch of K.
LENGTH = STRETCH.value * BLOCK.value
# Rows of gates per program.
GATE_ROWS = 4
# The most rows of a small weight.
SMALL = 4096
# Blocks of a row that a program prepares where there is no norm.
PREPARED_BLOCKS = 16


def takes_direct(x: Tensor, weight: Weight) -> bool:
    """Whether the kernels take rows x [R, K] and a weight [N, K]."""
    form, k = weight.format, weight.columns
    if x.dtype != torch.bfloat16 or k % BLOCK.value:
        return False
    if form is None:
        return weight.values.dtype == torch.bfloat16 and at_most(x.shape[0], FEW_ROWS)
    return at_most(x.shape[0], STEP_ROWS) and (has_stretches(k) or not in_fixed_point(weight))


def takes_unprepared(x: Tensor, weight: Weight, heads: int) -> bool:
    """Whether the kernel of small weights takes a weight [N, K] and rows x [R, K] as they are. heads: those of a row, which
    are divided by their root mean squares; 0: none."""
    small = in_fixed_point(weight) and has_stretches(weight.columns) and weight.rows <= SMALL
    whole = in_whole_blocks(weight.columns, heads)
    return x.dtype == torch.bfloat16 and small and whole and at_most(x.shape[0], FEW_ROWS)


def has_stretches(k: int) -> bool:
    """Whether the warps of a program can have K in stretches."""
    return k % LENGTH == 0 and k <= MAX_WARPS * LENGTH


def warps_for(k: int) -> int:
    """Warps of a program that have K in stretches."""
    return int(triton.next_power_of_2(k // LENGTH))


def in_whole_blocks(k: int, heads: int) -> bool:
    """Whether each block of a row lies in one of its heads, if it has some."""
    return heads == 0 or k // heads % BLOCK.value == 0


def divides_heads(k: int, heads: int) -> bool:
    """Whether a product with bfloat16 weights divides its rows' heads, if it has some. A warp then has 1, 2 or 4 blocks."""
    blocks, left = divmod(k, BLOCK.value * float_warps(k))
    return heads == 0 or (left == 0 and blocks in (1, 2, 4) and in_whole_blocks(k, heads))


def in_fixed_point(weight: Weight) -> bool:
    """Whether more rows in bfloat16 than `takes_direct` are multiplied by an integer weight in fixed point, too."""
    return isinstance(weight.format, Int4) and weight.group_size == 128 and weight.columns % 256 == 0


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes, and `takes_direct`.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graphs/nodes.py`).
    """
    of_conv = conv.weight, conv.state, index.positions, index.slots
    return _norm_linear_conv(x, norm.weight, norm.eps, *weight.arguments, gates, *of_conv)


@torch.library.triton_op("ostinato::rows_norm_linear_conv", mutates_args={"conv_state"})
def _norm_linear_conv(
    x: Tensor,
    norm: Tensor,
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
    gated = torch.empty((x.shape[0], gates.shape[0]), dtype=torch.float32, device=x.device)
    convolution = conv_weight, conv_state, positions, slots
    product = DirectProduct(weight, gates=gates, gated=gated, convolution=convolution)
    return product.of(x, x.dtype, norm=norm, eps=eps), gated


def prepared_at_once(blocks: int, norm: bool) -> int:
    """Blocks of a row, a power of two, that a program prepares. A norm needs all of them."""
    at_once = int(triton.next_power_of_2(blocks))
    return at_once if norm else min(at_once, PREPARED_BLOCKS)


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
        out = torch.empty((x.shape[0], self.outputs), dtype=out_dtype, device=x.device)
        if self.floats and norm is None and divides_heads(self.weight.columns, heads):
            return self._multiplied((x,), out, squares, eps, heads)
        return self._multiplied(self._prepared(x, norm, squares, eps, heads), out)

    def of_unprepared(
        self, x: Tensor, out_dtype: torch.dtype, squares: Tensor | None, eps: float, heads: int
    ) -> Tensor:
        """x [R, K] in bfloat16, `takes_unprepared` -> [R, outputs] in `out_dtype`."""
        weight, (rows, k) = self.weight, x.shape
        out = torch.empty((rows, self.outputs), dtype=out_dtype, device=x.device)
        warps = warps_for(k)
        launcher(direct_unpacked_rows_early)[(self._programs(TILE),)](
            *pointers(x, squares, weight.values, weight.scale, weight.bias, self.residual),
            out,
            rows,
            EPS=eps,
            N=self.outputs,
            K=k,
            HEADS=heads,
            PARTS=0 if squares is None else squares.shape[1],
            BIAS=weight.bias is not None,
            RESIDUAL=self.residual is not None,
            ROWS=TILE,
            COLUMNS=STEP_ROWS if at_most(rows, STEP_ROWS) else FEW_ROWS,
            WARPS=warps,
            EARLY=starts_early(),
            num_warps=warps,
        )
        return out

    @property
    def floats(self) -> bool:
        return self.weight.format is None

    @property
    def outputs(self) -> int:
        return self.weight.rows // 2 if self.swiglu else self.weight.rows

    @property
    def _stretches(self) -> bool:
        """Whether it is the product of `rows_direct_int4_triton`."""
        return in_fixed_point(self.weight)

    def _prepared(
        self, x: Tensor, norm: Tensor | None, squares: Tensor | None, eps: float, heads: int
    ) -> tuple[Tensor, ...]:
        """Normed or divided rows as the product reads them, in x's dtype or in fixed point. Also writes `gated`."""
        rows, k = x.shape[0], x.shape[1]
        blocks, columns = k // BLOCK.value, self._columns(rows)
        minima = self.weight.minimum is not None
        if self.floats:
            prepared: tuple[Tensor, ...] = (x.new_empty((k // TURN.value, columns, TURN.value)),)
        else:
            planes = x.new_empty((blocks, 2 * columns, BLOCK.value), dtype=torch.int8)
            factors = x.new_empty((blocks, columns), dtype=torch.float32)
            prepared = planes, factors, factors.new_empty((2 * columns, k // GROUP.value)) if minima else factors
        gates = 0 if self.gates is None else self.gates.shape[0]
        at_once = prepared_at_once(blocks, norm is not None)
        # `store_gates` has up to eight warps.
        warps = min(8 if gates else 16, max(4, at_once // 2))
        grid = rows * (1 + triton.cdiv(gates, GATE_ROWS)), triton.cdiv(blocks, at_once)
        launcher(prepare_direct_rows_early)[grid](
            *pointers(x, norm, squares, self.gates, self.gated),
            # What is not written is any tensor.
            *((*prepared, x, x, x) if self.floats else (x, *prepared)),
            rows,
            EPS=eps,
            K=k,
            NORM=norm is not None,
            HEADS=heads,
            PARTS=0 if squares is None else squares.shape[1],
            FLOATS=self.floats,
            STRETCHES=self._stretches,
            SUMS=minima,
            COLUMNS=columns,
            BLOCKS=at_once,
            GATES=gates,
            GATE_ROWS=GATE_ROWS,
            WARPS=warps,
            EARLY=starts_early(),
            num_warps=warps,
        )
        return prepared

    def _multiplied(
        self, prepared: tuple[Tensor, ...], out: Tensor, squares: Tensor | None = None, eps: float = 0.0, heads: int = 0
    ) -> Tensor:
        """heads: heads of a row that the product divides, with bfloat16 weights."""
        weight, k, rows = self.weight, self.weight.columns, out.shape[0]
        columns = self._columns(rows)
        conv, state, positions, slots = self.convolution or (None, None, None, None)
        optional = weight.bias, self.residual, conv, state, positions, slots
        constants = {
            "N": self.outputs,
            "K": k,
            "BIAS": weight.bias is not None,
            "RESIDUAL": self.residual is not None,
            "SWIGLU": self.swiglu,
            "CHANNELS": 0 if state is None else state.shape[2],
            "TAPS": 0 if conv is None else conv.shape[2],
            "EARLY": starts_early(),
        }
        if self.floats:
            programs = self._programs(TILE)
            floats = FloatsConfig.of(k, columns, programs, self.residual is not None, heads > 0)
            constants |= {
                "PREPARED": prepared[0].dim() == 3,
                "ROWS": TILE,
                "COLUMNS": columns,
                "WARPS": floats.warps,
                "AHEAD": floats.ahead,
                "num_warps": floats.warps,
            }
            if floats.fence:
                launcher(direct_long_floats_rows_early)[(programs,)](
                    *pointers(prepared[0], weight.values, *optional),
                    out,
                    rows,
                    INPUTS=floats.inputs,
                    FENCE=floats.fence,
                    **constants,
                )
            else:
                launcher(direct_floats_rows_early)[(programs,)](
                    *pointers(prepared[0], squares, weight.values, *optional),
                    out,
                    rows,
                    EPS=eps,
                    HEADS=heads,
                    PARTS=0 if squares is None else squares.shape[1],
                    HOLD=floats.inputs > 1,
                    **constants,
                )
        elif self._stretches:
            tile = 2 * TILE if self.outputs > 4096 else TILE
            warps = warps_for(k)
            launcher(direct_rows_early)[(self._programs(tile),)](
                *pointers(*prepared[:2], weight.values, weight.scale, *optional),
                out,
                rows,
                ROWS=tile,
                COLUMNS=columns,
                WARPS=warps,
                num_warps=warps,
                **constants,
            )
        else:
            config = IntegersConfig.of(weight, columns, self._programs(TILE))
            launcher(direct_integers_rows_early)[(self._programs(TILE),)](
                *pointers(*prepared, weight.values, weight.scale, weight.minimum, *optional),
                out,
                rows,
                GROUP=weight.group_size,
                BITS=bits_of(weight),
                MINIMUM=weight.minimum is not None,
                ROWS=TILE,
                COLUMNS=columns,
                WARPS=config.warps,
                BLOCKS=config.blocks,
                AHEAD=config.ahead,
                FENCE=config.fence,
                num_warps=config.warps,
                **constants,
            )
        return out

    def _columns(self, rows: int | torch.SymInt) -> int:
        """Rows that the product has room for."""
        fewer, more = (STEP_ROWS, FEW_ROWS) if self.floats else (FOUR_ROWS, STEP_ROWS)
        return fewer if at_most(rows, fewer) else more

    def _programs(self, tile: int) -> int:
        return int(triton.cdiv(self.outputs, tile // 2 if self.swiglu else tile))


@triton.jit
def prepare_direct_rows_early(
    x_ptr,
    norm_ptr,
    squares_ptr,
    gates_ptr,
    gated_ptr,
    normed_ptr,
    planes_ptr,
    factors_ptr,
    sums_ptr,
    rows,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    FLOATS: tl.constexpr,
    STRETCHES: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATES: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Norm or divide BLOCKS blocks of a row. With FLOATS a row stays in x's dtype, and normed is [K / TURN, COLUMNS, TURN].
    Else it is converted to fixed point (`store_operands`); with STRETCHES, elements have the order of nibbles.

    Behind these programs are others, each of which multiplies one normed row with GATE_ROWS rows of gates [GATES, K].
    """
    start_next(EARLY)
    if GATES > 0:
        rows = tl.cast(rows, tl.int32)
        if tl.program_id(0) >= rows:
            of_row = tl.program_id(0) % rows
            gate = (tl.program_id(0) // rows - 1) * GATE_ROWS
            store_gates(
                gated_ptr + of_row * GATES, x_ptr + of_row * K, 1, norm_ptr, gates_ptr, gate, EPS, GATES, K, GATE_ROWS, 1,
                WARPS, 256 * WARPS, 8, EARLY,
            )  # fmt: skip
            return
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCK)
    order = nibble_order(within) if STRETCHES else within
    x = prepared_blocks(x_ptr, norm_ptr, squares_ptr, row, block, order, EPS, K, NORM, HEADS, PARTS, EARLY)
    inside = (block < K // BLOCK)[:, None]
    if FLOATS:
        turn = block[:, None] * (BLOCK // TURN) + within[None, :] // TURN
        at = normed_ptr + (turn * COLUMNS + row) * TURN + within[None, :] % TURN
        tl.store(at, x.to(normed_ptr.dtype.element_ty), mask=inside)
    else:
        store_operands(planes_ptr, factors_ptr, sums_ptr, x, row, block, K, COLUMNS, not STRETCHES, SUMS)
