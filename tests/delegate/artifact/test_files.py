"""Tests of the readers of `.pte` and `.ptd`, and of the records in both files."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.delegate import ArtifactError, CheckpointError, Dim, Target, TensorSpec
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.flatbuffer import Table, damaged, map_file
from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.artifact.names import FORMAT_VERSION, MANIFEST_KEY
from ostinato.delegate.artifact.ptd import SCALAR_TYPES, parse_constants
from ostinato.delegate.artifact.pte import parse_program
from ostinato.delegate.artifact.records import (
    BufferSpec,
    Growth,
    Manifest,
    MethodRecord,
    PageGroup,
    Segment,
    StateKind,
)
from ostinato.delegate.artifact.seal import Seal
from ostinato.delegate.artifact.target import host_isa, host_target

from ...modules import MAX_SEQ_LEN, Recurrent
from ..loading_cases import written

DTYPES = tuple(SCALAR_TYPES.values())


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return small numbers of the dtype. Other bit patterns would do as well, but NaN is not equal to itself."""
    numbers = torch.arange(-3, -3 + max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape)
    return (numbers % 2).bool() if dtype is torch.bool else numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0, 2)], ids=str)
def test_constants_of_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    before, tensor, after = torch.arange(5), values(dtype, shape), torch.randn(3)
    file = written(tmp_path / "model.ptd", {"a": before, "b.weight": tensor, "z": after})
    assert set(file.entries) == {"a", "b.weight", "z"}
    found = file.entries["b.weight"].tensor()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert torch.equal(file.entries["a"].tensor(), before)
    assert torch.equal(file.entries["z"].tensor(), after)


def test_constants_that_are_not_contiguous(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(4, 8),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    file = written(tmp_path / "model.ptd", views)
    for key, tensor in views.items():
        assert torch.equal(file.entries[key].tensor(), tensor), key


def test_manifest_names_every_constant(tmp_path: Path) -> None:
    constants = {"w": torch.randn(4), "empty": torch.empty(0)}
    file = written(tmp_path / "model.ptd", constants)
    assert set(file.manifest.constants) == set(constants)
    assert file.manifest.constants["w"] != file.manifest.constants["empty"]


def test_many_constants(tmp_path: Path) -> None:
    constants = {f"layers.{index}.weight": torch.full((index % 5,), float(index)) for index in range(500)}
    file = written(tmp_path / "model.ptd", constants)
    assert all(torch.equal(file.entries[key].tensor(), tensor) for key, tensor in constants.items())


def test_a_ptd_without_manifest(tmp_path: Path) -> None:
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
    from executorch.exir.tensor_layout import TensorLayout
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    tensor = torch.arange(4)
    entry = DataEntry(0, 16, TensorLayout.from_tensor(tensor))
    data = bytes(FlatTensorSerializer().serialize(DataPayload([tensor.numpy().tobytes()], {"x": entry})))
    with pytest.raises(ArtifactError, match=f"no manifest.*{MANIFEST_KEY}"):
        parse_constants(memoryview(data), tmp_path / "foreign.ptd")


def test_mapped_constants_are_not_copied_and_cannot_be_written(recurrent_artifact: Path) -> None:
    path = recurrent_artifact / "model.ptd"
    data = map_file(path)
    assert data.readonly
    entry = parse_constants(data, path).entries["embed"]
    address = entry.tensor().data_ptr()
    # A line is: first-end permissions offset device inode path.
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    (found,) = [
        permissions
        for addresses, permissions, *_, name in (line for line in maps if len(line) == 6)
        if name == str(path) and int(addresses.split("-")[0], 16) <= address < int(addresses.split("-")[1], 16)
    ]
    assert found == "r--s"
    assert bytes(entry.data) == entry.tensor().view(torch.uint8).flatten().numpy().tobytes()


def test_program_of_an_export(recurrent_artifact: Path) -> None:
    path = recurrent_artifact / "model.pte"
    parsed = parse_program(map_file(path), path)
    assert set(parsed.methods) == {"prefill", "decode"}
    assert parsed.metadata["get_max_seq_len"] == MAX_SEQ_LEN
    for name, method in parsed.methods.items():
        assert (method.name, method.record.method) == (name, name)
        assert sorted(method.input_order) == [0, 1]
        assert method.output_order == (0,)
        (segment,) = method.record.segments
        code = parsed.named_data[segment.code_key]
        assert bytes(code[:4]) == b"\x7fELF"
        assert hashlib.sha256(code).hexdigest() == segment.code_sha256
        assert (segment.prefix, segment.inputs, segment.outputs, method.record.results) == ("", (0, 1), (2,), (2,))
        assert set(method.record.constants.values()) == {"embed", "head"}
        assert set(method.record.buffers.values()) == {"cache", "total", "steps"}
        assert {key: spec.initialised for key, spec in method.record.buffer_specs.items()} == {
            "cache": False,
            "total": False,
            "steps": True,
        }
    program, seal = Seal.split(map_file(path))
    assert hashlib.sha256(program).hexdigest() == seal.program


def test_constants_of_an_export(recurrent_artifact: Path) -> None:
    path = recurrent_artifact / "model.ptd"
    file = open_constants(path)
    module = Recurrent()
    assert set(file.entries) == {"embed", "head", "steps"}
    for key, entry in file.entries.items():
        assert torch.equal(entry.tensor(), module.state_dict()[key])


@pytest.mark.parametrize("bit", [20, 24])
def test_a_vector_longer_than_the_file_costs_nothing(recurrent_artifact: Path, bit: int) -> None:
    """A flipped bit in a count must not make the reader ask for gigabytes."""
    data = bytearray((recurrent_artifact / "model.pte").read_bytes())
    root = Table.root(memoryview(data))
    for slot in (1, 4, 7):
        begin, count = root._vector(slot, 4)
        damaged_data = bytearray(data)
        struct.pack_into("<I", damaged_data, begin - 4, count | 1 << bit)
        tracemalloc.start()
        with pytest.raises(ArtifactError, match="cannot be parsed"):
            parse_program(memoryview(damaged_data), Path("model.pte"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


RECORD = MethodRecord(
    method="decode",
    inputs=(
        TensorSpec("tokens", "int64", (Dim(1, 1), Dim(2, 31, "T")), (0, 10)),
        TensorSpec("slot", "int64", (), (0, 0), Growth.SLOTS),
    ),
    outputs=(TensorSpec("logits", "float32", (Dim(1, 1), Dim(11, 11))),),
    # The first segment gives values 2 and 3. Each of the others takes a value that the one before gave.
    segments=(
        Segment("ostinato.code.ab", "ab", "", "0/", (0,), (2, 3)),
        Segment("ostinato.code.cd", "cd", "ostinato.extern.cd", "1/", (3, 1), (4,)),
        Segment("ostinato.code.cd", "cd", "ostinato.extern.cd", "10/", (4, 2), (5,), device="cpu"),
    ),
    results=(5,),
    constants={"1/weight": "layers.0.weight", "10/weight": "layers.1.weight"},
    buffers={"0/cache": "cache"},
    buffer_specs={
        "cache": BufferSpec((32, 6), "float32", True, StateKind.KV_CACHE, Growth.PAGES),
        "table": BufferSpec((2, 8), "int32", False, StateKind.BLOCK_TABLE, Growth.SLOTS, PageGroup.of_window(24)),
    },
)


def test_record_round_trip() -> None:
    assert MethodRecord.from_bytes(RECORD.to_bytes()) == RECORD
    assert RECORD.buffer_specs["cache"].nbytes == 32 * 6 * 4
    assert [spec.group.name for spec in RECORD.buffer_specs.values()] == ["global", "window 24"]
    assert RECORD.inputs[0].shape_text == "[1, T=2..31]"
    assert [segment.on_host for segment in RECORD.segments] == [False, False, True]
    assert RECORD.host_names == {"10/weight"}


@pytest.mark.parametrize("key", sorted(asdict(RECORD)))
def test_a_record_lacks_a_field(key: str) -> None:
    data = json.loads(RECORD.to_bytes())
    del data[key]
    with pytest.raises(ArtifactError, match="record"):
        MethodRecord.from_bytes(json.dumps(data).encode())


def changed(path: Sequence[str | int], value: object) -> bytes:
    """RECORD's bytes with another value in one place."""
    data: Any = json.loads(RECORD.to_bytes())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value", "why"),
    (
        (("segments",), [], "it has no code"),
        (("segments", 0, "inputs"), [2], "a value is taken before it is given"),
        (("segments", 0, "streamed_by"), 7, "a segment is streamed by what it does not take of the method's inputs"),
        (("segments", 1, "streamed_by"), 2, "a segment is streamed by what it does not take of the method's inputs"),
        (("segments", 1, "inputs"), [5, 1], "a value is taken before it is given"),
        (("segments", 1, "inputs"), [-1], "a value is taken before it is given"),
        (("segments", 0, "outputs"), [3], "a value is taken before it is given"),
        (("segments", 0, "outputs"), [1, 3], "a value is given twice"),
        (("segments", 0, "outputs"), [2, 3, 3], "a value is given twice"),
        (("segments", 2, "outputs"), [4, 5], "a value is given twice"),
        (("segments", 2, "outputs"), [], "it lacks a result"),
        (("results",), [6], "it lacks a result"),
        (("results",), [], "it lacks a result"),
        (("results",), [5, 4], "it lacks a result"),
        (("segments", 1, "prefix"), "2/", "a constant does not belong to one segment"),
        (("segments", 0, "prefix"), "", "a constant does not belong to one segment"),
        (("constants",), {"weight": "layers.0.weight"}, "a constant does not belong to one segment"),
        (("buffers",), {"0/cache": "other"}, "it lacks a buffer's shape"),
        (("buffers",), {"0/cache": "cache", "10/cache": "cache"}, "a mutable buffer is on two devices"),
        (("buffer_specs", "table", "group", "name"), "global", "two page groups have one name"),
    ),
    ids=str,
)
def test_a_record_whose_chain_does_not_hold(path: Sequence[str | int], value: object, why: str) -> None:
    with pytest.raises(ArtifactError, match=rf"record of method 'decode' in model\.pte is damaged: {why}"):
        MethodRecord.from_bytes(changed(path, value))


NUMBERS = (("segments", 1, "inputs"), ("segments", 1, "outputs"), ("results",), ("buffer_specs", "cache", "shape"))
TEXTS = (("method",), *(("segments", 1, key) for key in ("code_key", "code_sha256", "extern_key", "prefix")))
TABLES = (("constants",), ("buffers",), ("segments", 0))
NO_NUMBERS: tuple[object, ...] = (None, 3, "x", {}, {"a": 3}, [None], ["0"], [0.0], [[0]], [True])
NO_TEXTS: tuple[object, ...] = (None, 3, 0.5, True, {}, [], ["x"])
NO_DEVICES: tuple[object, ...] = (*NO_TEXTS, "cuda", "host")
NO_TABLES: tuple[object, ...] = (None, 3, 0.5, "x", True, {"a": 3}, ["x"], [{}])
WRONG = [
    (path, value)
    for paths, values in (
        (NUMBERS, NO_NUMBERS),
        (TEXTS, NO_TEXTS),
        ((("segments", 1, "device"),), NO_DEVICES),
        (TABLES, NO_TABLES),
    )
    for path in paths
    for value in values
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=str)
def test_a_record_of_wrong_types(path: Sequence[str | int], value: object) -> None:
    with pytest.raises(ArtifactError, match="record"):
        MethodRecord.from_bytes(changed(path, value))


DEEP = [b"[" * 100_000, b'{"method":' * 100_000]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", *DEEP], ids=lambda data: str(data[:12]))
def test_no_record_at_all(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        MethodRecord.from_bytes(data)
    with pytest.raises(ArtifactError, match="manifest"):
        Manifest.from_bytes(data)
    with pytest.raises(ArtifactError, match="compile target"):
        Target.from_bytes(data)


@pytest.mark.parametrize("kind", list(StateKind))
def test_a_buffer_of_every_kind(kind: StateKind) -> None:
    specs = {"cache": replace(RECORD.buffer_specs["cache"], kind=kind)}
    found = MethodRecord.from_bytes(replace(RECORD, buffer_specs=specs).to_bytes())
    assert found.buffer_specs["cache"].kind is kind


@pytest.mark.parametrize("kind", ["paged", "", "KV_CACHE", None, 3, [], ["kv_cache"], {}])
def test_a_buffer_of_unknown_kind(kind: object) -> None:
    with pytest.raises(
        ArtifactError, match=r"record in model\.pte cannot be read: unknown kind of state .*recurrent, samp"
    ):
        MethodRecord.from_bytes(changed(("buffer_specs", "cache", "kind"), kind))
    with pytest.raises(ArtifactError, match="record"):
        MethodRecord.from_bytes(
            changed(("buffer_specs", "cache"), {"shape": [3], "dtype": "int8", "initialised": True})
        )


@pytest.mark.parametrize("growth", list(Growth))
def test_every_growth(growth: Growth) -> None:
    specs = {"cache": replace(RECORD.buffer_specs["cache"], growth=growth)}
    inputs = (*RECORD.inputs[:-1], replace(RECORD.inputs[-1], counts=growth))
    found = MethodRecord.from_bytes(replace(RECORD, inputs=inputs, buffer_specs=specs).to_bytes())
    assert found.buffer_specs["cache"].growth is growth
    assert found.inputs[-1].counts is growth


@pytest.mark.parametrize("growth", ["rows", "", "SLOTS", None, 3, [], ["slots"], {}])
@pytest.mark.parametrize("path", [("buffer_specs", "cache", "growth"), ("inputs", 1, "counts")], ids=str)
def test_unknown_growth(path: Sequence[str | int], growth: object) -> None:
    with pytest.raises(
        ArtifactError, match=r"record in model\.pte cannot be read: unknown growth of state .*are: fixed, slots, pages"
    ):
        MethodRecord.from_bytes(changed(path, growth))


@pytest.mark.parametrize("path", [("buffer_specs", "cache"), ("inputs", 1)], ids=str)
def test_growth_is_not_said(path: Sequence[str | int]) -> None:
    data: Any = json.loads(RECORD.to_bytes())
    del data[path[0]][path[1]]["counts" if path[0] == "inputs" else "growth"]
    with pytest.raises(ArtifactError, match="record"):
        MethodRecord.from_bytes(json.dumps(data).encode())


@pytest.mark.parametrize("data", DEEP, ids=["array", "object"])
def test_deep_nesting_is_said(data: bytes, tmp_path: Path) -> None:
    message = "cannot be read: its JSON is nested too deeply"
    for read in (MethodRecord.from_bytes, Manifest.from_bytes, Target.from_bytes):
        with pytest.raises(ArtifactError, match=message):
            read(data)
    (tmp_path / "deep.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"deep\.json {message}"):
        read_json(tmp_path / "deep.json", ArtifactError)


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for missing in (path, tmp_path):
        with pytest.raises(CheckpointError, match=f"{missing} cannot be read: (No such file|Is a directory)"):
            read_json(missing, CheckpointError)
    for content in (b"", b"{", b"{'a': 1}", b"\xff\xfe\xfa"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"some\.json cannot be read: "):
            read_json(path, CheckpointError)
    path.write_text('{"é": [1, null]}', encoding="utf-8")
    assert read_json(path, CheckpointError) == {"é": [1, None]}


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, 99])
def test_records_of_another_version_say_so(version: int) -> None:
    """The version is checked first, because other versions may have other fields."""
    message = f"format version {version}, this runtime reads version {FORMAT_VERSION}: export the model again"
    with pytest.raises(ArtifactError, match=message):
        MethodRecord.from_bytes(replace(RECORD, version=version).to_bytes())
    with pytest.raises(ArtifactError, match=message):
        Manifest.from_bytes(Manifest({}, version=version).to_bytes())
    older: Any = json.loads(replace(RECORD, version=version).to_bytes())
    for spec in (*older["inputs"], *older["outputs"]):
        del spec["counts"]
    del older["buffer_specs"]["cache"]["growth"]
    with pytest.raises(ArtifactError, match=message):
        MethodRecord.from_bytes(json.dumps(older).encode())


def test_manifest_round_trip() -> None:
    manifest = Manifest({"w": "ab", "é": "cd"})
    again = Manifest.from_bytes(manifest.to_bytes())
    assert (again, again.id) == (manifest, manifest.id)
    assert len({manifest.id, Manifest({"w": "ab"}).id, Manifest({"w": "ab", "é": "ce"}).id}) == 3


def test_seal_round_trip() -> None:
    seal = Seal("ab", "cd")
    program, found = Seal.split(memoryview(b"program" + seal.to_bytes()))
    assert (bytes(program), found) == (b"program", seal)
    for data in (
        b"",
        b"program",
        seal.to_bytes()[:-1],
        b"{}" + bytes(8) + Seal.MARK,
        b"[1]\x03" + bytes(7) + Seal.MARK,
    ):
        with pytest.raises(ArtifactError, match=r"(the seal of model\.pte cannot be read|model\.pte has no seal): "):
            Seal.split(memoryview(data))


def test_every_bit_of_a_seal_is_known_from_it() -> None:
    """Only then does the hash of what it says stand for all its bytes."""
    seal = Seal("ab" * 32, "cd" * 32)
    content = bytearray(seal.to_bytes())
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with suppress(ArtifactError):
            assert Seal.split(memoryview(content))[1].id != seal.id
        content[bit // 8] ^= 1 << bit % 8
    assert Seal.split(memoryview(content))[1] == seal
    for text in (b'{"constants": "cd", "program": "ab", "more": 1}', b'{"program": "ab", "constants": "cd"}'):
        with pytest.raises(ArtifactError, match="it has more than the two hashes"):
            Seal.split(memoryview(text + struct.pack("<Q", len(text)) + Seal.MARK))


def test_target_round_trip() -> None:
    target = host_target("cpu")
    assert Target.from_bytes(target.to_bytes()) == target
    assert target.isa == host_isa()
    assert str(target).startswith("cpu ")


@pytest.mark.parametrize("change", [{"isa": 3}, {"isa": None}])
def test_target_of_wrong_types(change: dict[str, Any]) -> None:
    data = {**json.loads(host_target("cpu").to_bytes()), **change}
    with pytest.raises(ArtifactError, match="compile target"):
        Target.from_bytes(json.dumps(data).encode())


@pytest.mark.parametrize("error", [struct.error("x"), IndexError("x"), ValueError("x"), KeyError("x"), MemoryError()])
def test_damaged_names_the_file(error: Exception) -> None:
    with pytest.raises(ArtifactError, match=r"some\.pte cannot be parsed"), damaged(Path("some.pte")):
        raise error
