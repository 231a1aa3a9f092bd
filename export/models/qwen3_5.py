"""Qwen3.5, the text model: a hybrid of gated delta-nets and gated full attention, with dense layers or sparse experts.

Modules have the names of the Hugging Face checkpoint, except for the projections in `FAMILY.names.stacked`. These projections
read the same input, and are one product here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError
from ostinato.export.compile.trace import Link
from ostinato.export.formats.format import Format
from ostinato.export.kernels.attention.limits import check_attention
from ostinato.export.kernels.delta_rule.limits import check_delta_rule
from ostinato.export.kernels.experts.limits import check_experts
from ostinato.export.kernels.operands import RowIndex
from ostinato.export.layers.attention import Attention, AttentionSizes
from ostinato.export.layers.build import Build
from ostinato.export.layers.delta_net import DeltaNetSizes, GatedDeltaNet
from ostinato.export.layers.experts import MoeSizes, SparseMoe
from ostinato.export.layers.feed_forward import SwiGLU
from ostinato.export.layers.host_experts import GIVEN, HostExperts
from ostinato.export.layers.norms import RMSNorm
from ostinato.export.layers.rotary import RotaryEmbedding
from ostinato.export.layers.stored import kind_of
from ostinato.export.weights.checkpoint import CheckpointNames
from ostinato.export.weights.dummy import DummySpreads

from . import config as read
from . import qwen3_5_gguf as gguf_files
from .config import MAX_COUNT, ModelConfig, Settings
from .family import Family
from .language_model import LanguageModel, Layer

MOE_MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
DENSE_MODEL_TYPES = ("qwen3_5_text", "qwen3_5")

LINEAR, FULL = "linear_attention", "full_attention"
LAYER_TYPES = (LINEAR, FULL)

# Settings that shape the network -> the values that it is written for. An absent or null setting means the first value. These
# are not read: settings for training only (dropout, initialisation, auxiliary loss), vision, multi-token prediction, the
# state's dtype (always float32), and `mrope_section`, because a text token's position is the same number on all three axes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    "use_sliding_window": (False,),
    "output_gate_type": ("silu", "swish"),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "per_layer_config": ({},),
}


@dataclass(frozen=True)
class Qwen3_5Config(ModelConfig):
    """Config of the text model. Names are those of transformers' `Qwen3_5MoeTextConfig` and `Qwen3_5TextConfig`, where they
    have them.

    A dense model has an `intermediate_size`, and 0 for the sizes of experts. A model with experts has 0 for
    `intermediate_size`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    intermediate_size: int

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_expert_layers(self) -> int:
        return self.num_hidden_layers if self.is_moe else 0

    @property
    def experts_per_layer(self) -> int:
        return self.num_experts

    @property
    def attention(self) -> AttentionSizes:
        return AttentionSizes(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            qk_norm=True,
            gated=True,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
        )

    @property
    def delta_net(self) -> DeltaNetSizes:
        return DeltaNetSizes(
            self.hidden_size,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    @property
    def moe(self) -> MoeSizes:
        return MoeSizes(
            self.hidden_size,
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.shared_expert_intermediate_size,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Qwen3_5Config:
        """Read the content of a config.json: the text model's settings, or a multimodal model's with them in `text_config`.

        Raises:
            CheckpointError: a setting is missing, of a wrong type or not supported; the message names it.
        """
        with_experts = data["model_type"] in MOE_MODEL_TYPES
        text = read.text_config(data, MOE_MODEL_TYPES if with_experts else DENSE_MODEL_TYPES)
        settings = Settings(text)
        settings.refuse_other_than(_ONLY)
        read.refuse_quantized(Settings(data, text))
        rope = read.rope_parameters(text, LAYER_TYPES)
        head_dim = settings.size("head_dim")
        # A model has experts, or it is dense. The sizes of the other kind are 0.
        moe, dense = (settings.size, _zero) if with_experts else (_zero, settings.size)
        config = cls(
            model_type=data["model_type"],
            vocab_size=settings.size("vocab_size"),
            hidden_size=settings.size("hidden_size"),
            layer_types=_layer_types(settings),
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.tied(data, text),
            max_position_embeddings=settings.size("max_position_embeddings", 32768),
            dtype=read.dtype(Settings(text, data)),
            num_attention_heads=settings.size("num_attention_heads"),
            num_key_value_heads=settings.size("num_key_value_heads"),
            head_dim=head_dim,
            attention_bias=settings.flag("attention_bias", False),
            rotary_dim=read.rotary_dim(rope, head_dim, 0.25),
            rope_theta=rope.number("rope_theta", 10000.0),
            linear_num_key_heads=settings.size("linear_num_key_heads"),
            linear_num_value_heads=settings.size("linear_num_value_heads"),
            linear_key_head_dim=settings.size("linear_key_head_dim"),
            linear_value_head_dim=settings.size("linear_value_head_dim"),
            linear_conv_kernel_dim=settings.size("linear_conv_kernel_dim", maximum=MAX_COUNT),
            num_experts=moe("num_experts"),
            num_experts_per_tok=moe("num_experts_per_tok"),
            moe_intermediate_size=moe("moe_intermediate_size"),
            shared_expert_intermediate_size=moe("shared_expert_intermediate_size"),
            intermediate_size=dense("intermediate_size"),
        )
        _check(config)
        return config


def _zero(name: str) -> int:
    return 0


def _layer_types(settings: Settings) -> tuple[str, ...]:
    """`layer_types` of the config. Without this setting, every `full_attention_interval`-th layer has full attention."""
    types = settings.get("layer_types")
    if types is None:
        interval = settings.size("full_attention_interval", 4)
        count = settings.size("num_hidden_layers", maximum=MAX_COUNT)
        return tuple(LAYER_TYPES[(index + 1) % interval == 0] for index in range(count))
    if not isinstance(types, list) or not types or len(types) != settings.size("num_hidden_layers", len(types)):
        raise CheckpointError("config.json: layer_types must be a list of num_hidden_layers names")
    if len(types) > MAX_COUNT:
        raise CheckpointError(f"config.json: layer_types must have at most {MAX_COUNT} names, got {len(types)}")
    unknown = sorted({name if isinstance(name, str) else read.short(name) for name in types if name not in LAYER_TYPES})
    if unknown:
        raise CheckpointError(
            f"unsupported layer types in config.json: {', '.join(unknown)[:200]}; supported are: "
            f"{', '.join(LAYER_TYPES)}"
        )
    return tuple(types)


def _check(config: Qwen3_5Config) -> None:
    read.check_multiple(config, "num_attention_heads", "num_key_value_heads")
    read.check_multiple(config, "linear_num_value_heads", "linear_num_key_heads")
    if config.num_experts_per_tok > config.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) must be 1 to num_experts ({config.num_experts})"
        )
    if config.linear_conv_kernel_dim < 2:
        raise CheckpointError(
            f"config.json: linear_conv_kernel_dim must be 2 or more, got {config.linear_conv_kernel_dim}"
        )


class DecoderLayer(Layer):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Qwen3_5Config, layer_type: str, build: Build, on_host: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_type = layer_type
        if layer_type == LINEAR:
            self.linear_attn = GatedDeltaNet(config.delta_net, eps, build)
        else:
            self.self_attn = Attention(config.attention, eps, build)
        if config.is_moe:
            self.mlp: SparseMoe | SwiGLU = SparseMoe(config.moe, build, on_host)
        else:
            self.mlp = SwiGLU(size, config.intermediate_size, build)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        # Refers to modules of this layer, and adds no others.
        self.parts: HostExperts | None = None
        if on_host and isinstance(self.mlp, SparseMoe):
            self.parts = HostExperts(self.mlp, self.post_attention_layernorm)

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        """The links from the value `x` to the next `x`."""
        if self.parts is None:
            kind = kind_of(self, f"{self.layer_type} layer")
            return [Link(self, ("x",), kind, prefix, "step" if step else "forward")]
        mixer = Link(self, GIVEN, kind_of(self, f"{self.layer_type} mixer"), prefix, "mix_step" if step else "mix")
        return [mixer, *self.parts.links(prefix, step, streamed)]

    @property
    def mixer(self) -> GatedDeltaNet | Attention:
        return self.linear_attn if self.layer_type == LINEAR else self.self_attn

    def forward(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. The other arguments are the fields of a `RowIndex`."""
        x = self._mixed(x, RowIndex(input_pos, slots, cos, sin))
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed, slots) if isinstance(self.mlp, SparseMoe) else self.mlp(normed))

    def step(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Norms and additions are computed inside the kernels."""
        h, norm = self._mixed_step(x, RowIndex(input_pos, slots, cos, sin)), self.post_attention_layernorm
        return self.mlp.step(h, norm, slots) if isinstance(self.mlp, SparseMoe) else self.mlp.step(h, norm)

    def mix(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Compute `forward` up to the choice of experts. Returns the values `GIVEN` for `HostExperts.links`."""
        assert self.parts is not None
        return self.parts.route(self._mixed(x, RowIndex(input_pos, slots, cos, sin)), slots)

    def mix_step(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Compute `step` up to the choice of experts. Returns the values `GIVEN`."""
        assert self.parts is not None
        return self.parts.route_step(self._mixed_step(x, RowIndex(input_pos, slots, cos, sin)), slots)

    def _mixed(self, x: Tensor, index: RowIndex) -> Tensor:
        return x + self.mixer(self.input_layernorm(x), index)

    def _mixed_step(self, x: Tensor, index: RowIndex) -> Tensor:
        return self.mixer.step(x, self.input_layernorm, index)


def network(config: Qwen3_5Config, build: Build) -> LanguageModel:
    """The network of a config. `build_network` calls this on the meta device: parameters have shapes and no values."""
    layers = [
        DecoderLayer(config, layer_type, build, on_host=index < build.cpu_moe)
        for index, layer_type in enumerate(config.layer_types)
    ]
    return LanguageModel(config, build, layers, RotaryEmbedding(config.rotary_dim, config.rope_theta))


def check_limits(config: Qwen3_5Config, form: Format | None, device: str, dtype: torch.dtype) -> None:
    """Raise ExportError if a size breaks a limit of quantisation or of the kernels. The message names both."""
    if form is not None:
        form.check(_quantized_sizes(config))
    if device == "cuda":
        _check_kernels(config, form, dtype)


def _check_kernels(config: Qwen3_5Config, form: Format | None, dtype: torch.dtype) -> None:
    attention, delta_net, moe = config.attention, config.delta_net, config.moe
    if FULL in config.layer_types:
        check_attention(attention.heads, attention.kv_heads, attention.head_dim, dtype)
    if LINEAR in config.layer_types:
        check_delta_rule(delta_net.key_heads, delta_net.value_heads, delta_net.key_head_dim, delta_net.value_head_dim)
    if config.is_moe:
        check_experts(moe.hidden, moe.inner, moe.experts, moe.top_k, form)


def _quantized_sizes(config: Qwen3_5Config) -> dict[str, int]:
    """Name in the config -> length, for the rows of weights that are quantised."""
    sizes = {"hidden_size": config.hidden_size}
    if FULL in config.layer_types:
        sizes["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
    if LINEAR in config.layer_types:
        sizes["linear_num_value_heads * linear_value_head_dim"] = config.delta_net.values
    if config.is_moe:
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
        sizes["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    else:
        sizes["intermediate_size"] = config.intermediate_size
    return sizes


FAMILY = Family(
    model_types=MOE_MODEL_TYPES + DENSE_MODEL_TYPES,
    config=Qwen3_5Config.from_dict,
    network=network,
    check_limits=check_limits,
    gguf={DENSE_MODEL_TYPES[0]: gguf_files.DENSE, MOE_MODEL_TYPES[0]: gguf_files.MOE},
    names=CheckpointNames(
        stacked={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
            "in_proj_ba": ("in_proj_b", "in_proj_a"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        # In a multimodal checkpoint, the text model's names begin with `model.language_model.`.
        renamed=("model.language_model.", "model."),
        # The text model has no multi-token prediction and no vision, and it computes `inv_freq`.
        skipped=re.compile(r"^(mtp\.|model\.visual\.|visual\.|model\.mtp\.)|rotary_emb\.inv_freq$"),
        # All norms but the one inside a delta-net.
        offsets=re.compile(r"(?<!linear_attn\.)norm\.weight$"),
    ),
    spreads=DummySpreads(
        by_ending={
            "A_log": (0.0, 0.5),
            "norm.weight": (1.0, 0.1),
            "conv1d.weight": (0.0, 0.5),
        },
        adding=(".out_proj", ".o_proj", ".down_proj"),
    ),
)
