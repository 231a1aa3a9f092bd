"""Shapes of models whose kernels scripts/bench_kernels.py measures: the flagship, and one for the interpreter."""

from __future__ import annotations

import sys
from typing import Any

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.models.dense import DenseConfig
from ostinato.export.models.qwen3_5 import Qwen3_5Config
from ostinato.export.models.registry import parse_config

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

from kernel_arguments import Shapes
from kernel_case import Case
from kernel_cases import decode_cases

FLAGSHIP = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
TINY_INT4 = Int4(32)
# Every kind of layer at sizes for the interpreter.
TINY: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 33,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "dtype": "bfloat16",
}


def flagship(depths: tuple[int, ...] = (0, 4000), rows: int = 1) -> tuple[Shapes, list[Case]]:
    shapes = Shapes.of_folder(FLAGSHIP, Int4(128), 5120)
    return shapes, decode_cases(shapes, depths, rows)


def tiny_shapes(form: Format | None = TINY_INT4, **changes: Any) -> Shapes:
    config = parse_config({**TINY, **changes})[1]
    assert isinstance(config, Qwen3_5Config | DenseConfig)
    return Shapes(config, form, 48)
