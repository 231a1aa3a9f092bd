"""GGUF files for tests, written by the package `gguf` as llama.cpp's converter writes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from torch import Tensor

# transformers' names of a layer's parts -> the file's names.
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_file(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def interleaved(value: Tensor, heads: int) -> Tensor:
    """Put the elements of a head that are rotated together beside each other, as llama.cpp's converter does."""
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kinds: Mapping[str, str] = {},
    metadata: Mapping[str, Any] = {},
    more: Mapping[str, Tensor] = {},
    without: Sequence[str] = (),
    tokens: Sequence[str] = (),
    twice: str = "",
) -> None:
    """Write transformers' dense model.

    Args:
        kinds: part of a name in the file -> its type; others are F32.
        metadata: keys without the architecture -> numbers or texts, besides the usual ones or in their place.
        more, without: tensors that are added, and names in the file that are left out.
        twice: transformers' name of a tensor that is written under it, too.
        tokens: the vocabulary of a tokenizer that merges "H" and "e" only.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **metadata,
    }
    writer = writer_of(path, architecture, values)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(list(tokens))
        writer.add_token_merges(["H e"])
        writer.add_token_types([1] * len(tokens))
        writer.add_eos_token_id(config.eos_token_id)
    tensors = dict(model.named_parameters()) | dict(more)
    for name, tensor in tensors.items():
        stored = name if name in more else name_in_file(name)
        if stored in without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        value = tensor.detach()
        if architecture == "llama" and ".self_attn.q_proj." in name:
            value = interleaved(value, config.num_attention_heads)
        if architecture == "llama" and ".self_attn.k_proj." in name:
            value = interleaved(value, config.num_key_value_heads)
        add_tensor(writer, stored, value, kinds)
    if twice:
        writer.add_tensor(twice, tensors[twice].detach().float().numpy())
    finish(writer)


def writer_of(path: Path, architecture: str, values: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Begin a file that has these numbers, texts and lists under keys that begin with the architecture's name."""
    writer = gguf.GGUFWriter(path, architecture)
    kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        kinds.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    return writer


def add_tensor(writer: gguf.GGUFWriter, name: str, value: Tensor, kinds: Mapping[str, str]) -> None:
    """`kinds`: part of a name -> its type; others are F32. The types that end in K get random numbers of the values' size."""
    kind = gguf.GGMLQuantizationType[next((kind for part, kind in kinds.items() if part in name), "F32")]
    if kind.name.endswith("_K"):
        # The package does not quantise to these types.
        data = random_blocks(kind.name, value.numel() // value.shape[-1], value.shape[-1], crc32(name.encode()))
        blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        scales = blocks[:, -2:] if kind.name == "Q6_K" else blocks[:, :2]
        scales[:] = _halves(scales, float(value.std() / dequantised(data, kind.name).std()))
        if kind.name != "Q6_K":
            # Minima that bring the mean near 0.
            blocks[:, 2:4] = _halves(scales, 7.5)
        data = data.reshape(*value.shape[:-1], -1)
    else:
        data = gguf.quants.quantize(np.ascontiguousarray(value.float().numpy()), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _halves(stored: np.ndarray, factor: float) -> np.ndarray:
    """Return float16 numbers [N, 2 bytes] times a factor."""
    return (np.ascontiguousarray(stored).view(np.float16) * np.float16(factor)).view(np.uint8)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random bytes that are finite values of a type, [rows, bytes of a row]."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    # The scales are in float16, and stand at a block's beginning or, in Q6_K, at its end.
    scales = np.float16(0.01 * (1 + np.arange(len(blocks)) % 7)).view(np.uint8).reshape(-1, 2)
    for at in {"Q6_K": (size - 2,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,)):
        blocks[:, at : at + 2] = scales
    return blocks.reshape(rows, -1)


def dequantised(data: np.ndarray, kind: str) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


def mutated(data: bytes, header: int, random: Random) -> bytes:
    """Change one place of a file's first `header` bytes, which have its counts, lengths, offsets and names; or cut the file
    off."""
    changed = bytearray(data)
    way, at = random.randrange(5), random.randrange(header)
    if way == 0:
        changed[at] = random.randrange(256)
    elif way == 1:
        changed[at : at + 8] = struct.pack("<Q", random.choice((2**63, 2**64 - 1, 2**32, 2**31, 0, len(data))))
    elif way == 2:
        del changed[at : at + random.randrange(1, 40)]
    elif way == 3:
        changed[at:at] = changed[at : at + random.randrange(1, 40)]
    else:
        del changed[random.randrange(len(changed)) :]
    return bytes(changed)
