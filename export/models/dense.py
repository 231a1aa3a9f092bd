"""Dense decoders: every layer is attention, full or in a sliding window, and a SwiGLU. Llama, Mistral, Qwen2 and Qwen3 are
such.

Modules have the names of the Hugging Face checkpoint, except for the projections in `NAMES.stacked`. These projections read
the same input, and are one product here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError
from ostinato.export.compile.trace import Link
from ostinato.export.formats.format import Format
from ostinato.export.kernels.attention.limits import check_attention
from ostinato.export.kernels.operands import RowIndex
from ostinato.export.layers.attention import Attention, AttentionSizes
from ostinato.export.layers.build import Build
from ostinato.export.layers.feed_forward import SwiGLU
from ostinato.export.layers.norms import RMSNorm
from ostinato.export.layers.rotary import RotaryEmbedding
from ostinato.export.layers.stored import kind_of
from ostinato.export.weights.checkpoint import CheckpointNames
from ostinato.export.weights.dummy import DummySpreads

from . import config as read
from .config import MAX_COUNT, ModelConfig, Settings
from .family import Family
from .gguf import GgufForm
from .language_model import LanguageModel, Layer

FULL, SLIDING = "full_attention", "sliding_attention"
_ROPES = ("default", "linear", "llama3", "divisors")

NAMES = CheckpointNames(
    stacked={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    # Old checkpoints have what the network computes.
    skipped=re.compile(r"rotary_emb\.inv_freq$"),
)
SPREADS = DummySpreads(by_ending={"norm.weight": (1.0, 0.1)}, adding=(".o_proj", ".down_proj"))


@dataclass(frozen=True)
class Differences:
    """Differences of one family of dense decoders from another.

    Attributes:
        qk_norm: whether queries and keys are normed.
        qkv_bias: whether their projection has a bias; None: as the config says, and then the attention's output has one too.
        head_dim: elements of a head if the config does not say; None: hidden_size / num_attention_heads.
        max_positions: positions of a session if the config does not say.
        window: the sliding window if the config does not say; None: there is none.
        windowed_by: setting without which a sliding window does not count. With it `layer_types` says which layers have
            one, or `max_window_layers` how many at the beginning do not. "": all layers have it.
        only: settings that shape the network -> the values that it is written for.
    """

    qk_norm: bool = False
    qkv_bias: bool | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    window: int | None = None
    windowed_by: str = ""
    only: Mapping[str, tuple[Any, ...]] | None = None


@dataclass(frozen=True)
class DenseConfig(ModelConfig):
    """Config of a dense decoder. Names are those of transformers, where it has them.

    Attributes:
        layer_types: FULL or SLIDING for each layer.
        attention: sizes of a layer with full attention.
        sliding_window: the window of the other layers; None if there are none.
    """

    attention: AttentionSizes
    sliding_window: int | None
    intermediate_size: int
    rope_theta: float
    rope_divisors: tuple[float, ...]

    def attention_of(self, layer_type: str) -> AttentionSizes:
        """The sizes of a layer of this type."""
        return replace(self.attention, window=self.sliding_window if layer_type == SLIDING else None)


def read_config(differences: Differences, data: Mapping[str, Any]) -> DenseConfig:
    """Read the content of a config.json.

    Raises:
        CheckpointError: a setting is missing, of a wrong type or not supported; the message names it.
    """
    settings = Settings(data)
    settings.refuse_other_than({"hidden_act": ("silu",), "mlp_bias": (False,), **(differences.only or {})})
    read.refuse_quantized(settings)
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    kv_heads = settings.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    head_dim = settings.size("head_dim", differences.head_dim or max(1, hidden // heads))
    bias = settings.flag("attention_bias", False) if differences.qkv_bias is None else differences.qkv_bias
    rope = read.rope_parameters(data, (FULL, SLIDING), _ROPES)
    read.rotary_dim(rope, head_dim, 1.0)
    theta = rope.number("rope_theta", 10000.0)
    window = _window(settings, differences)
    layer_types = _layer_types(settings, differences, window)
    return DenseConfig(
        model_type=data["model_type"],
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden,
        layer_types=layer_types,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=read.tied(data, data),
        max_position_embeddings=settings.size("max_position_embeddings", differences.max_positions),
        dtype=read.dtype(settings),
        attention=AttentionSizes(
            hidden,
            heads,
            kv_heads,
            head_dim,
            qk_norm=differences.qk_norm,
            qkv_bias=bias,
            out_bias=bias and differences.qkv_bias is None,
        ),
        sliding_window=window if SLIDING in layer_types else None,
        intermediate_size=settings.size("intermediate_size"),
        rope_theta=theta,
        rope_divisors=read.rope_divisors(rope, head_dim, theta),
    )


def _window(settings: Settings, differences: Differences) -> int | None:
    """The window of layers with a sliding window; None if the config has no such layers."""
    if differences.windowed_by and not settings.flag(differences.windowed_by, False):
        return None
    if settings.is_null("sliding_window") or (differences.window is None and settings.get("sliding_window") is None):
        return None
    return settings.size("sliding_window", differences.window)


def _layer_types(settings: Settings, differences: Differences, window: int | None) -> tuple[str, ...]:
    """The type of each layer. Where a family's other settings decide, `layer_types` may only say the same."""
    count, stated = settings.size("num_hidden_layers", maximum=MAX_COUNT), settings.get("layer_types")
    types = [FULL if window is None else SLIDING] * count
    supported = f"{types[0]!r} for all of {count} layers"
    if window is not None and differences.windowed_by:
        full = min(count, settings.size("max_window_layers", 28, minimum=0))
        types[:full] = [FULL] * full
        supported = f"{FULL!r} or {SLIDING!r} for each of {count} layers"
        if isinstance(stated, list) and len(stated) == count and all(one in (FULL, SLIDING) for one in stated):
            types = stated
    if stated not in (None, types):
        raise CheckpointError(f"unsupported layer_types {read.short(stated)} in config.json; supported is: {supported}")
    return tuple(types)


class DecoderLayer(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: DenseConfig, layer_type: str, build: Build) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config.attention_of(layer_type), eps, build)
        self.mlp = SwiGLU(size, config.intermediate_size, build)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def links(self, prefix: str, step: bool, streamed: bool) -> list[Link]:
        """The link from the value `x` to the next `x`."""
        window = self.self_attn.window
        kind = kind_of(self, f"{FULL} layer" if window is None else f"{SLIDING} ({window}) layer")
        return [Link(self, ("x",), kind, prefix, "step" if step else "forward")]

    def forward(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. The other arguments are the fields of a `RowIndex`."""
        x = x + self.self_attn(self.input_layernorm(x), RowIndex(input_pos, slots, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, input_pos: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Norms and additions are computed inside the kernels."""
        x = self.self_attn.step(x, self.input_layernorm, RowIndex(input_pos, slots, cos, sin))
        return self.mlp.step(x, self.post_attention_layernorm)


def network(config: DenseConfig, build: Build) -> LanguageModel:
    """The network of a config. `build_network` calls this on the meta device: parameters have shapes and no values."""
    layers = [DecoderLayer(config, layer_type, build) for layer_type in config.layer_types]
    rotary = RotaryEmbedding(config.attention.head_dim, config.rope_theta, config.rope_divisors)
    return LanguageModel(config, build, layers, rotary)


def check_limits(config: DenseConfig, form: Format | None, device: str, dtype: torch.dtype) -> None:
    """Raise ExportError if a size breaks a limit of quantisation or of the kernels. The message names both."""
    sizes = config.attention
    if form is not None:
        rows = {
            "hidden_size": config.hidden_size,
            "num_attention_heads * head_dim": sizes.heads * sizes.head_dim,
            "intermediate_size": config.intermediate_size,
        }
        form.check(rows)
    if device == "cuda":
        check_attention(sizes.heads, sizes.kv_heads, sizes.head_dim, dtype)


def family(config: Callable[[Mapping[str, Any]], DenseConfig], model_type: str, gguf: GgufForm | None = None) -> Family:
    """A family of dense decoders whose config this function reads."""
    return Family(
        model_types=(model_type,),
        gguf={} if gguf is None else {model_type: gguf},
        config=config,
        network=network,
        check_limits=check_limits,
        names=NAMES,
        spreads=SPREADS,
    )
