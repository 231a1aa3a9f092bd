"""GGUF files: values as the package `gguf` has them, and files with every kind of damage."""

from __future__ import annotations

import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch

from ostinato.delegate.errors import CheckpointError
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.weights.sources.gguf import FLOATS, TYPES, GgufFile
from ostinato.export.weights.sources.gguf_tensors import GgufChange, GgufOrder, GgufTensors

from ..gguf_files import dequantised, mutated, random_blocks

QUANTISED = [name for name, _, _ in TYPES.values() if name not in FLOATS]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **values: object) -> Path:
    writer = gguf.GGUFWriter(path, "test")
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, str(value))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one tensor of each type that is quantised, and lists of texts and of numbers."""
    tensors = {f"blk.{kind}.weight": (random_blocks(kind, 3, 512), kind) for kind in QUANTISED}
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    return write(path, tensors, tokens=["a", "", "ä" * 300], numbers=[1, -2, 3], scores=[0.5, -1.5])


@pytest.mark.parametrize("kind", QUANTISED)
def test_values_are_those_of_the_package(sound: Path, kind: str) -> None:
    file = GgufFile(sound)
    name = f"blk.{kind}.weight"
    assert file.tensors[name].shape == (3, 512) and file.tensors[name].kind == kind
    assert torch.equal(file.read(name), dequantised(random_blocks(kind, 3, 512), kind))


# A type -> what it becomes, without a change of its numbers, or rounded to eight bits.
KEPT = {
    "Q4_0": Int4(32, torch.float16),
    "Q4_1": Int4Min(32, torch.float16),
    "Q5_0": Int8(32, torch.float16),
    "Q8_0": Int8(32, torch.float16),
}
ROUNDED = {"Q5_1": Int8(32, torch.float16), "Q5_K": Int8(32, torch.float16), "Q6_K": Int8(32, torch.float16)}


@pytest.mark.parametrize("kind", QUANTISED)
def test_integers_are_kept(sound: Path, kind: str) -> None:
    """Bit for bit where a type's scales are as ours; else within the rounding that `gguf_blocks` names."""
    file, name = GgufFile(sound), f"blk.{kind}.weight"
    tensors = GgufTensors(file, {name: name}, {})
    form = {**KEPT, **ROUNDED, "Q4_K": Int4Min(32, torch.float16)}[kind]
    stored = tensors.stored(name, form)
    assert stored is not None and tensors.stored(name, Int4(64)) is None and tensors.format(name) == form
    values, scale, minimum = stored
    assert values.shape == (3, 512 // form.per_value) and scale.shape == (3, 16) and scale.dtype == torch.float16
    found, expected = form.dequantize(values, scale, minimum, torch.float32), file.read(name)
    off = (found - expected).abs().unflatten(-1, (-1, 32)).amax(-1)
    if kind in KEPT:
        assert torch.equal(found, expected)
    elif kind == "Q4_K":
        assert minimum is not None
        assert (off <= 2.0**-11 * (15 * scale.float() + minimum.float().abs()) * 1.01).all()
    else:
        assert (off <= scale.float() / 2 * 1.01 + 2.0**-11 * expected.abs().unflatten(-1, (-1, 32)).amax(-1)).all()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_large_tensor(tmp_path: Path, kind: str) -> None:
    """It is converted some rows at a time, in several threads, and afterwards the process holds none of the file."""
    data = random_blocks(kind, 3 * 700, 1024)
    path = write(tmp_path / "file.gguf", {"x": (data.reshape(3, 700, -1), kind)})
    file = GgufFile(path)
    expected = dequantised(data, kind)
    for _ in range(2):
        assert torch.equal(file.read("x").flatten(0, 1), expected)
        if file.has_integers("x"):
            form = KEPT.get(kind, Int4Min(32, torch.float16))
            q, scale, minimum = file.integers("x")
            found = form.dequantize(form.pack(q), scale, minimum, torch.float32)
            assert found.shape == (3, 700, 1024)
            off = (found.flatten(0, 1) - expected).abs().max()
            assert off == 0 if kind in KEPT else off < 2.0**-10 * expected.abs().max()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.endswith(str(path)))
    resident = next(int(line.split()[1]) for line in lines[place:] if line.startswith("Rss:"))
    assert resident < 100 < data.nbytes / 1024


def test_short_rows_of_nibbles_become_bytes(tmp_path: Path) -> None:
    """Rows that are no multiple of 64 have no place in four bits; of Q4_0 nothing is lost."""
    path = write(tmp_path / "file.gguf", {"x": (random_blocks("Q4_0", 3, 96), "Q4_0")})
    tensors = GgufTensors(GgufFile(path), {"x": "x"}, {})
    stored = tensors.stored("x", Int8(32, torch.float16))
    assert stored is not None and tensors.stored("x", Int4(32, torch.float16)) is None
    expected = GgufFile(path).read("x")
    found = Int8(32).dequantize(*stored, torch.float32)
    assert (found - expected).abs().max() <= expected.abs().max() / 254


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_keep_their_bits(tmp_path: Path, kind: str) -> None:
    value = torch.randn(3, 5, 7).to(FLOATS[kind])
    data = value.view(torch.uint8 if kind == "BF16" else value.dtype).numpy()
    found = GgufFile(write(tmp_path / "file.gguf", {"x": (data, kind)})).read("x")
    assert found.dtype == value.dtype and torch.equal(found, value)


@pytest.mark.parametrize(
    "order",
    [GgufOrder(3), GgufOrder(2, outer=4), GgufOrder(2, outer=3, size=4, first=8), GgufOrder(1, size=8)],
    ids=str,
)
def test_orders(order: GgufOrder) -> None:
    """The file counts rows or columns as [outer, n, inner, size]; blocks that stay together can be moved as such."""
    count = order.first + order.outer * 5 * order.inner * order.size
    elements = torch.arange(count)
    expected = [
        order.first + ((outer * 5 + n) * order.inner + inner) * order.size + element
        for outer in range(order.outer)
        for inner in range(order.inner)
        for n in range(5)
        for element in range(order.size)
    ]
    found = order.restore(elements, 0)
    assert found.tolist() == [*range(order.first), *expected]
    table = torch.randn(3, count)
    assert torch.equal(order.restore(table, 1), table[:, found])
    for block in (1, 2, 4, 8):
        if order.keeps(block):
            assert torch.equal(order.restore(elements.view(-1, block), 0, block).flatten(), found)
        else:
            assert order.size % block or order.first % block


def test_changes() -> None:
    table = torch.arange(24).view(4, 6)
    change = GgufChange(rows=GgufOrder(2), columns=GgufOrder(3), values=torch.neg, shape=(4, 1, 6))
    assert torch.equal(change.apply(table), -table[[0, 2, 1, 3]][:, [0, 3, 1, 4, 2, 5]].unsqueeze(1))
    assert [change.shaped(shape) for shape in ((4, 6), (4, 6, 1), (6, 4))] == [(4, 1, 6), (4, 1, 6), (6, 4)]


def test_metadata(sound: Path) -> None:
    found = GgufFile(sound).metadata
    assert found["general.architecture"] == "test"
    assert (found["tokens"], found["numbers"], found["scores"]) == (["a", "", "ä" * 300], [1, -2, 3], [0.5, -1.5])
    reader = gguf.GGUFReader(sound)
    assert {key for key in reader.fields if not key.startswith("GGUF.")} == set(found)


def edited(path: Path, to: Path, old: bytes, new: bytes) -> str:
    """Return what is said of a copy in which these bytes are replaced once."""
    data = path.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    to.write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError) as caught:
        GgufFile(to)
    assert str(to) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_damage_is_named(sound: Path, tmp_path: Path) -> None:
    to = tmp_path / "damaged.gguf"
    assert "and no GGUF file" in edited(sound, to, b"GGUF", b"GGML")
    assert "GGUF of version 1" in edited(sound, to, b"GGUF\x03", b"GGUF\x01")
    assert "ends" in edited(sound, to, text("tokens"), struct.pack("<Q", 2**63) + b"tokens")
    assert "twice" in edited(sound, to, text("scores"), text("tokens"))
    assert "not UTF-8" in edited(sound, to, text("scores"), struct.pack("<Q", 6) + b"\xff" * 6)
    named = text("blk.Q4_0.weight") + struct.pack("<I", 2)
    sizes = struct.pack("<QQI", 512, 3, 2)
    assert "9 dimensions" in edited(sound, to, named, text("blk.Q4_0.weight") + struct.pack("<I", 9))
    assert "not read (ggml's number 10)" in edited(sound, to, named + sizes, named + struct.pack("<QQI", 512, 3, 10))
    assert "the sizes [511, 3]" in edited(sound, to, named + sizes, named + struct.pack("<QQI", 511, 3, 2))
    huge = struct.pack("<QQI", 2**62, 2**62, 2)
    assert "lies outside the file" in edited(sound, to, named + sizes, named + huge)
    other = text("blk.Q4_1.weight") + struct.pack("<IQQI", 2, 512, 3, 3)
    first = sound.read_bytes()[sound.read_bytes().index(other) :][len(other) :][:8]
    assert "overlaps" in edited(sound, to, other + first, other + bytes(8))
    to.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        GgufFile(to)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limits the memory: a reader that believes a damaged count asks for gigabytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
def test_a_thousand_mutations(sound: Path, tmp_path: Path) -> None:
    """Bytes changed, cut out, doubled, and cut off: a file is read, or refused in one line."""
    random, data, path = Random(1), sound.read_bytes(), tmp_path / "mutated.gguf"
    header = data.index(random_blocks(QUANTISED[0], 3, 512).tobytes()[:40])
    refused = 0
    for _ in range(1000):
        path.write_bytes(mutated(data, header, random))
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.read(name)
        except CheckpointError as error:
            assert len(str(error).splitlines()) == 1, error
            refused += 1
    assert refused > 500


def part(folder: Path, index: int, of: int, count: int = 3) -> Path:
    """Write one part of three tensors in all; the first says how many there are."""
    path = folder / f"model-{index:05}-of-{of:05}.gguf"
    writer = gguf.GGUFWriter(path, "test")
    if index == 1:
        writer.add_int32("split.tensors.count", count)
    for name in ("a", "b") if index == 1 else ("c",):
        writer.add_tensor(name, np.full((2, 3), ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_in_parts(tmp_path: Path) -> None:
    first, second = part(tmp_path, 1, 2), part(tmp_path, 2, 2)
    file = GgufFile(first)
    assert {name: file.read(name)[0, 0].item() for name in file.tensors} == {"a": 97, "b": 98, "c": 99}
    with pytest.raises(CheckpointError, match=r"is one of 2 parts: give the first, model-00001-of-00002\.gguf"):
        GgufFile(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 parts: model-00002-of-00002\.gguf"):
        GgufFile(first)
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match="an earlier part has a too"):
        GgufFile(first)
    part(tmp_path, 1, 2, count=7)
    part(tmp_path, 2, 2)
    with pytest.raises(CheckpointError, match="have 3 tensors, and say that they have 7"):
        GgufFile(first)
