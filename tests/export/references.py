"""Reference models from outside the project: transformers' Qwen3.5 in random tiny shapes, saved as checkpoints.

Every block of the random weights matters: `tests/export/models/test_qwen3_5.py` checks that a change of any one parameter
moves the logits far more than the tolerance of the comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from ostinato.export.formats.format import StoredFormats
from ostinato.export.kernels import Kernels
from ostinato.export.models import LanguageModel, build_network, open_gguf, read_config
from ostinato.export.weights.stream import QuantizedWeights, materialise

from ..comparison import relative_error as relative_error
from .networks import with_room

LENGTHS = (1, 2, 3, 31, 63, 64, 65, 128, 200)
LINEAR, FULL = "linear_attention", "full_attention"

# All settings that shape the network; a case of `CASES` lists its differences. A case with `intermediate_size` is dense, and
# the settings of experts in `BASE` are left out.
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "eos_token_id": 5,
}

CASES: dict[str, dict[str, Any]] = {
    "three-to-one": {"num_hidden_layers": 4, "layer_types": None},
    "all-linear": {"layer_types": [LINEAR] * 2, "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2},
    "all-full": {"layer_types": [FULL] * 2, "num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "alternating": {"num_hidden_layers": 3, "layer_types": [FULL, LINEAR, FULL], "head_dim": 32},
    "four-queries-a-key": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 5e5},
    "one-key-head": {"num_key_value_heads": 1, "head_dim": 8, "partial_rotary_factor": 0.5, "hidden_size": 48},
    "wide-values": {"linear_num_value_heads": 8, "linear_value_head_dim": 24, "tie_word_embeddings": True},
    "wide-keys": {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 32},
    "short-convolution": {"linear_conv_kernel_dim": 2, "num_experts": 4, "num_experts_per_tok": 1},
    "many-experts": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "vocab_size": 131},
    "biases": {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "rope_theta": 1e7},
    "full-first": {"num_hidden_layers": 3, "layer_types": [FULL, FULL, LINEAR], "num_experts_per_tok": 3},
    # All experts are chosen, so that rounding cannot choose others.
    "every-expert": {
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR] * 2 + [FULL],
    },
    "dense": {"intermediate_size": 40, "num_hidden_layers": 4, "layer_types": None},
    "dense-tied": {"intermediate_size": 24, "tie_word_embeddings": True, "linear_num_value_heads": 2},
    "dense-biases": {"intermediate_size": 64, "attention_bias": True, "layer_types": [FULL, LINEAR], "rope_theta": 1e7},
    "dense-wide": {
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR],
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-3,
    },
    # Its first layers may keep their experts on the host; the first 2 are one of each type. GPUs take these sizes too.
    "five-layers": {
        "num_hidden_layers": 5,
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}

# Our projections, each with the projections of transformers whose rows it stacks.
STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

EXPERT_SETTINGS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
TextConfig = Qwen3_5MoeTextConfig | Qwen3_5TextConfig


@dataclass(frozen=True)
class Reference:
    """A checkpoint folder, and transformers' model with the same weights in float32."""

    folder: Path
    model: Any

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [1, T] -> logits of every position, [T, vocab], without any cache."""
        with torch.no_grad():
            return self.model(tokens, use_cache=False).logits[0].float()

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """Return random tokens, [1, count] int64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.config.vocab_size, (1, count), generator=generator)

    def changes_without(self) -> dict[str, float]:
        """Map each parameter to how far the logits of 65 tokens move if it is zero, as a relative error."""
        tokens = self.tokens(65)
        expected = self.logits(tokens)
        moved = {}
        for name, parameter in self.model.named_parameters():
            kept = parameter.clone()
            parameter.zero_()
            moved[name] = relative_error(self.logits(tokens), expected)
            parameter.copy_(kept)
        return moved


def make_reference(folder: Path, changes: Mapping[str, Any], seed: int, max_shard_size: str = "20KB") -> Reference:
    """Build the model of `BASE` with `changes` and random weights, and save it: sharded, with experts one by one."""
    config = text_config({**BASE, **changes})
    model_class = Qwen3_5MoeForCausalLM if isinstance(config, Qwen3_5MoeTextConfig) else Qwen3_5ForCausalLM
    model = model_class(config).eval().requires_grad_(False)
    random_weights(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Reference(folder, model)


def shipped_reference(folder: Path) -> Reference:
    """A checkpoint in a folder as it is."""
    return Reference(
        folder, Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    )


def text_config(settings: Mapping[str, Any]) -> TextConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": settings["rope_theta"],
        "partial_rotary_factor": settings["partial_rotary_factor"],
    }
    dense = "intermediate_size" in settings
    left_out = {*rope, *EXPERT_SETTINGS} if dense else {*rope}
    plain = {key: value for key, value in settings.items() if key not in left_out}
    return (Qwen3_5TextConfig if dense else Qwen3_5MoeTextConfig)(**plain, rope_parameters=rope)


def random_weights(model: torch.nn.Module, seed: int) -> None:
    """Set random weights of about 1 / sqrt(fan-in), and norms and decays that differ from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return noise - 1.0
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith(("norm.weight", "bias")):
        return 0.4 * noise
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise / math.sqrt(noise.shape[-1])


def is_offset(name: str) -> bool:
    """Return whether transformers' parameter is an offset from one."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def stack_rows(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' parameters in the form that our network has."""
    home = {part: stack for stack, parts in STACKS.items() for part in parts}
    stacked: dict[str, Tensor] = {}
    for name in parameters:
        *above, module, last = name.split(".")
        target = ".".join((*above, home.get(module, module), last))
        parts = [".".join((*above, part, last)) for part in STACKS.get(home.get(module, ""), (module,))]
        value = torch.cat([parameters[part].detach() for part in parts])
        stacked[target] = 1 + value if is_offset(name) else value
    return stacked


def load_ours(
    folder: Path,
    max_seq_len: int = 256,
    dtype: torch.dtype = torch.float32,
    cpu_moe: int = 0,
    kernels: type[Kernels] = Kernels,
    slots: int = 2,
    keeps: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """Return our module with the weights of a folder or a GGUF file, and new state for `slots` sessions.

    Args:
        keeps: whether a file's integers stay as they are.
    """
    family, config = read_config(folder)
    tensors = open_gguf(folder).tensors if folder.is_file() else None

    def build(formats: StoredFormats) -> LanguageModel:
        return build_network(
            config, max_seq_len, dtype, cpu_moe=cpu_moe, kernels=kernels, formats=formats, state_dtype=state_dtype
        )

    model = build({})
    if keeps:
        model = build(family.checkpoint_weights(model, folder, tensors).formats())
    source = family.checkpoint_weights(model, folder, tensors)
    materialise(model, QuantizedWeights(model, source, torch.device("cpu")))
    return with_room(model, slots)
