"""Models in GGUF files: logits as transformers has them over the same weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MistralConfig, MistralForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato.delegate.errors import CheckpointError
from ostinato.export.kernels import Kernels
from ostinato.export.kernels.cpu import CpuKernels
from ostinato.export.models import LanguageModel, find_family, open_gguf, read_config
from ostinato.export.models.dense import DenseConfig
from ostinato.export.weights.stream import formats_of

from ...comparison import relative_error
from ..gguf_files import write_gguf
from ..references import Reference, load_ours
from .dense_references import BASE, CASES, LLAMA3, make_dense

MODELS = ("llama", "llama-tied", "qwen2", "qwen3")


def made(tmp_path: Path, case: str, **file: Any) -> tuple[Path, Reference]:
    reference = make_dense(tmp_path / "checkpoint", CASES[case])
    path = tmp_path / "model.gguf"
    write_gguf(path, reference.model, CASES[case]["model_type"], **file)
    return path, reference


def logits(path: Path, tokens: torch.Tensor, max_seq_len: int = 256) -> torch.Tensor:
    return prompt_logits(load_ours(path, max_seq_len), tokens)


def prompt_logits(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]), torch.zeros(tokens.shape[1], dtype=torch.int64))[0]


@pytest.mark.parametrize("case", MODELS)
def test_a_file_is_the_checkpoint(tmp_path: Path, case: str) -> None:
    """Its config means the same, its tensors are equal bit for bit, and so are the logits."""
    path, reference = made(tmp_path, case)
    ours, theirs = read_config(path)[1], read_config(reference.folder)[1]
    assert isinstance(ours, DenseConfig) and isinstance(theirs, DenseConfig)
    assert ours.attention == theirs.attention and ours.rope_theta == theirs.rope_theta
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    found, expected = (dict(load_ours(one, 8).named_parameters()) for one in (path, reference.folder))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    tokens = reference.tokens(65)
    assert relative_error(logits(path, tokens), reference.logits(tokens)[-1]) < 1e-4


def test_quantised_tensors_beside_others(tmp_path: Path) -> None:
    """Logits over the dequantised weights, which transformers' model gets as well."""
    kinds = {"attn_q.": "Q8_0", "attn_v.": "Q4_0", "ffn_down": "Q4_1", "token_embd": "F16", "ffn_up": "BF16"}
    path, reference = made(tmp_path, "llama", kinds=kinds)
    tensors = open_gguf(path).tensors
    for name, parameter in reference.model.named_parameters():
        parameter.copy_(tensors.read(name).float())
    tokens = reference.tokens(65)
    assert relative_error(logits(path, tokens), reference.logits(tokens)[-1]) < 1e-4


def test_a_file_as_it_is(tmp_path: Path) -> None:
    """Formats that differ between layers and between the rows of one projection, each kept: in float32, with reference
    kernels, the logits are those over the dequantised weights."""
    kinds = {"blk.0.attn_v": "Q8_0", "attn_q.": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q4_0", "attn_output": "Q4_1"}
    kinds |= {
        "blk.1.ffn_up": "Q5_0",
        "ffn_gate": "Q4_1",
        "ffn_up": "Q4_1",
        "blk.1.ffn_down": "F16",
        "token_embd": "Q8_0",
    }
    path, reference = made(tmp_path, "llama-tied", kinds=kinds)
    tensors = open_gguf(path).tensors
    for name, parameter in reference.model.named_parameters():
        parameter.copy_(tensors.read(name).float())
    for kernels in (Kernels, CpuKernels):
        network = load_ours(path, keeps=True, kernels=kernels)
        parts = {name for name, _ in network.named_parameters() if ".parts." in name and name.endswith("weight")}
        layers = (
            "model.layers.{}.self_attn.qkv_proj.parts.{}_proj.weight",
            "model.layers.1.mlp.gate_up_proj.parts.{}_proj",
        )
        expected = {layers[0].format(0, one) for one in "qkv"} | {
            f"{layers[1].format(one)}.weight" for one in ("gate", "up")
        }
        assert parts == expected
        formats = formats_of(network)
        assert network.lm_head.weight is network.model.embed_tokens.weight
        assert str(formats["model.embed_tokens.weight"]) == "int8 g32" and "lm_head.weight" not in formats
        assert {str(form) for form in formats.values()} == {"int4 g32", "int4_min g32", "int8 g32"}
    tokens = reference.tokens(65)
    network = load_ours(path, keeps=True)
    assert relative_error(prompt_logits(network, tokens), reference.logits(tokens)[-1]) < 1e-4
    weights = find_family("llama").checkpoint_weights(network, path, tensors)
    said = open_gguf(path).summary(weights, network, None)
    for line in ("in Q4_0 -> int4 g32", "in Q4_1 -> int4_min g32", "1 in Q5_0 -> int8 g32;", "1 in F16 -> float32"):
        assert line in said


def test_a_stretched_context_is_a_tensor(tmp_path: Path) -> None:
    """`rope_freqs.weight` divides the frequencies. Behind the first context it shows."""
    reference = make_dense(tmp_path / "checkpoint", {**CASES["llama"], "rope_parameters": LLAMA3})
    theirs = AutoConfig.for_model("llama", **BASE, rope_parameters=LLAMA3)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))
    path = tmp_path / "model.gguf"
    write_gguf(path, reference.model, "llama", more={"rope_freqs.weight": plain / stretched})
    write_gguf(tmp_path / "dropped.gguf", reference.model, "llama")
    tokens = reference.tokens(900)
    expected = reference.logits(tokens)[-1]
    assert relative_error(logits(path, tokens, 1024), expected) < 1e-4
    assert relative_error(logits(tmp_path / "dropped.gguf", tokens, 1024), expected) > 1e-2
    # The artifact's config.json says the same.
    (tmp_path / "artifact").mkdir()
    open_gguf(path).write_folder(tmp_path / "artifact")
    again, ours = read_config(tmp_path / "artifact")[1], read_config(path)[1]
    assert again == ours


@pytest.mark.parametrize("case", ("llama", "qwen2"))
def test_a_window(tmp_path: Path, case: str) -> None:
    """All layers have it, and the artifact's config.json says the same. 0 is none."""
    path, reference = made(tmp_path, case, metadata={"attention.sliding_window": 30})
    config = read_config(path)[1]
    assert isinstance(config, DenseConfig) and config.max_position_embeddings == 1024
    assert [config.attention_of(layer_type).window for layer_type in config.layer_types] == [30, 30]
    (tmp_path / "artifact").mkdir()
    open_gguf(path).write_folder(tmp_path / "artifact")
    assert read_config(tmp_path / "artifact")[1] == config
    tokens = reference.tokens(100)
    theirs = MistralForCausalLM(MistralConfig(**{**reference.model.config.to_dict(), "sliding_window": 30}))
    if case == "llama":
        theirs.load_state_dict(reference.model.state_dict())
        expected = Reference(tmp_path, theirs.eval()).logits(tokens)[-1]
        assert relative_error(logits(path, tokens), expected) < 1e-4
        assert relative_error(reference.logits(tokens)[-1], expected) > 1e-2
    (tmp_path / "none").mkdir()
    without, _ = made(tmp_path / "none", case, metadata={"attention.sliding_window": 0})
    assert set(read_config(without)[1].layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"metadata": {"expert_count": 4}}, "a mixture of experts"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "unsupported rope_type 'yarn'"),
        ({"metadata": {"rope.dimension_count": 8}}, "dimension_count is 8"),
        ({"metadata": {"attention.sliding_window": "wide"}}, "llama.attention.sliding_window must be 1 to"),
        (
            {"metadata": {"attention.sliding_window": 8, "attention.sliding_window_pattern": 4}},
            "unsupported llama.attention.sliding_window_pattern",
        ),
        ({"metadata": {"attention.head_count": 0}}, "must be a number of heads, got 0"),
        ({"metadata": {"block_count": 10**9}}, "block_count must be 1 to 1024"),
        ({"without": ["token_embd.weight"]}, "lacks the token embedding"),
        ({"without": ["blk.1.attn_k.weight"]}, r"missing \(1\): model\.layers\.1\.self_attn\.k_proj\.weight"),
        ({"more": {"blk.0.attn_sinks.weight": torch.zeros(4)}}, r"unexpected \(1\): blk\.0\.attn_sinks\.weight"),
        ({"more": {"model.norm.weight ": torch.zeros(64)}}, r"unexpected \(1\): "),
        (
            {"metadata": {"context_length": "long", "attention.sliding_window": 8}},
            "max_position_embeddings must be a whole",
        ),
        ({"metadata": {"embedding_length": "wide", "attention.key_length": 16}}, "hidden_size must be a whole number"),
        ({"more": {"rope_freqs.weight": torch.zeros(8)}}, "divisors of the rotary embedding must be 8 numbers above 0"),
    ],
)
def test_refusals(tmp_path: Path, file: dict[str, Any], message: str) -> None:
    path, _ = made(tmp_path, "llama", **file)
    with pytest.raises(CheckpointError, match=message):
        load_ours(path, 64)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    reference = make_dense(tmp_path / "checkpoint", CASES["llama"])
    write_gguf(tmp_path / "model.gguf", reference.model, "gemma3")
    with pytest.raises(
        CheckpointError, match=r"unsupported architecture 'gemma3' in .*; supported are: llama, qwen2, qwen3"
    ):
        read_config(tmp_path / "model.gguf")


def test_the_folder_that_an_artifact_gets(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "qwen3")
    open_gguf(path).write_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("qwen3", 32)
    assert not (tmp_path / "tokenizer.json").exists()


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    reference = make_dense(tmp_path / "checkpoint", CASES["llama"])
    write_gguf(tmp_path / "model.gguf", reference.model, "llama", twice="model.norm.weight")
    with pytest.raises(CheckpointError, match="two of its tensors have one meaning"):
        read_config(tmp_path / "model.gguf")
