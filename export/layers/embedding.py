"""The beginning of a network: turns tokens and positions into the input of the first layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostinato.export.formats.int4 import SCALE_DTYPE
from ostinato.export.kernels.linear.panels import rows_of_panels

from .build import Build, parameter
from .rotary import RotaryEmbedding


class Embedding(nn.Module):
    """One vector per token: `weight` [V, H] in the model's dtype.

    If the build quantises, `weight` is int8 and `weight_scale` is [V, H / G], with one scale per group.

    Attributes:
        token_fraction: fraction of its weights that one token reads.
        panels: see `Linear`. Set if a head shares this weight.
    """

    weight: Tensor
    weight_scale: Tensor | None

    def __init__(self, rows: int, size: int, build: Build) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.token_fraction = 1 / rows
        self.panels: tuple[str, ...] = ()
        if build.group_size is None:
            self.weight, self.weight_scale = parameter(rows, size, dtype=build.dtype), None
        else:
            self.weight = parameter(rows, size, dtype=torch.int8)
            self.weight_scale = parameter(rows, size // build.group_size, dtype=SCALE_DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, H]."""
        if self.panels:
            return rows_of_panels(self.weight, tokens)
        if self.weight_scale is None:
            return F.embedding(tokens, self.weight)
        scale = self.weight_scale[tokens].float().unsqueeze(-1)
        groups = self.weight[tokens].unflatten(-1, (scale.shape[-2], -1))
        return (groups.float() * scale).flatten(-2).to(self.dtype)


class NetworkInput(nn.Module):
    """Token embedding and rotary angles."""

    def __init__(self, embed_tokens: Embedding, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.rotary = rotary

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the first layer's input for a prompt, tokens [1, T] and input_pos [T] int64: what `rows` returns."""
        return self.rows(tokens[0], input_pos)

    def rows(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens and input_pos [T] int64 -> (x [T, H], cos, sin [T, rotary_dim] float32)."""
        return (self.embed_tokens(tokens), *self.rotary(input_pos))
