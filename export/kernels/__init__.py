"""The steps that decide speed, as functions: a plain PyTorch reference each, and beside it a Triton form for NVIDIA GPUs.

`int4.py`, `experts.py`, `delta_rule.py`, `attention.py` and `sample.py` hold the references; beside each, a file with
`_triton` in its name holds the kernels, with the same functions and the same arguments. `kernels_for` chooses. The files
whose names begin with `step_` hold what one token alone takes, several of a layer's operations to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
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


class Sample(Protocol):
    def __call__(
        self,
        logits: Tensor,
        position: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        workspace: Tensor,
    ) -> Tensor: ...


class SampleNext(Protocol):
    def __call__(
        self,
        logits: Tensor,
        position: Tensor,
        token: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        workspace: Tensor,
    ) -> Tensor: ...


class NormLinear(Protocol):
    def __call__(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor, out_dtype: torch.dtype
    ) -> Tensor: ...


class NormLinearConv(Protocol):
    def __call__(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        scale: Tensor,
        extra: Tensor,
        conv_weight: Tensor,
        conv_state: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class LinearAdd(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, squares: Tensor | None, eps: float
    ) -> Tensor: ...


class DeltaStep(Protocol):
    def __call__(
        self,
        mixed: Tensor,
        gates: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        positions: Tensor,
        norm_weight: Tensor,
        key_heads: int,
    ) -> tuple[Tensor, Tensor]: ...


class AttendStep(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        positions: Tensor,
        heads: int,
    ) -> Tensor: ...


class RouteLogits(Protocol):
    def __call__(self, h: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, shared_gate: Tensor) -> Tensor: ...


class ExpertsGateUp(Protocol):
    def __call__(
        self,
        h: Tensor,
        norm_weight: Tensor,
        eps: float,
        logits: Tensor,
        top_k: int,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        shared_gate_up: Tensor,
        shared_gate_up_scale: Tensor,
    ) -> Tensor: ...


class ExpertsDown(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        top_k: int,
        down: Tensor,
        down_scale: Tensor,
        shared_down: Tensor,
        shared_down_scale: Tensor,
        residual: Tensor,
    ) -> Tensor: ...


@dataclass(frozen=True)
class StepKernels:
    """One token through int4 layers, in the order in which a layer takes them."""

    norm_linear: NormLinear
    norm_linear_conv: NormLinearConv
    delta_step: DeltaStep
    attend_step: AttendStep
    linear_add: LinearAdd
    route_logits: RouteLogits
    experts_gate_up: ExpertsGateUp
    experts_down: ExpertsDown


@dataclass(frozen=True)
class Kernels:
    """What a model calls; the functions of `kernels_for`'s modules say what each does. `step` is there on a GPU only."""

    int4_linear: Int4Linear
    route: Route
    experts: Experts
    gated_delta_rule: GatedDeltaRule
    attend: Attend
    sample: Sample
    sample_next: SampleNext
    step: StepKernels | None = None


def kernels_for(device: str) -> Kernels:
    """The references for "cpu", the Triton kernels for "cuda" (these need the triton package)."""
    if device not in ("cpu", "cuda"):
        raise ExportError(f"unknown device {device!r}; the devices are: cpu, cuda")
    if device == "cuda":
        from .attention_triton import attend
        from .delta_rule_triton import gated_delta_rule
        from .experts_triton import experts, route
        from .int4_triton import int4_linear
        from .sample_triton import sample, sample_next
        from .step_attention_triton import attend_step
        from .step_delta_triton import delta_step
        from .step_linear_triton import linear_add, norm_linear, norm_linear_conv
        from .step_moe_triton import experts_down, experts_gate_up, route_logits

        step = StepKernels(
            norm_linear,
            norm_linear_conv,
            delta_step,
            attend_step,
            linear_add,
            route_logits,
            experts_gate_up,
            experts_down,
        )
        return Kernels(int4_linear, route, experts, gated_delta_rule, attend, sample, sample_next, step)
    from . import attention, delta_rule, int4, sample
    from . import experts as expert_reference

    return Kernels(
        int4.int4_linear,
        expert_reference.route,
        expert_reference.experts,
        delta_rule.gated_delta_rule,
        attention.attend,
        sample.sample,
        sample.sample_next,
    )
