"""The part of `config.json` that all families share, and the reader for its settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.errors import CheckpointError
from ostinato.export.layers.rotary import banded_divisors

# Sizes in the artifact's files are 32-bit.
MAX_SIZE = 2**31 - 1
# Limit for the number of layers and of a convolution's taps. Each one becomes code, so tracing would never end for a number
# that is mistyped by far.
MAX_COUNT = 1024


@dataclass(frozen=True)
class ModelConfig:
    """The settings that the export needs of any language model. Names are those of transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers that have routed experts."""
        return 0

    @property
    def experts_per_layer(self) -> int:
        """Number of routed experts in each layer that has some."""
        return 0


class Settings:
    """Reads settings by name from JSON objects: the first object that has a setting counts. null counts as absent.

    Types and ranges are checked here; otherwise a wrong value would fail much later. Every method raises CheckpointError that
    names the setting.
    """

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def get(self, name: str) -> Any:
        """The setting as JSON has it; None if no object has it."""
        return next((values[name] for values in self._objects if values.get(name) is not None), None)

    def is_null(self, name: str) -> bool:
        """Whether an object has the setting, as null, and no object has a value for it."""
        return self.get(name) is None and any(name in values for values in self._objects)

    def size(self, name: str, default: int | None = None, maximum: int = MAX_SIZE, minimum: int = 1) -> int:
        """A whole number from `minimum` to `maximum`. Without a default, the setting must be present."""
        value = self._stated(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise CheckpointError(
                f"config.json: {name} must be a whole number from {minimum} to {maximum}, got {short(value)}"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self._stated(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: {name} must be a number above 0, got {short(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._stated(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, got {short(value)}")
        return value

    def word(self, name: str, default: str) -> str:
        """A string."""
        value = self._stated(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {name} must be a string, got {short(value)}")
        return value

    def refuse_other_than(self, supported: Mapping[str, Sequence[Any]]) -> None:
        """Raise CheckpointError if a setting is present with a value that is not supported.

        Args:
            supported: setting -> the values that the network is written for.
        """
        for name, values in supported.items():
            value = self.get(name)
            if value is not None and value not in values:
                known = " or ".join(map(repr, values))
                raise CheckpointError(f"unsupported {name} {short(value)} in config.json; supported is: {known}")

    def _stated(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"config.json lacks {name!r}, which a model of its type needs")
        return default


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read `folder/config.json`.

    Raises:
        CheckpointError: there is no such folder or file, or it holds no JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError(f"not a folder: {folder}")
        raise CheckpointError(f"no such folder: {folder}{_download(folder)}")
    if not path.exists():
        held = next((f"; for {file.name} give --model {file}" for file in sorted(folder.glob("*.gguf"))), "")
        raise CheckpointError(f"{folder} is not a Hugging Face checkpoint: it has no config.json{held}")
    data = read_json(path, CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not the config of a model: expected a JSON object")
    return data


def _download(folder: Path) -> str:
    """The command that downloads a model, if `folder` has the form of its name on the Hugging Face hub, OWNER/NAME."""
    name = folder.as_posix()
    # These are folders of people's own; README has the first.
    own = folder.parts[0] in ("checkpoints", "models", "artifacts")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or own or folder.parent.exists():
        return ""
    return f"; a model's name? Download it: hf download {name} --local-dir {folder.name}, then --model {folder.name}"


def text_config(data: Mapping[str, Any], supported: Sequence[str]) -> Mapping[str, Any]:
    """The text model's settings: `text_config` in a multimodal model, else all. Its model type must be in `supported`."""
    text = data.get("text_config", data)
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object, got {short(text)}")
    inner = text.get("model_type", data["model_type"])
    if inner not in supported:
        raise CheckpointError(
            f"unsupported model type {short(inner)} in config.json's text_config; in a {data['model_type']} model "
            f"supported are: {', '.join(supported)}"
        )
    return text


def refuse_quantized(settings: Settings) -> None:
    """Raise CheckpointError if the checkpoint is quantised already.

    transformers writes `quantization_config`, MLX writes `quantization`.
    """
    for name in ("quantization_config", "quantization"):
        stored = settings.get(name)
        if stored:
            method = stored.get("quant_method", "unnamed") if isinstance(stored, dict) else stored
            raise CheckpointError(
                f"unsupported {name} in config.json (method: {short(method)}): the weights are quantised already; "
                "supported is: the model's checkpoint in bfloat16, float16 or float32"
            )


def rope_parameters(
    text: Mapping[str, Any], layer_types: Sequence[str], kinds: Sequence[str] = ("default",)
) -> Settings:
    """The rotary embedding's settings; its type must be one of `kinds`. transformers 5 has them in an object of their own,
    older configs at the top level."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: rope_parameters must be an object, got {short(rope)}")
    for name in layer_types:
        if name in rope:
            raise CheckpointError(
                f"config.json: rope_parameters has an entry for {name}; supported is one for all layers"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        known = " or ".join(map(repr, kinds))
        raise CheckpointError(f"unsupported rope_type {short(kind)} in config.json; supported is: {known}")
    return Settings({**rope, "rope_type": kind}, text)


def rope_divisors(rope: Settings, rotary_dim: int, theta: float) -> tuple[float, ...]:
    """Divisors of the frequencies, see `RotaryEmbedding`, for the types "default", "linear" and "llama3", and for "divisors",
    which has the numbers themselves."""
    kind = rope.get("rope_type")
    if kind == "default":
        return ()
    if kind == "divisors":
        divisors = rope.get("divisors")
        good = isinstance(divisors, list) and len(divisors) == rotary_dim // 2
        if not good or not all(type(one) in (int, float) and 0 < one < sys.float_info.max for one in divisors):
            raise CheckpointError(
                f"config.json: divisors of the rotary embedding must be {rotary_dim // 2} numbers above 0, got "
                f"{short(divisors)}"
            )
        return tuple(map(float, divisors))
    factor = rope.number("factor", 1.0)
    if kind == "linear":
        return (factor,) * (rotary_dim // 2)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise CheckpointError(
            f"config.json: low_freq_factor ({low}) of the rotary embedding must be less than high_freq_factor ({high})"
        )
    return banded_divisors(
        rotary_dim, theta, factor, low, high, rope.size("original_max_position_embeddings", maximum=MAX_SIZE)
    )


def rotary_dim(rope: Settings, head_dim: int, default_factor: float) -> int:
    """Number of elements of a head that are rotated."""
    partial = rope.number("partial_rotary_factor", default_factor)
    size = int(min(head_dim * partial, MAX_SIZE))
    if not 2 <= size <= head_dim or size % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor ({partial}) of head_dim ({head_dim}) is a rotary dimension of {size}; "
            f"it must be even, and 2 to {head_dim}"
        )
    return size


def tied(data: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether `lm_head` shares the embedding's weight.

    The outer object decides, because its class wrote the weights. transformers writes its default, false, into a
    `text_config` that does not say, even if the model is tied.
    """
    return Settings(data, text).flag("tie_word_embeddings", False)


def dtype(settings: Settings) -> str:
    """Name of the checkpoint's dtype. transformers 5 writes `dtype`, earlier versions write `torch_dtype`."""
    return settings.word("dtype", settings.word("torch_dtype", "float32"))


def check_multiple(config: ModelConfig, name: str, divisor: str) -> None:
    """Raise CheckpointError unless the setting `name` is a multiple of the setting `divisor`."""
    value, by = getattr(config, name), getattr(config, divisor)
    if value % by:
        raise CheckpointError(f"config.json: {name} ({value}) is not a multiple of {divisor} ({by})")


def short(value: object, max_length: int = 80) -> str:
    """The value as text in one line of a message. A config can hold anything."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # The value is nested too deeply, or is an integer of more digits than Python prints.
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
