"""A sparse mixture of experts: routed experts, and one shared expert behind a gate of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.export.kernels.operands import ExpertWeights

from .build import Build
from .feed_forward import SwiGLU
from .linear import Linear
from .norms import RMSNorm
from .stored import StoredWeights


@dataclass(frozen=True)
class MoeSizes:
    """Sizes of a mixture of experts.

    Attributes:
        hidden: H, the model's size.
        experts: E, number of routed experts.
        top_k: number of routed experts that one token takes.
        inner: I, inner size of a routed expert.
        shared_inner: inner size of the shared expert.
    """

    hidden: int
    experts: int
    top_k: int
    inner: int
    shared_inner: int


class Experts(StoredWeights):
    """Weights of all routed experts: gate and up projection stacked, [E, 2 I, H], and down projection, [E, H, I].

    Attributes:
        token_fraction: fraction of its weights that one token reads.
        on_host: whether the weights stay in the host's memory.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, sizes: MoeSizes, build: Build, on_host: bool) -> None:
        super().__init__(build.dtype)
        kernels = build.host_kernels if on_host else build.kernels
        self.on_host = on_host
        self.token_fraction = sizes.top_k / sizes.experts
        self.store_as("gate_up_proj", build.format, (sizes.experts, 2 * sizes.inner, sizes.hidden))
        self.store_as("down_proj", build.format, (sizes.experts, sizes.hidden, sizes.inner))
        self.experts = kernels.experts
        self.panels = ("gate_up_proj", "down_proj") if kernels.has_panels else ()

    @property
    def operand(self) -> ExpertWeights:
        """The weights as kernels take them."""
        return ExpertWeights(self.stored("gate_up_proj"), self.stored("down_proj"))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, chosen [T, k] -> [T, H]."""
        return self.experts(x, weights, chosen, self.operand)


class SparseMoe(nn.Module):
    """Routed experts plus the gated shared expert. The router and the shared expert's gate stay in the model's dtype.

    Args:
        on_host: whether the routed experts are made for `build.host_kernels`. If so, `HostExperts` computes the layer from
            this module's children, and `forward` and `step` are not called.
    """

    def __init__(self, sizes: MoeSizes, build: Build, on_host: bool = False) -> None:
        super().__init__()
        self.gate = Linear(sizes.hidden, sizes.experts, build, quantize=False)
        self.routed_kernels = build.host_kernels if on_host else build.kernels
        self.experts = Experts(sizes, build, on_host)
        self.shared_expert = SwiGLU(sizes.hidden, sizes.shared_inner, build, divisible=False)
        self.shared_expert_gate = Linear(sizes.hidden, 1, build, quantize=False)
        self.top_k = sizes.top_k
        self.kernels = build.kernels

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [T, H], slots [T] as in `RowIndex` -> [T, H]."""
        weights, chosen = self.kernels.route(self.gate(x), self.top_k, slots)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weights, chosen) + shared

    def step(self, x: Tensor, norm: RMSNorm, slots: Tensor) -> Tensor:
        """x [T, H], slots [T] as in `RowIndex` -> x + self(norm(x))."""
        shared = ExpertWeights(self.shared_expert.gate_up_proj.operand, self.shared_expert.down_proj.operand)
        return self.kernels.sparse_moe(
            x,
            norm.operand,
            self.gate.weight,
            self.shared_expert_gate.weight,
            self.top_k,
            self.experts.operand,
            shared,
            slots,
        )
