# mypy: allow-untyped-defs
"""Routing on the GPU, for any number of tokens: softmax over the router's logits and the top k, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.export.kernels.launch import launcher


def route(logits: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.route`; indices are int32, in order of falling weight, the lower index first where logits are equal."""
    weights, chosen = _route(logits.contiguous(), top_k, slots)
    return weights, chosen


@torch.library.triton_op("ostinato::route", mutates_args={})
def _route(logits: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    padded = max(32, triton.next_power_of_2(count))
    launcher(_route_kernel)[(tokens,)](
        logits, slots, weights, chosen, count, padded, top_k, triton.next_power_of_2(top_k), num_warps=1
    )
    return weights, chosen


@triton.jit
def _route_kernel(
    logits,
    slots,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    """Route one token per program.

    Keys are integers in the order of the logits: a warp finds the largest integer in one instruction.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    values = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    # Read as integers, negative floats are in reverse order. So all their bits except the sign are inverted here, and
    # inverted back below.
    keys = values.to(tl.int32, bitcast=True)
    keys = tl.where(expert < EXPERTS, keys ^ ((keys >> 31) & 0x7FFFFFFF), -0x80000000)
    place = tl.arange(0, PADDED_K)
    best_keys = tl.full([PADDED_K], -0x80000000, tl.int32)
    best_experts = tl.zeros([PADDED_K], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        index = tl.min(tl.where(keys == best, expert, PADDED), 0)
        best_keys = tl.where(place == i, best, best_keys)
        best_experts = tl.where(place == i, index, best_experts)
        keys = tl.where(expert == index, -0x80000000, keys)
    best_values = (best_keys ^ ((best_keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    largest = tl.max(tl.where(place == 0, best_values, float("-inf")), 0)
    shares = tl.where(place < TOP_K, tl.exp(best_values - largest), 0.0)
    shares = shares / tl.sum(shares, 0)
    tl.store(weights + token * TOP_K + place, shares, mask=place < TOP_K)
    best_experts = tl.where(tl.load(slots + token) >= 0, best_experts, EXPERTS)
    tl.store(chosen + token * TOP_K + place, best_experts, mask=place < TOP_K)
