"""Operands that travel together from the layers to the kernels: small records of tensors.

A kernel's functions take these, so that a new operand is a new field here, read where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.export.formats.int4 import dequantize_int4

from .linear.panels import unpack_panels


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer, [N, K], or of one linear layer per expert, [E, N, K].

    Attributes:
        values: [..., N, K] in a floating dtype, or [..., N, K / 2] uint8: four-bit integers packed as `formats/int4.py` says.
        scale: [..., N, K / G] bfloat16 for four-bit integers, None for a floating dtype.
        bias: [N] in a floating dtype, added to the product; None for zeros.
        in_panels: values and scale are in panels (linear/panels.py).
    """

    values: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    in_panels: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, scale and bias: what an operator of torch takes in its place."""
        return self.values, self.scale, self.bias

    @property
    def rows(self) -> int:
        """N."""
        return self.values.shape[-2]

    @property
    def columns(self) -> int:
        """K."""
        return self.values.shape[-1] * (1 if self.scale is None else 2)

    @property
    def group_size(self) -> int | None:
        """G, or None for a floating dtype."""
        return None if self.scale is None else self.columns // self.scale.shape[-1]

    def of_experts(self, chosen: Tensor) -> Weight:
        """The weights of the experts `chosen` [..., k], in their order: [..., k, N, K]."""
        scale = None if self.scale is None else self.scale[chosen]
        return Weight(self.values[chosen], scale, in_panels=self.in_panels)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K] in `dtype`."""
        values, scale = unpack_panels(self.values, self.scale) if self.in_panels else (self.values, self.scale)
        return values.to(dtype) if scale is None else dequantize_int4(values, scale, dtype)


@dataclass(frozen=True)
class Norm:
    """An RMS norm over K elements: `x / rms(x) * (1 + weight)`; the weight is stored as an offset from one.

    Attributes:
        weight: [K] float32.
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> normed x, float32, or float64 where x is."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


# The most rows of several sessions in one call, as GPU kernels hold something about each of them; and the most of a call that
# counts as one of few rows, for which there are kernels of their own.
MAX_ROWS, FEW_ROWS = 256, 16


class RowIndex(NamedTuple):
    """Where the T rows of a call stand.

    Neighbouring rows of one slot are a *run*: tokens of one session, at consecutive positions. A slot has one run at most,
    and a run that begins at position 0 starts a new sequence. A prompt is one run, and perhaps padding behind it.

    Attributes:
        positions: [T] int64, of the rows in their sessions, from 0. Behind a prompt, padding repeats the last token's.
        slots: [T] int64: whose rows they are; -1 is padding. Such a row leaves no trace in any state, and what it gives means
            nothing.
        cos, sin: [T, R] float32, of the angles by which the first R elements of queries and keys are rotated.
    """

    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


def runs_of(slots: Tensor) -> Iterator[tuple[int, slice]]:
    """Each run's slot and rows; padding is in none. For references: it reads values, so it cannot be traced.

    Args:
        slots: [T] int64, as in `RowIndex`.
    """
    rows = slots.tolist()
    for slot, group in groupby(range(len(rows)), key=rows.__getitem__):
        if slot >= 0:
            members = list(group)
            yield slot, slice(members[0], members[-1] + 1)


def length_of(positions: Tensor) -> Tensor:
    """How many of a prompt's rows are tokens, [1] int64; the others are padding.

    Args:
        positions: [T] int64, of a prompt, as in `RowIndex`.
    """
    return (positions[-1:] - positions[:1] + 1).clamp(1, positions.shape[0])


def rows_to_keep(positions: Tensor) -> Tensor:
    """For each of a prompt's rows the row whose key and value it may write, [T] int64: its own, or the last token's for
    padding."""
    rows = torch.arange(positions.shape[0], device=positions.device)
    return torch.minimum(rows, length_of(positions) - 1)


def is_padding(positions: Tensor) -> Tensor:
    """Which of a prompt's rows are padding, [T] bool."""
    return torch.arange(positions.shape[0], device=positions.device) >= length_of(positions)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all sessions, in pages of P positions, P being a power of two.

    Attributes:
        keys, values: [pages, kv_heads, P, D] each.
        table: [slots, M] int32: position p of a slot is in its page `table[slot, p // P]`, at `p % P`.
    """

    keys: Tensor
    values: Tensor
    table: Tensor

    @property
    def page_size(self) -> int:
        """P."""
        return self.keys.shape[2]


@dataclass(frozen=True)
class Convolution:
    """A causal depthwise convolution over C channels.

    Attributes:
        weight: [C, 1, W], W >= 2.
        state: [slots, W - 1, C], the last inputs of each session, the oldest first.
    """

    weight: Tensor
    state: Tensor


@dataclass(frozen=True)
class Decay:
    """What turns a projection into a gated delta rule's log decay: `-exp(a_log) softplus(a + dt_bias)`; [H] each."""

    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class HeadSquares:
    """A vector's heads are still to be divided by their root mean squares: the sums of squares for this.

    Attributes:
        sums: [T heads, P] float32, the heads of a token together; a row adds up to the sum of squares of its head.
        eps: added to the mean square.
    """

    sums: Tensor
    eps: float


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one or of all experts of a SwiGLU, I being its inner size.

    Attributes:
        gate_up: gate and up projection stacked: [E, 2 I, H], or [2 I, H] for a single expert.
        down: [E, H, I], or [H, I].
    """

    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class LastTokens:
    """The token that each session has last, and where it stands; the model has not seen it yet. [slots] int64 each."""

    token: Tensor
    position: Tensor
