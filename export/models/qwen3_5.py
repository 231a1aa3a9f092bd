"""Qwen3.5, the text model: a hybrid of gated delta-nets and gated full attention, with dense layers or sparse experts.

Module names are those of the Hugging Face checkpoint, but for the projections in `STACKED`, which read the same input and
are one product here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels import StepKernels, kernels_for
from .attention import Attention, Place, RotaryEmbedding
from .config import ModelConfig
from .delta_net import GatedDeltaNet
from .linear import Build, make_embedding, make_linear, packed
from .moe import SparseMoe, SwiGLU
from .norms import RMSNorm
from .sampling import SamplingState

# Module here -> modules of the checkpoint whose rows it stacks, in order.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)).

    The last addition is left to whoever comes next, who reads both: the compiler makes it one kernel with the norm there.
    """

    def __init__(self, build: Build, layer_type: str) -> None:
        super().__init__()
        config = build.config
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(build)
        else:
            self.self_attn = Attention(build)
        self.mlp = SparseMoe(build) if config.is_moe else SwiGLU(config.intermediate_size, build)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_type = layer_type

    def forward(self, x: Tensor, delta: Tensor, input_pos: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta is the input, [T, hidden]; so is the output. The others are a `Place`."""
        mixer = self.linear_attn if self.layer_type == "linear_attention" else self.self_attn
        x = x + delta
        x = x + mixer(self.input_layernorm(x), Place(input_pos, cos, sin))
        return x, self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, place: Place, kernels: StepKernels) -> Tensor:
        """One token, x [1, hidden] -> [1, hidden]; both additions are in the kernels."""
        mixer = self.linear_attn if self.layer_type == "linear_attention" else self.self_attn
        x = mixer.step(x, self.input_layernorm, place, kernels)
        return self.mlp.step(x, self.post_attention_layernorm, kernels)


class Decoder(nn.Module):
    """Embedding, layers and final norm; the checkpoint's `model.`."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.embed_tokens = make_embedding(config.vocab_size, config.hidden_size, build)
        self.layers = nn.ModuleList(DecoderLayer(build, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens [1, T], positions [T] -> (x, delta, cos, sin) for the first layer."""
        x = self.embed_tokens(tokens[0])
        _, cos, sin = self.rotary(positions)
        return x, torch.zeros_like(x), cos, sin


class Qwen3_5(nn.Module):
    """The language model with its state.

    `forward(tokens [1, T] int64, input_pos [T] int64)` gives the logits of the last position, [1, vocab] float32, and moves
    the state by T tokens. Positions are consecutive; a call whose first position is 0 starts a new sequence. T = 1
    takes the recurrent step, T >= 2 the chunked delta rule: two graphs from one module.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        self.model = Decoder(build)
        self.lm_head = make_linear(build.config.hidden_size, build.config.vocab_size, build)
        if build.config.tie_word_embeddings and build.group_size is None:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.sampling = SamplingState(build)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        x, delta, cos, sin = self.model.embed(tokens, input_pos)
        for layer in self.model.layers:
            x, delta = layer(x, delta, input_pos, cos, sin)
        return self.head(x, delta)

    def head(self, x: Tensor, delta: Tensor) -> Tensor:
        """What the last layer gives -> logits of the last position."""
        return self.lm_head(self.model.norm(x[-1:] + delta[-1:])).float()

    def step_head(self, x: Tensor, kernels: StepKernels) -> Tensor:
        """x [1, hidden] -> logits [1, vocab] float32."""
        norm = self.model.norm
        return kernels.norm_linear(x, norm.weight, norm.eps, *packed(self.lm_head), torch.float32)


def build_on_meta(
    config: ModelConfig,
    max_seq_len: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    max_chunk: int | None = None,
    group_size: int | None = None,
) -> Qwen3_5:
    """The module with parameters that have shapes and no storage; its state buffers are zeros on the CPU.

    `device` is what the code will be compiled for: it chooses the kernels.
    """
    build = Build(config, max_seq_len, max_chunk or max_seq_len - 1, dtype, kernels_for(device), group_size)
    with torch.device("meta"):
        model = Qwen3_5(build)
    return model.eval().requires_grad_(False)
