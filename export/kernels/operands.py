"""Operands that travel together from the layers to the kernels: small records of tensors.

A kernel's functions take these, so that a new operand is a new field here, read where it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.export.formats import dequantize_int4

from .linear.panels import unpack_panels


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer, [N, K], or of one linear layer per expert, [E, N, K].

    Attributes:
        values: [..., N, K] in a floating dtype, or [..., N, K / 2] uint8: four-bit integers packed as `formats` says.
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


class Place(NamedTuple):
    """Where the T rows of a call stand.

    Attributes:
        positions: [T] int64: consecutive for the tokens; rows after the last token are padding and repeat its position.
        cos, sin: [T, R] float32, of the angles by which the first R elements of queries and keys are rotated.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor


def length_of(positions: Tensor) -> Tensor:
    """How many of a call's rows are tokens, [1] int64. The others are padding: they leave no trace in any state, what they
    give means nothing, and their position is that of the last token.

    Args:
        positions: [T] int64, as in `Place`.
    """
    return (positions[-1:] - positions[:1] + 1).clamp(1, positions.shape[0])


def rows_to_keep(positions: Tensor) -> Tensor:
    """For each of T rows the row whose key and value it may write, [T] int64: its own, or the last token's for padding."""
    rows = torch.arange(positions.shape[0], device=positions.device)
    return torch.minimum(rows, length_of(positions) - 1)


def is_padding(positions: Tensor) -> Tensor:
    """Which of T rows are padding, [T] bool."""
    return torch.arange(positions.shape[0], device=positions.device) >= length_of(positions)


def rows_before_the_end(window: Tensor, state: Tensor, positions: Tensor) -> Tensor:
    """What a convolution keeps of `window`, which is `state` and then the T rows of a call: as many rows as `state` has, up
    to the last token's."""
    return window.index_select(0, length_of(positions) + torch.arange(state.shape[0], device=window.device))


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the positions so far, [kv_heads, S, D] each, S being the number of slots."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Convolution:
    """A causal depthwise convolution over C channels.

    Attributes:
        weight: [C, 1, W], W >= 2.
        state: [W - 1, C], its last inputs, the oldest first.
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
