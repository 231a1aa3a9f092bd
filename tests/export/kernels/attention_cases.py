"""Attention over caches that hold NaN wherever no token is, and its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.export.kernels.attention.prefill_triton import attend
from ostinato.export.kernels.operands import KVCache, RowIndex

from ...comparison import relative_error
from .paged import held, paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In bfloat16 the softmax is rounded too, before it is multiplied with the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
SLOTS, SLOT = 3, 1


@dataclass(frozen=True)
class Case:
    """Arguments of `attend`, in its order."""

    query: Tensor
    cache: KVCache
    index: RowIndex

    @property
    def expected(self) -> Tensor:
        """Token by token and head by head, over the positions that a token sees and no others; float64."""
        tokens, heads, head_dim = self.query.shape
        out = torch.empty(tokens, heads, head_dim, dtype=torch.float64, device=self.query.device)
        keys, values = held(self.cache, SLOT, 0, int(self.index.positions[-1]) + 1)
        for token, position in enumerate(self.index.positions.tolist()):
            for head in range(heads):
                seen = head // (heads // keys.shape[0]), slice(position + 1)
                scores = keys[seen].double() @ self.query[token, head].double() * head_dim**-0.5
                out[token, head] = scores.softmax(0) @ values[seen].double()
        return out


def prompt_index(first: int, tokens: int, rows: int | None = None) -> RowIndex:
    """Of a prompt of SLOT, with padding up to `rows`. Nothing is rotated."""
    rows = rows or tokens
    positions = (first + torch.arange(rows, device=DEVICE)).clamp(max=first + tokens - 1)
    slots = torch.full((rows,), SLOT, device=DEVICE)
    slots[tokens:] = -1
    nothing = torch.zeros(rows, 2, device=DEVICE)
    return RowIndex(positions, slots, nothing, nothing)


def draw(
    shape: tuple[int, int, int], tokens: int, first: int, capacity: int, dtype: torch.dtype, page_size: int = 16
) -> Case:
    """Scores that spread over several powers of two; NaN behind the last token. shape: heads, key heads, D."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator(DEVICE).manual_seed(tokens + first)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)

    keys, values = (normal(kv_heads, first + tokens, head_dim) for _ in range(2))
    cache = paged({SLOT: (keys, values)}, SLOTS, capacity, page_size)
    return Case(2 * normal(tokens, heads, head_dim), cache, prompt_index(first, tokens))


def check(case: Case) -> None:
    """The kernels against the definition."""
    out = attend(case.query, case.cache, case.index)
    assert out.shape == case.query.shape and out.dtype == case.query.dtype
    error = relative_error(out, case.expected)
    assert error < TOLERANCE[out.dtype], f"relative error {error:.1e}"
