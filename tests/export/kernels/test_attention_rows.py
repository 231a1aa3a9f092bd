"""Attention of several rows: any runs, pages in any order, and nothing read or written that is not theirs."""

from __future__ import annotations

import pytest
import torch

from ostinato.export.kernels.attention import reference, rows_triton
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex

from .row_cases import DEVICE, checkered

NAN = float("nan")
# (slot, first position, rows) of each run.
RUNS = {
    "batch": [(2, 0, 1), (0, 5, 1), (3, 40, 1), (1, 63, 1)],
    "mixed": [(1, 0, 3), (-1, 7, 2), (3, 30, 5), (0, 64, 1), (-1, 0, 1)],
    "prompt": [(2, 20, 19), (-1, 38, 3)],
    "behind many": [(0, 93, 5), (1, 5, 1), (3, 70, 2)],
    "padding": [(-1, 0, 2)],
}
# (page, heads, key heads, D)
SHAPES = [(16, 4, 2, 32), (64, 6, 2, 16), (32, 2, 2, 64)]


@pytest.fixture(params=(False, True), ids=("together", "split"))
def in_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short contexts as long ones are: in splits."""
    if request.param:
        monkeypatch.setattr(rows_triton, "MIN_SPLIT", dict.fromkeys(rows_triton.MIN_SPLIT, 16))


@pytest.mark.usefixtures("in_splits")
@pytest.mark.parametrize(("name", "shape", "dtype"), checkered(RUNS, SHAPES, (torch.float32, torch.bfloat16)), ids=str)
def test_rows(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    runs, (page, heads, kv_heads, size) = RUNS[name], shape
    generator = torch.Generator().manual_seed(0)
    slots, most = 4, -(-100 // page)
    rows = torch.tensor([slot for slot, _, count in runs for _ in range(count)])
    positions = torch.tensor([first + step for _, first, count in runs for step in range(count)])
    rotary = size // 2
    index = RowIndex(positions, rows, *torch.rand(2, len(rows), rotary, generator=generator))
    table = torch.randperm(slots * most + 3, generator=generator)[: slots * most].view(slots, most).int()
    qkv = torch.randn(len(rows), 2 * (heads + kv_heads) * size, generator=generator).to(dtype)
    # What nobody has written yet is NaN.
    pools = torch.full((2, slots * most + 3, kv_heads, page, size), NAN)
    for slot, first, _ in runs:
        for position in range(first if slot >= 0 else 0):
            values = torch.randn(2, kv_heads, size, generator=generator)
            pools[:, table[slot, position // page], :, position % page] = values
    q_norm, k_norm = torch.rand(2, size, generator=generator)
    found_cache = KVCache(pools[0].to(DEVICE, dtype), pools[1].to(DEVICE, dtype), table.to(DEVICE))
    known_cache = KVCache(pools[0].to(dtype), pools[1].to(dtype), table)
    known = reference.attend_step(qkv, Norm(q_norm, 1e-6), Norm(k_norm, 1e-6), index, known_cache, heads)
    there = RowIndex(*(value.to(DEVICE) for value in index))
    norms = Norm(q_norm.to(DEVICE), 1e-6), Norm(k_norm.to(DEVICE), 1e-6)
    found = rows_triton.attend_step(qkv.to(DEVICE), *norms, there, found_cache, heads).cpu()
    real = rows >= 0
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[real], known[real], atol=tolerance, rtol=tolerance)
    assert found.isfinite().all()
    for ours, theirs in ((found_cache.keys, known_cache.keys), (found_cache.values, known_cache.values)):
        torch.testing.assert_close(ours.cpu(), theirs, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert torch.equal(ours.cpu().isnan(), theirs.isnan())
