"""Readable contents of config.json: the published layouts, the shipped configs compared with transformers, and every
refusal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from ostinato.delegate.errors import CheckpointError
from ostinato.export.models import LanguageModel, ModelConfig, build_network, parse_config, read_config
from ostinato.export.models.qwen3_5 import Qwen3_5Config as OurConfig

from ..networks import qwen3_5
from ..references import BASE, FULL, LINEAR, TextConfig, text_config

CONFIGS = Path(__file__).resolve().parents[2] / "assets" / "configs"
LARGE, SMALL = "Qwen3.5-35B-A3B", "Qwen3.5-0.8B"

# Settings of transformers' text configs that do not affect the exported network, with the reason where it is not obvious.
WITHOUT_EFFECT = {
    "attention_dropout",  # training
    "initializer_range",
    "router_aux_loss_coef",
    "output_router_logits",
    "use_cache",  # there is always a cache
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",  # the export reads it elsewhere
}


def moe(**changes: Any) -> dict[str, Any]:
    """Return the config that transformers writes for the tiny model with experts; a setting of None becomes null."""
    return {**json.loads(json.dumps(text_config(BASE).to_dict())), **changes}


def dense(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(text_config({**BASE, "intermediate_size": 40}).to_dict())), **changes}


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def shipped(name: str) -> OurConfig:
    return qwen3_5(read_config(CONFIGS / name)[1])


def theirs(name: str) -> TextConfig:
    """The shipped config as transformers reads it."""
    data = json.loads((CONFIGS / name / "config.json").read_text())
    config = (Qwen3_5MoeConfig if name == LARGE else Qwen3_5Config)(**data).text_config
    assert isinstance(config, TextConfig)
    return config


def rope_of(config: TextConfig) -> dict[str, Any]:
    """Return transformers' settings of the rotary embedding, which always exist."""
    assert config.rope_parameters is not None
    return dict(config.rope_parameters)


def on_meta(config: ModelConfig) -> LanguageModel:
    return build_network(config, max_seq_len=8, dtype=torch.bfloat16)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_config(data)[1]
    return str(caught.value)


# The shipped configs.


@pytest.mark.parametrize("name", (LARGE, SMALL))
def test_shipped_config_is_read_as_transformers_reads_it(name: str) -> None:
    ours, other = shipped(name), theirs(name)
    common = {field.name for field in dataclasses.fields(OurConfig)} & set(other.to_dict()) - {"model_type", "dtype"}
    assert len(common) > 15
    for field in common:
        found, expected = getattr(ours, field), getattr(other, field)
        assert found == (tuple(expected) if field == "layer_types" else expected), field
    assert ours.dtype == "bfloat16"
    assert ours.rope_theta == rope_of(other)["rope_theta"] == 10_000_000
    assert ours.rotary_dim == ours.head_dim * rope_of(other)["partial_rotary_factor"] == 64


def test_shape_of_the_large_model() -> None:
    config = shipped(LARGE)
    assert config.is_moe and not config.tie_word_embeddings
    assert config.layer_types == ((LINEAR,) * 3 + (FULL,)) * 10
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (40, 2048, 248320)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (256, 8, 512)
    assert (config.delta_net.values, config.delta_net.channels) == (4096, 8192)
    assert config.intermediate_size == 0 and config.max_position_embeddings == 262144


def test_shape_of_the_small_model() -> None:
    config = shipped(SMALL)
    assert not config.is_moe and config.tie_word_embeddings
    assert config.layer_types == ((LINEAR,) * 3 + (FULL,)) * 6
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (24, 1024, 3584)
    assert (config.delta_net.values, config.delta_net.channels) == (2048, 6144)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (0, 0, 0)


def test_parameters_of_the_large_model() -> None:
    """The model has 35B parameters. A token uses 3.45B of them, or 2.95B without the embedding, of which it reads one row."""
    config = shipped(LARGE)
    network = on_meta(config)
    with torch.device("meta"):
        assert parameters(network) == parameters(Qwen3_5MoeForCausalLM(theirs(LARGE))) == 34_660_610_688
    experts = sum(p.numel() for name, p in network.named_parameters() if ".mlp.experts." in name)
    active = parameters(network) - experts + experts * config.num_experts_per_tok // config.num_experts
    assert active == 3_454_988_928
    assert active - network.model.embed_tokens.weight.numel() == 2_946_429_568


def test_parameters_of_the_small_model() -> None:
    network = on_meta(shipped(SMALL))
    with torch.device("meta"):
        reference = Qwen3_5ForCausalLM(theirs(SMALL))
    reference.tie_weights()
    assert parameters(network) == parameters(reference) == 752_393_024


# Layouts.


@pytest.mark.parametrize("config", (Qwen3_5MoeTextConfig, Qwen3_5TextConfig))
def test_no_setting_of_transformers_goes_unnoticed(config: type[TextConfig]) -> None:
    """Each setting in transformers' config is a field of ours, is read into a field of ours, is refused unless it has the one
    supported value, or is listed in WITHOUT_EFFECT."""
    own = {name for name in config.__annotations__ if name in config().to_dict()}
    ours = {field.name for field in dataclasses.fields(OurConfig)}
    assert own - ours - WITHOUT_EFFECT == {"num_hidden_layers", "rope_parameters", "hidden_act"}


@pytest.mark.parametrize(("outer", "text"), (("qwen3_5_moe", moe()), ("qwen3_5", dense())))
def test_wrapper_and_text_config_alone_are_the_same(outer: str, text: dict[str, Any]) -> None:
    alone = parse_config(text)[1]
    vision = {"model_type": outer, "hidden_size": 16, "depth": 1, "dtype": "float16"}
    for inner in (text, {**text, "model_type": outer}, without(text, "model_type")):
        wrapped = parse_config({"model_type": outer, "text_config": inner, "vision_config": vision})[1]
        assert wrapped == dataclasses.replace(alone, model_type=outer)
    assert parse_config({**text, "model_type": outer})[1] == dataclasses.replace(alone, model_type=outer)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        (True, None, True),
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
def test_tied_embeddings_inside_and_outside(outer: bool | None, inner: bool | None, tied: bool) -> None:
    text = dense(tie_word_embeddings=inner)
    data = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outer}
    assert parse_config(data)[1].tie_word_embeddings is tied


def test_transformers_states_its_default_inside_a_tied_model() -> None:
    """transformers writes its default into the inner config of a tied model, so the outer setting decides."""
    written = Qwen3_5Config(text_config=without(dense(), "tie_word_embeddings"), tie_word_embeddings=True).to_dict()
    assert written["text_config"]["tie_word_embeddings"] is False
    assert parse_config(written)[1].tie_word_embeddings


@pytest.mark.parametrize(
    ("outer", "inner", "dtype"),
    [
        ({}, {"dtype": "bfloat16"}, "bfloat16"),
        ({}, {"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {"dtype": None}, "float16"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "float32"),
    ],
)
def test_dtype(outer: dict[str, Any], inner: dict[str, Any], dtype: str) -> None:
    text = {**without(dense(), "dtype"), **inner}
    assert parse_config({"model_type": "qwen3_5", "text_config": text, **outer})[1].dtype == dtype


@pytest.mark.parametrize(
    ("settings", "theta", "rotary_dim"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, 5e5, 8),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10}, "partial_rotary_factor": 1.0}, 10, 16),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}, "rope_theta": 3.0}, 3, 4),
        ({"rope_scaling": None, "rope_theta": 1e6, "partial_rotary_factor": 0.125}, 1e6, 2),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 8.0}, 7, 4),
        ({}, 10000, 4),
    ],
)
def test_rotary_embedding(settings: dict[str, Any], theta: float, rotary_dim: int) -> None:
    """The two settings of the rotary embedding are found wherever transformers finds them, with the same defaults."""
    data = {**without(moe(), "rope_parameters", "partial_rotary_factor"), **settings}
    config = qwen3_5(parse_config(data)[1])
    assert (config.rope_theta, config.rotary_dim) == (theta, rotary_dim)
    rope = rope_of(Qwen3_5MoeTextConfig(**json.loads(json.dumps(data))))
    assert (rope["rope_theta"], int(16 * rope["partial_rotary_factor"])) == (theta, rotary_dim)


def test_layer_types() -> None:
    plain = {**without(moe(), "layer_types"), "num_hidden_layers": 7}
    assert parse_config(plain)[1].layer_types == (LINEAR,) * 3 + (FULL,) + (LINEAR,) * 3
    assert parse_config({**plain, "full_attention_interval": 2})[1].layer_types[:4] == (LINEAR, FULL) * 2
    assert parse_config({**plain, "full_attention_interval": 1})[1].layer_types == (FULL,) * 7
    # A list overrides the interval, because there are models from which layers were removed.
    stated = moe(layer_types=[FULL, LINEAR], num_hidden_layers=2, full_attention_interval=4)
    assert parse_config(stated)[1].layer_types == (FULL, LINEAR)


def test_settings_that_state_what_is_so_anyway() -> None:
    plain = parse_config(moe())[1]
    stated = {"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": [], "decoder_sparse_step": 1}
    ignored = {"norm_topk_prob": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "intermediate_size": 9}
    assert parse_config(moe(**stated, **ignored, quantization_config=None, attention_dropout=0.1))[1] == plain


# Refusals: a changed config, and the words that the message must contain.

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (moe(model_type="gpt2"), ("'gpt2'", "qwen3_5_moe_text, qwen3_5_moe, qwen3_5_text, qwen3_5")),
    (moe(model_type=None), ("None", "qwen3_5_moe_text")),
    (moe(model_type=["qwen3_5"]), ("['qwen3_5']", "qwen3_5_moe_text")),
    ({"model_type": "qwen3_5", "text_config": moe()}, ("'qwen3_5_moe_text'", "qwen3_5_text, qwen3_5")),
    ({"model_type": "qwen3_5_moe", "text_config": dense()}, ("'qwen3_5_text'", "qwen3_5_moe_text, qwen3_5_moe")),
    ({"model_type": "qwen3_5", "text_config": None}, ("text_config", "None")),
    ({"model_type": "qwen3_5", "text_config": dense(), "quantization_config": FP8}, ("quantization_config", "fp8")),
    (moe(quantization_config={"bits": 4}), ("quantization_config", "quantised already", "bfloat16")),
    (moe(quantization={"group_size": 64, "bits": 8}), ("quantization",)),
    # Settings for which the network supports one value only.
    (moe(hidden_act="gelu"), ("hidden_act 'gelu'", "'silu'")),
    (moe(attn_output_gate=False), ("attn_output_gate False", "True")),
    (moe(output_gate_type="sigmoid"), ("output_gate_type 'sigmoid'", "'silu' or 'swish'")),
    (moe(mlp_only_layers=[0]), ("mlp_only_layers [0]", "[]")),
    (moe(decoder_sparse_step=2), ("decoder_sparse_step 2", "1")),
    (moe(norm_topk_prob=False), ("norm_topk_prob False", "True")),
    (moe(per_layer_config={"1": {"head_dim": 32}}), ("per_layer_config", "{}")),
    # Rotary embedding.
    (moe(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ("rope_type 'yarn'", "default")),
    (moe(rope_scaling={"type": "linear", "factor": 2.0}), ("rope_type 'linear'", "default")),
    (moe(rope_parameters={"full_attention": {"rope_theta": 1e4}}), ("rope_parameters", "full_attention")),
    (moe(rope_parameters="none"), ("rope_parameters", "'none'")),
    (moe(rope_parameters={"rope_theta": "big"}), ("rope_theta", "'big'")),
    (moe(rope_parameters={"rope_theta": 0}), ("rope_theta", "0")),
    (moe(rope_parameters={"partial_rotary_factor": True}), ("partial_rotary_factor", "True")),
    (moe(rope_parameters={"partial_rotary_factor": 0.05}), ("partial_rotary_factor (0.05)", "dimension of 0")),
    (moe(rope_parameters={"partial_rotary_factor": 0.2}), ("partial_rotary_factor (0.2)", "dimension of 3")),
    (
        moe(rope_parameters={"partial_rotary_factor": 2.0}),
        ("partial_rotary_factor (2.0)", "dimension of 32", "2 to 16"),
    ),
    (moe(rope_parameters={"partial_rotary_factor": 1e308}), ("partial_rotary_factor (1e+308)", "2 to 16")),
    # Layers.
    (moe(layer_types=[LINEAR, "mamba"]), ("mamba", FULL, LINEAR)),
    (moe(layer_types=[LINEAR, 3]), ("3", FULL, LINEAR)),
    (moe(layer_types="full"), ("layer_types",)),
    (moe(layer_types=[]), ("layer_types",)),
    (moe(num_hidden_layers=3), ("layer_types", "num_hidden_layers")),
    (moe(layer_types=None, num_hidden_layers=None), ("'num_hidden_layers'",)),
    (moe(layer_types=None, num_hidden_layers="two"), ("num_hidden_layers", "'two'")),
    (moe(layer_types=None, full_attention_interval=0), ("full_attention_interval", "0")),
    # Sizes that do not fit each other.
    (moe(num_key_value_heads=3), ("num_attention_heads (4)", "num_key_value_heads (3)")),
    (moe(linear_num_value_heads=3), ("linear_num_value_heads (3)", "linear_num_key_heads (2)")),
    (moe(num_experts_per_tok=9), ("num_experts_per_tok (9)", "num_experts (8)")),
    (moe(linear_conv_kernel_dim=1), ("linear_conv_kernel_dim", "1")),
    # Types.
    (moe(num_key_value_heads=0), ("num_key_value_heads", "0")),
    (moe(num_experts_per_tok=0), ("num_experts_per_tok", "0")),
    (moe(num_experts=True), ("num_experts", "True")),
    (moe(hidden_size="many"), ("hidden_size", "'many'")),
    (moe(hidden_size=32.0), ("hidden_size", "32.0")),
    (moe(max_position_embeddings=-1), ("max_position_embeddings", "-1")),
    (dense(intermediate_size=0), ("intermediate_size", "0")),
    (moe(rms_norm_eps="small"), ("rms_norm_eps", "'small'")),
    (moe(rms_norm_eps=float("nan")), ("rms_norm_eps", "nan")),
    (moe(rms_norm_eps=float("inf")), ("rms_norm_eps", "inf")),
    (moe(attention_bias="no"), ("attention_bias", "'no'")),
    (moe(tie_word_embeddings=1), ("tie_word_embeddings", "1")),
    (moe(dtype=16), ("dtype", "16")),
    # Sizes that no model has.
    (moe(vocab_size=10**30), ("vocab_size", "from 1 to 2147483647", "1000000")),
    (moe(hidden_size=2**40), ("hidden_size", "from 1 to 2147483647", "1099511627776")),
    (moe(num_experts=2**31), ("num_experts", "from 1 to 2147483647")),
    (moe(layer_types=None, num_hidden_layers=10**9), ("num_hidden_layers", "from 1 to 1024")),
    (moe(layer_types=[LINEAR] * 1025, num_hidden_layers=1025), ("layer_types", "at most 1024", "1025")),
    (moe(linear_conv_kernel_dim=10**6), ("linear_conv_kernel_dim", "from 1 to 1024")),
    (moe(hidden_size=10**5000), ("hidden_size", "from 1 to 2147483647", "type int")),
    (moe(hidden_act="x" * 10**6), ("hidden_act", "'silu'")),
]


@pytest.mark.parametrize(("data", "words"), REFUSED, ids=[" ".join(words)[:60] for _, words in REFUSED])
def test_refusal(data: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(data)
    assert "config.json" in message and len(message) < 400 and "\n" not in message
    assert all(word in message for word in words), message


NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "linear_key_head_dim")
NEEDED_BY_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


@pytest.mark.parametrize("name", (*NEEDED, *NEEDED_BY_MOE))
def test_a_model_with_experts_needs(name: str) -> None:
    assert f"config.json lacks {name!r}" in refusal(without(moe(), name))


@pytest.mark.parametrize("name", (*NEEDED, "intermediate_size"))
def test_a_dense_model_needs(name: str) -> None:
    assert f"config.json lacks {name!r}" in refusal(dense(**{name: None}))


@pytest.mark.parametrize("content", (b"{", b"[]", b'"qwen3_5_moe"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000))
def test_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)[1]


def test_a_name_of_the_hub_is_answered_with_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"hf download Qwen/Qwen3\.5-0\.8B --local-dir Qwen3\.5-0\.8B"):
        read_config(Path("Qwen/Qwen3.5-0.8B"))
    Path("Qwen").mkdir()
    with pytest.raises(CheckpointError, match=r"no such folder: Qwen/Qwen3\.5-0\.8B$"):
        read_config(Path("Qwen/Qwen3.5-0.8B"))


def test_no_folder_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_config(tmp_path / "nowhere")[1]
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        read_config(tmp_path)[1]
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path)[1]
