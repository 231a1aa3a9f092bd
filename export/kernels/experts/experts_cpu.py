"""Routing and the experts for CPUs, for any number of tokens: the functions of `reference.py`, with weights in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight, unbiased
from ostinato.export.kernels.operators_cpu import LIBRARY

# Weights of the routed experts and of the shared one in an operator's schema: `unbiased` of both.
WEIGHTS = (
    "Tensor values, Tensor? scale, Tensor? minimum, str form, "
    "Tensor? shared_values, Tensor? shared_scale, Tensor? shared_minimum, str shared_form"
)


def experts(x: Tensor, weights: Tensor, chosen: Tensor, routed: ExpertWeights, pinned: bool = False) -> Tensor:
    """As `reference.experts`; with `pinned` the result is in pinned memory, which a GPU reads directly."""
    return _experts(x, weights, chosen.int(), *unbiased(routed.gate_up), *unbiased(routed.down), pinned)


@LIBRARY.operator(
    "experts(Tensor x, Tensor weights, Tensor chosen, Tensor gate_up, Tensor? gate_up_scale, "
    "Tensor? gate_up_minimum, str gate_up_form, Tensor down, Tensor? down_scale, Tensor? down_minimum, "
    "str down_form, bool pinned) -> Tensor"
)
def _experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    gate_up_minimum: Tensor | None,
    gate_up_form: str,
    down: Tensor,
    down_scale: Tensor | None,
    down_minimum: Tensor | None,
    down_form: str,
    pinned: bool,
) -> Tensor:
    return torch.empty_like(x)


def route_logits(x: Tensor, norm: Norm, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    """As `reference.route_logits`; `gate` is in panels too."""
    return _route_logits(x, norm.weight, norm.eps, gate, shared_gate)


@LIBRARY.operator("route_logits(Tensor x, Tensor norm, float eps, Tensor gate, Tensor? shared_gate) -> Tensor")
def _route_logits(x: Tensor, norm: Tensor, eps: float, gate: Tensor, shared_gate: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], gate.shape[0] + (0 if shared_gate is None else 1))


def experts_gate_up(
    x: Tensor,
    norm: Norm,
    logits: Tensor,
    top_k: int,
    routed: Weight,
    shared: Weight | None,
    slots: Tensor | None = None,
) -> Tensor:
    """As `reference.experts_gate_up`; rows with a negative slot reach no routed expert."""
    return _experts_gate_up(x, norm.weight, norm.eps, logits, top_k, *unbiased(routed), *unbiased(shared), slots)


@LIBRARY.operator(
    f"experts_gate_up(Tensor x, Tensor norm, float eps, Tensor logits, int top_k, {WEIGHTS}, Tensor? slots) -> Tensor"
)
def _experts_gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    logits: Tensor,
    top_k: int,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    form: str,
    shared_values: Tensor | None,
    shared_scale: Tensor | None,
    shared_minimum: Tensor | None,
    shared_form: str,
    slots: Tensor | None,
) -> Tensor:
    shared = 0 if shared_values is None else shared_values.shape[0] // 2
    return x.new_empty(x.shape[0], top_k * (values.shape[1] // 2) + shared)


def experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    routed: Weight,
    shared: Weight | None,
    residual: Tensor,
    slots: Tensor | None = None,
) -> Tensor:
    """As `reference.experts_down`; `slots` as for `experts_gate_up`."""
    return _experts_down(hidden, logits, top_k, *unbiased(routed), *unbiased(shared), residual, slots)


@LIBRARY.operator(
    f"experts_down(Tensor hidden, Tensor logits, int top_k, {WEIGHTS}, Tensor residual, Tensor? slots) -> Tensor"
)
def _experts_down(
    hidden: Tensor,
    logits: Tensor,
    top_k: int,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    form: str,
    shared_values: Tensor | None,
    shared_scale: Tensor | None,
    shared_minimum: Tensor | None,
    shared_form: str,
    residual: Tensor,
    slots: Tensor | None,
) -> Tensor:
    return torch.empty_like(residual)


def sparse_moe(
    x: Tensor,
    norm: Norm,
    gate: Tensor,
    shared_gate: Tensor | None,
    top_k: int,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    slots: Tensor | None,
) -> Tensor:
    """As `reference.sparse_moe`; padding rows get the shared expert only."""
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    logits = route_logits(x, norm, gate, shared_gate)
    hidden = experts_gate_up(x, norm, logits, top_k, routed.gate_up, gate_up, slots)
    return experts_down(hidden, logits, top_k, routed.down, down, x, slots)
