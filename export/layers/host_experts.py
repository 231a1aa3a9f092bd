"""A layer whose routed experts stay in the host's memory, whatever the program's device is.

What runs where, for a few tokens::

    device    h, n = mixer and norm; logits, and which experts they choose
    host      y = routed experts(n)               only n and the choice go there, and only y comes back
    device    s = h + shared expert(n)            needs nothing of the host, so it runs meanwhile
    device    x = s + y

For many, whose experts the CPU would compute for longer than it takes to send their weights to the device, both work: the
first `streamed` experts are computed on the device, their weights being sent ahead of that, and the others on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.names import HOST
from ostinato.export.compile.trace import Link

from .experts import SparseMoe
from .norms import RMSNorm

# What `links` takes.
GIVEN = ("h", "n", "logits", "weights", "chosen")
STREAMED = "streamed"


class HostExperts(nn.Module):
    """What comes behind a layer's mixer, in parts. It has no tensors of its own.

    Values: h, n, s, y, z and x [T, H]; logits [T, E + 1], those of the routed experts and last that of the shared one's gate;
    weights [T, k] float32, chosen and others [T, k] int32 as of `Kernels.route`; streamed [1] int64. Methods that end with
    `_step` are for `Kernels` that fold a step.

    Args:
        moe: its routed experts are made for the host.
        norm: the one before it.
    """

    def __init__(self, moe: SparseMoe, norm: RMSNorm) -> None:
        super().__init__()
        self.moe = moe
        self.norm = norm

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        """From the values `GIVEN` to `x`; with `streamed` also from how many experts the device computes."""
        shared = Link(self, ("s",), "shared expert", prefix, "shared_step" if step else "shared")
        if not streamed:
            routed = Link(self, ("y",), "routed experts", prefix, "routed", device=HOST)
            return [shared, routed, Link(self, ("x",), "sum of experts", prefix, "sum")]
        return [
            Link(self, ("others",), "division of experts", prefix, "divide"),
            Link(self, ("z",), "streamed experts", prefix, "first", streamed_by=STREAMED),
            shared,
            Link(self, ("y",), "other experts", prefix, "routed", inputs=("n", "weights", "others"), device=HOST),
            Link(self, ("x",), "sum of all experts", prefix, "sum_of_both"),
        ]

    def route(self, h: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """`GIVEN` of h and of the rows' slots."""
        n = self.norm(h)
        logits = torch.cat((self.moe.gate(n), self.moe.shared_expert_gate(n)), dim=-1)
        return h, n, logits, *self._choose(logits, slots)

    def route_step(self, h: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """As `route`."""
        moe = self.moe
        if not moe.kernels.folds_prompts and not isinstance(h.shape[0], int):
            # The router of a GPU's step takes one row.
            return self.route(h, slots)
        logits = moe.kernels.route_logits(h, self.norm.operand, moe.gate.weight, moe.shared_expert_gate.weight)
        return h, self.norm(h), logits, *self._choose(logits, slots)

    def routed(self, n: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """y: what the routed experts give."""
        return self.moe.routed_kernels.experts(n, weights, chosen, self.moe.experts.operand)

    def divide(self, chosen: Tensor, streamed: Tensor) -> Tensor:
        """others: as chosen, nobody for experts before `streamed`. On the device, for the host would wait to be told."""
        return torch.where(chosen < streamed, self._count, chosen).int()

    def first(self, n: Tensor, weights: Tensor, chosen: Tensor, streamed: Tensor) -> Tensor:
        """z: what the experts before `streamed` give, by the device's kernels."""
        mine = torch.where(chosen < streamed, chosen, self._count)
        return self.moe.kernels.experts(n, weights, mine.int(), self.moe.experts.operand)

    def shared(self, h: Tensor, n: Tensor, logits: Tensor) -> Tensor:
        """s: h and the shared expert's part."""
        return h + torch.sigmoid(logits[:, -1:]) * self.moe.shared_expert(n)

    def shared_step(self, h: Tensor, logits: Tensor) -> Tensor:
        """As `shared`."""
        kernels, shared = self.moe.kernels, self.moe.shared_expert
        inner = kernels.norm_swiglu(h, self.norm.operand, shared.gate_up_proj.operand)
        inner = inner * torch.sigmoid(logits[:, -1:].float()).to(inner.dtype)
        return kernels.linear_add(inner, shared.down_proj.operand, h)

    def sum(self, s: Tensor, y: Tensor) -> Tensor:
        """x, what the layer gives."""
        return s + y

    def sum_of_both(self, s: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """x, what the layer gives."""
        return s + (y + z)

    @property
    def _count(self) -> int:
        """E, which stands for nobody among those chosen."""
        return self.moe.experts.gate_up_proj.shape[0]

    def _choose(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.moe.kernels.route(logits[:, :-1], self.moe.top_k, slots)
        return weights, chosen.int()
