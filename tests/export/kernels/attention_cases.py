"""Cases that every form of attention is held to: its definition in float64, over pages that hold NaN where no token is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ostinato.export.kernels.operands import Heads, KVCache, Norm, RowIndex, runs_of

from ...comparison import relative_error
from .paged import assert_same_elsewhere, copied, held, paged
from .runs import DEVICE, SLOT, SLOTS, Run, real_rows, rows_index

# In bfloat16 the softmax is rounded too, before it is multiplied with the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# Keys and values are rounded once, before they go into the cache.
CACHED = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# Of each element of an output. Its values are of size 3.
ELEMENT = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
EPS = 1e-6
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of a form, in its order."""

    qkv: Tensor
    heads: Heads
    index: RowIndex
    cache: KVCache

    def run(self, attend: Attend) -> tuple[Tensor, KVCache]:
        """Return the output, and the cache after the call. The case can be used again."""
        cache = copied(self.cache)
        out = attend(**vars(self) | {"cache": cache})
        assert torch.equal(cache.table, self.cache.table)
        assert out.dtype == cache.keys.dtype and out.shape == (len(self.qkv), self.heads.count * cache.keys.shape[3])
        return out, cache

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs [rows, heads, D], and the new keys and values [rows, kv_heads, D], float64. Padding is NaN."""
        _, kv_heads, _, head_dim = self.cache.keys.shape
        count, parts = self.heads.count, 1 + self.heads.gated
        sizes = (parts * count * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        queries, keys, values = self.qkv.double().split(sizes, dim=1)
        query, *gates = queries.unflatten(1, (count, parts, head_dim)).unbind(2)
        query = self.rotated(query, self.heads.q_norm)
        key = self.rotated(keys.unflatten(1, (kv_heads, -1)), self.heads.k_norm)
        value = values.unflatten(1, (kv_heads, -1))
        out = torch.full_like(query, torch.nan)
        for slot, rows in runs_of(self.index.slots):
            first = int(self.index.positions[rows.start])
            past = held(self.cache, slot, 0, first)
            seen = [
                torch.cat((before.double(), new[rows].transpose(0, 1)), dim=1).repeat_interleave(
                    count // kv_heads, dim=0
                )
                for before, new in zip(past, (key, value), strict=True)
            ]
            scores = query[rows].transpose(0, 1) @ seen[0].transpose(1, 2) * head_dim**-0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
            if self.cache.window is not None:
                hidden |= torch.ones_like(hidden).tril(first - self.cache.window)
                # What no row sees is NaN.
                unseen = max(0, first - self.cache.window + 1)
                seen[1][:, :unseen] = 0
            scores.masked_fill_(hidden, -torch.inf)
            out[rows] = (scores.softmax(-1) @ seen[1]).transpose(0, 1)
        return out * gates[0].sigmoid() if gates else out, key, value

    def rotated(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Normalise x [rows, heads, D], if there is a norm. Then take its first R elements as R / 2 complex numbers, whose
        parts are R / 2 apart, and multiply them by e^(i angle)."""
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        half = self.index.cos.shape[1] // 2
        turn = torch.complex(self.index.cos[:, :half].double(), self.index.sin[:, :half].double())[:, None]
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((z.real, z.imag, x[..., 2 * half :]), dim=-1)


def make(
    shape: tuple[int, int, int, int],
    runs: Sequence[Run],
    dtype: torch.dtype,
    page_size: int = 16,
    *,
    qkv_dtype: torch.dtype | None = None,
    capacity: int = 0,
    size: float = 1.0,
    normed: bool = True,
    gated: bool = True,
    window: int | None = None,
    device: str = DEVICE,
) -> Case:
    """Make random arguments: scores spread over several powers of two; NaN in all rows of padding, at the rows' own positions
    and behind them, before the first position that a row sees, and in all pages of other sessions. Pages that lie before that
    position are none of the slot's.

    Args:
        shape: heads, kv_heads, D, R.
        qkv_dtype: of the projection; None: `dtype`, which is that of the cache.
        capacity: positions that each slot has pages for; 0: as many as the runs need.
        size: factor on the norm of the queries, and so on the scores.
        normed, gated: whether there are norms and gates.
        window: as in `KVCache`.
    """
    heads, kv_heads, head_dim, rotary = shape
    generator = torch.Generator().manual_seed(sum(run.end for run in runs) + head_dim)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    index = rows_index(runs, rotary, device)
    # Without norms, products of queries and keys would be nine times as large.
    spread = 3 if normed else 1
    qkv = spread * normal(len(index.slots), ((1 + gated) * heads + 2 * kv_heads) * head_dim).to(qkv_dtype or dtype)
    qkv[index.slots < 0] = torch.nan
    tokens = [run for run in runs if run.slot >= 0] or [Run(SLOT, 0, 0)]
    past = {run.slot: tuple(normal(2, kv_heads, run.first, head_dim).to(dtype)) for run in tokens}
    if window is not None:
        for run in tokens:
            for values in past[run.slot]:
                values[:, : max(0, run.first - window + 1)] = torch.nan
    cache = replace(paged(past, SLOTS, max(capacity, 1, *(run.end for run in tokens)), page_size), window=window)
    if window is not None:
        nobodys = min(set(range(len(cache.keys))).difference(cache.table.flatten().tolist()))
        for run in tokens:
            cache.table[run.slot, : max(0, run.first - window + 1) // page_size] = nobodys
    norms = Norm(1 + size * (1 + 0.3 * normal(head_dim)), EPS), Norm(1 + 0.3 * normal(head_dim), EPS)
    q_norm, k_norm = norms if normed else (None, None)
    return Case(qkv, Heads(heads, q_norm, k_norm, gated), index, cache)


def check(case: Case, attend: Attend, slack: float = 1.0) -> None:
    """Hold a form to the definition: the outputs and the cache of all rows that are tokens, and no other byte is written."""
    dtype, index = case.cache.keys.dtype, case.index
    out, after = case.run(attend)
    runs = {slot: (int(index.positions[rows.start]), rows) for slot, rows in runs_of(index.slots)}
    assert_same_elsewhere(
        case.cache, after, {slot: (first, rows.stop - rows.start) for slot, (first, rows) in runs.items()}
    )
    if not runs:
        return
    new = [held(after, slot, first, rows.stop - rows.start) for slot, (first, rows) in runs.items()]
    keys, values = (torch.cat(parts, dim=1).transpose(0, 1) for parts in zip(*new, strict=True))
    found = out.unflatten(1, (case.heads.count, -1))[real_rows(index)], keys, values
    expected = [x[real_rows(index)] for x in case.exact()]
    for name, ours, theirs, tolerance in zip(
        ("out", "keys", "values"), found, expected, (TOLERANCE, CACHED, CACHED), strict=True
    ):
        error = relative_error(ours, theirs)
        assert error < slack * tolerance[dtype], f"relative error of {name} is {error:.1e}"
    limit = slack * ELEMENT[dtype]
    torch.testing.assert_close(found[0].double(), expected[0], atol=limit, rtol=limit)


def as_padding(case: Case) -> Case:
    """The same rows, but they belong to nobody."""
    return replace(case, index=case.index._replace(slots=torch.full_like(case.index.slots, -1)))
