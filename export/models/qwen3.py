"""Qwen3, dense: queries and keys are normed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dense import DenseConfig, Differences, family, read_config
from .gguf import GgufForm

DIFFERENCES = Differences(qk_norm=True, head_dim=128, windowed_by="use_sliding_window", window=4096)


def config(data: Mapping[str, Any]) -> DenseConfig:
    """Read the content of a config.json. Raises CheckpointError, as `read_config` does."""
    return read_config(DIFFERENCES, data)


FAMILY = family(config, "qwen3", GgufForm("qwen3"))
