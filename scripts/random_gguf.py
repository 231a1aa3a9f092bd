"""Write a GGUF file with random weights in a model's shape, for benchmarks: ours and llama.cpp's read the same.

    python scripts/random_gguf.py CONFIG OUTPUT.gguf [--type Q4_0|Q4_K_M|Q8_0|BF16]

CONFIG is a folder with the config.json of a Llama or of a Qwen3.5 with experts, such as tests/assets/configs/Llama-3.1-8B.
Q4_K_M mixes Q4_K, Q5_K and Q6_K as llama-quantize does. The file has no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Type -> where a block's float16 scales stand in its bytes, and what they are for weights of about 0.02.
SCALES = {
    "Q4_0": {0: 3e-3},
    "Q8_0": {0: 2e-4},
    "Q4_K": {0: 8e-5, 2: 6e-4},
    "Q5_K": {0: 4e-5, 2: 6e-4},
    "Q6_K": {208: 2e-5},
}
BYTES = 1 << 24


def dense_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in the file and shapes of a Llama's tensors."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * head_dim
    for layer in range(config["num_hidden_layers"]):
        name = f"blk.{layer}."
        yield f"{name}attn_norm", (hidden,)
        yield f"{name}ffn_norm", (hidden,)
        yield f"{name}attn_q", (heads * head_dim, hidden)
        yield f"{name}attn_k", (keys, hidden)
        yield f"{name}attn_v", (keys, hidden)
        yield f"{name}attn_output", (hidden, heads * head_dim)
        yield f"{name}ffn_gate", (inner, hidden)
        yield f"{name}ffn_up", (inner, hidden)
        yield f"{name}ffn_down", (hidden, inner)


def hybrid_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in the file and shapes of the tensors of a Qwen3.5 with experts."""
    hidden, head_dim, experts = config["hidden_size"], config["head_dim"], config["num_experts"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    delta_heads, delta_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    delta = delta_heads * delta_dim
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + delta
    inner, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    for layer, kind in enumerate(config["layer_types"]):
        name = f"blk.{layer}."
        yield f"{name}attn_norm", (hidden,)
        yield f"{name}post_attention_norm", (hidden,)
        if kind == "full_attention":
            yield f"{name}attn_q", (2 * queries, hidden)
            yield f"{name}attn_k", (keys, hidden)
            yield f"{name}attn_v", (keys, hidden)
            yield f"{name}attn_output", (hidden, queries)
            yield f"{name}attn_q_norm", (head_dim,)
            yield f"{name}attn_k_norm", (head_dim,)
        else:
            yield f"{name}attn_qkv", (mixed, hidden)
            yield f"{name}attn_gate", (delta, hidden)
            yield f"{name}ssm_conv1d", (mixed, config["linear_conv_kernel_dim"])
            yield f"{name}ssm_dt", (delta_heads,)
            yield f"{name}ssm_a", (delta_heads,)
            yield f"{name}ssm_beta", (delta_heads, hidden)
            yield f"{name}ssm_alpha", (delta_heads, hidden)
            yield f"{name}ssm_norm", (delta_dim,)
            yield f"{name}ssm_out", (hidden, delta)
        yield f"{name}ffn_gate_inp", (experts, hidden)
        yield f"{name}ffn_gate_exps", (experts, inner, hidden)
        yield f"{name}ffn_up_exps", (experts, inner, hidden)
        yield f"{name}ffn_down_exps", (experts, hidden, inner)
        yield f"{name}ffn_gate_inp_shexp", (hidden,)
        yield f"{name}ffn_gate_shexp", (shared, hidden)
        yield f"{name}ffn_up_shexp", (shared, hidden)
        yield f"{name}ffn_down_shexp", (hidden, shared)


def hybrid_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a Qwen3.5 with experts, besides those in `settings`."""
    pairs = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
    return {
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": 2 * pairs,
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.group_count": config["linear_num_key_heads"],
        "full_attention_interval": config["full_attention_interval"],
    }


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata that any model has. Keys are without the architecture's name."""
    heads = config["num_attention_heads"]
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or config["moe_intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
    }


def type_of(name: str, shape: tuple[int, ...], kind: str, layers: int) -> str:
    """The type of a tensor. In Q4_K_M the head, a delta-net's first projection and, in half of the layers, values and down
    projections have more bits."""
    if len(shape) == 1 or name.endswith(("ssm_conv1d", "ffn_gate_inp")):
        return "F32"
    if kind != "Q4_K_M":
        return kind
    if name == "output":
        return "Q6_K"
    if name.endswith("attn_qkv"):
        return "Q5_K"
    if name.endswith("attn_v") or "ffn_down" in name:
        layer, eighth = int(name.split(".")[1]), layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def random_blocks(name: str, kind: str, shape: tuple[int, ...], noise: np.ndarray) -> np.ndarray:
    """Bytes of a tensor. `noise`: random bytes, which are repeated. Norms multiply by one, and states decay."""
    size = math.prod(shape)
    if kind == "F32":
        if name.endswith("norm"):
            return np.ones(size, np.float32)
        if name.endswith("ssm_a"):
            return np.full(size, -1, np.float32)
        return np.resize(noise.view(np.int8), size).astype(np.float32) / 3000
    if kind == "BF16":
        # Between -0.06 and 0.06: sign and mantissa are random, and so are the exponent's last two bits.
        return (np.resize(noise.view(np.uint16), size) & 0x81FF) | 0x3C00
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.resize(noise, size // block * block_bytes).reshape(-1, block_bytes)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", choices=("Q4_0", "Q4_K_M", "Q8_0", "BF16"), default="Q4_0")
    arguments = parser.parse_args()
    config = json.loads((arguments.config / "config.json").read_text())
    config = config.get("text_config", config)
    hybrid = "layer_types" in config
    architecture = "qwen35moe" if hybrid else "llama"
    shapes = [
        ("token_embd", (config["vocab_size"], config["hidden_size"])),
        ("output", (config["vocab_size"], config["hidden_size"])),
        ("output_norm", (config["hidden_size"],)),
        *(hybrid_shapes if hybrid else dense_shapes)(config),
    ]
    writer = gguf.GGUFWriter(arguments.output, architecture)
    add: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in (settings(config) | (hybrid_settings(config) if hybrid else {})).items():
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")
    noise = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8)
    # Tensors are described first and written one by one, so that they are never in memory all at once.
    tensors = [
        (name, shape, type_of(name, shape, arguments.type, config["num_hidden_layers"])) for name, shape in shapes
    ]
    for name, shape, kind in tensors:
        form = gguf.GGMLQuantizationType[kind]
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        stored = shape if kind == "F32" else gguf.quant_shape_to_byte_shape(shape, form)
        suffix = "" if name.endswith("ssm_a") else ".bias" if name.endswith("ssm_dt") else ".weight"
        writer.add_tensor_info(name + suffix, stored, dtype, math.prod(stored) * dtype.itemsize, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, kind in tensors:
        writer.write_tensor_data(random_blocks(name, kind, shape, noise))
    writer.close()
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
