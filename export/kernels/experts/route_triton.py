# mypy: allow-untyped-defs
"""Routing on the GPU, for any number of tokens: softmax over the router's logits and the top k, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher

from .step_route_triton import expert_of, largest_keys, load_keys, softmax_of


def route(logits: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.route`; indices are int32, in order of falling weight, the lower index first where logits are equal."""
    weights, chosen = _route(logits.contiguous(), top_k, slots)
    return weights, chosen


@torch.library.triton_op("ostinato::route", mutates_args={})
def _route(logits: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    launcher(_route_kernel)[(tokens,)](logits, slots, weights, chosen, count, top_k, num_warps=1)
    return weights, chosen


@triton.jit
def _route_kernel(logits, slots, weights, chosen, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """Route one token per program. The program has one warp, so that keys are compared without a barrier."""
    token = tl.program_id(0).to(tl.int64)
    best = largest_keys(load_keys(logits + token * EXPERTS, EXPERTS, ""), TOP_K)
    shares = softmax_of(best)
    filled = tl.load(slots + token) >= 0
    for i in tl.static_range(TOP_K):
        tl.store(weights + token * TOP_K + i, shares[i])
        tl.store(chosen + token * TOP_K + i, tl.where(filled, expert_of(best[i]), EXPERTS))
