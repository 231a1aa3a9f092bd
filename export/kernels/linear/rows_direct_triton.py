# mypy: allow-untyped-defs
"""Products of few rows whose weights go from memory directly into operands of tensor cores, with all that is around them.

One kernel prepares the rows: it norms them or divides their heads, and beside this computes a delta-net's gates. The other
has the product, and behind it SwiGLU, a residual or the convolution. Rows that are multiplied as they are need only this one.

    weights                     rows at most   kernel
    int4 in groups of 128       FOUR_ROWS      rows_direct_int4_triton, in fixed point
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

from .rows_direct_floats_triton import direct_floats_rows_early
from .rows_direct_int4_triton import COLUMNS, STRETCH, direct_rows_early
from .rows_prepare_triton import prepare_rows_early
from .rows_tiles_triton import BLOCK
from .step_kernels_triton import store_gates

MAX_WARPS = 8
# Rows of gates per program.
GATE_ROWS = 4
# Most weight rows. More are more programs than a GPU has room for at once: for 2 rows 248,320 x 2,048 takes 124 us, and in
# `rows_fixed_triton`, whose programs load weights all the time, 101 (one H100, 2026-11-27).
MOST_ROWS = 32768
# Turns of bfloat16 weights that a warp loads ahead.
AHEAD = 8


def takes_direct(x: Tensor, weight: Weight) -> bool:
    """Whether the kernels take rows x [R, K] and a weight [N, K]."""
    form, k, size = weight.format, weight.columns, STRETCH.value * BLOCK.value
    if x.dtype != torch.bfloat16 or weight.rows > MOST_ROWS:
        return False
    if form is None:
        return weight.values.dtype == torch.bfloat16 and k % BLOCK.value == 0 and at_most(x.shape[0], FEW_ROWS)
    int4 = isinstance(form, Int4) and form.group_size == BLOCK.value and k % size == 0 and k <= MAX_WARPS * size
    return int4 and at_most(x.shape[0], FOUR_ROWS)


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes, and `takes_direct`.

    Positions, slots and the state are read before the kernel ahead has ended (rule R2 in `delegate/graphs/nodes.py`).
    """
    values, scale, _, bias, form = weight.arguments
    of_conv = conv.weight, conv.state, index.positions, index.slots
    return _norm_linear_conv(x, norm.weight, norm.eps, values, scale, bias, form, gates, *of_conv)


@torch.library.triton_op("ostinato::rows_norm_linear_conv", mutates_args={"conv_state"})
def _norm_linear_conv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
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
        if self.floats and norm is None and heads == 0:
            prepared: tuple[Tensor, ...] = (x,)
        else:
            prepared = self._prepared(x, norm, squares, eps, heads)
        return self._multiplied(prepared, torch.empty((x.shape[0], self.outputs), dtype=out_dtype, device=x.device))

    @property
    def floats(self) -> bool:
        return self.weight.format is None

    @property
    def outputs(self) -> int:
        return self.weight.rows // 2 if self.swiglu else self.weight.rows

    def _prepared(
        self, x: Tensor, norm: Tensor | None, squares: Tensor | None, eps: float, heads: int
    ) -> tuple[Tensor, ...]:
        """Normed or divided rows as the product reads them, in x's dtype or in fixed point. Also writes `gated`."""
        rows, k = x.shape[0], x.shape[1]
        if self.floats:
            prepared: tuple[Tensor, ...] = (torch.empty_like(x),)
        else:
            planes = torch.empty((rows, 2, k), dtype=torch.int8, device=x.device)
            prepared = planes, torch.empty((rows, k // BLOCK.value), dtype=torch.float32, device=x.device)
        gates = 0 if self.gates is None else self.gates.shape[0]
        # `store_gates` has up to eight warps.
        warps = min(8 if gates else 16, max(4, triton.next_power_of_2(k // 256)))
        launcher(prepare_direct_rows_early)[(rows * (1 + triton.cdiv(gates, GATE_ROWS)),)](
            *pointers(x, norm, squares, self.gates, self.gated),
            # What is not written is any tensor.
            *((*prepared, x, x) if self.floats else (x, *prepared)),
            rows,
            EPS=eps,
            K=k,
            NORM=norm is not None,
            HEADS=heads,
            PARTS=0 if squares is None else squares.shape[1],
            FLOATS=self.floats,
            GATES=gates,
            GATE_ROWS=GATE_ROWS,
            WARPS=warps,
            EARLY=starts_early(),
            num_warps=warps,
        )
        return prepared

    def _multiplied(self, prepared: tuple[Tensor, ...], out: Tensor) -> Tensor:
        weight, k, rows = self.weight, self.weight.columns, out.shape[0]
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
            tile, warps = 16, MAX_WARPS if k > 1024 else MAX_WARPS // 2
            launcher(direct_floats_rows_early)[(self._programs(tile),)](
                *pointers(prepared[0], weight.values, *optional),
                out,
                rows,
                ROWS=tile,
                COLUMNS=STEP_ROWS if at_most(rows, STEP_ROWS) else FEW_ROWS,
                WARPS=warps,
                AHEAD=AHEAD,
                num_warps=warps,
                **constants,
            )
        else:
            tile, warps = 32 if self.outputs > 4096 else 16, triton.next_power_of_2(k // (STRETCH.value * BLOCK.value))
            launcher(direct_rows_early)[(self._programs(tile),)](
                *pointers(*prepared, weight.values, weight.scale, *optional),
                out,
                rows,
                ROWS=tile,
                WARPS=warps,
                num_warps=warps,
                **constants,
            )
        return out

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
    rows,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    FLOATS: tl.constexpr,
    GATES: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`prepare_rows_early`: with FLOATS rows in x's dtype, else in fixed point. Behind its programs are others, each of which
    multiplies one normed row with GATE_ROWS rows of gates [GATES, K]."""
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
        x_ptr, norm_ptr, squares_ptr, normed_ptr, x_ptr, planes_ptr, factors_ptr, EPS, K, NORM, HEADS, PARTS, FLOATS,
        not FLOATS, COLUMNS, 0, EARLY,
    )  # fmt: skip
