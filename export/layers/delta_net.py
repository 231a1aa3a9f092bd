"""Gated delta-net: causal convolution, gated delta rule, gated norm (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import StateKind
from ostinato.export.kernels.operands import (
    PENDING_MOVES,
    STATE_MOVES,
    Convolution,
    Decay,
    HeadSquares,
    RecurrentState,
    RowIndex,
)

from .build import Build, parameter
from .linear import Linear
from .norms import GatedRMSNorm, RMSNorm
from .state import EXAMPLE_SLOTS, register_state


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a gated delta-net.

    Attributes:
        hidden: H, the model's size.
        key_heads, value_heads: numbers of heads; `value_heads` is a multiple of `key_heads`.
        key_head_dim, value_head_dim: elements of a head.
        conv_width: taps of the convolution, 2 or more.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return self.value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_head_dim + self.values


class CausalConv(nn.Module):
    """The depthwise convolution's weight, [channels, 1, width]; named as in the checkpoint."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, width, dtype=dtype)


class GatedDeltaNet(nn.Module):
    """One layer's linear attention. Its buffers hold each session's last inputs of the convolution, and its recurrent state.

    The recurrent state is float32 in every model dtype unless the build says otherwise: it accumulates over the whole
    sequence. The gates' projections stay in the model's dtype when other weights are quantised.

    Attributes:
        pending_state: names of the buffers that hold pending updates of the state.
        state_moves: how often a step of one row moves a buffer, by name; others are read and written once. With states in
            float32 it leaves no update pending.
    """

    conv_state: Tensor
    recurrent_state: Tensor
    pending_keys: Tensor
    pending_updates: Tensor

    def __init__(self, sizes: DeltaNetSizes, eps: float, build: Build) -> None:
        super().__init__()
        heads, value_size = sizes.value_heads, sizes.value_head_dim
        self.key_heads, self.heads_shape = sizes.key_heads, (heads, value_size)
        self.split = (sizes.channels, sizes.values)
        self.max_chunk = build.max_chunk
        self.kernels = build.kernels
        self.in_proj_qkvz = Linear(sizes.hidden, sum(self.split), build)
        self.in_proj_ba = Linear(sizes.hidden, 2 * heads, build, quantize=False)
        self.conv1d = CausalConv(sizes.channels, sizes.conv_width, build.dtype)
        self.A_log = parameter(heads)
        self.dt_bias = parameter(heads)
        self.norm = GatedRMSNorm(value_size, eps)
        self.out_proj = Linear(sizes.values, sizes.hidden, build)
        conv = torch.zeros(EXAMPLE_SLOTS, sizes.conv_width - 1, sizes.channels, dtype=build.dtype, device="cpu")
        register_state(self, StateKind.CONVOLUTION, conv_state=conv)
        dims = sizes.key_head_dim, value_size
        recurrent = RecurrentState.zeros(
            EXAMPLE_SLOTS, (sizes.key_heads, heads), dims, self.kernels.pending_updates, build.dtype, build.state_dtype
        )
        register_state(self, StateKind.RECURRENT, recurrent_state=recurrent.stored)
        self.pending_state: tuple[str, ...] = ()
        if recurrent.keys is not None and recurrent.updates is not None:
            register_state(self, StateKind.RECURRENT, pending_keys=recurrent.keys, pending_updates=recurrent.updates)
            self.pending_state = "pending_keys", "pending_updates"
        self.state_moves = dict.fromkeys(self.pending_state, 0.0)
        if self.pending_state and build.state_dtype != torch.float32:
            self.state_moves = dict.fromkeys(self.pending_state, PENDING_MOVES) | {"recurrent_state": STATE_MOVES}

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.conv1d.weight, self.conv_state)

    @property
    def recurrence(self) -> RecurrentState:
        return RecurrentState(self.recurrent_state, *(getattr(self, name) for name in self.pending_state))

    @property
    def decay(self) -> Decay:
        return Decay(self.A_log, self.dt_bias)

    def forward(self, x: Tensor, index: RowIndex) -> Tensor:
        """x [T, H] -> [T, H]. At position 0 the old state counts as zeros."""
        tokens = x.shape[0]
        qkv, z = self.in_proj_qkvz(x).split(self.split, dim=1)
        b, a = self.in_proj_ba(x).chunk(2, dim=1)
        mixed = self.kernels.convolve(qkv, self.convolution, index)
        out = self.kernels.gated_delta_rule(
            mixed, a, b, self.decay, self.recurrence, index, self.key_heads, self.max_chunk
        )
        out = self.norm(out, z.reshape(tokens, *self.heads_shape))
        return self.out_proj(out.reshape(tokens, -1))

    def step(self, x: Tensor, norm: RMSNorm, index: RowIndex) -> Tensor:
        """x [T, H] -> x + self(norm(x)), in three kernels."""
        kernels = self.kernels
        mixed, gates = kernels.norm_linear_conv(
            x, norm.operand, self.in_proj_qkvz.operand, self.in_proj_ba.weight, self.convolution, index
        )
        values, squares = kernels.delta_step(
            mixed, gates, self.decay, self.recurrence, index, self.norm.weight, self.key_heads
        )
        return kernels.linear_add(values, self.out_proj.operand, x, HeadSquares(squares, self.norm.eps))
