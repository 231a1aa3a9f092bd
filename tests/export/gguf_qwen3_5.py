"""GGUF files of Qwen3.5 for tests, written as llama.cpp's converter writes them (conversion/qwen.py there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .gguf_files import PARTS, add_tensor, finish, writer_of

# transformers' names -> the file's names: of the whole model, and of a layer's tensors.
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MODULES = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def architecture_of(config: Any) -> str:
    return "qwen35" if getattr(config, "num_experts", None) is None else "qwen35moe"


def metadata_of(config: Any) -> dict[str, Any]:
    """Return the usual keys, without the architecture in front of them."""
    rope = config.rope_parameters
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if architecture_of(config) == "qwen35":
        return {**values, "feed_forward_length": config.intermediate_size}
    return {
        **values,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def tiled(value: Tensor, dim: int, config: Any, size: int) -> Tensor:
    """Put value heads of `size` elements, which are grouped by their key head, in the order in which the file has them."""
    keys = config.linear_num_key_heads
    shared = config.linear_num_value_heads // keys
    order = [
        (key * shared + head) * size + element
        for head in range(shared)
        for key in range(keys)
        for element in range(size)
    ]
    return value.index_select(dim, torch.tensor(order))


def in_file(config: Any, name: str, value: Tensor, fused: bool = False) -> dict[str, Tensor]:
    """Return what the file has for a tensor of transformers: its name there -> its values."""
    if name in WHOLE:
        return {WHOLE[name]: 1 + value if name == "model.norm.weight" else value}
    _, _, layer, part = name.split(".", 3)
    if part == "mlp.experts.gate_up_proj":
        gate, up = value.chunk(2, dim=1)
        found = {"ffn_gate_up_exps": value} if fused else {"ffn_gate_exps": gate, "ffn_up_exps": up}
        return {f"blk.{layer}.{key}.weight": one for key, one in found.items()}
    if part == "mlp.experts.down_proj":
        return {f"blk.{layer}.ffn_down_exps.weight": value}
    size, channels = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if part == "linear_attn.A_log":
        return {f"blk.{layer}.ssm_a": tiled(-torch.exp(value), 0, config, 1)}
    if part == "linear_attn.dt_bias":
        return {f"blk.{layer}.ssm_dt.bias": tiled(value, 0, config, 1)}
    module, _, kind = part.rpartition(".")
    if module == "linear_attn.conv1d":
        value = value.squeeze(1)
    if module in ("linear_attn.conv1d", "linear_attn.in_proj_qkv"):
        value = torch.cat((value[:channels], tiled(value[channels:], 0, config, size)))
    elif module == "linear_attn.in_proj_z":
        value = tiled(value, 0, config, size)
    elif module in ("linear_attn.in_proj_b", "linear_attn.in_proj_a"):
        value = tiled(value, 0, config, 1)
    elif module == "linear_attn.out_proj":
        value = tiled(value, 1, config, size)
    elif module.endswith("norm") and module != "linear_attn.norm":
        value = 1 + value
    return {f"blk.{layer}.{MODULES[module]}.{kind}": value}


def write_qwen3_5(
    path: Path,
    model: Any,
    kinds: Mapping[str, str] = {},
    metadata: Mapping[str, Any] = {},
    more: Mapping[str, Tensor] = {},
    without: Sequence[str] = (),
    fused: bool = False,
) -> None:
    """Write transformers' model, without a tokenizer.

    Args:
        kinds: part of a name in the file -> its type; others are F32.
        metadata: keys without the architecture -> values besides the usual ones or in their place; None: no such key.
        more, without: tensors of the file that are added or replaced, and that are left out.
        fused: whether gate and up projections of experts are one tensor.
    """
    config = model.config
    values = {key: value for key, value in {**metadata_of(config), **metadata}.items() if value is not None}
    writer = writer_of(path, architecture_of(config), values)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors.update(in_file(config, name, parameter.detach(), fused))
    for name, value in {**tensors, **more}.items():
        if name not in without:
            add_tensor(writer, name, value, kinds)
    finish(writer)
