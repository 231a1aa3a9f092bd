"""Families of models, one file each, and what all families share: registry, frame, methods, and reading of configs."""

from .config import ModelConfig
from .language_model import LanguageModel
from .registry import FAMILIES, build_network, find_family, open_gguf, parse_config, read_config

__all__ = [
    "FAMILIES",
    "LanguageModel",
    "ModelConfig",
    "build_network",
    "find_family",
    "open_gguf",
    "parse_config",
    "read_config",
]
