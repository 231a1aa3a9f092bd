"""The steps that decide speed, as functions: a plain PyTorch reference each, and beside it a Triton form for NVIDIA GPUs.

`int4.py`, `experts.py`, `delta_rule.py` and `attention.py` hold the references; beside each, a file with `_triton` in its
name holds the kernels, with the same functions and the same arguments. `kernels_for` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...delegate.errors import ExportError


class Int4Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor: ...


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]: ...


class Experts(Protocol):
    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor | None,
        down: Tensor,
        down_scale: Tensor | None,
    ) -> Tensor: ...


class GatedDeltaRule(Protocol):
    def __call__(
        self,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        positions: Tensor,
        key_heads: int,
        max_tokens: int,
    ) -> Tensor: ...


class Attend(Protocol):
    def __call__(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """What a model calls; the functions of `kernels_for`'s modules say what each does."""

    int4_linear: Int4Linear
    route: Route
    experts: Experts
    gated_delta_rule: GatedDeltaRule
    attend: Attend


def kernels_for(device: str) -> Kernels:
    """The references for "cpu", the Triton kernels for "cuda" (these need the triton package)."""
    if device not in ("cpu", "cuda"):
        raise ExportError(f"unknown device {device!r}; the devices are: cpu, cuda")
    if device == "cuda":
        from .attention_triton import attend
        from .delta_rule_triton import gated_delta_rule
        from .experts_triton import experts, route
        from .int4_triton import int4_linear

        return Kernels(int4_linear, route, experts, gated_delta_rule, attend)
    from . import attention, delta_rule, int4
    from . import experts as expert_reference

    return Kernels(
        int4.int4_linear,
        expert_reference.route,
        expert_reference.experts,
        delta_rule.gated_delta_rule,
        attention.attend,
    )
