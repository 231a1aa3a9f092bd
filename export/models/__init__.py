"""The networks: one file a building block, one file a model family."""

from .config import SUPPORTED_MODEL_TYPES, ModelConfig
from .qwen3_5_moe import Qwen3_5Moe, build_on_meta

__all__ = ["SUPPORTED_MODEL_TYPES", "ModelConfig", "Qwen3_5Moe", "build_on_meta"]
