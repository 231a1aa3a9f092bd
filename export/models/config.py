"""Shape of a Qwen3.5 text model, with experts or dense, read from a Hugging Face `config.json` as it stands."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...delegate.errors import CheckpointError

MOE_MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
DENSE_MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
SUPPORTED_MODEL_TYPES = MOE_MODEL_TYPES + DENSE_MODEL_TYPES

LAYER_TYPES = ("linear_attention", "full_attention")

# Settings that shape the network, and the values that it is written for; absent or null is the first of them. Not looked at
# are what acts in training only (dropout, initialisation, auxiliary loss), vision, multi-token prediction, the state's dtype
# (float32 always), and `mrope_section`: a text token's position is the same number on all three axes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "per_layer_config": ({},),
}


@dataclass(frozen=True)
class ModelConfig:
    """Names follow transformers' `Qwen3_5MoeTextConfig` and `Qwen3_5TextConfig` where they are the same thing.

    A dense model has an `intermediate_size` and zeros for what speaks of experts; a model with experts the other way round.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
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
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`.

        Raises:
            CheckpointError: no or broken config.json, an unsupported model type, or a setting that is not supported.
        """
        path = folder / "config.json"
        if not folder.is_dir():
            raise CheckpointError(f"no such folder: {folder}")
        if not path.exists():
            raise CheckpointError(f"{folder} is not a Hugging Face checkpoint: it has no config.json")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} is not the config of a model: expected a JSON object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """`data` is what config.json holds: the text model's settings, or a multimodal model's with them in `text_config`.

        Raises:
            CheckpointError: naming the setting that is missing, of a wrong type or not supported.
        """
        model_type = data.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise CheckpointError(
                f"unsupported model type {model_type!r} in config.json; supported are: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        text = _text_config(data, model_type)
        settings = _Settings(text)
        _refuse_unsupported(settings)
        _refuse_quantized(_Settings(data, text))
        rope = _rope_parameters(text)
        head_dim = settings.size("head_dim")
        moe, dense = (settings.size, _zero) if model_type in MOE_MODEL_TYPES else (_zero, settings.size)
        config = cls(
            model_type=model_type,
            vocab_size=settings.size("vocab_size"),
            hidden_size=settings.size("hidden_size"),
            layer_types=_layer_types(settings),
            num_attention_heads=settings.size("num_attention_heads"),
            num_key_value_heads=settings.size("num_key_value_heads"),
            head_dim=head_dim,
            attention_bias=settings.flag("attention_bias", False),
            rotary_dim=_rotary_dim(rope, head_dim),
            rope_theta=rope.number("rope_theta", 10000.0),
            linear_num_key_heads=settings.size("linear_num_key_heads"),
            linear_num_value_heads=settings.size("linear_num_value_heads"),
            linear_key_head_dim=settings.size("linear_key_head_dim"),
            linear_value_head_dim=settings.size("linear_value_head_dim"),
            linear_conv_kernel_dim=settings.size("linear_conv_kernel_dim"),
            num_experts=moe("num_experts"),
            num_experts_per_tok=moe("num_experts_per_tok"),
            moe_intermediate_size=moe("moe_intermediate_size"),
            shared_expert_intermediate_size=moe("shared_expert_intermediate_size"),
            intermediate_size=dense("intermediate_size"),
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=_tied(data, text),
            max_position_embeddings=settings.size("max_position_embeddings", 32768),
            dtype=_dtype(_Settings(text, data)),
        )
        _check(config)
        return config


class _Settings:
    """JSON objects read by name, the first that states a setting; null states nothing.

    Types are checked here: what JSON may hold instead of a size would fail far away.
    """

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def get(self, name: str) -> Any:
        return next((values[name] for values in self._objects if values.get(name) is not None), None)

    def size(self, name: str, default: int | None = None) -> int:
        value = self._stated(name, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: {name} must be a whole number of 1 or more, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._stated(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: {name} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._stated(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def word(self, name: str, default: str) -> str:
        value = self._stated(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {name} must be a string, got {value!r}")
        return value

    def _stated(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"config.json lacks {name!r}, which a model of its type needs")
        return default


def _zero(name: str) -> int:
    """The size of what the other family has."""
    return 0


def _text_config(data: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """The settings of the text model: `text_config` of a multimodal model, or all."""
    text = data.get("text_config", data)
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object, got {text!r}")
    family = MOE_MODEL_TYPES if model_type in MOE_MODEL_TYPES else DENSE_MODEL_TYPES
    inner = text.get("model_type", model_type)
    if inner not in family:
        raise CheckpointError(
            f"unsupported model type {inner!r} in config.json's text_config; in a {model_type} model "
            f"supported are: {', '.join(family)}"
        )
    return text


def _refuse_unsupported(settings: _Settings) -> None:
    for name, supported in _ONLY.items():
        value = settings.get(name)
        if value is not None and value not in supported:
            known = " or ".join(map(repr, supported))
            raise CheckpointError(f"unsupported {name} {value!r} in config.json; supported is: {known}")


def _refuse_quantized(settings: _Settings) -> None:
    """`quantization_config` is transformers' name, `quantization` MLX's."""
    for name in ("quantization_config", "quantization"):
        stored = settings.get(name)
        if stored:
            method = stored.get("quant_method", "unnamed") if isinstance(stored, dict) else stored
            raise CheckpointError(
                f"unsupported {name} in config.json (method: {method}): the weights are quantised already; "
                "supported is: the model's checkpoint in bfloat16, float16 or float32"
            )


def _rope_parameters(text: Mapping[str, Any]) -> _Settings:
    """The rotary embedding's settings. transformers 5 has them in one object; older configs at the top."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: rope_parameters must be an object, got {rope!r}")
    for name in LAYER_TYPES:
        if name in rope:
            raise CheckpointError(
                f"config.json: rope_parameters has an entry for {name}; supported is one for all layers"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"unsupported rope_type {kind!r} in config.json; supported is: 'default'")
    return _Settings(rope, text)


def _rotary_dim(rope: _Settings, head_dim: int) -> int:
    partial = rope.number("partial_rotary_factor", 0.25)
    size = int(head_dim * partial)
    if not 2 <= size <= head_dim or size % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor ({partial}) of head_dim ({head_dim}) is a rotary dimension of {size}; "
            f"it must be even, and 2 to {head_dim}"
        )
    return size


def _layer_types(settings: _Settings) -> tuple[str, ...]:
    """`layer_types` as stated; without it, every `full_attention_interval`-th layer has full attention."""
    types = settings.get("layer_types")
    if types is None:
        interval = settings.size("full_attention_interval", 4)
        count = settings.size("num_hidden_layers")
        return tuple(LAYER_TYPES[(index + 1) % interval == 0] for index in range(count))
    if not isinstance(types, list) or not types or len(types) != settings.size("num_hidden_layers", len(types)):
        raise CheckpointError("config.json: layer_types must be a list of num_hidden_layers names")
    unknown = sorted({str(name) for name in types if name not in LAYER_TYPES})
    if unknown:
        raise CheckpointError(
            f"unsupported layer types in config.json: {', '.join(unknown)}; supported are: {', '.join(LAYER_TYPES)}"
        )
    return tuple(types)


def _tied(data: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether `lm_head` is the embedding.

    The outer object decides: its class wrote the weights, and into a `text_config` that does not say, transformers writes its
    default, false, though the model is tied.
    """
    return _Settings(data, text).flag("tie_word_embeddings", False)


def _dtype(settings: _Settings) -> str:
    """transformers 5 writes `dtype`, earlier ones `torch_dtype`."""
    return settings.word("dtype", settings.word("torch_dtype", "float32"))


def _check(config: ModelConfig) -> None:
    for name, divisor in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        value, by = getattr(config, name), getattr(config, divisor)
        if value % by:
            raise CheckpointError(f"config.json: {name} ({value}) is not a multiple of {divisor} ({by})")
    if config.num_experts_per_tok > config.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) must be 1 to num_experts ({config.num_experts})"
        )
    if config.linear_conv_kernel_dim < 2:
        raise CheckpointError(
            f"config.json: linear_conv_kernel_dim must be 2 or more, got {config.linear_conv_kernel_dim}"
        )
