"""What can be quantised and what the kernels take, checked before anything slow begins."""

from __future__ import annotations

import torch

from ..delegate.errors import ExportError
from .kernels.int4 import SPAN
from .models import ModelConfig
from .quantization import GROUP_SIZES


def check_shapes(config: ModelConfig, group_size: int | None, device: str, dtype: torch.dtype) -> None:
    """Raises ExportError that names the size and the limit that it breaks."""
    if group_size is not None:
        _check_groups(config, group_size)
    if device == "cuda":
        _check_kernels(config, group_size, dtype)


def _check_kernels(config: ModelConfig, group_size: int | None, dtype: torch.dtype) -> None:
    from .kernels import attention_triton, delta_rule_triton, experts_triton

    if "full_attention" in config.layer_types:
        attention_triton.check_shapes(config.num_attention_heads, config.num_key_value_heads, config.head_dim, dtype)
    if "linear_attention" in config.layer_types:
        delta_rule_triton.check_shapes(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
    if config.is_moe:
        experts_triton.check_shapes(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            group_size,
        )


def _check_groups(config: ModelConfig, group_size: int) -> None:
    for name, size in _quantised_sizes(config).items():
        if size % SPAN:
            raise ExportError(f"int4 needs {name} to be a multiple of {SPAN}, the config has {size}")
        if size % group_size:
            fitting = ", ".join(str(g) for g in GROUP_SIZES if size % g == 0)
            raise ExportError(f"group size {group_size} does not divide {name} ({size}); --group-size {fitting} would")


def _quantised_sizes(config: ModelConfig) -> dict[str, int]:
    """Lengths of the rows that are quantised, by what the config calls them. Layers with a bias are not."""
    sizes = {"hidden_size": config.hidden_size}
    if "full_attention" in config.layer_types and not config.attention_bias:
        sizes["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
    if "linear_attention" in config.layer_types:
        sizes["linear_num_value_heads * linear_value_head_dim"] = config.value_dim
    if config.is_moe:
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
        sizes["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    else:
        sizes["intermediate_size"] = config.intermediate_size
    return sizes
