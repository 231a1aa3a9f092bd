"""The end of a step on the device: samples the next token from logits, and makes the next step's input from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import StateKind
from ostinato.delegate.logits_processing import Processing, ProcessingTensors, processing_tensors, words_of
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing

from .build import Build
from .embedding import NetworkInput
from .state import EXAMPLE_SLOTS, register_state


class SamplingState(nn.Module):
    """State of sampling: each session's parameters, its last token, and this token's position. A step reads and updates them.

    Buffers of [slots], each written on the device: `token` int64, which the model has not seen yet; its `position` int64; the
    fields of `SamplingTensors`; and `processed` int64, whether and when the slot's logits are changed first (`Processing`).
    For that it has the fields of `ProcessingTensors`, [slots, ...] each.

    Args:
        build: the settings that all layers were built with.
        vocab: number of tokens that the model has.
    """

    token: Tensor
    position: Tensor
    processed: Tensor

    def __init__(self, build: Build, vocab: int) -> None:
        super().__init__()
        self.kernels = build.kernels
        with torch.device("cpu"):
            params = SamplingParams(seed=0)
            register_state(
                self,
                StateKind.SAMPLING,
                token=torch.zeros(EXAMPLE_SLOTS, dtype=torch.int64),
                position=torch.zeros(EXAMPLE_SLOTS, dtype=torch.int64),
                processed=torch.full((EXAMPLE_SLOTS,), Processing.OFF.value),
                **{name: value.repeat(EXAMPLE_SLOTS) for name, value in params.tensors()._asdict().items()},
            )
            register_state(self, StateKind.LOGITS_PROCESSING, **_processing_rows(params, vocab))

    def next(self, logits: Tensor, input_pos: Tensor, slots: Tensor) -> Tensor:
        """Sample the token after each row, and keep it as the slot's last token. logits [T, V], input_pos and slots [T] ->
        [T]."""
        return self._sampled(logits, input_pos, slots, late=False)

    def next_of(self, logits: Tensor, input_pos: Tensor, slots: Tensor, logits_indices: Tensor) -> Tensor:
        """Call `next` for the rows `logits_indices` [L] of input_pos and slots; -1 is padding. logits [L, V] -> [L]."""
        rows = logits_indices.clamp(min=0)
        slots = torch.where(logits_indices < 0, -1, slots.index_select(0, rows))
        return self.next(logits, input_pos.index_select(0, rows), slots)

    def sample(self, logits: Tensor, tokens: Tensor, input_pos: Tensor, slots: Tensor) -> Tensor:
        """Sample the token after each row, as `next` does, also where a step has left it for later.

        Args:
            logits: [L, V] float32.
            tokens, input_pos, slots: [L] int64. Rows of slot -1 change nothing, and give their token of `tokens`.

        Returns:
            [L] int64.
        """
        return torch.where(slots < 0, tokens, self._sampled(logits, input_pos, slots, late=True))

    def logprobs(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `logprob_tensors` gives for logits [L, V] and tokens [L]."""
        return self.kernels.logprobs(logits, tokens)

    def _sampled(self, logits: Tensor, input_pos: Tensor, slots: Tensor, late: bool) -> Tensor:
        last = LastTokens(self.token, self.position)
        params = SamplingTensors(*map(self.get_buffer, SamplingTensors._fields))
        given = ProcessingTensors(*map(self.get_buffer, ProcessingTensors._fields))
        processing = LogitsProcessing(self.processed, given)
        return self.kernels.sample_next(logits, input_pos, slots, last, params, processing, late)


def _processing_rows(params: SamplingParams, vocab: int) -> dict[str, Tensor]:
    """The fields of `ProcessingTensors` for EXAMPLE_SLOTS slots, before any token. Zeros take no memory until they are
    written: a config may ask for a vocabulary that no memory holds, and is refused later."""
    sizes = {"prompt_tokens": words_of(vocab), "output_counts": vocab, "allowed_tokens": words_of(vocab)}
    rows = {}
    for name, first in processing_tensors(params, (), 0, 1, ())._asdict().items():
        shape = (EXAMPLE_SLOTS, sizes[name]) if name in sizes else (EXAMPLE_SLOTS, *first.shape[1:])
        value = first.flatten()[0].item()
        rows[name] = torch.full(shape, value, dtype=first.dtype) if value else torch.zeros(shape, dtype=first.dtype)
    return rows


class NextInput(nn.Module):
    """Makes the input of a step from the tokens that earlier steps kept in `SamplingState`."""

    def __init__(self, sampling: SamplingState, network_input: NetworkInput) -> None:
        super().__init__()
        self.sampling = sampling
        self.network_input = network_input

    def forward(self, slots: Tensor) -> tuple[Tensor, ...]:
        """slots [T], whose last tokens are taken -> (input_pos [T] int64, and what `NetworkInput.rows` returns)."""
        position = self.sampling.position.index_select(0, slots)
        return (position, *self.network_input.rows(self.sampling.token.index_select(0, slots), position))

    def rows(self, tokens: Tensor, input_pos: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """tokens, input_pos and slots [T] -> what `forward` returns. A negative number stands for the slot's last token or
        its position."""
        kept = slots.clamp(min=0)
        position = torch.where(input_pos < 0, self.sampling.position.index_select(0, kept), input_pos)
        tokens = torch.where(tokens < 0, self.sampling.token.index_select(0, kept), tokens)
        return (position, *self.network_input.rows(tokens, position))
