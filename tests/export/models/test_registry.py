"""The registry: every family is found by its model types, and says all that the export needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.delegate.errors import CheckpointError
from ostinato.export.models import FAMILIES, build_network, find_family

from ...processes import PATIENCE
from ..networks import FAMILIES as SHAPES
from ..networks import config_of


def test_every_model_type_has_one_family() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))
    for family in FAMILIES:
        for name in family.model_types:
            assert find_family(name) is family


@pytest.mark.parametrize("model_type", (None, "gpt2", ["qwen3_5"], 3, "x" * 10_000))
def test_unknown_model_type(model_type: object) -> None:
    with pytest.raises(CheckpointError, match=r"unsupported model type .*; supported are: ") as caught:
        find_family(model_type)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("shape", SHAPES)
def test_network_is_the_familys_with_checkpoint_names(shape: str) -> None:
    network = build_network(config_of(shape, 4), 32, torch.float32)
    names = {name for name, _ in network.named_parameters()}
    assert all(name.startswith(("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")) for name in names)
    assert all(parameter.is_meta for parameter in network.parameters())


@pytest.mark.parametrize(
    "sizes",
    (
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1},
        {"linear_num_value_heads": 2**30, "linear_value_head_dim": 2**31 - 1, "linear_num_key_heads": 1},
        {"num_key_value_heads": 2**20, "head_dim": 2**31 - 1},
    ),
    ids=("parameters", "a layer's rows", "a cache"),
)
def test_sizes_whose_product_is_too_large(sizes: dict[str, int]) -> None:
    """Each size alone is one that a config may state."""
    with pytest.raises(CheckpointError, match=r"the sizes in config\.json do not make a network that can be built: \S"):
        build_network(config_of("Qwen3.5-35B-A3B", 4, **sizes), 64, torch.float32)


def test_a_config_is_read_without_the_compiler_stack(capitals_checkpoint: Path) -> None:
    """A mistyped path is reported at once, and the heavy packages print nothing while they load."""
    code = (
        "import sys; from pathlib import Path; from ostinato.export.models import read_config; "
        f"read_config(Path({str(capitals_checkpoint)!r})); "
        "print({'executorch', 'torch._inductor', 'torchao', 'transformers', 'triton'} & sys.modules.keys() or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("none\n", "")
