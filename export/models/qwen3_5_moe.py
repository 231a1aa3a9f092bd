"""Qwen3.5-MoE, the text model: a hybrid of gated delta-nets and gated full attention with sparse experts.

Module names are those of the Hugging Face checkpoint, so that a tensor's name there is its name in `model.ptd`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig
from .delta_net import GatedDeltaNet
from .moe import SparseMoe
from .norms import RMSNorm


class DecoderLayer(nn.Module):
    """norm -> mixer -> add, norm -> experts -> add."""

    def __init__(self, config: ModelConfig, layer_type: str, max_seq_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, max_seq_len, dtype)
        else:
            self.self_attn = Attention(config, max_seq_len, dtype)
        self.mlp = SparseMoe(config, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_type = layer_type

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        mixer = self.linear_attn if self.layer_type == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm; the checkpoint's `model.`."""

    def __init__(self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, kind, max_seq_len, dtype) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [1, T], positions [T] -> the last position's hidden state, [1, hidden]."""
        x = self.embed_tokens(tokens[0])
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x[-1:])


class Qwen3_5Moe(nn.Module):
    """The language model with its state.

    `forward(tokens [1, T] int64, input_pos [T] int64)` gives the logits of the last position, [1, vocab] float32, and moves
    the state by T tokens. Positions are consecutive; a call whose first position is 0 starts a new sequence. T = 1
    takes the recurrent step, T >= 2 the chunked delta rule: two graphs from one module.
    """

    def __init__(self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = max_seq_len
        self.model = Decoder(config, max_seq_len, dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens, input_pos)).float()


def build_on_meta(config: ModelConfig, max_seq_len: int, dtype: torch.dtype) -> Qwen3_5Moe:
    """The module with parameters that have shapes and no storage; its state buffers are zeros on the CPU."""
    with torch.device("meta"):
        model = Qwen3_5Moe(config, max_seq_len, dtype)
    return model.eval().requires_grad_(False)
