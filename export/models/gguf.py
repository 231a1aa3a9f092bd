"""A GGUF file as a checkpoint: what its metadata say as a config.json, and its tensors under transformers' names."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.delegate.artifact.names import CONFIG_FILE
from ostinato.delegate.errors import CheckpointError
from ostinato.delegate.memory import size_text
from ostinato.export.formats.quantization import Quantization
from ostinato.export.weights.checkpoint import CheckpointWeights
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.export.weights.sources.gguf_tensors import GgufChange, GgufOrder, GgufTensors
from ostinato.export.weights.stream import formats_of

from .config import MAX_COUNT, MAX_SIZE, short
from .gguf_tokenizer import write_tokenizer
from .language_model import LanguageModel

# Names in the file -> transformers' names: of the whole model, and of a layer's parts behind "blk.N.".
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What frequencies are divided by: Llama 3.1's stretched context is a tensor here, and not metadata.
_DIVISORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")
_KINDS = ("weight", "bias")

Config = dict[str, Any]


def dense_config(file: GgufFile, shared: Config) -> Config:
    """The config of a dense decoder, of which all elements of a head are rotated: what all families have."""
    if file.setting("expert_count"):
        raise CheckpointError(
            f"{file.path} is a mixture of experts; of architecture {file.architecture!r} dense models are read"
        )
    rotated = file.setting("rope.dimension_count")
    if _is_size(rotated) and rotated != shared["head_dim"]:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.rope.dimension_count is {rotated}; supported is the head's size, "
            f"{shared['head_dim']}"
        )
    return shared


def no_changes(config: Config) -> Mapping[str, GgufChange]:
    return {}


@dataclass(frozen=True)
class GgufForm:
    """How a family's GGUF files differ from its Hugging Face checkpoints.

    The norms of a file are whole: where a checkpoint stores offsets from one, llama.cpp's converter has added the one.

    Attributes:
        architecture: `general.architecture` of these files.
        permuted: whether rows of the query and key projections stand in another order: in each head, the elements that are
            rotated together are neighbours there, and half a head apart here.
        parts: names of a layer's tensors behind "blk.N." -> transformers' names behind "model.layers.N.", for those that a
            dense decoder does not have, or has under other names.
        config: function from a file and the settings that all families have to the content of config.json. Settings that
            are None are left out. Raises CheckpointError.
        changes: function from this content to what tensors need, see `GgufTensors`. The sizes may not fit each other.
    """

    architecture: str
    permuted: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[GgufFile, Config], Config] = dense_config
    changes: Callable[[Config], Mapping[str, GgufChange]] = no_changes


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose architecture is known.

    Attributes:
        file: the file.
        config: what its config.json would hold.
        tensors: its tensors under transformers' names.
    """

    file: GgufFile
    config: dict[str, Any]
    tensors: GgufTensors

    def write_folder(self, folder: Path) -> None:
        """Write config.json and the tokenizer's files, if the file has a tokenizer. Raises CheckpointError."""
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=1))
        write_tokenizer(self.file.metadata, folder)

    def summary(self, weights: CheckpointWeights, network: LanguageModel, quant: Quantization | None) -> str:
        """Say in one line what the file's tensors become in the network, and how large both are."""
        formats, dtypes = formats_of(network), {name: one.dtype for name, one in network.named_parameters()}
        became: Counter[tuple[str, str]] = Counter()
        for name, parts in weights.parts.items():
            for part in parts:
                form = formats.get(name)
                text = str(dtypes[name]).removeprefix("torch.") if form is None else str(form)
                again = quant is None and form is not None and not self.tensors.keeps_integers(part, form)
                became[self.tensors.kind(part), text + (", rounded once more" if again else "")] += 1
        size = size_text(sum(tensor.nbytes for tensor in self.file.tensors.values()))
        listed = "; ".join(f"{count} in {kind} -> {text}" for (kind, text), count in became.most_common())
        here = size_text(sum(parameter.nbytes for parameter in network.parameters()))
        return f"{self.file.path.name}: {size} of tensors: {listed}; {here} in the artifact"


def read_gguf(path: Path, forms: Mapping[str, GgufForm]) -> GgufModel:
    """Read the header of a GGUF file.

    Args:
        path: a file.
        forms: model type -> form of its files.

    Raises:
        CheckpointError: the file is no GGUF file, is damaged, or is of an architecture or a type that is not supported.
    """
    file = GgufFile(path)
    model_type = next((name for name, form in forms.items() if form.architecture == file.architecture), None)
    if model_type is None:
        known = ", ".join(form.architecture for form in forms.values())
        raise CheckpointError(f"unsupported architecture {short(file.architecture)} in {path}; supported are: {known}")
    form = forms[model_type]
    settings = form.config(file, _shared(file, model_type))
    config = {name: value for name, value in settings.items() if value is not None or name == "sliding_window"}
    predicting = {str(layer) for layer in range(config["num_hidden_layers"], file.setting("block_count"))}
    names = {name: _named(name, form, predicting) for name in file.tensors if name != _DIVISORS}
    return GgufModel(file, config, GgufTensors(file, names, {**_rotated(form, config), **form.changes(config)}))


def size_setting(file: GgufFile, name: str, maximum: int = MAX_SIZE) -> int:
    """A size in the metadata. Raises CheckpointError if it is absent, or not from 1 to `maximum`."""
    value = file.setting(name)
    if not _is_size(value) or value > maximum:
        raise CheckpointError(f"{file.path}: {file.architecture}.{name} must be 1 to {maximum}, got {short(value)}")
    return int(value)


def _rotated(form: GgufForm, config: Config) -> dict[str, GgufChange]:
    if not form.permuted:
        return {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    orders = {module: GgufOrder(inner=2, outer=count) for module, count in heads.items()}
    return {f".{module}.{kind}": GgufChange(rows=order) for module, order in orders.items() for kind in _KINDS}


def _named(name: str, form: GgufForm, predicting: Container[str]) -> str:
    """transformers' name of a tensor; a name that is not known stays as it is, and is refused as unexpected.

    Args:
        predicting: numbers of the layers behind the model's own, which predict further tokens. Checkpoints name what is in
            them "mtp."
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        return f"{_WHOLE[module]}.{kind}" if module in _WHOLE and kind in _KINDS else name
    layer, part = match["layer"], match["part"]
    if layer in predicting:
        return f"mtp.{name}"
    module, _, kind = part.rpartition(".")
    if part in form.parts:
        return f"model.layers.{layer}.{form.parts[part]}"
    return f"model.layers.{layer}.{_PARTS[module]}.{kind}" if module in _PARTS and kind in _KINDS else name


def _shared(file: GgufFile, model_type: str) -> Config:
    """The settings that all families have."""
    get = file.setting
    heads = get("attention.head_count")
    kv_heads = heads if get("attention.head_count_kv") is None else get("attention.head_count_kv")
    for name, value in (("attention.head_count", heads), ("attention.head_count_kv", kv_heads)):
        if not _is_size(value) or value > 1 << 20:
            raise CheckpointError(
                f"{file.path}: {file.architecture}.{name} must be a number of heads, got {short(value)}"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} lacks the token embedding, token_embd.weight")
    hidden, layers = get("embedding_length"), size_setting(file, "block_count", MAX_COUNT)
    # The last ones may predict further tokens.
    predicting = get("nextn_predict_layers") or 0
    if type(predicting) is not int or not 0 <= predicting < layers:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.nextn_predict_layers must be less than block_count ({layers}), got "
            f"{short(predicting)}"
        )
    head_dim = get("attention.key_length")
    if head_dim is None and _is_size(hidden):
        head_dim = hidden // heads
    return {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers - predicting,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file),
        "max_position_embeddings": get("context_length"),
        **_windowed(file, layers - predicting),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _windowed(file: GgufFile, layers: int) -> Config:
    """The settings of a sliding window, which a file has for all layers or not at all."""
    if file.setting("attention.sliding_window") in (None, 0):
        return {"sliding_window": None}
    if file.setting("attention.sliding_window_pattern") is not None:
        raise CheckpointError(
            f"{file.path}: unsupported {file.architecture}.attention.sliding_window_pattern; supported is: "
            "one sliding_window for all layers"
        )
    window = size_setting(file, "attention.sliding_window")
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": ["sliding_attention"] * layers}


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _decimal(value: object) -> object:
    """The shortest number of which a float32 in the metadata is the nearest one: 1e-06, as in a config.json."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _rope(file: GgufFile) -> dict[str, Any]:
    base = file.setting("rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 if base is None else base}
    if _DIVISORS in file.tensors:
        divisors = file.read(_DIVISORS).float().flatten().tolist()
        return {**rope, "rope_type": "divisors", "divisors": divisors}
    kind = file.setting("rope.scaling.type")
    if kind in (None, "none"):
        return rope
    return {**rope, "rope_type": kind, "factor": file.setting("rope.scaling.factor")}


def _dtype(kinds: Iterable[str]) -> str:
    """The dtype that the matrices are in; that of the scales if they are quantised."""
    found = set(kinds)
    if found <= {"BF16", "F32"}:
        return "bfloat16" if "BF16" in found else "float32"
    return "float16"
