"""The end of a step on the device: from logits to the next token, and from that to the next step's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import StateKind
from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling.reference import workspace_size

from .build import Build
from .embedding import NetworkInput
from .state import EXAMPLE_SLOTS, register_state


class SamplingState(nn.Module):
    """How each session samples, its last token and that one's position: what a step starts from, and what it leaves.

    Buffers of [slots], each written on the device: `token` int64 and its `position` int64, which the model has not seen
    yet; and the fields of `SamplingTensors`.
    """

    token: Tensor
    position: Tensor
    scratch: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.kernels = build.kernels
        with torch.device("cpu"):
            params = SamplingParams(seed=0).tensors()._asdict()
            register_state(
                self,
                StateKind.SAMPLING,
                token=torch.zeros(EXAMPLE_SLOTS, dtype=torch.int64),
                position=torch.zeros(EXAMPLE_SLOTS, dtype=torch.int64),
                **{name: value.repeat(EXAMPLE_SLOTS) for name, value in params.items()},
            )
            register_state(self, StateKind.WORKSPACE, scratch=torch.zeros(workspace_size(), dtype=torch.int64))

    @property
    def params(self) -> SamplingTensors:
        return SamplingTensors(*(self.get_buffer(name) for name in SamplingTensors._fields))

    def begin(self, input_pos: Tensor, slots: Tensor, *params: Tensor) -> Tensor:
        """Have `next` sample the token that will stand at `input_pos` [1]; keep the parameters, the fields of
        `SamplingTensors`, for the session of `slots` [1].

        Returns the position ahead of it, [1].
        """
        for kept, given in zip(self.params, params, strict=True):
            kept.index_copy_(0, slots, given)
        return input_pos - 1

    def next(self, logits: Tensor, input_pos: Tensor, slots: Tensor) -> Tensor:
        """Sample the tokens behind rows, and make each its slot's last. logits [T, V], input_pos and slots [T] -> [T]."""
        last = LastTokens(self.token, self.position)
        return self.kernels.sample_next(logits, input_pos, slots, last, self.params, self.scratch)

    def next_of(self, logits: Tensor, input_pos: Tensor, slots: Tensor, logits_indices: Tensor) -> Tensor:
        """As `next` for the rows `logits_indices` [L] of input_pos and slots; logits [L, V] -> [L]."""
        return self.next(logits, input_pos.index_select(0, logits_indices), slots.index_select(0, logits_indices))


class NextInput(nn.Module):
    """What `NetworkInput` gives for the tokens that steps have left."""

    def __init__(self, sampling: SamplingState, network_input: NetworkInput) -> None:
        super().__init__()
        self.sampling = sampling
        self.network_input = network_input

    def forward(self, slots: Tensor) -> tuple[Tensor, ...]:
        """The last token of each of `slots` [T] -> (input_pos [T] int64, then what `NetworkInput.rows` gives)."""
        position = self.sampling.position.index_select(0, slots)
        return (position, *self.network_input.rows(self.sampling.token.index_select(0, slots), position))

    def rows(self, tokens: Tensor, input_pos: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """tokens, input_pos and slots [T] -> as `forward`. A negative number stands for that of the slot's last token."""
        kept = slots.clamp(min=0)
        position = torch.where(input_pos < 0, self.sampling.position.index_select(0, kept), input_pos)
        tokens = torch.where(tokens < 0, self.sampling.token.index_select(0, kept), tokens)
        return (position, *self.network_input.rows(tokens, position))
