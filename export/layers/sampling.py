"""The end of a step on the device: from logits to the next token, and from that to the next step's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact import StateKind
from ostinato.delegate.sampling import Sampling, SamplingInputs
from ostinato.export.kernels.sampling.reference import workspace_size

from .build import Build
from .embedding import NetworkInput
from .state import register_state


class SamplingState(nn.Module):
    """The sampling options, the last token and its position: what a step starts from, and what it leaves for the next one.

    Buffers, each written on the device: `token` [1, 1] int64 and its `position` [1] int64, which the model has not seen
    yet; and the fields of `SamplingInputs`.
    """

    token: Tensor
    position: Tensor
    scratch: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.kernels = build.kernels
        with torch.device("cpu"):
            register_state(
                self,
                StateKind.SAMPLING,
                token=torch.zeros(1, 1, dtype=torch.int64),
                position=torch.zeros(1, dtype=torch.int64),
                **Sampling(seed=0).inputs()._asdict(),
            )
            register_state(self, StateKind.WORKSPACE, scratch=torch.zeros(workspace_size(), dtype=torch.int64))

    @property
    def how(self) -> SamplingInputs:
        return SamplingInputs(*(self.get_buffer(name) for name in SamplingInputs._fields))

    def begin(self, input_pos: Tensor, *how: Tensor) -> Tensor:
        """Have `next` draw the token that will stand at `input_pos` [1]; keep the options, the fields of `SamplingInputs`.

        Returns the position that it leaves, [1]: the one ahead.
        """
        before = input_pos - 1
        self.position.copy_(before)
        for kept, given in zip(self.how, how, strict=True):
            kept.copy_(given)
        return before

    def next(self, logits: Tensor) -> Tensor:
        """Draw the token after the last one, and make it the last. logits [1, V] -> [1, 1]."""
        return self.kernels.sample_next(logits, self.position, self.token, self.how, self.scratch)


class NextInput(nn.Module):
    """`NetworkInput` of the token that the last step has left, with the position where it stands."""

    def __init__(self, sampling: SamplingState, network_input: NetworkInput) -> None:
        super().__init__()
        self.sampling = sampling
        self.network_input = network_input

    def forward(self) -> tuple[Tensor, ...]:
        """-> (input_pos [1] int64, then what `NetworkInput` gives)."""
        position = self.sampling.position.clone()
        return (position, *self.network_input(self.sampling.token, position))
