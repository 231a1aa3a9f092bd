"""GGUF files of Qwen3.5, as llama.cpp's converter writes them (conversion/qwen.py there; read by src/models/qwen35.cpp and
qwen35moe.cpp).

Several value heads of a delta-net share a key head. Checkpoints have those of one key head side by side, a file has first one
of each key head, then the next of each: so ggml can repeat the keys as a whole. That is the order of everything that belongs
to value heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.export.weights.sources.gguf_tensors import GgufChange, GgufOrder

from .config import short
from .gguf import Config, GgufForm, size_setting

_PARTS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_MOE_PARTS = {
    **_PARTS,
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    # The converter's option --fuse-gate-up-exps.
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}


def _config(file: GgufFile, shared: Config) -> Config:
    """The config, but for experts. `rope.dimension_sections` is not read, since a text token has the same position on all
    axes."""
    values, value_heads = size_setting(file, "ssm.inner_size"), size_setting(file, "ssm.time_step_rank")
    if values % value_heads:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.ssm.inner_size ({values}) is not a multiple of ssm.time_step_rank "
            f"({value_heads})"
        )
    return {
        **shared,
        "hidden_size": size_setting(file, "embedding_length"),
        "layer_types": _layer_types(file, shared["num_hidden_layers"]),
        "full_attention_interval": file.setting("full_attention_interval"),
        # The converter writes all that a checkpoint has; llama.cpp reads those of queries, keys and values.
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "rope_parameters": {**shared["rope_parameters"], "partial_rotary_factor": _rotated_part(file)},
        "linear_num_key_heads": size_setting(file, "ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": size_setting(file, "ssm.state_size"),
        "linear_value_head_dim": values // value_heads,
        "linear_conv_kernel_dim": size_setting(file, "ssm.conv_kernel"),
    }


def _moe_config(file: GgufFile, shared: Config) -> Config:
    scale = file.setting("expert_weights_scale")
    if scale not in (None, 0.0, 1.0):
        raise CheckpointError(
            f"{file.path}: unsupported {file.architecture}.expert_weights_scale {short(scale)}; supported is: 1.0"
        )
    return {
        **_config(file, shared),
        "num_experts": file.setting("expert_count"),
        "num_experts_per_tok": file.setting("expert_used_count"),
        "moe_intermediate_size": file.setting("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.setting("expert_shared_feed_forward_length"),
    }


def _layer_types(file: GgufFile, layers: int) -> list[str] | None:
    """The types of the layers if the file lists them; None if `full_attention_interval` says them."""
    recurrent = file.setting("attention.recurrent_layers")
    if recurrent is None:
        return None
    # Layers that predict further tokens follow.
    if not isinstance(recurrent, list) or len(recurrent) < layers or any(type(one) is not bool for one in recurrent):
        raise CheckpointError(
            f"{file.path}: {file.architecture}.attention.recurrent_layers must be true or false for each of {layers} "
            f"layers, got {short(recurrent)}"
        )
    return ["linear_attention" if one else "full_attention" for one in recurrent[:layers]]


def _rotated_part(file: GgufFile) -> float:
    head_dim = size_setting(file, "attention.key_length")
    if file.setting("rope.dimension_count") is None:
        return 1.0
    return factor_of(size_setting(file, "rope.dimension_count"), head_dim)


def factor_of(rotated: int, head_dim: int) -> float:
    """The fraction of a head that is rotated, such that its product with the head's size is not rounded down."""
    factor = rotated / head_dim
    return factor if int(factor * head_dim) == rotated else math.nextafter(factor, math.inf)


def _changes(config: Config) -> Mapping[str, GgufChange]:
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    size, values = config["linear_value_head_dim"], config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = GgufOrder(inner=config["linear_num_key_heads"])
    elements = GgufOrder(inner=config["linear_num_key_heads"], size=size)
    channels = GgufOrder(inner=config["linear_num_key_heads"], size=size, first=keys)
    return {
        ".linear_attn.in_proj_qkv.weight": GgufChange(rows=channels),
        ".linear_attn.conv1d.weight": GgufChange(
            rows=channels, shape=(keys + values, 1, config["linear_conv_kernel_dim"])
        ),
        ".linear_attn.in_proj_z.weight": GgufChange(rows=elements),
        ".linear_attn.out_proj.weight": GgufChange(columns=elements),
        ".linear_attn.in_proj_b.weight": GgufChange(rows=heads),
        ".linear_attn.in_proj_a.weight": GgufChange(rows=heads),
        ".linear_attn.dt_bias": GgufChange(rows=heads),
        ".linear_attn.A_log": GgufChange(rows=heads, values=_log_of_decay),
        ".shared_expert_gate.weight": GgufChange(shape=(1, config["hidden_size"])),
    }


def _log_of_decay(decay: Tensor) -> Tensor:
    """A_log, of which a file has -exp(A_log). A number above 0 becomes NaN."""
    return torch.log(-decay.double()).float()


DENSE = GgufForm("qwen35", parts=_PARTS, config=_config, changes=_changes)
MOE = GgufForm("qwen35moe", parts=_MOE_PARTS, config=_moe_config, changes=_changes)
