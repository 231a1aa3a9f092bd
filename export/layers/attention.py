"""Gated full attention: QK-norm, partial rotary embedding, grouped heads, a KV cache, a gate on the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import StateKind
from ostinato.export.kernels.operands import KVCache, RowIndex

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
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


class GatedAttention(nn.Module):
    """One layer's attention. Two buffers hold the keys and values of all sessions; the block table says in which pages."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor

    def __init__(self, sizes: AttentionSizes, eps: float, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.split = (
            2 * sizes.heads * sizes.head_dim,
            sizes.kv_heads * sizes.head_dim,
            sizes.kv_heads * sizes.head_dim,
        )
        self.qkv_proj = Linear(sizes.hidden, sum(self.split), build, bias=bias)
        self.o_proj = Linear(sizes.heads * sizes.head_dim, sizes.hidden, build, bias=bias)
        self.q_norm = RMSNorm(sizes.head_dim, eps)
        self.k_norm = RMSNorm(sizes.head_dim, eps)
        self.kernels = build.kernels
        pages = (EXAMPLE_PAGES, sizes.kv_heads, build.page_size, sizes.head_dim)
        register_state(
            self,
            StateKind.KV_CACHE,
            k_cache=torch.zeros(pages, dtype=build.dtype, device="cpu"),
            v_cache=torch.zeros(pages, dtype=build.dtype, device="cpu"),
        )
        # All layers share this tensor.
        register_state(self, StateKind.BLOCK_TABLE, block_table=build.block_table)

    @property
    def cache(self) -> KVCache:
        return KVCache(self.k_cache, self.v_cache, self.block_table)

    def forward(self, x: Tensor, index: RowIndex) -> Tensor:
        """x [T, H] -> [T, H]."""
        norms = self.q_norm.operand, self.k_norm.operand
        return self.o_proj(self.kernels.attend(self.qkv_proj(x), *norms, index, self.cache, self.heads))

    def step(self, x: Tensor, norm: RMSNorm, index: RowIndex) -> Tensor:
        """x [T, H] -> x + self(norm(x)), in three or four kernels."""
        kernels = self.kernels
        qkv = kernels.norm_linear(x, norm.operand, self.qkv_proj.operand, x.dtype)
        heads = kernels.attend_step(qkv, self.q_norm.operand, self.k_norm.operand, index, self.cache, self.heads)
        return kernels.linear_add(heads, self.o_proj.operand, x)
