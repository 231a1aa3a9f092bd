"""Write a GGUF file with random weights in the shape of a dense model, for benchmarks: ours and llama.cpp's read the same.

    python scripts/random_gguf.py CONFIG OUTPUT.gguf [--type Q4_0|Q4_K_M|Q8_0|BF16]

CONFIG is a folder with the config.json of a Llama, such as tests/assets/configs/Llama-3.1-8B. Q4_K_M mixes Q4_K and Q6_K as
llama-quantize does. The file has no tokenizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

# Type -> where a block's float16 scales stand in its bytes, and what they are for weights of about 0.02.
SCALES = {
    "Q4_0": {0: 3e-3},
    "Q8_0": {0: 2e-4},
    "Q4_K": {0: 8e-5, 2: 6e-4},
    "Q6_K": {208: 2e-5},
}
BYTES = 1 << 24


def shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names in the file and shapes of all matrices."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * head_dim
    yield "token_embd", (config["vocab_size"], hidden)
    yield "output", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"blk.{layer}."
        yield f"{name}attn_q", (heads * head_dim, hidden)
        yield f"{name}attn_k", (keys, hidden)
        yield f"{name}attn_v", (keys, hidden)
        yield f"{name}attn_output", (hidden, heads * head_dim)
        yield f"{name}ffn_gate", (inner, hidden)
        yield f"{name}ffn_up", (inner, hidden)
        yield f"{name}ffn_down", (hidden, inner)


def type_of(name: str, kind: str, layers: int) -> str:
    """The type of a matrix. In Q4_K_M the head and, in half of the layers, values and down projections have more bits."""
    if kind != "Q4_K_M":
        return kind
    if name == "output":
        return "Q6_K"
    if name.endswith(("attn_v", "ffn_down")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def random_blocks(kind: str, shape: tuple[int, int], noise: np.ndarray) -> np.ndarray:
    """Bytes of a matrix [rows, bytes of a row]. `noise`: random bytes, which are repeated."""
    rows, columns = shape
    if kind == "BF16":
        # Between -0.06 and 0.06: sign and mantissa are random, and so are the exponent's last two bits.
        numbers = np.resize(noise.view(np.uint16), rows * columns)
        return ((numbers & 0x81FF) | 0x3C00).view(np.uint8).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.resize(noise, rows * columns // block * size).reshape(-1, size)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", choices=("Q4_0", "Q4_K_M", "Q8_0", "BF16"), default="Q4_0")
    arguments = parser.parse_args()
    config = json.loads((arguments.config / "config.json").read_text())
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    writer = gguf.GGUFWriter(arguments.output, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "none")
    noise = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8)
    for norm in ("output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(layers) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{norm}.weight", np.ones(config["hidden_size"], np.float32))
    # Tensors are described first and written one by one, so that they are never in memory all at once.
    matrices = [(name, shape, type_of(name, arguments.type, layers)) for name, shape in shapes(config)]
    for name, shape, kind in matrices:
        form = gguf.GGMLQuantizationType[kind]
        blank = np.lib.stride_tricks.as_strided(
            np.zeros(1, np.uint8), gguf.quant_shape_to_byte_shape(shape, form), (0, 0)
        )
        writer.add_tensor_info(f"{name}.weight", blank.shape, blank.dtype, blank.nbytes, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in range(1 + 2 * layers):
        writer.write_tensor_data(np.ones(config["hidden_size"], np.float32))
    for _, shape, kind in matrices:
        writer.write_tensor_data(random_blocks(kind, shape, noise))
    writer.close()
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
