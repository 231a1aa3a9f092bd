"""Gated delta-net layer of Qwen3.5: causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import StepKernels
from .attention import Place
from .linear import Build, make_linear, packed
from .norms import GatedRMSNorm, RMSNorm


class CausalConv(nn.Module):
    """The depthwise convolution's weight, [channels, 1, width]; named as in the checkpoint."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, channels] after state [width - 1, channels] -> (SiLU of the convolution [T, channels], new state)."""
        tokens = x.shape[0]
        window = torch.cat((state, x), dim=0)
        taps = self.weight[:, 0, :].float().t()
        # Width is 4: four fused multiply-adds beat a convolution call, and need no library kernel.
        out = sum(taps[i] * window[i : i + tokens].float() for i in range(taps.shape[0]))
        assert isinstance(out, Tensor)
        return F.silu(out).to(x.dtype), window[tokens:]


class GatedDeltaNet(nn.Module):
    """One layer's linear attention; the convolution's last inputs and the recurrent state are in its two buffers.

    The recurrent state is float32 in every model dtype: it accumulates over the whole sequence. The gates' projections stay
    in the model's dtype when other weights are quantised.
    """

    conv_state: Tensor
    recurrent_state: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, dtype = build.config, build.dtype
        self.key_heads = config.linear_num_key_heads
        self.value_heads = config.linear_num_value_heads
        self.value_head_dim = config.linear_value_head_dim
        self.sizes = (config.conv_dim, config.value_dim)
        self.max_chunk = build.max_chunk
        self.gated_delta_rule = build.kernels.gated_delta_rule
        size, width = config.hidden_size, config.linear_conv_kernel_dim
        self.in_proj_qkvz = make_linear(size, sum(self.sizes), build)
        self.in_proj_ba = nn.Linear(size, 2 * self.value_heads, bias=False, dtype=dtype)
        self.conv1d = CausalConv(config.conv_dim, width, dtype)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.value_head_dim, config.rms_norm_eps)
        self.out_proj = make_linear(config.value_dim, size, build)
        conv = torch.zeros(width - 1, config.conv_dim, dtype=dtype, device="cpu")
        state = torch.zeros(self.value_heads, config.linear_key_head_dim, self.value_head_dim, device="cpu")
        self.register_buffer("conv_state", conv, persistent=False)
        self.register_buffer("recurrent_state", state, persistent=False)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x [T, hidden] -> [T, hidden]. At position 0 the old state counts as zeros."""
        positions = place.positions
        tokens = x.shape[0]
        qkv, z = self.in_proj_qkvz(x).split(self.sizes, dim=1)
        b, a = self.in_proj_ba(x).chunk(2, dim=1)
        before = torch.where(positions[0] == 0, torch.zeros_like(self.conv_state), self.conv_state)
        mixed, after = self.conv1d(qkv, before)
        self.conv_state.copy_(after)
        out = self.gated_delta_rule(
            mixed,
            a,
            b,
            self.A_log,
            self.dt_bias,
            self.recurrent_state,
            positions,
            self.key_heads,
            self.max_chunk,
        )
        out = self.norm(out, z.reshape(tokens, self.value_heads, self.value_head_dim))
        return self.out_proj(out.reshape(tokens, -1))

    def step(self, x: Tensor, norm: RMSNorm, place: Place, kernels: StepKernels) -> Tensor:
        """x [1, hidden] -> x + self(norm(x)), in three kernels."""
        mixed, gates = kernels.norm_linear_conv(
            x,
            norm.weight,
            norm.eps,
            *packed(self.in_proj_qkvz),
            self.in_proj_ba.weight,
            self.conv1d.weight,
            self.conv_state,
            place.positions,
        )
        values, squares = kernels.delta_step(
            mixed,
            gates,
            self.A_log,
            self.dt_bias,
            self.recurrent_state,
            place.positions,
            self.norm.weight,
            self.key_heads,
        )
        return kernels.linear_add(values, *packed(self.out_proj), x, squares, self.norm.eps)
