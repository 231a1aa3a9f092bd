"""Weights that are made when they are asked for: dummy ones, quantised pairs, memory that is never touched, streaming."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.artifact import constant_digest, dtype_name
from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.delegate.flatbuffer import map_file
from ostinato.delegate.ptd import parse_constants
from ostinato.export.lower import _value
from ostinato.export.methods import model_methods
from ostinato.export.models import ModelConfig, Qwen3_5, build_on_meta
from ostinato.export.quantize import quantize_int4, quantize_int8
from ostinato.export.records import Constants
from ostinato.export.trace import trace_method
from ostinato.export.weights import (
    DummyWeights,
    QuantizedWeights,
    WeightSource,
    checkpoint_weights,
    float_shapes,
    hollow,
    materialise,
)
from ostinato.export.writer import write_constants

from .references import relative_error

CPU = torch.device("cpu")
CONFIGS = Path(__file__).resolve().parents[1] / "assets" / "configs"
MIB = 1 << 20

# Shapes that a CPU computes in milliseconds; what they leave out is as published.
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
    config = ModelConfig.from_folder(CONFIGS / family)
    return replace(config, layer_types=config.layer_types[:layers], **{**SMALL, **FAMILIES[family], **changes})


def dummy_network(config: ModelConfig, group_size: int | None, dtype: torch.dtype = torch.float32) -> Qwen3_5:
    network = build_on_meta(config, 128, dtype, group_size=group_size)
    source = DummyWeights(float_shapes(network), CPU, dtype)
    materialise(network, QuantizedWeights(network, source, CPU))
    return network


def anonymous_memory() -> int:
    """Bytes of this process that are in RAM and not from a file."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells what of a process's memory was touched")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


# --- dummy weights


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_the_seeds(family: str) -> None:
    shapes = float_shapes(build_on_meta(config_of(family), 128, torch.bfloat16))
    first, same, other = (DummyWeights(shapes, CPU, torch.bfloat16, seed) for seed in (7, 7, 8))
    values = {name: first.read(name) for name in shapes}
    for name in reversed(list(shapes)):
        assert values[name].shape == shapes[name] and values[name].dtype == torch.bfloat16
        assert torch.equal(values[name], same.read(name)), name
        assert not torch.equal(values[name], other.read(name)), name
    # Layers of one shape are not the same layer.
    norms = [value for name, value in values.items() if name.endswith("input_layernorm.weight")]
    assert len(norms) == 8 and len({tuple(norm.tolist()) for norm in norms}) == 8


PROMPT, STEP = (torch.arange(100)[None], torch.arange(100)), (torch.tensor([[3]]), torch.tensor([100]))


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_logits_are_of_order_one(family: str, group_size: int | None, dtype: torch.dtype) -> None:
    """After a prompt, and a step later. No layer is idle, and none drowns the embedding."""
    network = dummy_network(config_of(family), group_size, dtype)
    added: list[float] = []
    for layer in network.model.layers:

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]) -> None:
            before, after = (sum(pair).float() for pair in (inputs[:2], outputs))  # type: ignore[union-attr]
            added.append(relative_error(after, before))

        layer.register_forward_hook(keep)
    for tokens, positions in (PROMPT, STEP):
        logits = network(tokens, positions)
        assert logits.isfinite().all()
        assert 0.5 < logits.std() < 2
    # Measured: 0.10 to 0.26.
    assert len(added) == 16
    assert min(added) > 0.05 and max(added) < 0.5


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_does_not_grow_from_layer_to_layer(family: str) -> None:
    """All the published model's layers, in bfloat16 beside float32 of the same weights."""
    config = config_of(family, layers=100)
    exact, rounded = (dummy_network(config, None, dtype) for dtype in (torch.float32, torch.bfloat16))
    materialise(exact, {name: value.to(exact.get_parameter(name)) for name, value in rounded.named_parameters()})
    assert config.num_hidden_layers >= 24
    # Measured: 0.03 (a token may choose other experts) and 0.01 (dense). With additions as large as the embedding it would
    # be 0.87 and 0.29.
    for tokens, positions in (PROMPT, STEP):
        assert relative_error(rounded(tokens, positions), exact(tokens, positions)) < 0.1


# --- what the artifact stores


class Recorded:
    """Random floats by name, and which were asked for."""

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
    network = build_on_meta(config_of(family, 4), 128, torch.bfloat16, group_size=64)
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
        # Asked for in either order, a pair costs one quantisation.
        assert torch.equal(weights[name], stored) and torch.equal(weights[f"{name}_scale"], scale), name
        assert torch.equal(weights[f"{name}_scale"], scale) and torch.equal(weights[name], stored), name
        assert source.asked[before:] == [name] * 2
        for found, key in ((stored, name), (scale, f"{name}_scale")):
            assert found.shape == parameters[key].shape and found.dtype == parameters[key].dtype, key
    with pytest.raises(KeyError):
        weights["model.layers.0.nothing"]


@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
def test_each_weight_is_made_once(group_size: int | None) -> None:
    """As an export asks for it: whether there is such a weight, and in the order of the file."""
    network = build_on_meta(config_of("Qwen3.5-35B-A3B", 4), 64, torch.float32, group_size=group_size)
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
    network = build_on_meta(config_of("Qwen3.5-35B-A3B", 1), 64, torch.float32, group_size=32)
    source = Recorded(float_shapes(network))
    source.values[name].view(-1)[1000] = value
    weights = QuantizedWeights(network, source, CPU, hqq=hqq)
    with pytest.raises(CheckpointError, match=f"parameter '{name}' cannot be quantised"):
        weights[name]
    with pytest.raises(CheckpointError, match=f"parameter '{name}' cannot be quantised"):
        weights[f"{name}_scale"]


def test_router_norms_and_gates_are_not_quantised() -> None:
    network = build_on_meta(config_of("Qwen3.5-35B-A3B", 4), 128, torch.bfloat16, group_size=32)
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
    network = build_on_meta(ModelConfig.from_folder(capitals_checkpoint), 32, torch.float32, group_size=32)
    source = checkpoint_weights(network, capitals_checkpoint)
    name = "model.layers.1.mlp.experts.down_proj"
    packed, scale = quantize_int4(source.read(name), 32, hqq, CPU)
    weights = QuantizedWeights(network, source, CPU, hqq=hqq)
    assert torch.equal(weights[name], packed) and torch.equal(weights[f"{name}_scale"], scale)


# --- tensors without memory


def constants_of(network: Qwen3_5) -> Constants:
    """The tensors of `decode` by their keys."""
    constants = Constants()
    constants.add(trace_method("decode", model_methods(network)["decode"]))
    return constants


def test_hollow_memory_is_never_touched() -> None:
    """A network of 4 GB, made hollow and traced, takes next to none of it."""
    config = config_of("Qwen3.5-35B-A3B", 1, vocab_size=248_320, hidden_size=2048, tie_word_embeddings=False)
    before = anonymous_memory()
    network = build_on_meta(config, 64, torch.float32)
    hollow(network)
    assert sum(parameter.nbytes for parameter in network.parameters()) > 4e9
    assert all(parameter.device == CPU for parameter in network.parameters())
    tensors = constants_of(network).tensors
    assert tensors["lm_head.weight"].shape == (248_320, 2048)
    # Measured: 6 to 9 MiB, state and the traced graph.
    assert anonymous_memory() - before < 100 * MIB


@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
def test_every_hollow_tensor_of_a_program_has_a_value(group_size: int | None) -> None:
    """What has none would be written as it is: as whatever that memory holds. A tied head has its embedding's."""
    network = build_on_meta(config_of("Qwen3.5-0.8B", 4), 64, torch.float32, group_size=group_size)
    parameters = {name for name, _ in network.named_parameters()}
    assert ("lm_head.weight" in parameters) is (group_size is not None)
    hollow(network)
    if group_size is None:
        assert network.lm_head.weight is network.model.embed_tokens.weight
    buffers = {name for name, _ in network.named_buffers()}
    found = constants_of(network)
    assert found.mutable == {name for name in buffers if name.endswith(("_cache", "_state"))}
    assert set(found.tensors) - buffers == parameters
    weights = QuantizedWeights(network, DummyWeights(float_shapes(network), CPU, torch.float32), CPU)
    assert parameters == set(weights)


# --- streaming into the file


class Counted:
    """Dummy weights that know how many of them are alive."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def read(self, name: str) -> Tensor:
        value = self._source.read(name)
        self._alive.add(value)
        self.most = max(self.most, len(self._alive))
        return value


class Peak:
    """The most anonymous memory that the process has while the block runs, beyond what it had before; in bytes."""

    def __init__(self) -> None:
        self.grown = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, args=(anonymous_memory(),))

    def _look(self, before: int) -> None:
        while not self._done.wait(0.001):
            self.grown = max(self.grown, anonymous_memory() - before)

    def __enter__(self) -> Peak:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()


def wide_config(layers: int) -> ModelConfig:
    """A dense model of 48 MiB a layer in float32."""
    return config_of("Qwen3.5-0.8B", layers, hidden_size=1024, intermediate_size=4096)


@pytest.mark.parametrize("group_size", (None, 128), ids=("plain", "int4"))
def test_weights_stream_into_the_file(tmp_path: Path, group_size: int | None) -> None:
    network = build_on_meta(wide_config(6), 64, torch.float32, group_size=group_size)
    source = Counted(DummyWeights(float_shapes(network), CPU, torch.float32))
    total = sum(4 * torch.Size(shape).numel() for shape in float_shapes(network).values())
    assert total > 280 * MIB
    parameters = dict(sorted(network.named_parameters()))
    gc.collect()
    path = tmp_path / "model.ptd"
    with Peak() as peak:
        write_constants(path, parameters, "id", b"program", QuantizedWeights(network, source, CPU).__getitem__)
    # One that is written and one that is read: measured, 2.
    assert source.most <= 3
    # The largest tensor is 32 MiB; torchao makes copies of what it is given. Measured: 50 and 130 to 170 MiB.
    assert peak.grown < (100 if group_size is None else 250) * MIB

    stored = parse_constants(map_file(path), path)
    weights = QuantizedWeights(network, DummyWeights(float_shapes(network), CPU, torch.float32), CPU)
    assert set(stored.entries) == set(parameters)
    for name in ("lm_head.weight", "model.layers.5.mlp.down_proj.weight", "model.layers.0.linear_attn.A_log"):
        if name in parameters:
            assert torch.equal(stored.entries[name].tensor(), weights[name]), name


def test_constants_are_asked_for_once_in_order_and_hashed(tmp_path: Path) -> None:
    asked: list[str] = []
    values = {
        "matrix": torch.randn(5, 7),
        "column": torch.randn(4, 3).t()[1],
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "transposed": torch.randn(3, 2).t(),
    }

    def load(key: str) -> Tensor:
        asked.append(key)
        return values[key]

    path = tmp_path / "model.ptd"
    placeholders = {key: torch.empty_like(value, device="meta") for key, value in values.items()}
    write_constants(path, placeholders, "the id", b"program", load)
    assert asked == list(values)
    stored = parse_constants(map_file(path), path)
    manifest = stored.manifest
    assert manifest.export_id == "the id"
    for key, value in values.items():
        assert torch.equal(stored.entries[key].tensor(), value), key
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        strides = value.contiguous().stride()
        assert manifest.constants[key] == constant_digest(data, dtype_name(value.dtype), tuple(value.shape), strides)


def test_value_that_does_not_fit_its_code(tmp_path: Path) -> None:
    wanted = {"w": torch.empty(2, 3, device="meta")}
    for value, said in ((torch.zeros(3, 2), r"\[3, 2\] float32"), (torch.zeros(2, 3).half(), r"\[2, 3\] float16")):
        with pytest.raises(ExportError, match=rf"constant 'w' was compiled as \[2, 3\] float32, its value is {said}"):
            write_constants(tmp_path / "model.ptd", wanted, "id", b"", lambda key, value=value: value)


def test_failed_load_ends_the_writing(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(key: str) -> Tensor:
        asked.append(key)
        if key == "b":
            raise ExportError("no such weight")
        return torch.zeros(3)

    with pytest.raises(ExportError, match="no such weight"):
        write_constants(tmp_path / "model.ptd", {key: torch.zeros(3) for key in "abcdef"}, "id", b"", load)
    assert asked == ["a", "b"]
