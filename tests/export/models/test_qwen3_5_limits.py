"""Sizes that four-bit weights cannot take, refused by name before anything slow begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.int4 import Int4
from ostinato.export.models import build_network, parse_config
from ostinato.export.models.qwen3_5 import Qwen3_5Config, check_limits

from ..networks import of_group, qwen3_5


def config_of(folder: Path, **changes: object) -> Qwen3_5Config:
    return qwen3_5(parse_config({**json.loads((folder / "config.json").read_text()), **changes})[1])


def test_group_size_that_does_not_divide(capitals_checkpoint: Path) -> None:
    config = config_of(capitals_checkpoint)
    for size in (32, 64):
        check_limits(config, Int4(size), "cpu", torch.float32)
    check_limits(config, None, "cpu", torch.float32)
    with pytest.raises(ExportError) as caught:
        check_limits(config, Int4(128), "cpu", torch.float32)
    assert str(caught.value) == ("group size 128 does not divide moe_intermediate_size (64); --group-size 32, 64 would")


@pytest.mark.parametrize(
    ("setting", "value", "name", "size"),
    (
        ("hidden_size", 96, "hidden_size", 96),
        ("head_dim", 24, r"num_attention_heads \* head_dim", 96),
        ("linear_value_head_dim", 8, r"linear_num_value_heads \* linear_value_head_dim", 32),
        ("moe_intermediate_size", 72, "moe_intermediate_size", 72),
        ("shared_expert_intermediate_size", 32, "shared_expert_intermediate_size", 32),
    ),
)
def test_sizes_that_four_bits_cannot_take(
    capitals_checkpoint: Path, setting: str, value: int, name: str, size: int
) -> None:
    config = config_of(capitals_checkpoint, **{setting: value})
    check_limits(config, None, "cpu", torch.float32)
    with pytest.raises(ExportError, match=f"int4 needs {name} to be a multiple of 64, the config has {size}"):
        check_limits(config, Int4(32), "cpu", torch.float32)


LINEAR_ONLY, FULL_ONLY = ["linear_attention"] * 4, ["full_attention"] * 4


@pytest.mark.parametrize(
    "changes",
    (
        {"layer_types": FULL_ONLY, "linear_value_head_dim": 8},
        {"layer_types": LINEAR_ONLY, "head_dim": 24},
    ),
    ids=("no delta-nets", "no attention"),
)
def test_sizes_that_nothing_quantised_has(capitals_checkpoint: Path, changes: dict[str, object]) -> None:
    config = config_of(capitals_checkpoint, **changes)
    check_limits(config, Int4(32), "cpu", torch.float32)
    # The network does not have these sizes either.
    network = build_network(config, 16, torch.float32, quant=of_group(32))
    for name, parameter in network.named_parameters():
        if name.endswith("_scale"):
            columns = network.get_parameter(name.removesuffix("_scale")).shape[-1]
            packed = 1 if name.startswith("model.embed_tokens.") else 2
            assert columns * packed == 32 * parameter.shape[-1] and columns * packed % 64 == 0, name
