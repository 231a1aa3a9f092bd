"""Weights that are made when they are asked for: quantised pairs, and memory that is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.records import StateKind
from ostinato.delegate.errors import CheckpointError
from ostinato.export.artifact.records import Constants
from ostinato.export.compile.trace import trace_method
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.layers.state import state_forms
from ostinato.export.models import LanguageModel, build_network, read_config
from ostinato.export.models.methods import language_model_methods
from ostinato.export.program import _value
from ostinato.export.weights import quantize, stream
from ostinato.export.weights.stream import QuantizedWeights, allocate_untouched, float_shapes

from ..memory import MIB, anonymous_memory
from ..networks import CPU, FAMILIES, config_of, dummy_weights, of_group
from ..quantized import quantize_int4, quantize_int8


class Recorded:
    """Random floats by name, with a list of the names that were asked for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.values = {name: torch.randn(shape) for name, shape in shapes.items()}
        self.asked: list[str] = []

    def read(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.values[name]


def is_quantised(name: str, network: nn.Module) -> bool:
    return f"{name}_scale" in dict(network.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_pairs_in_either_order(family: str) -> None:
    network = build_network(config_of(family, 4), 128, torch.bfloat16, quant=of_group(64))
    shapes = float_shapes(network)
    source = Recorded(shapes)
    weights = QuantizedWeights(network, source, CPU)
    parameters = dict(network.named_parameters())
    assert list(weights) == list(parameters) and len(weights) == len(parameters)
    assert set(shapes) == {name for name in parameters if not name.endswith("_scale")}
    pairs = [name for name in shapes if is_quantised(name, network)]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.3.self_attn.qkv_proj.weight"} <= set(pairs)
    for name, value in source.values.items():
        if name not in pairs:
            assert torch.equal(weights[name], value.to(parameters[name].dtype)), name
            continue
        embedding = parameters[name].dtype == torch.int8
        stored, scale = quantize_int8(value, 64, CPU) if embedding else quantize_int4(value, 64, False, CPU)
        before = len(source.asked)
        # Two requests for a pair, in either order, cost one quantisation.
        assert torch.equal(weights[name], stored) and torch.equal(weights[f"{name}_scale"], scale), name
        assert torch.equal(weights[f"{name}_scale"], scale) and torch.equal(weights[name], stored), name
        assert source.asked[before:] == [name] * 2
        for found, key in ((stored, name), (scale, f"{name}_scale")):
            assert found.shape == parameters[key].shape and found.dtype == parameters[key].dtype, key
    with pytest.raises(KeyError):
        weights["model.layers.0.nothing"]


@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
def test_each_weight_is_made_once(group_size: int | None) -> None:
    """Each weight is made once, as an export asks: first whether it exists, then in the order of the file."""
    network = build_network(config_of("Qwen3.5-35B-A3B", 4), 64, torch.float32, quant=of_group(group_size))
    source = Recorded(float_shapes(network))
    weights = QuantizedWeights(network, source, CPU)
    own = {**dict(network.named_parameters()), "constant": torch.ones(3)}
    found = {key: _value(weights, own, key) for key in sorted(own)}
    assert sorted(source.asked) == sorted(source.values)
    assert torch.equal(found.pop("constant"), torch.ones(3))
    assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
        name: (parameter.shape, parameter.dtype) for name, parameter in network.named_parameters()
    }


@pytest.mark.parametrize("hqq", (False, True), ids=("nearest", "hqq"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize(
    "name", ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.experts.down_proj")
)
def test_weight_that_is_no_number(name: str, value: float, hqq: bool) -> None:
    network = build_network(config_of("Qwen3.5-35B-A3B", 1), 64, torch.float32, quant=of_group(32))
    source = Recorded(float_shapes(network))
    source.values[name].view(-1)[1000] = value
    weights = QuantizedWeights(network, source, CPU, hqq=hqq)
    with pytest.raises(CheckpointError, match=f"parameter '{name}' cannot be quantised"):
        weights[name]
    with pytest.raises(CheckpointError, match=f"parameter '{name}' cannot be quantised"):
        weights[f"{name}_scale"]


def test_router_norms_and_gates_are_not_quantised() -> None:
    network = build_network(config_of("Qwen3.5-35B-A3B", 4), 128, torch.bfloat16, quant=of_group(32))
    floats = {
        name.split(".layers.")[-1].partition(".")[2]
        for name in float_shapes(network)
        if not is_quantised(name, network) and ".layers." in name
    }
    mixers = ("in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight")
    assert floats == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.shared_expert_gate.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"linear_attn.{name}" for name in mixers),
    }


@pytest.mark.parametrize("hqq", (False, True), ids=("nearest", "hqq"))
def test_hqq_reaches_the_weights(capitals_checkpoint: Path, hqq: bool) -> None:
    family, config = read_config(capitals_checkpoint)
    network = build_network(config, 32, torch.float32, quant=of_group(32))
    source = family.checkpoint_weights(network, capitals_checkpoint)
    name = "model.layers.1.mlp.experts.down_proj"
    packed, scale = quantize_int4(source.read(name), 32, hqq, CPU)
    weights = QuantizedWeights(network, source, CPU, hqq=hqq)
    assert torch.equal(weights[name], packed) and torch.equal(weights[f"{name}_scale"], scale)


# --- tensors without memory


def constants_of(network: LanguageModel) -> Constants:
    """The tensors of `decode` by their keys."""
    constants = Constants()
    constants.name_after(network)
    constants.add(trace_method("decode", language_model_methods(network)["decode"]))
    return constants


def test_allocated_memory_is_never_touched() -> None:
    """A network of 4 GB, allocated and traced, takes almost no memory."""
    config = config_of("Qwen3.5-35B-A3B", 1, vocab_size=248_320, hidden_size=2048, tie_word_embeddings=False)
    before = anonymous_memory()
    network = build_network(config, 64, torch.float32)
    allocate_untouched(network)
    assert sum(parameter.nbytes for parameter in network.parameters()) > 4e9
    assert all(parameter.device == CPU for parameter in network.parameters())
    tensors = constants_of(network).tensors
    assert tensors["lm_head.weight"].shape == (248_320, 2048)
    # Measured: 6 to 9 MiB, state and the traced graph.
    assert anonymous_memory() - before < 100 * MIB


@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
def test_every_untouched_tensor_of_a_program_has_a_value(group_size: int | None) -> None:
    """Every tensor without memory gets a value: otherwise the file would hold whatever is in that memory. A tied head has the
    embedding's value."""
    network = build_network(config_of("Qwen3.5-0.8B", 4), 64, torch.float32, quant=of_group(group_size))
    parameters = {name for name, _ in network.named_parameters()}
    assert ("lm_head.weight" in parameters) is (group_size is not None)
    allocate_untouched(network)
    if group_size is None:
        assert network.lm_head.weight is network.model.embed_tokens.weight
    buffers = {name for name, _ in network.named_buffers()}
    found = constants_of(network)
    others = (StateKind.SAMPLING, StateKind.LOGITS_PROCESSING, StateKind.BLOCK_TABLE)
    assert found.mutable == {name for name, form in state_forms(network).items() if form.kind not in others}
    assert set(found.tensors) - buffers == parameters
    weights = QuantizedWeights(network, dummy_weights(network), CPU)
    assert parameters == set(weights)


@pytest.mark.parametrize("shape", [(3, 48, 64), (3, 40, 64), (80, 64)])
@pytest.mark.parametrize("elements", [1, 40 * 64, 1 << 21])
def test_panels_are_packed_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], elements: int
) -> None:
    monkeypatch.setitem(quantize.BLOCK, "cpu", elements)
    values, scale = torch.randint(0, 256, shape, dtype=torch.uint8), torch.randn(*shape[:-1], 4).bfloat16()
    kinds = (Int4(32), values, scale), (None, torch.randn(shape), None), (None, torch.randn(shape).bfloat16(), None)
    for given in (*((*kind, None) for kind in kinds), (Int4Min(), values, scale, 2 * scale)):
        for found, whole in zip(stream._packed(*given), pack_panels(*given), strict=True):
            assert found is whole is None or (found is not None and whole is not None and torch.equal(found, whole))
