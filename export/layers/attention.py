"""Full attention: rotary embedding, grouped heads, a KV cache; with or without QK norm, biases and a gate on the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import PageGroup, StateKind
from ostinato.export.kernels.operands import Heads, KVCache, RowIndex

from .build import Build
from .linear import Linear
from .norms import RMSNorm
from .state import EXAMPLE_PAGES, register_state


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer.

    Attributes:
        hidden: H, the model's size.
        heads, kv_heads: number of query heads, and of heads of keys and values.
        head_dim: elements of a head.
        qk_norm: whether queries and keys are normed.
        gated: whether each head's output is multiplied by the sigmoid of a gate.
        qkv_bias, out_bias: whether these projections have a bias.
        window: the sliding window: number of positions that a token sees, its own included; None: it sees all before it.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    gated: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None


class Attention(nn.Module):
    """One layer's attention. Two buffers hold the keys and values of all sessions; the block table says in which pages.

    Attributes:
        window: the window of the sizes; None also where a session is no longer than it.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor

    def __init__(self, sizes: AttentionSizes, eps: float, build: Build) -> None:
        super().__init__()
        self.count, self.gated = sizes.heads, sizes.gated
        self.window = None if sizes.window is None or sizes.window >= build.max_seq_len else sizes.window
        self.q_norm = RMSNorm(sizes.head_dim, eps) if sizes.qk_norm else None
        self.k_norm = RMSNorm(sizes.head_dim, eps) if sizes.qk_norm else None
        outputs = sum(self.heads.split(sizes.kv_heads, sizes.head_dim))
        self.qkv_proj = Linear(sizes.hidden, outputs, build, bias=sizes.qkv_bias, divisible=True)
        self.o_proj = Linear(sizes.heads * sizes.head_dim, sizes.hidden, build, bias=sizes.out_bias)
        self.kernels = build.kernels
        pages = (EXAMPLE_PAGES, sizes.kv_heads, build.page_size, sizes.head_dim)
        group = PageGroup.of_window(self.window)
        register_state(
            self,
            StateKind.KV_CACHE,
            group,
            k_cache=torch.zeros(pages, dtype=build.dtype, device="cpu"),
            v_cache=torch.zeros(pages, dtype=build.dtype, device="cpu"),
        )
        # All layers of the group share this tensor.
        register_state(self, StateKind.BLOCK_TABLE, group, block_table=build.block_table(group))

    @property
    def heads(self) -> Heads:
        if self.q_norm is None or self.k_norm is None:
            return Heads(self.count, gated=self.gated)
        return Heads(self.count, self.q_norm.operand, self.k_norm.operand, self.gated)

    @property
    def cache(self) -> KVCache:
        return KVCache(self.k_cache, self.v_cache, self.block_table, self.window)

    def forward(self, x: Tensor, index: RowIndex) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.o_proj(self.kernels.attend(self.qkv_proj(x), self.heads, index, self.cache))

    def step(self, x: Tensor, norm: RMSNorm, index: RowIndex) -> Tensor:
        """x [T, H] -> x + self(norm(x)), in three or four kernels."""
        qkv = self.qkv_proj.normed(x, norm, x.dtype)
        out = self.kernels.attend_step(qkv, self.heads, index, self.cache)
        return self.kernels.linear_add(out, self.o_proj.operand, x)
