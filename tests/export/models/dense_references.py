"""Dense models of transformers in random tiny shapes, saved as checkpoints: every family, and what their configs may say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..references import Reference

# Settings of all cases; a case of `CASES` lists its model type and its differences. Rows of 64 can be quantised.
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 1024,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "pad_token_id": None,
}
# As Llama 3.1 has it, for a first context of 64 positions: frequencies of all three kinds.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    | {"hidden_size": 192, "rms_norm_eps": 1e-5},
    "llama-3.1": {"model_type": "llama", "rope_parameters": LLAMA3, "head_dim": 32, "num_key_value_heads": 1},
    "llama-linear": {"model_type": "llama"}
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24},
    "mistral-long-window": {"model_type": "mistral", "sliding_window": 256},
    "qwen2-mixed": {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24}
    | {"max_window_layers": 1},
    "qwen3-mixed": {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": True, "sliding_window": 70}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-group-of-16": {"model_type": "qwen3", "head_dim": 16, "num_attention_heads": 16, "num_key_value_heads": 1},
}


def make_dense(folder: Path, changes: Mapping[str, Any], seed: int = 0) -> Reference:
    """Build the model of `BASE` with `changes` and random weights, and save it."""
    settings = {**BASE, **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        elif name.endswith("bias"):
            noise = 0.4 * noise
        elif not name.endswith("embed_tokens.weight"):
            noise = noise / parameter.shape[-1] ** 0.5
        parameter.copy_(noise)
    model.save_pretrained(folder, max_shard_size="100KB")
    return Reference(folder, model)
