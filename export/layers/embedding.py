"""The beginning of a network: turns tokens and positions into the input of the first layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ostinato.export.kernels.linear.panels import rows_of_panels, rows_of_scale

from .build import Build
from .rotary import RotaryEmbedding, RotaryTables
from .stored import StoredWeights


class Embedding(StoredWeights):
    """One vector per token: `weight` [V, H]. In panels, which it shares with a head, it is no format of nibbles.

    Attributes:
        token_fraction: fraction of its weights that one token reads.
    """

    weight: Tensor
    weight_scale: Tensor | None
    weight_minimum: Tensor | None

    def __init__(self, rows: int, size: int, build: Build) -> None:
        super().__init__(build.dtype)
        self.token_fraction = 1 / rows
        self.store_as("weight", None if build.quant is None else build.quant.embedding, (rows, size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, H]."""
        form = self.formats["weight"]
        if self.panels:
            # A head shares this weight.
            values = rows_of_panels(self.weight, tokens)
        else:
            values = F.embedding(tokens, self.weight) if form is None else self.weight[tokens]
        if form is None or self.weight_scale is None:
            return values
        scale = rows_of_scale(self.weight_scale, tokens) if self.panels else self.weight_scale[tokens]
        minimum = None if self.weight_minimum is None else self.weight_minimum[tokens]
        return form.dequantize(values, scale, minimum, self.dtype)


class NetworkInput(nn.Module):
    """Token embedding and rotary angles.

    Attributes:
        names: names of the values in a chain that hold what `rows` returns.
    """

    def __init__(self, embed_tokens: Embedding, rotary: RotaryEmbedding | RotaryTables) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.rotary = rotary
        self.names = ("x", *rotary.names)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Compute the first layer's input for a prompt, tokens [1, T] and input_pos [T] int64: what `rows` returns."""
        return self.rows(tokens[0], input_pos)

    def rows(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """tokens and input_pos [T] int64 -> (x [T, H], cos, sin [T, rotary_dim] float32 of each rotary embedding)."""
        return (self.embed_tokens(tokens), *self.rotary(input_pos))
