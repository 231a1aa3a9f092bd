"""How many bytes a decode step moves at least: what its speed is measured against."""

from __future__ import annotations

from .models import Qwen3_5


def decode_bytes(network: Qwen3_5) -> int:
    """Weights that one token uses, read once, and state of fixed size, read and written once."""
    config = network.build.config
    total = 0.0
    for name, parameter in network.named_parameters():
        share = 1.0
        if ".mlp.experts." in name:
            share = config.num_experts_per_tok / config.num_experts
        elif name.startswith("model.embed_tokens.") and not _is_head(network, name):
            share = 1 / config.vocab_size
        total += share * parameter.nbytes
    state = sum(buffer.nbytes for name, buffer in network.named_buffers() if name.endswith("_state"))
    return round(total) + 2 * state


def kv_bytes_per_token(network: Qwen3_5) -> int:
    """Keys and values of one position, over all layers."""
    caches = [buffer for name, buffer in network.named_buffers() if name.endswith("_cache")]
    return sum(cache.nbytes // cache.shape[1] for cache in caches)


def _is_head(network: Qwen3_5, name: str) -> bool:
    """Tied embeddings are one parameter, and the head reads it whole."""
    return network.get_parameter(name) is getattr(network.lm_head, "weight", None)
