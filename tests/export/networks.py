"""Networks in small shapes of the published configs, for tests that need no checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate.artifact.records import Growth, StateForm, StateKind
from ostinato.export.formats.quantization import Quantization
from ostinato.export.kernels import Kernels
from ostinato.export.kernels.operands import PENDING_UPDATES
from ostinato.export.layers.state import state_forms
from ostinato.export.models import LanguageModel, ModelConfig, build_network, find_family, read_config
from ostinato.export.models.methods import language_model_methods
from ostinato.export.models.qwen3_5 import Qwen3_5Config
from ostinato.export.weights.dummy import DummyWeights
from ostinato.export.weights.stream import QuantizedWeights, materialise

CPU = torch.device("cpu")
CONFIGS = Path(__file__).resolve().parents[1] / "assets" / "configs"

# Shapes that a CPU computes in milliseconds; all other settings are as published.
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "rotary_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, int]] = {
    "Qwen3.5-35B-A3B": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "Qwen3.5-0.8B": {"intermediate_size": 256},
}


def config_of(family: str, layers: int = 8, **changes: Any) -> ModelConfig:
    """The published config in a small shape, by default with two layers of full attention."""
    config = read_config(CONFIGS / family)[1]
    return replace(config, layer_types=config.layer_types[:layers], **{**SMALL, **FAMILIES[family], **changes})


def of_group(size: int | None) -> Quantization | None:
    """int4 in groups of this size; None: no quantisation."""
    return None if size is None else Quantization(size)


def qwen3_5(config: ModelConfig) -> Qwen3_5Config:
    """Return the config as `Qwen3_5Config`, for settings that only this family has."""
    assert isinstance(config, Qwen3_5Config)
    return config


def dummy_weights(network: LanguageModel, seed: int = 0) -> DummyWeights:
    """Return random weights of the network's family, on the CPU."""
    return find_family(network.config.model_type).dummy_weights(network, CPU, seed=seed)


def dummy_network(config: ModelConfig, group_size: int | None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    network = build_network(config, 128, dtype, quant=of_group(group_size))
    materialise(network, QuantizedWeights(network, dummy_weights(network), CPU))
    return with_room(network)


@torch.no_grad()
def network_logits(
    network: LanguageModel, tokens: torch.Tensor, begin: int, end: int, step: bool = False, slot: int = 1
) -> torch.Tensor:
    """Return the logits [vocab] after tokens `begin` to `end` of one session in one call. With `step`, layers take it as a
    step."""
    values = {
        "tokens": tokens[:, begin:end],
        "input_pos": torch.arange(begin, end),
        "slots": torch.full((end - begin,), slot),
    }
    for link in network.prompt_links(step):
        link.run(values)
    return values["logits"][0]


def network_conversation(
    network: LanguageModel, tokens: torch.Tensor, length: int, steps: int = 3, step: bool = False
) -> list[torch.Tensor]:
    """Prefill `length` tokens, then make `steps` decode steps, which layers take as steps if `step`; return the logits of
    each call."""
    prefill = network_logits(network, tokens, 0, length)
    return [prefill, *(network_logits(network, tokens, at, at + 1, step) for at in range(length, length + steps))]


class RowKernels(Kernels):
    """The reference kernels, in a network whose prompts and rows use the folded links of a step, and whose recurrent states
    have room for pending updates."""

    folds_steps, folds_prompts, max_rows, pending_updates = True, True, (256,), PENDING_UPDATES


@torch.no_grad()
def rows_output(network: LanguageModel, output: str, runs: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
    """Return an output of the method `rows` for the last row of each run. A run is (slot, first position, tokens); slot -1 is
    padding."""
    inputs = {
        "tokens": [token for _, _, tokens in runs for token in tokens],
        "input_pos": [max(first + row, -1) for _, first, tokens in runs for row in range(len(tokens))],
        "slots": [slot for slot, _, tokens in runs for _ in tokens],
    }
    ends = itertools.accumulate(len(tokens) for _, _, tokens in runs)
    inputs["logits_indices"] = [end - 1 for (slot, _, _), end in zip(runs, ends, strict=True) if slot >= 0]
    device = next(network.buffers()).device
    values = {name: torch.tensor(numbers, device=device) for name, numbers in inputs.items()}
    for link in language_model_methods(network)["rows"].links:
        link.run(values)
    return values[output]


def with_room(network: LanguageModel, slots: int = 1) -> LanguageModel:
    """Give the network state for `slots` sessions, as a loaded program has it, with shuffled pages."""
    forms = state_forms(network)
    tables = [name for name, form in forms.items() if form.kind is StateKind.BLOCK_TABLE]
    pages = slots * network.get_buffer(tables[0]).shape[1] if tables else 0
    grown = {
        id(network.get_buffer(name)): _grown(network.get_buffer(name), form, slots, pages)
        for name, form in forms.items()
    }
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, grown.get(id(buffer), buffer))
    return network


def _grown(buffer: torch.Tensor, form: StateForm, slots: int, pages: int) -> torch.Tensor:
    if form.kind is StateKind.BLOCK_TABLE:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        return order.view(slots, -1).to(buffer.dtype)
    if form.growth is Growth.FIXED:
        return buffer
    count = slots if form.growth is Growth.SLOTS else pages
    return buffer[:1].repeat(count, *[1] * (buffer.dim() - 1))
