"""Triton's routing against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.experts import reference
from ostinato.export.kernels.experts.route_triton import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_route(logits: Tensor, top_k: int) -> None:
    weights, chosen = route(logits, top_k, torch.arange(len(logits), device=logits.device))
    expected, _ = reference.route(logits, top_k, torch.arange(len(logits), device=logits.device))
    assert (weights.dtype, chosen.dtype, chosen.shape) == (torch.float32, torch.int32, (logits.shape[0], top_k))
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    # Not the reference's choice: where logits or probabilities are equal (zeros, for example), it takes any of the experts.
    assert torch.equal(logits.gather(1, chosen.long()), logits.topk(top_k).values)
    assert all(len(set(row)) == top_k for row in chosen.tolist())


@pytest.mark.parametrize("tokens", (1, 17))
@pytest.mark.parametrize(("count", "top_k"), ((8, 2), (256, 8), (5, 3), (1, 1), (20, 20), (33, 1)))
def test_route(tokens: int, count: int, top_k: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(count)
    logits = torch.randn(tokens, count, generator=generator, device=DEVICE)
    check_route(3 * logits, top_k)
    check_route((3 * logits).bfloat16(), top_k)


@pytest.mark.parametrize("size", (1e4, 3e38, float("inf")))
def test_route_with_large_logits(size: float) -> None:
    logits = torch.linspace(-1, 1, 11, device=DEVICE).expand(2, 11).clone() * 100
    logits[:, 4] = -size
    check_route(logits, 3)
    logits[0, 7] = min(size, 3e38)
    check_route(logits, 3)


def test_route_with_equal_logits() -> None:
    weights, chosen = route(torch.full((2, 10), -3.0, device=DEVICE), 4, torch.arange(2, device=DEVICE))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


def test_route_of_nan_stays_in_range() -> None:
    """An index out of range would be an illegal address in the experts, and end the process."""
    weights, chosen = route(torch.full((2, 10), float("nan"), device=DEVICE), 4, torch.arange(2, device=DEVICE))
    assert weights.isnan().all()
    assert ((chosen >= 0) & (chosen < 10)).all()


def test_padding_reaches_no_expert() -> None:
    logits = torch.randn(9, 10, device=DEVICE)
    logits[6:] = torch.nan
    slots = torch.tensor([2, 2, 2, 2, 2, 2, -1, -1, -1], device=DEVICE)
    weights, chosen = route(logits, 4, slots)
    expected, found = reference.route(logits, 4, slots)
    assert (chosen[6:] == 10).all() and torch.equal(chosen, found.int())
    torch.testing.assert_close(weights[:6], expected[:6])
