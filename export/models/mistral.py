"""Mistral's dense models. The first one had a sliding window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dense import DenseConfig, Differences, family, read_config

DIFFERENCES = Differences(qkv_bias=False, max_positions=131072, window=4096)


def config(data: Mapping[str, Any]) -> DenseConfig:
    """Read the content of a config.json. Raises CheckpointError, as `read_config` does."""
    return read_config(DIFFERENCES, data)


FAMILY = family(config, "mistral")
