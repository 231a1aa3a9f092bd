"""Gated delta-net layer of Qwen3.5: causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .delta_rule import chunked_gated_delta_rule, recurrent_step
from .norms import GatedRMSNorm, l2_normalize


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

    The recurrent state is float32 in every model dtype: it accumulates over the whole sequence.
    """

    conv_state: Tensor
    recurrent_state: Tensor

    def __init__(self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.key_heads = config.linear_num_key_heads
        self.value_heads = config.linear_num_value_heads
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.sizes = (config.key_dim, config.key_dim, config.value_dim)
        self.max_seq_len = max_seq_len
        size, width = config.hidden_size, config.linear_conv_kernel_dim
        self.in_proj_qkv = nn.Linear(size, config.conv_dim, bias=False, dtype=dtype)
        self.in_proj_z = nn.Linear(size, config.value_dim, bias=False, dtype=dtype)
        self.in_proj_b = nn.Linear(size, self.value_heads, bias=False, dtype=dtype)
        self.in_proj_a = nn.Linear(size, self.value_heads, bias=False, dtype=dtype)
        self.conv1d = CausalConv(config.conv_dim, width, dtype)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, size, bias=False, dtype=dtype)
        conv = torch.zeros(width - 1, config.conv_dim, dtype=dtype, device="cpu")
        state = torch.zeros(self.value_heads, self.key_head_dim, self.value_head_dim, device="cpu")
        self.register_buffer("conv_state", conv, persistent=False)
        self.register_buffer("recurrent_state", state, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> [T, hidden]. At position 0 the old state counts as zeros."""
        tokens = x.shape[0]
        starts_here = positions[0] == 0
        conv_before = torch.where(starts_here, torch.zeros_like(self.conv_state), self.conv_state)
        state_before = torch.where(starts_here, torch.zeros_like(self.recurrent_state), self.recurrent_state)

        mixed, conv_after = self.conv1d(self.in_proj_qkv(x), conv_before)
        q, k, v = mixed.float().split(self.sizes, dim=1)
        q = self._key_heads(q) * self.key_head_dim**-0.5
        k = self._key_heads(k)
        v = v.unflatten(1, (-1, self.value_head_dim)).transpose(0, 1)
        beta = torch.sigmoid(self.in_proj_b(x)).float().t()
        g = (-self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())).t()

        if tokens == 1:
            out, state_after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state_before)
            out = out.unsqueeze(1)
        else:
            out, state_after = chunked_gated_delta_rule(q, k, v, g, beta, state_before, self.max_seq_len)
        self.conv_state.copy_(conv_after)
        self.recurrent_state.copy_(state_after)

        z = self.in_proj_z(x).view(tokens, self.value_heads, self.value_head_dim)
        out = self.norm(out.transpose(0, 1).to(x.dtype), z)
        return self.out_proj(out.reshape(tokens, -1))

    def _key_heads(self, x: Tensor) -> Tensor:
        """[T, key heads * key_head_dim] -> [value heads, T, key_head_dim], normalised, repeated where value heads share."""
        heads = l2_normalize(x.unflatten(1, (-1, self.key_head_dim)))
        return heads.repeat_interleave(self.value_heads // self.key_heads, dim=1).transpose(0, 1)
