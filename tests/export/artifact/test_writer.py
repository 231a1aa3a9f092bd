"""Constants stream into the file: each made once, in order, hashed on the way, and none kept."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.records import constant_digest, dtype_name
from ostinato.delegate.errors import ExportError
from ostinato.export.artifact import writer
from ostinato.export.artifact.writer import ConstantsWriter, constants_layout, write_constants
from ostinato.export.models import ModelConfig, build_network
from ostinato.export.weights.stream import QuantizedWeights, WeightSource, float_shapes

from ..memory import MIB, Peak
from ..networks import CPU, config_of, dummy_weights, of_group


class Counted:
    """Dummy weights that record the largest number of them alive at a time."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.max_alive = 0

    def read(self, name: str) -> Tensor:
        value = self._source.read(name)
        self._alive.add(value)
        self.max_alive = max(self.max_alive, len(self._alive))
        return value


def wide_config(layers: int) -> ModelConfig:
    """Return the config of a dense model with 48 MiB per layer in float32."""
    return config_of("Qwen3.5-0.8B", layers, hidden_size=1024, intermediate_size=4096)


@pytest.mark.parametrize("group_size", (None, 128), ids=("plain", "int4"))
def test_weights_stream_into_the_file(tmp_path: Path, group_size: int | None) -> None:
    network = build_network(wide_config(6), 64, torch.float32, quant=of_group(group_size))
    source = Counted(dummy_weights(network))
    total = sum(4 * torch.Size(shape).numel() for shape in float_shapes(network).values())
    assert total > 280 * MIB
    parameters = dict(sorted(network.named_parameters()))
    gc.collect()
    path = tmp_path / "model.ptd"
    # The first file imports what writes it: 130 MiB.
    write_constants(path, {"first": torch.zeros(1)}, lambda key: torch.zeros(1))
    with Peak() as peak:
        write_constants(path, parameters, QuantizedWeights(network, source, CPU).__getitem__)
    # One weight that is hashed, one that is written and one that is read. Measured: 2.
    assert source.max_alive <= 3
    # The largest tensor has 32 MiB, and torchao copies its inputs. Measured: 50 MiB, and 130 to 170 MiB for int4.
    assert peak.grown < (100 if group_size is None else 250) * MIB

    stored = open_constants(path)
    weights = QuantizedWeights(network, dummy_weights(network), CPU)
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
    written = write_constants(path, placeholders, load)
    assert asked == list(values)
    stored = open_constants(path)
    manifest = stored.manifest
    assert manifest == written
    for key, value in values.items():
        assert torch.equal(stored.entries[key].tensor(), value), key
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        strides = value.contiguous().stride()
        assert manifest.constants[key] == constant_digest(data, dtype_name(value.dtype), tuple(value.shape), strides)


def test_value_that_does_not_fit_its_code(tmp_path: Path) -> None:
    wanted = {"w": torch.empty(2, 3, device="meta")}
    for value, said in ((torch.zeros(3, 2), r"\[3, 2\] float32"), (torch.zeros(2, 3).half(), r"\[2, 3\] float16")):
        with pytest.raises(ExportError, match=rf"constant 'w' was compiled as \[2, 3\] float32, its value is {said}"):
            write_constants(tmp_path / "model.ptd", wanted, {"w": value}.__getitem__)


def test_failed_load_ends_the_writing(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(key: str) -> Tensor:
        asked.append(key)
        if key == "b":
            raise ExportError("no such weight")
        return torch.zeros(3)

    with pytest.raises(ExportError, match="no such weight"):
        write_constants(tmp_path / "model.ptd", {key: torch.zeros(3) for key in "abcdef"}, load)
    assert asked == ["a", "b"]


def test_writing_beside_other_work(tmp_path: Path) -> None:
    values = {key: torch.full((3,), float(number)) for number, key in enumerate("abc")}
    counted: list[int] = []
    with ConstantsWriter(tmp_path / "beside.ptd") as writer:
        writer.start(values, values.__getitem__, constants_layout(values))
        manifest = writer.finish(counted.append)
    assert manifest == write_constants(tmp_path / "model.ptd", values, values.__getitem__)
    assert (tmp_path / "beside.ptd").read_bytes() == (tmp_path / "model.ptd").read_bytes()
    assert sum(counted) == 3 * 12


def test_failed_load_is_raised_at_the_end(tmp_path: Path) -> None:
    def load(key: str) -> Tensor:
        raise ExportError("no such weight")

    with ConstantsWriter(tmp_path / "model.ptd") as writer:
        values = {"a": torch.zeros(3)}
        writer.start(values, load, constants_layout(values))
        with pytest.raises(ExportError, match="no such weight"):
            writer.finish(lambda nbytes: None)


def test_an_error_elsewhere_ends_the_writing(tmp_path: Path) -> None:
    asked: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def load(key: str) -> Tensor:
        asked.append(key)
        begun.set()
        goes_on.wait()
        return torch.zeros(3)

    with pytest.raises(ZeroDivisionError), ConstantsWriter(tmp_path / "model.ptd") as writer:
        values = {key: torch.zeros(3) for key in "abcdef"}
        writer.start(values, load, constants_layout(values))
        begun.wait()
        # The block waits for the constant that is being loaded.
        threading.Timer(0.2, goes_on.set).start()
        raise ZeroDivisionError
    assert len(asked) < 6 and not [one for one in threading.enumerate() if one.name.startswith("ostinato-write")]


def test_the_disk_gets_the_file_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, begun = list[int](), threading.Event()
    flush = os.fsync

    def counted(number: int) -> None:
        sizes.append(os.fstat(number).st_size)
        begun.set()
        flush(number)

    def load(key: str) -> Tensor:
        # A value is asked for while the one ahead is written.
        assert key < "d" or begun.wait(10)
        return torch.zeros(1000)

    monkeypatch.setattr(writer, "_FLUSH_BYTES", 4000)
    monkeypatch.setattr(os, "fsync", counted)
    path = tmp_path / "model.ptd"
    write_constants(path, {key: torch.zeros(1000) for key in "abcdef"}, load)
    assert len(sizes) > 1 and sizes[0] < sizes[-1] == path.stat().st_size


def test_a_disk_that_fails_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(writer, "_FLUSH_BYTES", 4000)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no room"):
        write_constants(tmp_path / "model.ptd", {"a": torch.zeros(1000)}, lambda key: torch.zeros(1000))


@pytest.mark.parametrize(("largest", "count"), [(3, 2), (6, 3), (25, 6)])
def test_few_values_wait_for_their_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, largest: int, count: int
) -> None:
    """The first hash ends when value number `count` is asked for, and the next is not asked for before: no more wait than
    have the bytes of the largest value, which comes last."""
    asked: list[str] = []
    seen: list[int] = []
    enough = threading.Event()
    digest = writer._digest
    constants = {key: torch.zeros(3) for key in "abcde"} | {"f": torch.zeros(largest)}

    def slow(value: Tensor) -> str:
        if value[0] == 0:
            assert enough.wait(60)
            seen.append(len(asked))
        return digest(value)

    def load(key: str) -> Tensor:
        asked.append(key)
        if len(asked) == count:
            enough.set()
        return torch.full_like(constants[key], float("abcdef".index(key)))

    monkeypatch.setattr(writer, "_digest", slow)
    write_constants(tmp_path / "model.ptd", constants, load)
    assert seen == [count]
