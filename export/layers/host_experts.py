"""A layer whose routed experts stay in the host's memory, whatever the program's device is.

With few tokens, the work is divided like this::

    device    h, n = mixer and norm; logits, and which experts they choose
    host      y = routed experts(n)               only n and the choice go to the host, and only y comes back
    device    s = h + shared expert(n)            needs nothing from the host, so it runs at the same time
    device    x = s + y

With many tokens, computing an expert on the CPU takes longer than sending its weights to the device. Then both work: the
device computes the first `streamed` experts, whose weights are sent ahead, and the host computes the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.names import HOST
from ostinato.export.compile.trace import Link

from .experts import SparseMoe
from .norms import RMSNorm
from .stored import kind_of

# The values that `links` starts from.
GIVEN = ("h", "n", "logits", "weights", "chosen")
STREAMED = "streamed"


class HostExperts(nn.Module):
    """What a layer computes after its mixer, split into links. It has no tensors of its own.

    Values: h, n, s, y, z and x are [T, H]. logits is [T, E + 1]: those of the routed experts, then that of the shared
    expert's gate. weights [T, k] float32, and chosen and others [T, k] int32, are as `Kernels.route` returns them. streamed
    is [1] int64. Methods whose names end with `_step` are for `Kernels` that fold a step.

    Args:
        moe: the mixture of experts, with its routed experts made for the host.
        norm: the norm before it.
    """

    def __init__(self, moe: SparseMoe, norm: RMSNorm) -> None:
        super().__init__()
        self.moe = moe
        self.norm = norm

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        """The links from the values `GIVEN` to `x`. With `streamed`, they also take the number of experts that the device
        computes."""
        link = partial(self._link, prefix)
        shared = link(("s",), "shared expert", "shared_step" if step else "shared")
        if not streamed:
            routed = link(("y",), "routed experts", "routed", device=HOST)
            return [shared, routed, link(("x",), "sum of experts", "sum")]
        return [
            link(("others",), "division of experts", "divide"),
            link(("z",), "streamed experts", "first", streamed_by=STREAMED),
            shared,
            link(("y",), "other experts", "routed", inputs=("n", "weights", "others"), device=HOST),
            link(("x",), "sum of all experts", "sum_of_both"),
        ]

    def _link(self, prefix: str, outputs: tuple[str, ...], name: str, method: str, **options: Any) -> Link:
        """A link of this module. Its kind includes the formats of all weights of the module, also where it reads none."""
        return Link(self, outputs, kind_of(self.moe, name), prefix, method, **options)

    def route(self, h: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Compute the values `GIVEN` from h and the rows' slots."""
        n = self.norm(h)
        logits = torch.cat((self.moe.gate(n), self.moe.shared_expert_gate(n)), dim=-1)
        return h, n, logits, *self._choose(logits, slots)

    def route_step(self, h: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Compute what `route` computes, by a step's kernels where these take h."""
        moe = self.moe
        if not moe.kernels.folds_prompts and not isinstance(h.shape[0], int):
            # On a GPU, a step's kernel for the router takes only one row.
            return self.route(h, slots)
        logits = moe.kernels.route_logits(h, self.norm.operand, moe.gate.weight, moe.shared_expert_gate.weight)
        return h, self.norm(h), logits, *self._choose(logits, slots)

    def routed(self, n: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """y: the output of the routed experts."""
        return self.moe.routed_kernels.experts(n, weights, chosen, self.moe.experts.operand)

    def divide(self, chosen: Tensor, streamed: Tensor) -> Tensor:
        """others: `chosen`, with E (no expert) in place of experts below `streamed`.

        Runs on the device: the host would have to wait for `streamed`.
        """
        return torch.where(chosen < streamed, self._count, chosen).int()

    def first(self, n: Tensor, weights: Tensor, chosen: Tensor, streamed: Tensor) -> Tensor:
        """z: the output of the experts below `streamed`, by the device's kernels."""
        mine = torch.where(chosen < streamed, chosen, self._count)
        return self.moe.kernels.experts(n, weights, mine.int(), self.moe.experts.operand)

    def shared(self, h: Tensor, n: Tensor, logits: Tensor) -> Tensor:
        """s: h plus the gated output of the shared expert."""
        return h + torch.sigmoid(logits[:, -1:]) * self.moe.shared_expert(n)

    def shared_step(self, h: Tensor, logits: Tensor) -> Tensor:
        """s, by a step's kernels; see `shared`."""
        kernels, shared = self.moe.kernels, self.moe.shared_expert
        inner = kernels.norm_swiglu(h, self.norm.operand, shared.gate_up_proj.operand)
        inner = inner * torch.sigmoid(logits[:, -1:].float()).to(inner.dtype)
        return kernels.linear_add(inner, shared.down_proj.operand, h)

    def sum(self, s: Tensor, y: Tensor) -> Tensor:
        """x: the output of the layer."""
        return s + y

    def sum_of_both(self, s: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """x: the output of the layer."""
        return s + (y + z)

    @property
    def _count(self) -> int:
        """E. Among the chosen experts, this number means no expert."""
        return self.moe.experts.gate_up_proj.shape[0]

    def _choose(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.moe.kernels.route(logits[:, :-1], self.moe.top_k, slots)
        return weights, chosen.int()
