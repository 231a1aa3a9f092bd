"""Linear layers and embeddings, in the model's dtype or quantised, and how a model is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels import Kernels, StepKernels
from .config import ModelConfig

SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Build:
    """What all building blocks are made from.

    Attributes:
        config: the model's shape.
        max_seq_len: slots of the KV caches.
        max_chunk: most tokens of one call.
        dtype: of activations, and of weights that are not quantised.
        kernels: the functions for the device that the code is compiled for.
        group_size: elements a scale, for int4 linear layers and experts and an int8 embedding; None: no quantisation.
    """

    config: ModelConfig
    max_seq_len: int
    max_chunk: int
    dtype: torch.dtype
    kernels: Kernels
    group_size: int | None = None

    @property
    def step(self) -> StepKernels | None:
        """The kernels that take one token through a layer; None where one token goes the way of many."""
        whole = self.group_size is not None and not self.config.attention_bias
        return self.kernels.step if whole else None


class Int4Linear(nn.Module):
    """`x @ w.T` with w in the packed layout of `kernels.int4`: `weight` [N, K / 2] uint8, `weight_scale` [N, K / G]."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, build: Build, group_size: int) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.weight_scale = _frozen(torch.empty(out_features, in_features // group_size, dtype=SCALE_DTYPE))
        self.int4_linear = build.kernels.int4_linear

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        return self.int4_linear(x, self.weight, self.weight_scale)


class Int8Embedding(nn.Module):
    """Rows of 8-bit integers with a scale for each group: `weight` [V, H] int8, `weight_scale` [V, H / G]."""

    def __init__(self, rows: int, size: int, build: Build, group_size: int) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(rows, size, dtype=torch.int8))
        self.weight_scale = _frozen(torch.empty(rows, size // group_size, dtype=SCALE_DTYPE))
        self.dtype = build.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, H]."""
        scale = self.weight_scale[tokens].float().unsqueeze(-1)
        groups = self.weight[tokens].unflatten(-1, (scale.shape[-2], -1))
        return (groups.float() * scale).flatten(-2).to(self.dtype)


def make_linear(in_features: int, out_features: int, build: Build, bias: bool = False) -> nn.Module:
    """A linear layer in int4 where the build asks for it. A layer with a bias stays in the model's dtype."""
    if build.group_size is None or bias:
        return nn.Linear(in_features, out_features, bias=bias, dtype=build.dtype)
    return Int4Linear(in_features, out_features, build, build.group_size)


def packed(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and scale of an int4 layer."""
    assert isinstance(layer, Int4Linear)
    return layer.weight, layer.weight_scale


def make_embedding(rows: int, size: int, build: Build) -> nn.Module:
    if build.group_size is None:
        return nn.Embedding(rows, size, dtype=build.dtype)
    return Int8Embedding(rows, size, build, build.group_size)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
