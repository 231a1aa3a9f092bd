"""A network -> the methods of its program, as chains of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from ..delegate import artifact
from .kernels import StepKernels
from .models import Decoder, Qwen3_5
from .models.attention import Place
from .models.qwen3_5 import DecoderLayer
from .trace import Chain, Link


def model_methods(network: Qwen3_5) -> dict[str, Chain]:
    """The methods of a language model, from the same modules.

    - `prefill(tokens [1, T] int64, input_pos [T] int64) -> logits [1, vocab] float32` of the last position, 2 <= T.
    - `decode(tokens [1, 1] int64, input_pos [1] int64) -> logits [1, vocab] float32`.
    - `sample(logits [1, vocab] float32, input_pos [1] int64, temperature [1] float32, top_k [1] int64, top_p [1] float32,
      seed [1] int64) -> token [1, 1] int64`: draws the token that will stand at input_pos, and keeps it, its position and
      the parameters in the buffers `sampling.*`.
    - `decode_sample() -> token [1, 1] int64, logits [1, vocab] float32`: `decode` of the kept token at its position, then
      draws the next one and keeps it. It needs nothing from the host.

    Chains, so that a kind of layer is traced and compiled once: a model of 40 layers takes as long as one of 4.
    """
    layers = cast(list[DecoderLayer], list(network.model.layers))
    many = [Link(_Embedding(network), ("x", "delta", "cos", "sin"), "embedding")]
    many += _links(layers, ("x", "delta"))
    many.append(Link(_Head(network), ("logits",), "head"))
    step = network.build.step
    if step is None:
        one = many[1:]
        first = many[0]
        again = Link(_NextEmbedding(network), ("input_pos", "x", "cos", "sin", "delta"), "embedding")
    else:
        one = _links([_StepLayer(layer, step) for layer in layers], ("x",))
        one.append(Link(_StepHead(network, step), ("logits",), "head"))
        first = Link(_StepEmbedding(network), ("x", "cos", "sin"), "embedding")
        again = Link(_NextEmbedding(network), ("input_pos", "x", "cos", "sin"), "embedding")
    longest = network.build.max_chunk
    length = Dim("T", min=2, max=longest)
    example = min(130, longest)
    prefill = {"tokens": torch.zeros(1, example, dtype=torch.int64), "input_pos": torch.arange(example)}
    decode = {"tokens": torch.zeros(1, 1, dtype=torch.int64), "input_pos": torch.zeros(1, dtype=torch.int64)}
    begin = {
        "logits": torch.zeros(1, network.build.config.vocab_size),
        "input_pos": torch.zeros(1, dtype=torch.int64),
        "temperature": torch.zeros(1),
        "top_k": torch.zeros(1, dtype=torch.int64),
        "top_p": torch.ones(1),
        "seed": torch.zeros(1, dtype=torch.int64),
    }
    return {
        artifact.PREFILL: Chain(many, prefill, ("logits",), {"tokens": {1: length}, "input_pos": {0: length}}),
        artifact.DECODE: Chain([first, *one], decode, ("logits",), {}),
        artifact.SAMPLE: Chain([Link(_Begin(network), ("token",), "sampling")], begin, ("token",), {}),
        artifact.DECODE_SAMPLE: Chain(
            [again, *one, Link(_Next(network), ("token",), "sampling")], {}, ("token", "logits"), {}
        ),
    }


def _links(layers: Sequence[DecoderLayer | _StepLayer], outputs: tuple[str, ...]) -> list[Link]:
    return [
        Link(layer, outputs, f"{layer.layer_type} layer", f"model.layers.{index}.")
        for index, layer in enumerate(layers)
    ]


class _Embedding(nn.Module):
    """The first link of a chain, under the network's names."""

    def __init__(self, network: Qwen3_5) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.model.rotary = network.model.embed_tokens, network.model.rotary

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.embed(tokens, input_pos)

    def embed(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return Decoder.embed(self.model, tokens, input_pos)  # type: ignore[arg-type]


class _StepEmbedding(_Embedding):
    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, _, cos, sin = self.embed(tokens, input_pos)
        return x, cos, sin


class _NextEmbedding(_Embedding):
    """Takes the token and its position from where the last step has left them."""

    def __init__(self, network: Qwen3_5) -> None:
        super().__init__(network)
        self.sampling = network.sampling
        self._adds = network.build.step is None

    def forward(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        position = self.sampling.position.clone()
        x, delta, cos, sin = self.embed(self.sampling.token, position)
        return (position, x, cos, sin, delta) if self._adds else (position, x, cos, sin)


class _StepLayer(nn.Module):
    """A layer that takes one token, under the layer's names."""

    def __init__(self, layer: DecoderLayer, kernels: StepKernels) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.layer_type = layer.layer_type
        self._kernels = kernels

    def forward(self, x: Tensor, input_pos: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return DecoderLayer.step(self, x, Place(input_pos, cos, sin), self._kernels)  # type: ignore[arg-type]


class _Head(nn.Module):
    """The link that gives logits, under the network's names."""

    def __init__(self, network: Qwen3_5) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm, self.lm_head = network.model.norm, network.lm_head

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        return Qwen3_5.head(self, x, delta)  # type: ignore[arg-type]


class _StepHead(_Head):
    def __init__(self, network: Qwen3_5, kernels: StepKernels) -> None:
        super().__init__(network)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return Qwen3_5.step_head(self, x, self._kernels)  # type: ignore[arg-type]


class _Begin(nn.Module):
    def __init__(self, network: Qwen3_5) -> None:
        super().__init__()
        self.sampling = network.sampling

    def forward(
        self, logits: Tensor, input_pos: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor
    ) -> Tensor:
        return self.sampling.begin(logits, input_pos, temperature, top_k, top_p, seed)


class _Next(nn.Module):
    def __init__(self, network: Qwen3_5) -> None:
        super().__init__()
        self.sampling = network.sampling

    def forward(self, logits: Tensor) -> Tensor:
        return self.sampling.next(logits)
