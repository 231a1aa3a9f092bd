"""The frame of a decoder-only language model: embedding, layers, final norm, head, and sampling on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from ostinato.export.compile.trace import Link
from ostinato.export.layers.build import Build
from ostinato.export.layers.embedding import Embedding, NetworkInput
from ostinato.export.layers.head import Head
from ostinato.export.layers.linear import Linear
from ostinato.export.layers.norms import RMSNorm
from ostinato.export.layers.rotary import RotaryEmbedding, RotaryTables
from ostinato.export.layers.sampling import NextInput, SamplingState

from .config import ModelConfig


class Layer(nn.Module, ABC):
    """A layer of any family."""

    @abstractmethod
    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]: ...


class Decoder(nn.Module):
    """The modules whose names begin with `model.` in the checkpoint."""

    def __init__(self, config: ModelConfig, build: Build, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, build)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LanguageModel(nn.Module):
    """A network with its state. Parameters have the checkpoint's names: under `model.` and `lm_head.`.

    `forward(tokens [1, T] int64, input_pos [T] int64, slots [T] int64)` returns the logits of a prompt's last token, [1,
    vocab] float32, and advances the slot's state by the prompt's tokens. Positions and slots are as in `RowIndex`.

    Args:
        config: the family's config.
        build: the settings that all layers were built with.
        layers: one module per layer. Its `links(prefix, step, streamed)` lead from the values x [T, H], input_pos and slots
            [T], cos and sin to the next x. `step` and `streamed` are as in `layer_links` below.
        rotary: module that computes cos and sin. With `RotaryTables`, the links of a layer name those that they take.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        layers: Sequence[Layer],
        rotary: RotaryEmbedding | RotaryTables,
    ) -> None:
        super().__init__()
        self.config = config
        self.build = build
        self.model = Decoder(config, build, layers)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, build)
        self.tie()
        # Modules for links of chains. They hold the parameters above again, and no others.
        self.input = NetworkInput(self.model.embed_tokens, rotary)
        self.head = Head(self.model.norm, self.lm_head, build)
        self.sampling = SamplingState(build, config.vocab_size)
        self.next_input = NextInput(self.sampling, self.input)

    def tie(self) -> None:
        """Let the head share the embedding's weight, if the config ties them and both are stored alike."""
        embedding, head = self.model.embed_tokens, self.lm_head
        form = embedding.formats["weight"]
        # Rows of nibbles cannot be looked up in panels.
        in_rows = form is None or form.per_value == 1 or not head.panels
        if self.config.tie_word_embeddings and embedding.formats == head.formats and in_rows:
            for name in ("weight", "weight_scale", "weight_minimum"):
                setattr(head, name, getattr(embedding, name))
            embedding.panels = head.panels

    def layer_links(self, step: bool = False, streamed: bool = False) -> list[Link]:
        """The links of all layers, in order.

        Args:
            step: whether layers use the operations of a step, which `build.kernels` folds into few kernels.
            streamed: whether the device computes some of the experts that stay on the host.
        """
        return [
            link
            for index, layer in enumerate(self.model.layers)
            for link in cast(Layer, layer).links(f"model.layers.{index}.", step, streamed)
        ]

    def prompt_links(self, step: bool = False, streamed: bool = False) -> list[Link]:
        """The links that compute a prompt, in order: input, layers and head. For the arguments see `layer_links`."""
        start = Link(self.input, self.input.names, "embedding")
        return [start, *self.layer_links(step, streamed), Link(self.head, ("logits",), "head")]

    def forward(self, tokens: Tensor, input_pos: Tensor, slots: Tensor) -> Tensor:
        values = {"tokens": tokens, "input_pos": input_pos, "slots": slots}
        for link in self.prompt_links():
            link.run(values)
        return values["logits"]
