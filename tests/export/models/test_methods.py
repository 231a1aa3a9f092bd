"""The methods of a language model, and the state that each of them writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.delegate.artifact.names import ROWS_METHODS
from ostinato.delegate.artifact.records import Growth, StateForm, StateKind
from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export.artifact.records import Constants
from ostinato.export.compile.trace import Chain, Known, trace_method
from ostinato.export.kernels import Kernels, kernels_for
from ostinato.export.layers.state import state_forms
from ostinato.export.models import build_network, read_config
from ostinato.export.models.methods import language_model_methods
from ostinato.export.weights.stream import allocate_untouched

from ...conftest import ROOT
from ..networks import of_group


@pytest.mark.parametrize("kernels", [Kernels, kernels_for("cpu")])
def test_state_of_a_model(capitals_checkpoint: Path, kernels: type[Kernels]) -> None:
    """Methods that run the model write all of its state. Methods that sample write the slot's token and position, and
    count the token. No method writes parameters and block tables, which are mutable all the same."""
    config = replace(read_config(capitals_checkpoint)[1], layer_types=("linear_attention", "full_attention"))
    network = build_network(config, 64, torch.float32, quant=of_group(32), kernels=kernels)
    allocate_untouched(network)
    forms = state_forms(network)
    begun = {name for name, form in forms.items() if form.kind is StateKind.SAMPLING}
    own = ("token", "position", "processed")
    assert begun == {f"sampling.{name}" for name in (*own, *SamplingTensors._fields)}
    others = (StateKind.SAMPLING, StateKind.LOGITS_PROCESSING, StateKind.BLOCK_TABLE)
    state = {name for name, form in forms.items() if form.kind not in others}
    assert len(state) == 4
    moved = {"sampling.token", "sampling.position", "sampling.output_counts"}
    written = {
        "prefill": state,
        "decode": state,
        "sample": moved,
        "logprobs": set(),
        "decode_sample": state | moved,
    }
    if kernels.max_rows:
        written |= {"rows": state | moved, "rows_hidden": state}
    methods = language_model_methods(network)
    assert methods.keys() == written.keys()
    given = (StateKind.BLOCK_TABLE, StateKind.SAMPLING, StateKind.LOGITS_PROCESSING)
    tables = {name for name, form in forms.items() if form.kind in given}
    for name, chain in methods.items():
        method = trace_method(name, chain)
        constants = Constants()
        constants.name_after(network)
        constants.add(method)
        assert constants.mutable == written[name], name
        # What the runtime writes is mutable, although no method writes it.
        declared = Constants(forms)
        declared.name_after(network)
        declared.add(method)
        assert tables & declared.tensors.keys() <= declared.mutable, name


def test_prompts_and_rows_of_the_same_code(capitals_checkpoint: Path) -> None:
    """On a CPU, prompts and rows share the graphs of layers, which needs examples of the same size. Where prompts have code
    of their own, the example is a long prompt."""
    config = replace(read_config(capitals_checkpoint)[1], layer_types=("linear_attention", "full_attention"))
    plain = language_model_methods(build_network(config, 1024, torch.float32))
    assert plain["prefill"].inputs["tokens"].shape == (1, 512)
    if not kernels_for("cpu").folds_prompts:
        pytest.skip("this CPU does not have AVX2")
    network = build_network(config, 1024, torch.float32, kernels=kernels_for("cpu"))
    allocate_untouched(network)
    methods, known = language_model_methods(network), Known()
    names = ("prefill", "rows", "rows_hidden")
    prompt, rows, hidden = (trace_method(name, methods[name], known=known).graphs for name in names)
    shared = {kind for kind, graph in prompt.items() if graph is rows.get(kind)}
    assert shared == {"linear_attention layer", "full_attention layer"}
    assert {kind for kind, graph in hidden.items() if graph is not rows.get(kind)} == {"final norm"}


def methods_of_a_gpu(model: str, group: int | None) -> dict[str, Chain]:
    config = read_config(ROOT / "tests" / "assets" / "configs" / model)[1]
    with torch.device("meta"):
        network = build_network(config, 1024, torch.bfloat16, kernels=kernels_for("cuda"), quant=of_group(group))
    return language_model_methods(network)


def test_rows_of_a_gpu() -> None:
    """Each range of rows that has kernels of its own is a method. The names stand in the order of the ranges."""
    pytest.importorskip("triton")
    methods = methods_of_a_gpu("Qwen3.5-35B-A3B", 128)
    rows = {name: methods[name].dynamic_shapes["tokens"][0] for name in ROWS_METHODS[1:]}
    ranges = {
        "four_rows": (2, 4),
        "step_rows": (2, 8),
        "few_rows": (2, 16),
        "rows": (2, 256),
        "many_rows": (257, 512),
    }
    assert {name: (size.min, size.max) for name, size in rows.items()} == ranges
    assert ("two_rows", *sorted(ranges, key=lambda name: rows[name].max)) == ROWS_METHODS
    assert {len(methods["two_rows"].inputs[name]) for name in ("tokens", "input_pos", "slots")} == {2}


@pytest.mark.parametrize(
    ("model", "group"), [("Qwen3.5-0.8B", None), ("Qwen3.5-0.8B", 128), ("Qwen3.5-0.8B", 32), ("Qwen3.5-35B-A3B", 32)]
)
def test_up_to_four_rows_have_a_method_for_integer_weights(model: str, group: int | None) -> None:
    pytest.importorskip("triton")
    left_out = set(ROWS_METHODS) - methods_of_a_gpu(model, group).keys()
    assert left_out == ({"four_rows"} if group is None else set())


@pytest.mark.parametrize("chunk", [3, 4, 5, 6])
def test_the_shortest_prompts(capitals_checkpoint: Path, chunk: int) -> None:
    """All methods are traced for any number of tokens, up to the few that an export may ask for."""
    config = replace(read_config(capitals_checkpoint)[1], layer_types=("linear_attention", "full_attention"))
    network = build_network(config, chunk + 1, torch.float32, kernels=kernels_for("cpu"))
    allocate_untouched(network)
    known = Known()
    for name, chain in language_model_methods(network).items():
        method = trace_method(name, chain, known=known)
        ranges = [(str(size), span) for graph in method.graphs.values() for size, span in graph.ranges.items()]
        assert all(span.upper == chunk for _, span in ranges), (name, ranges)


def test_forms_of_state(capitals_checkpoint: Path) -> None:
    """Shows which buffers grow with slots and which with pages. Layers share one table."""
    config = replace(read_config(capitals_checkpoint)[1], layer_types=("linear_attention", "full_attention") * 2)
    network = build_network(config, 200, torch.float32)
    forms = state_forms(network)
    table = "model.layers.1.self_attn.block_table"
    assert {name for name, form in forms.items() if form.growth is Growth.PAGES} == {
        f"model.layers.{index}.self_attn.{name}_cache" for index in (1, 3) for name in "kv"
    }
    assert not [name for name, form in forms.items() if form.growth is Growth.FIXED]
    assert forms[table] == StateForm(StateKind.BLOCK_TABLE, Growth.SLOTS)
    assert sum(form.kind is StateKind.BLOCK_TABLE for form in forms.values()) == 1
    # 200 positions are four pages of 64.
    assert network.get_buffer(table).shape[1] == 4
    assert network.get_buffer("model.layers.3.self_attn.block_table") is network.get_buffer(table)
