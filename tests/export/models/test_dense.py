"""Dense families compared with transformers over the same weights, and what their configs may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.layers.rotary import RotaryEmbedding
from ostinato.export.models import build_network, find_family, parse_config
from ostinato.export.models.dense import DenseConfig

from ...comparison import relative_error
from ..networks import network_conversation
from ..references import Reference, load_ours
from .dense_references import BASE, CASES, LLAMA3, make_dense

STEPS, TOLERANCE, MAX_SEQ_LEN = 3, 1e-4, 256
LENGTHS = (1, 2, 3, 63, 64, 65, 200)
Get = Callable[[str], Reference]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Get:
    made: dict[str, Reference] = {}

    def get(case: str) -> Reference:
        if case not in made:
            made[case] = make_dense(tmp_path_factory.mktemp(case), CASES[case], seed=list(CASES).index(case))
        return made[case]

    return get


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode(reference: Get, case: str, length: int) -> None:
    ref = reference(case)
    tokens = ref.tokens(length + STEPS, seed=length)
    expected = ref.logits(tokens)[length - 1 :]
    for step in (False, True):
        model = load_ours(ref.folder, MAX_SEQ_LEN)
        found = network_conversation(model, tokens, length, STEPS, step)
        errors = [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
        assert max(errors) < TOLERANCE, f"step {step}: {errors}"


def test_random_models_are_sensitive(reference: Get) -> None:
    """A mistake in any one block would show: if any one parameter is zero, the logits change."""
    for case in ("llama-biases", "qwen2", "qwen3"):
        for name, moved in reference(case).changes_without().items():
            assert moved > 1e-3, f"{case}: without {name} the logits move by {moved:.1e} only"


@pytest.mark.parametrize("dim", (64, 128))
def test_frequencies_of_a_stretched_context(dim: int) -> None:
    """As Llama 3.1's own, 131,072 positions far."""
    rope = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = read({"model_type": "llama", "rope_parameters": rope, "head_dim": dim})
    theirs = AutoConfig.for_model("llama", **BASE, rope_parameters=rope, head_dim=dim)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    ours = RotaryEmbedding(dim, config.rope_theta, config.rope_divisors)
    torch.testing.assert_close(ours.inv_freq, expected, rtol=1e-6, atol=0)
    assert len(set(config.rope_divisors)) > 3 and {1.0, 8.0} < set(config.rope_divisors)


def read(changes: dict[str, Any]) -> DenseConfig:
    """Read a config without what transformers adds to it, as published ones are."""
    config = parse_config(json.loads(json.dumps({**BASE, **changes})))[1]
    assert isinstance(config, DenseConfig)
    return config


@pytest.mark.parametrize("case", CASES)
def test_short_configs_mean_what_transformers_takes_them_for(case: str) -> None:
    """All that a family adds by itself is what transformers' class has: sizes of heads, biases, norms, positions."""
    ours = read(CASES[case])
    settings = {**BASE, **CASES[case]}
    theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
    sizes = ours.attention
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert ours.rms_norm_eps == theirs.rms_norm_eps and ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


WINDOWED = {"use_sliding_window": True, "sliding_window": 100}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, [4096, 4096]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "mistral", "sliding_window": 100}, [100, 100]),
        ({"model_type": "qwen2", "sliding_window": 100}, [None, None]),
        ({"model_type": "qwen2", **WINDOWED}, [None, None]),
        ({"model_type": "qwen2", **WINDOWED, "max_window_layers": 1}, [None, 100]),
        ({"model_type": "qwen2", **WINDOWED, "max_window_layers": 0, "sliding_window": None}, [None, None]),
        ({"model_type": "qwen3", **WINDOWED, "max_window_layers": 0}, [100, 100]),
        ({"model_type": "qwen3", **WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, [100, None]),
        ({"model_type": "llama"}, [None, None]),
    ],
)
def test_windows_of_layers(changes: dict[str, Any], windows: list[int | None]) -> None:
    """As transformers has them, and sessions are as long as without."""
    config = read(changes)
    assert [config.attention_of(layer_type).window for layer_type in config.layer_types] == windows
    assert config.sliding_window == next((window for window in windows if window is not None), None)
    assert config.max_position_embeddings == BASE["max_position_embeddings"]
    settings = {**BASE, **changes}
    theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2
    window = getattr(theirs, "sliding_window", None)
    assert [window if one == "sliding_attention" else None for one in types] == windows


def test_kinds_of_layers() -> None:
    """A window has a kind of its own, but where a session is no longer than it."""
    config = read({"model_type": "qwen2", **WINDOWED, "max_window_layers": 1})
    for length, window in ((101, 100), (100, None)):
        links = build_network(config, length, torch.float32).layer_links()
        kinds = ["full_attention layer", "full_attention layer" if window is None else "sliding_attention (100) layer"]
        assert [link.kind for link in links] == kinds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "mlp_bias": True}, "unsupported mlp_bias True"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"model_type": "llama", "pretraining_tp": 2}, "unsupported pretraining_tp 2"),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0}}, "unsupported rope_type 'yarn'"),
        ({"model_type": "llama", "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, r"low_freq_factor \(1\.0\)"),
        ({"model_type": "llama", "rope_parameters": {**LLAMA3, "factor": 0}}, "factor must be a number above 0"),
        ({"model_type": "llama", "num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]},
            "unsupported layer_types .*; supported is: 'full_attention' for all of 2 layers",
        ),
        (
            {"model_type": "qwen2", **WINDOWED, "layer_types": ["sliding_attention", "chunked_attention"]},
            "supported is: 'full_attention' or 'sliding_attention' for each of 2 layers",
        ),
        ({"model_type": "qwen2", **WINDOWED, "layer_types": ["sliding_attention"]}, "for each of 2 layers"),
        (
            {"model_type": "mistral", "sliding_window": 100, "layer_types": ["full_attention"] * 2},
            "supported is: 'sliding_attention' for all of 2 layers",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a whole number from 1 to"),
        (
            {"model_type": "qwen2", **WINDOWED, "max_window_layers": -1},
            "max_window_layers must be a whole number from 0",
        ),
        ({"model_type": "qwen3", "intermediate_size": None}, "lacks 'intermediate_size'"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "unsupported quantization_config"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(changes)


@pytest.mark.parametrize(
    ("changes", "group", "message"),
    [
        ({"hidden_size": 96}, 32, "int4 needs hidden_size to be a multiple of 64, the config has 96"),
        ({"hidden_size": 64, "intermediate_size": 192}, 128, "group size 128 does not divide hidden_size"),
        (
            {"num_attention_heads": 34, "num_key_value_heads": 2, "head_dim": 64},
            None,
            "1 to 16 times that of key heads",
        ),
        ({"head_dim": 80}, None, "head sizes of 16, 32, 64, 128, 256, got 80"),
    ],
)
def test_limits(changes: dict[str, Any], group: int | None, message: str) -> None:
    config = read({"model_type": "llama", **changes})
    with pytest.raises(ExportError, match=message):
        find_family("llama").check_limits(config, None if group is None else Int4(group), "cuda", torch.bfloat16)


def test_a_family_has_a_file_of_its_own() -> None:
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        assert find_family(name).config.__module__ == f"ostinato.export.models.{name}"
        assert Path(str(__import__("sys").modules[find_family(name).config.__module__].__file__)).stem == name
