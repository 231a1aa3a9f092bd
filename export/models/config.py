"""Shape of a Qwen3.5 text model, with experts or dense, read from a Hugging Face `config.json` as it stands."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...delegate.errors import CheckpointError

MOE_MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
DENSE_MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
SUPPORTED_MODEL_TYPES = MOE_MODEL_TYPES + DENSE_MODEL_TYPES


# What one of the two families does not have.
_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_DENSE_FIELDS = ("intermediate_size",)


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
            data = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("text_config", {}), dict):
            raise CheckpointError(f"{path} is not the config of a model: expected a JSON object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        model_type = data.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise CheckpointError(
                f"unsupported model type {model_type!r} in config.json; supported are: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        text = data.get("text_config", data)
        try:
            return cls._from_text(text, model_type, bool(data.get("tie_word_embeddings", False)))
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]!r}, which a {model_type} model needs") from error

    @classmethod
    def _from_text(cls, text: dict[str, Any], model_type: str, outer_tie: bool) -> ModelConfig:
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise CheckpointError(f"config.json: rope_parameters must be an object, got {rope!r}")
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"unsupported rope_type {rope['rope_type']!r} in config.json; supported is: default")
        if text.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"unsupported hidden_act {text['hidden_act']!r} in config.json; supported is: silu")
        head_dim = text.get("head_dim") or _quotient(text["hidden_size"], text["num_attention_heads"])
        # transformers 5 puts both into rope_parameters; older configs have them at the top.
        partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        theta = rope.get("rope_theta", text.get("rope_theta", 10000.0))
        is_moe = model_type in MOE_MODEL_TYPES
        config = cls(
            model_type=model_type,
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            layer_types=_layer_types(text),
            num_attention_heads=text["num_attention_heads"],
            num_key_value_heads=text["num_key_value_heads"],
            head_dim=head_dim,
            attention_bias=text.get("attention_bias", False),
            rotary_dim=int(head_dim * partial)
            if isinstance(head_dim, int) and isinstance(partial, (int, float))
            else 0,
            rope_theta=theta,
            linear_num_key_heads=text["linear_num_key_heads"],
            linear_num_value_heads=text["linear_num_value_heads"],
            linear_key_head_dim=text["linear_key_head_dim"],
            linear_value_head_dim=text["linear_value_head_dim"],
            linear_conv_kernel_dim=text["linear_conv_kernel_dim"],
            num_experts=text["num_experts"] if is_moe else 0,
            num_experts_per_tok=text["num_experts_per_tok"] if is_moe else 0,
            moe_intermediate_size=text["moe_intermediate_size"] if is_moe else 0,
            shared_expert_intermediate_size=text["shared_expert_intermediate_size"] if is_moe else 0,
            intermediate_size=0 if is_moe else text["intermediate_size"],
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", outer_tie)),
            max_position_embeddings=text.get("max_position_embeddings", 32768),
            dtype=text.get("dtype") or text.get("torch_dtype") or "float32",
        )
        _check(config)
        return config


def _quotient(size: Any, parts: Any) -> int:
    return size // parts if isinstance(size, int) and isinstance(parts, int) and parts else 0


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        count = text["num_hidden_layers"]
        types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != text.get("num_hidden_layers", len(types)):
        raise CheckpointError("config.json: layer_types must be a list of num_hidden_layers names")
    unknown = sorted(set(types) - {"full_attention", "linear_attention"})
    if unknown:
        raise CheckpointError(
            f"unsupported layer types in config.json: {', '.join(unknown)}; supported are: linear_attention, full_attention"
        )
    return tuple(types)


def _check(config: ModelConfig) -> None:
    _check_types(config)
    whole = [
        (
            "num_attention_heads",
            config.num_attention_heads,
            "num_key_value_heads",
            config.num_key_value_heads,
        ),
        (
            "linear_num_value_heads",
            config.linear_num_value_heads,
            "linear_num_key_heads",
            config.linear_num_key_heads,
        ),
        ("rotary dimension", config.rotary_dim, "2", 2),
    ]
    for name, value, by, divisor in whole:
        if value % divisor:
            raise CheckpointError(f"config.json: {name} ({value}) is not a multiple of {by} ({divisor})")
    if config.is_moe and not 1 <= config.num_experts_per_tok <= config.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) must be 1 to num_experts ({config.num_experts})"
        )
    if config.linear_conv_kernel_dim < 2:
        raise CheckpointError(
            f"config.json: linear_conv_kernel_dim must be 2 or more, got {config.linear_conv_kernel_dim}"
        )


def _check_types(config: ModelConfig) -> None:
    """Every size is a whole number of 1 or more; what else JSON may hold would fail far from here."""
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        absent = value == 0 and field.name in (_DENSE_FIELDS if config.model_type in MOE_MODEL_TYPES else _MOE_FIELDS)
        if field.type == "int" and (type(value) is not int or value < 1) and not absent:
            raise CheckpointError(f"config.json: {field.name} must be a whole number of 1 or more, got {value!r}")
        if field.type == "float" and not isinstance(value, (int, float)):
            raise CheckpointError(f"config.json: {field.name} must be a number, got {value!r}")
