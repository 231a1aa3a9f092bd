"""Llama 2 and 3, and models of the same shape, such as SmolLM2. Llama 3.1 stretched its context: `rope_type` llama3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dense import DenseConfig, Differences, family, read_config
from .gguf import GgufForm

DIFFERENCES = Differences(max_positions=2048, only={"pretraining_tp": (1,)})


def config(data: Mapping[str, Any]) -> DenseConfig:
    """Read the content of a config.json. Raises CheckpointError, as `read_config` does."""
    return read_config(DIFFERENCES, data)


FAMILY = family(config, "llama", GgufForm("llama", permuted=True))
