"""How Triton's attention of one token splits the cache.

What it computes for one token is also tested in `test_attention_prefill`, through `attend`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.kernels.attention import decode_triton

from .attention_cases import TOLERANCE, check, draw


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("splits", (1, 2, 4, 16))
def test_splits(splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits with several blocks, with one, with part of one, with nothing."""
    monkeypatch.setattr(decode_triton, "splits_for", lambda kv_heads, slots: splits)
    for position in (0, 15, 16, 63, 64, 128, 299):
        check(draw((6, 2, 32), 1, position, slots=301, dtype=dtype))


@pytest.mark.parametrize(
    ("kv_heads", "slots", "splits"),
    [(2, 4096, 64), (2, 262144, 64), (8, 4096, 16), (3, 4096, 32), (2, 5, 1), (200, 64, 1)],
)
def test_number_of_splits(kv_heads: int, slots: int, splits: int) -> None:
    assert decode_triton.splits_for(kv_heads, slots) == splits
