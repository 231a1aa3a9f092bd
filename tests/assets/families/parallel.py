"""A family of one's own: attention and the feed-forward layer read the same norm, and both are added to what it read.

    ostinato export --family-module parallel.py --model CHECKPOINT --output ARTIFACT

Config and checkpoint have the names that Llama's have, without `post_attention_layernorm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ostinato.export import Family, Link, register_family
from ostinato.export.kernels.operands import RowIndex
from ostinato.export.layers.attention import Attention
from ostinato.export.layers.build import Build
from ostinato.export.layers.feed_forward import SwiGLU
from ostinato.export.layers.norms import RMSNorm
from ostinato.export.layers.rotary import RotaryEmbedding
from ostinato.export.models.dense import NAMES, SPREADS, DenseConfig, Differences, check_limits, read_config
from ostinato.export.models.language_model import LanguageModel, Layer


def config(data: Mapping[str, Any]) -> DenseConfig:
    return read_config(Differences(), data)


class ParallelLayer(Layer):
    """x + attention(norm(x)) + feed_forward(norm(x))."""

    def __init__(self, config: DenseConfig, layer_type: str, build: Build) -> None:
        super().__init__()
        self.self_attn = Attention(config.attention_of(layer_type), config.rms_norm_eps, build)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, build)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        # One kind of layer: it is traced and compiled once.
        return [Link(self, ("x",), "parallel layer", prefix, "step" if step else "forward")]

    def forward(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """A prompt, x [T, H] -> [T, H]."""
        normed = self.input_layernorm(x)
        return x + self.self_attn(normed, RowIndex(input_pos, slots, cos, sin)) + self.mlp(normed)

    def step(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Any rows, x [T, H] -> [T, H], with the operations that kernels fold."""
        norm, kernels = self.input_layernorm, self.mlp.kernels
        attended = self.self_attn.step(x, norm, RowIndex(input_pos, slots, cos, sin))
        hidden = kernels.norm_swiglu(x, norm.operand, self.mlp.gate_up_proj.operand)
        return kernels.linear_add(hidden, self.mlp.down_proj.operand, attended)


def network(config: DenseConfig, build: Build) -> LanguageModel:
    layers = [ParallelLayer(config, layer_type, build) for layer_type in config.layer_types]
    return LanguageModel(config, build, layers, RotaryEmbedding(config.attention.head_dim, config.rope_theta))


register_family(
    Family(
        model_types=("parallel",),
        config=config,
        network=network,
        check_limits=check_limits,
        names=NAMES,
        spreads=SPREADS,
    )
)
