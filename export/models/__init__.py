"""The networks: one file a building block, one file a model family."""

from .config import SUPPORTED_MODEL_TYPES, ModelConfig
from .qwen3_5 import STACKED, Decoder, Qwen3_5, build_on_meta

__all__ = ["STACKED", "SUPPORTED_MODEL_TYPES", "Decoder", "ModelConfig", "Qwen3_5", "build_on_meta"]
