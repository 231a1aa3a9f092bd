"""The linear layers of a step of R rows as Triton kernels; R is known only when a kernel is launched.

Bfloat16 rows and int4 weights in groups of 128, with K a multiple of 256, are multiplied in *fixed point*, by two kernels.
One writes the rows in the form that the product reads, normed if there is a norm. The other computes the product and the
operations behind it. One row goes to `step_triton`, and two do where that is faster. Up to STEP_ROWS rows have a product of
another kind (`rows_direct_triton`), also with all other integers if K is a multiple of 128.

On an H200, 2026-11-23, in microseconds for 2, 8, 16, 32 and 64 rows: 12,288 x 2,048 takes 7.9, 8.0, 8.4, 12.9 and 15.5; with
products in bfloat16 11.3, 11.6, 12.3, 15.9 and 16.4; dequantised for torch's product 30. 248,320 x 2,048 takes 76, 78, 79,
110 and 202. The error before rounding is 5e-5 of the largest output; with products in bfloat16 it is 1.6e-3.

More bfloat16 rows and all other integer weights with K a multiple of 64 are multiplied in bfloat16, by two kernels of the
same kind (`rows_grouped_triton`). Fixed point would have to make floats of integers for each group, four times as often in
groups of 32, and for both planes of a row.

What is left, float32 and odd K, has one plain kernel. Weights in a floating dtype use torch's product, and so do all weights
for more than SOME_ROWS rows, as for a prompt (`prefill_triton`). Then the norm and the operations behind the product are left
to Inductor. But up to FEW_ROWS rows in bfloat16 go to `rows_direct_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ostinato.export.kernels.delta_rule.rows_conv_triton import conv_rows
from ostinato.export.kernels.launch import (
    LARGE,
    SMALL,
    are_many,
    at_most,
    fitting,
    is_one,
    launcher,
    pointers,
    starts_early,
)
from ostinato.export.kernels.operands import TWO_ROWS, Convolution, HeadSquares, Norm, RowIndex, Weight

from . import prefill_triton, rows_direct_triton, step_triton
from .limits import check_weight, heads_of
from .rows_direct_triton import DirectProduct, in_fixed_point, prepared_at_once, takes_direct, takes_unprepared
from .rows_fixed_triton import fixed_rows_early
from .rows_grouped_triton import grouped_rows_early, order_rows_early
from .rows_prepare_triton import prepare_rows_early
from .rows_scaled_triton import scaled_product

# Weight rows per program. For 8 input rows, 12,288 x 2,048 takes 8.7 us with 64 weight rows, and 9.6 with 128.
ROWS = 64
# From MANY_OUTPUTS on, a program takes 2 * ROWS weight rows, if there may be more than FEW input rows and the GPU has the
# shared memory. For 64 input rows, 32,768, 65,536 and 248,320 x 2,048 then take 28.3, 52.0 and 183 us, not 34.1, 64.5
# and 230. But 12,288 x 2,048 would take 20.0, not 14.1.
MANY_OUTPUTS = 32768
# Products in bfloat16 have at least SPLIT_PROGRAMS programs for a block of input rows. For that K is divided into at most
# GROUPED_SPLITS parts, of at least SPLIT_BLOCKS blocks of 128. Parts of more than LONG_SPLIT blocks are divided once more: 8,
# 32 and 64 rows times 4,096 x 14,336 in int4 then take 27, 31 and 46 us, not 31 to 34, 34 and 42 (H200, 2026-11-26).
SPLIT_PROGRAMS, GROUPED_SPLITS, SPLIT_BLOCKS, LONG_SPLIT = 256, 8, 4, 16
# Input rows per program: FEW if there are never more than FEW rows, else MANY.
FEW, MANY = 16, 32
# Stages of the loop (`num_stages`), by input rows per program. For FEW, 3 stages make no difference to 12,288 x 2,048; with
# 6 stages, 248,320 x 2,048 takes 94 us.
STAGES = {FEW: 4, MANY: 3}
# Up to SPLIT_OUTPUTS outputs, a program has one of SPLITS parts of K. For 8 rows, 12,288 x 2,048 takes 9.9 us in 2 parts, not
# 8.7; 2,048 x 4,096 takes 7.6, 6.8 and 7.1 us in 2, 4 and 8 parts.
SPLIT_OUTPUTS, SPLITS = 4096, 4
# Where there is no norm, two rows have direct products with weights in bfloat16 of up to DIRECT_COLUMNS columns, and in fixed
# point of up to DIRECT_ROWS rows.
DIRECT_COLUMNS, DIRECT_ROWS = 4096, 2048


@dataclass(frozen=True)
class GroupedConfig:
    """Configuration of the products in bfloat16: the part of a weight that one program takes, and how.

    Attributes:
        rows: weight rows, a multiple of 64 for each four warps.
        warps: its warps.
        stages: stages of its loop (`num_stages`).
    """

    rows: int
    warps: int
    stages: int


# By input rows per program.
GROUPED = {FEW: GroupedConfig(rows=64, warps=4, stages=3), MANY: GroupedConfig(rows=64, warps=4, stages=3)}


def columns_for(x: Tensor) -> int:
    """Rows of x [R, ..] per program. If R is a symbol in a trace, its upper bound decides."""
    return FEW if at_most(x.shape[0], FEW) else MANY


def norm_linear(x: Tensor, norm: Norm, weight: Weight, out_dtype: torch.dtype) -> Tensor:
    """See `reference.norm_linear`; all tensors contiguous and aligned to 16 bytes. Some rows go to `step_triton`.

    Raises:
        ExportError: see `check_weight`.
    """
    if takes_step(x, weight, normed=True):
        return step_triton.norm_linear(x, norm, weight, out_dtype)
    check_weight(weight, x.dtype)
    if not _is_fused(x, weight):
        return _product(norm(x).to(x.dtype), weight).to(out_dtype)
    return _norm_product(x, norm.weight, norm.eps, *weight.arguments, out_dtype, columns_for(x))


def norm_swiglu(x: Tensor, norm: Norm, weight: Weight) -> Tensor:
    """See `reference.norm_swiglu`; all tensors contiguous and aligned to 16 bytes. Some rows go to `step_triton`.

    Raises:
        ExportError: see `check_weight`.
    """
    if takes_step(x, weight, normed=True):
        return step_triton.norm_swiglu(x, norm, weight)
    check_weight(weight, x.dtype)
    if not _is_fused(x, weight):
        gate, up = _product(norm(x).to(x.dtype), weight).float().chunk(2, dim=1)
        return (F.silu(gate) * up).to(x.dtype)
    return _norm_swiglu(x, norm.weight, norm.eps, *weight.arguments, columns_for(x))


def norm_linear_conv(
    x: Tensor, norm: Norm, weight: Weight, gates: Tensor, conv: Convolution, index: RowIndex
) -> tuple[Tensor, Tensor]:
    """See `reference.norm_linear_conv`; all tensors contiguous and aligned to 16 bytes. Some rows go to `step_triton`.

    Raises:
        ExportError: see `check_weight`.
    """
    if takes_step(x, weight, normed=True):
        return step_triton.norm_linear_conv(x, norm, weight, gates, conv, index)
    if takes_direct(x, weight):
        return rows_direct_triton.norm_linear_conv(x, norm, weight, gates, conv, index)
    product, gated = norm_linear_gates(x, norm, weight, gates)
    return conv_rows(product, conv, index), gated


def norm_linear_gates(x: Tensor, norm: Norm, weight: Weight, gates: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] -> (normed x @ w.T + bias [R, N] in x's dtype, normed x @ gates.T [R, M] float32), for any R.

    Args:
        gates: [M, K] in x's dtype. Normed x is rounded to this dtype before it is multiplied by `gates`.

    Raises:
        ExportError: see `check_weight`.
    """
    check_weight(weight, x.dtype)
    if not _is_fused(x, weight):
        normed = norm(x).to(x.dtype)
        return _product(normed, weight).to(x.dtype), F.linear(normed, gates).float()
    return _norm_gates(x, norm.weight, norm.eps, *weight.arguments, gates, columns_for(x))


def linear_add(x: Tensor, weight: Weight, residual: Tensor, squares: HeadSquares | None = None) -> Tensor:
    """See `reference.linear_add`; all tensors contiguous and aligned to 16 bytes. Some rows go to `step_triton`.

    Raises:
        ExportError: see `check_weight`; also if K is not a multiple of the number of heads.
    """
    if takes_step(x, weight, normed=False):
        return step_triton.linear_add(x, weight, residual, squares)
    check_weight(weight, x.dtype)
    heads = 0 if squares is None else heads_of(x, squares)
    if not _is_fused(x, weight):
        product = _product(x if squares is None else _divided(x, squares, heads), weight)
        return (residual.float() + product.float()).to(residual.dtype)
    sums, eps = (None, 0.0) if squares is None else (squares.sums, squares.eps)
    return _product_add(x, sums, eps, heads, *weight.arguments, residual, columns_for(x))


def takes_step(x: Tensor, weight: Weight, normed: bool) -> bool:
    """Whether rows x [R, K] go to the kernels of a single row. One row does, and two do where direct products are slower."""
    slower = not takes_direct(x, weight) or not _gains_from_direct(weight, normed)
    return is_one(x.shape[0]) or (at_most(x.shape[0], TWO_ROWS) and slower)


def _gains_from_direct(weight: Weight, normed: bool) -> bool:
    """Whether direct products are the faster ones for two rows.

    In bfloat16, a norm costs a kernel ahead of the product. In fixed point, a single row's kernels would convert both rows in
    each program; so behind a norm a direct product is always faster, and else where a weight is small. A layer takes, by a
    single row's kernels | as here | by direct products alone (us; one H200, 2026-11-30, int4_min 2026-12-01):

        1,024 wide, in bfloat16, delta-net            21.2    19.3    19.9
        with attention                                19.2    19.0    19.4
        4,096 and 14,336 wide, in bfloat16           109.4   108.9   114.4
        in int4_min g32                               59.0    56.1    56.1
        in int8 g32                                   75.2    74.7    74.7

    By a single row's kernels a vocabulary of 128,256 x 4,096 in int8 g32 takes 143.5 us, not 134.0. If these compute the
    flagship's `linear_add`, its layers take 28.2 and 28.1 us, not 28.0 and 27.4.
    """
    if weight.format is None:
        return not normed and weight.columns <= DIRECT_COLUMNS
    return not in_fixed_point(weight) or normed or weight.rows <= DIRECT_ROWS


def _is_fused(x: Tensor, weight: Weight) -> bool:
    """Whether rows x and a weight have kernels that take the operations around the product too."""
    whole = x.dtype == torch.bfloat16 and weight.columns % 64 == 0
    return takes_direct(x, weight) or (weight.format is not None and whole and not are_many(x.shape[0]))


def _divided(x: Tensor, squares: HeadSquares, heads: int) -> Tensor:
    """x [R, K] with its heads divided by their root mean squares."""
    of_heads = x.float().unflatten(1, (heads, -1))
    mean = squares.sums.sum(1).view(-1, heads, 1) / of_heads.shape[2]
    return (of_heads * torch.rsqrt(mean + squares.eps)).flatten(1).to(x.dtype)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K] @ w.T + bias: [R, N] in x's dtype, but in float32 where integers have the plain kernel."""
    if weight.format is None or are_many(x.shape[0]):
        return prefill_triton.linear(x, weight)
    return scaled_product(x.contiguous(), *weight.arguments, columns_for(x))


@torch.library.triton_op("ostinato::rows_norm_linear", mutates_args={})
def _norm_product(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    out_dtype: torch.dtype,
    columns: int,
) -> Tensor:
    product = _FusedProduct(Weight.of(values, scale, minimum, bias, form), columns)
    return product.of(x, out_dtype, norm=norm, eps=eps)


@torch.library.triton_op("ostinato::rows_norm_swiglu", mutates_args={})
def _norm_swiglu(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    columns: int,
) -> Tensor:
    product = _FusedProduct(Weight.of(values, scale, minimum, bias, form), columns, swiglu=True)
    return product.of(x, x.dtype, norm=norm, eps=eps)


@torch.library.triton_op("ostinato::rows_norm_linear_gates", mutates_args={})
def _norm_gates(
    x: Tensor,
    norm: Tensor,
    eps: float,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    gates: Tensor,
    columns: int,
) -> tuple[Tensor, Tensor]:
    gated = torch.empty((x.shape[0], gates.shape[0]), dtype=torch.float32, device=x.device)
    product = _FusedProduct(Weight.of(values, scale, minimum, bias, form), columns, gates=gates, gated=gated)
    return product.of(x, x.dtype, norm=norm, eps=eps), gated


@torch.library.triton_op("ostinato::rows_linear_add", mutates_args={})
def _product_add(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    heads: int,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    bias: Tensor | None,
    form: str,
    residual: Tensor,
    columns: int,
) -> Tensor:
    product = _FusedProduct(Weight.of(values, scale, minimum, bias, form), columns, residual=residual)
    return product.of(x, residual.dtype, squares=squares, eps=eps, heads=heads)


@dataclass(frozen=True)
class _FusedProduct:
    """A product with the operations behind it; see `fixed_rows_early` and `grouped_rows_early`.

    Attributes:
        columns: input rows per program.
        gated: the tensor that gets the products with `gates`.
    """

    weight: Weight
    columns: int
    swiglu: bool = False
    residual: Tensor | None = None
    gates: Tensor | None = None
    gated: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weight.rows // 2 if self.swiglu else self.weight.rows

    @property
    def fixed(self) -> bool:
        return in_fixed_point(self.weight)

    @property
    def tile(self) -> int:
        """Outputs per program. An output of SwiGLU takes two products: in fixed point registers run short with 64 outputs and
        MANY rows."""
        if not self.fixed:
            return GROUPED[self.columns].rows
        if self.columns == FEW:
            return ROWS
        if self.swiglu:
            return ROWS // 2
        return fitting({LARGE: 2 * ROWS, SMALL: ROWS}) if self.outputs >= MANY_OUTPUTS else ROWS

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.outputs, self.tile)

    @property
    def splits(self) -> int:
        """Number of parts of K, which does not depend on `columns`. SwiGLU is not split: a program has two products as it is.
        In two parts, those of a layer 4,096 and 14,336 wide take 128 us in int4 with 32 rows, not 113."""
        if self.swiglu:
            return 1
        if self.fixed:
            return 1 if self.outputs > SPLIT_OUTPUTS else min(SPLITS, self.weight.columns // 256)
        wanted = triton.next_power_of_2(triton.cdiv(SPLIT_PROGRAMS, triton.cdiv(self.outputs, ROWS)))
        blocks = triton.cdiv(self.weight.columns, 128)
        if 1 < wanted < blocks / LONG_SPLIT:
            wanted *= 2
        return max(1, min(wanted, GROUPED_SPLITS, blocks // SPLIT_BLOCKS))

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
        direct = DirectProduct(self.weight, self.swiglu, self.residual, self.gates, self.gated)
        if norm is None and takes_unprepared(x, self.weight, heads):
            return direct.of_unprepared(x, out_dtype, squares, eps, heads)
        if takes_direct(x, self.weight):
            return direct.of(x, out_dtype, norm, squares, eps, heads)
        rows, k = x.shape
        blocks, split = (rows + self.columns - 1) // self.columns, self.splits > 1

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=x.device)

        # A program reads all of its columns, also past the last row.
        padded, width = blocks * self.columns, triton.cdiv(k, 128)
        normed = None if self.gates is None else empty(rows, k, dtype=x.dtype)
        counters = empty(blocks * self.tiles, dtype=torch.int32) if split else None
        prepare = {
            "EPS": eps,
            "K": k,
            "NORM": norm is not None,
            "HEADS": heads,
            "PARTS": 0 if squares is None else squares.shape[1],
            "NORMED": normed is not None,
            "COLUMNS": self.columns,
            "COUNTERS": self.tiles if split else 0,
            "EARLY": starts_early(),
            "num_warps": min(16, max(4, triton.next_power_of_2(k // 256))),
        }
        prepared: tuple[Tensor, ...]
        if self.fixed:
            prepared = empty(padded, 2, k, dtype=torch.int8), empty(padded, width)
            operands = pointers(x, norm, squares, normed, counters)
            launcher(prepare_rows_early)[(rows,)](*operands, *prepared, **prepare)
        else:
            inputs = empty(padded, width * 128, dtype=torch.bfloat16)
            sums = None if self.weight.minimum is None else empty(padded, width * 4)
            optional = norm, squares, normed, sums, counters
            at_once = prepared_at_once(width, norm is not None)
            prepare |= {"SUMS": sums is not None, "BLOCKS": at_once, "num_warps": min(16, max(4, at_once // 2))}
            launcher(order_rows_early)[(rows, triton.cdiv(width, at_once))](*pointers(x, *optional), inputs, **prepare)
            prepared = pointers(inputs, sums)
        return self._multiplied(prepared, normed, counters, empty(rows, self.outputs, dtype=out_dtype))

    def _multiplied(
        self, prepared: tuple[Tensor, ...], normed: Tensor | None, counters: Tensor | None, out: Tensor
    ) -> Tensor:
        """Write `out` [R, outputs], from what the first kernel has prepared."""
        rows, weight = out.shape[0], self.weight
        parts = None if counters is None else out.new_empty((self.splits, rows, self.outputs), dtype=torch.float32)
        optional = weight.bias, self.residual, self.gates, normed, self.gated, counters, parts
        gates = 0 if self.gates is None else self.gates.shape[0]
        grid = ((rows + self.columns - 1) // self.columns, self.splits, self.tiles + triton.cdiv(gates, 16))
        constants = {
            "N": self.outputs,
            "K": weight.columns,
            "BIAS": weight.bias is not None,
            "RESIDUAL": self.residual is not None,
            "SWIGLU": self.swiglu,
            "GATES": gates,
            "ROWS": self.tile,
            "COLUMNS": self.columns,
            "SPLITS": self.splits,
            "EARLY": starts_early(),
        }
        if self.fixed:
            launcher(fixed_rows_early)[grid](
                *prepared,
                *pointers(weight.values, weight.scale, *optional),
                out,
                rows,
                num_warps=4,
                num_stages=STAGES[self.columns],
                **constants,
            )
        else:
            launcher(grouped_rows_early)[grid](
                *prepared,
                *pointers(weight.values, weight.scale, weight.minimum, *optional),
                out,
                rows,
                GROUP=weight.group_size,
                BITS=step_triton.bits_of(weight),
                MINIMUM=weight.minimum is not None,
                num_warps=GROUPED[self.columns].warps,
                num_stages=GROUPED[self.columns].stages,
                **constants,
            )
        return out
