"""Attention over caches that hold NaN wherever no token is, and its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.export.kernels.attention.prefill_triton import attend
from ostinato.export.kernels.operands import KVCache

from ...comparison import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In bfloat16 the softmax is rounded too, before it is multiplied with the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """Arguments of `attend`, in its order."""

    query: Tensor
    cache: KVCache
    positions: Tensor

    @property
    def expected(self) -> Tensor:
        """Token by token and head by head, over the slots that a token sees and no others; float64."""
        tokens, heads, head_dim = self.query.shape
        out = torch.empty(tokens, heads, head_dim, dtype=torch.float64, device=self.query.device)
        for token, position in enumerate(self.positions.tolist()):
            for head in range(heads):
                seen = head // (heads // self.cache.keys.shape[0]), slice(position + 1)
                scores = self.cache.keys[seen].double() @ self.query[token, head].double() * head_dim**-0.5
                out[token, head] = scores.softmax(0) @ self.cache.values[seen].double()
        return out


def draw(shape: tuple[int, int, int], tokens: int, first: int, slots: int, dtype: torch.dtype) -> Case:
    """Scores that spread over several powers of two; NaN behind the last token. shape: heads, key heads, D."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator(DEVICE).manual_seed(tokens + first)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)

    cache = KVCache(*(normal(kv_heads, slots, head_dim) for _ in range(2)))
    for tensor in (cache.keys, cache.values):
        tensor[:, first + tokens :] = torch.nan
    return Case(2 * normal(tokens, heads, head_dim), cache, first + torch.arange(tokens, device=DEVICE))


def check(case: Case) -> None:
    """The kernels against the definition."""
    out = attend(case.query, case.cache, case.positions)
    assert out.shape == case.query.shape and out.dtype == case.query.dtype
    error = relative_error(out, case.expected)
    assert error < TOLERANCE[out.dtype], f"relative error {error:.1e}"
