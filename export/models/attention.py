"""Gated full attention of Qwen3.5: QK-norm, partial rotary embedding, grouped heads, a KV cache, a gate on the output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import StepKernels
from .config import ModelConfig
from .linear import Build, make_linear, packed
from .norms import RMSNorm


class Place(NamedTuple):
    """Where the tokens of a call stand.

    Attributes:
        positions: [T] int64, consecutive.
        cos, sin: [T, rotary_dim] float32, of the angles by which queries and keys are turned.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Rotation of the first `rotary_dim` elements of each head by its position (RoPE, arXiv:2104.09864)."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu") / config.rotary_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponent), persistent=False)

    def forward(self, positions: Tensor) -> Place:
        """positions [T] int64, consecutive."""
        angles = positions.float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return Place(positions, angles.cos(), angles.sin())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim], cos and sin [T, rotary_dim]; elements past the rotary dimension pass through."""
    size = cos.shape[-1]
    turned, kept = x[..., :size].float(), x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat(((turned * cos[:, None] + half * sin[:, None]).to(x.dtype), kept), dim=-1)


class Attention(nn.Module):
    """One layer's attention; keys and values of all positions so far are in its two buffers."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        size, bias = config.hidden_size, config.attention_bias
        self.sizes = (2 * self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        self.qkv_proj = make_linear(size, sum(self.sizes), build, bias)
        self.o_proj = make_linear(self.heads * self.head_dim, size, build, bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attend = build.kernels.attend
        for name in ("k_cache", "v_cache"):
            cache = torch.zeros(self.kv_heads, build.max_seq_len, self.head_dim, dtype=build.dtype, device="cpu")
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        positions, cos, sin = place
        tokens = x.shape[0]
        query, key, value = self.qkv_proj(x).split(self.sizes, dim=1)
        # Each head's query and the gate of its output stand together.
        query, gate = query.reshape(tokens, self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        key = key.reshape(tokens, self.kv_heads, self.head_dim)
        value = value.reshape(tokens, self.kv_heads, self.head_dim)
        self.k_cache.index_copy_(1, positions, rotate(self.k_norm(key), cos, sin).transpose(0, 1))
        self.v_cache.index_copy_(1, positions, value.transpose(0, 1))
        out = self.attend(rotate(self.q_norm(query), cos, sin), self.k_cache, self.v_cache, positions)
        return self.o_proj((out * torch.sigmoid(gate)).reshape(tokens, -1))

    def step(self, x: Tensor, norm: RMSNorm, place: Place, kernels: StepKernels) -> Tensor:
        """x [1, hidden] -> x + self(norm(x)), in four kernels."""
        heads = kernels.attend_step(
            kernels.norm_linear(x, norm.weight, norm.eps, *packed(self.qkv_proj), x.dtype),
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            place.cos,
            place.sin,
            self.k_cache,
            self.v_cache,
            place.positions,
            self.heads,
        )
        return kernels.linear_add(heads, *packed(self.o_proj), x, None, 0.0)
