"""A layer whose routed experts stay in the host's memory, whatever the program's device is.

What runs where, for a few tokens::

    device    h, logits = mixer and router                `HostExperts.logits` is the router
    host      y = h + routed experts(norm(h), logits)     only h and logits go there, and only y comes back
    device    s = shared expert(norm(h))                  needs nothing of the host, so it runs meanwhile
    device    x = y + s

For many, whose experts the CPU would compute for longer than it takes to send their weights to the device, y is computed
there: from STREAM_FROM tokens on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact import HOST
from ostinato.export.compile.trace import Link

from .experts import SparseMoe
from .norms import RMSNorm

# Tokens.
STREAM_FROM = 64


class HostExperts(nn.Module):
    """What comes behind a layer's mixer, in parts. It has no tensors of its own.

    Methods that end with `_step` are for `Kernels` that fold a step; `h` is [T, H], `logits` are [T, E + 1].

    Args:
        moe: its routed experts are made for the host.
        norm: the one before it.
    """

    def __init__(self, moe: SparseMoe, norm: RMSNorm) -> None:
        super().__init__()
        self.moe = moe
        self.norm = norm

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        """From the values `h` and `logits` to `x`; with `streamed` everything runs on the device."""
        form = "_step" if step else ""
        if streamed:
            routed = Link(self, ("y",), "streamed experts", prefix, "streamed", streamed=True)
        else:
            routed = Link(self, ("y",), "routed experts", prefix, "routed", device=HOST)
        return [
            Link(self, ("s",), "shared expert", prefix, f"shared{form}"),
            routed,
            Link(self, ("x",), "sum of experts", prefix, f"sum{form}"),
        ]

    def logits(self, h: Tensor) -> Tensor:
        """Of the routed experts and last of the shared one's gate, [T, E + 1] in the dtype of h."""
        normed = self.norm(h)
        return torch.cat((self.moe.gate(normed), self.moe.shared_expert_gate(normed)), dim=-1)

    def logits_step(self, h: Tensor) -> Tensor:
        """As `logits`."""
        moe = self.moe
        return moe.kernels.route_logits(h, self.norm.operand, moe.gate.weight, moe.shared_expert_gate.weight)

    def routed(self, h: Tensor, logits: Tensor) -> Tensor:
        """y [T, H]: h and the routed experts' part."""
        moe, norm = self.moe, self.norm.operand
        kernels, routed = moe.routed_kernels, moe.experts.operand
        hidden = kernels.experts_gate_up(h, norm, logits, moe.top_k, routed.gate_up, None)
        return kernels.experts_down(hidden, logits, moe.top_k, routed.down, None, h)

    def streamed(self, h: Tensor, logits: Tensor, input_pos: Tensor) -> Tensor:
        """As `routed`, by the device's kernels."""
        moe = self.moe
        if moe.kernels.folds_prompts:
            return self.routed(h, logits)
        weights, chosen = moe.kernels.route(logits[:, :-1], moe.top_k, input_pos)
        return h + moe.kernels.experts(self.norm(h), weights, chosen, moe.experts.operand)

    def shared(self, h: Tensor, logits: Tensor) -> Tensor:
        """s [T, H]: the shared expert's part."""
        return torch.sigmoid(logits[:, -1:]) * self.moe.shared_expert(self.norm(h))

    def sum(self, y: Tensor, s: Tensor) -> Tensor:
        """x [T, H], what the layer gives."""
        return y + s

    def shared_step(self, h: Tensor, logits: Tensor) -> Tensor:
        """s [T, I]: the shared expert's inner activations times its gate."""
        moe = self.moe
        hidden = moe.kernels.norm_swiglu(h, self.norm.operand, moe.shared_expert.gate_up_proj.operand)
        return hidden * torch.sigmoid(logits[:, -1:].float()).to(hidden.dtype)

    def sum_step(self, y: Tensor, s: Tensor) -> Tensor:
        """x [T, H], what the layer gives, of what `shared_step` gave."""
        return self.moe.kernels.linear_add(s, self.moe.shared_expert.down_proj.operand, y)
