"""One file per model family, and what all families share: their registry, frame, methods and config's settings."""

from .config import ModelConfig
from .language_model import LanguageModel
from .registry import FAMILIES, build_network, find_family, parse_config, read_config

__all__ = ["FAMILIES", "LanguageModel", "ModelConfig", "build_network", "find_family", "parse_config", "read_config"]
