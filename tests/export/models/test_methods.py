"""The methods of a language model: what each of them writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ostinato.delegate.artifact import StateKind
from ostinato.delegate.sampling import SamplingInputs
from ostinato.export.artifact.records import Constants
from ostinato.export.compile.trace import trace_method
from ostinato.export.layers.state import state_kinds
from ostinato.export.models import build_network, read_config
from ostinato.export.models.methods import language_model_methods
from ostinato.export.weights.stream import allocate_untouched


def test_state_of_a_model(capitals_checkpoint: Path) -> None:
    """What moves the model writes all of its state; what draws a token writes all of the sampling's."""
    config = replace(read_config(capitals_checkpoint)[1], layer_types=("linear_attention", "full_attention"))
    network = build_network(config, 64, torch.float32, group_size=32)
    allocate_untouched(network)
    kinds = state_kinds(network)
    begun = {name for name, kind in kinds.items() if kind is StateKind.SAMPLING}
    assert begun == {f"sampling.{name}" for name in ("token", "position", *SamplingInputs._fields)}
    state = {name for name, kind in kinds.items() if kind not in (StateKind.SAMPLING, StateKind.WORKSPACE)}
    assert len(state) == 4
    moved = {"sampling.token", "sampling.position"}
    written = {"prefill": state, "decode": state, "sample": begun, "decode_sample": state | moved}
    methods = language_model_methods(network)
    assert methods.keys() == written.keys()
    for name, chain in methods.items():
        method = trace_method(name, chain)
        constants = Constants()
        constants.name_after(network)
        constants.add(method)
        assert constants.mutable == written[name], name
