"""Sampling for CPUs: `reference.sample_next`."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.operators_cpu import LIBRARY


def sample_next(logits: Tensor, positions: Tensor, slots: Tensor, last: LastTokens, params: SamplingTensors) -> Tensor:
    """See `reference.sample_next`."""
    return _sample_next(logits, positions, slots, last.token, last.position, *params)


@LIBRARY.operator(
    "sample_next(Tensor logits, Tensor positions, Tensor slots, Tensor(a!) token, Tensor(b!) position, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor seed, Tensor min_p) -> Tensor"
)
def _sample_next(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    token: Tensor,
    position: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    min_p: Tensor,
) -> Tensor:
    return torch.empty_like(slots)
