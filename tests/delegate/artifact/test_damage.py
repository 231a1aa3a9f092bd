"""Files that are cut short, flipped, swapped or made elsewhere: each gives an ArtifactError, and never another error."""

from __future__ import annotations

import hashlib
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.delegate import ArtifactError, Target, TargetError, load_program
from ostinato.delegate import program as program_module
from ostinato.delegate.artifact import target as target_module
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.flatbuffer import Table, map_file
from ostinato.delegate.artifact.pte import parse_program
from ostinato.delegate.artifact.records import MethodRecord, dtype_from_name
from ostinato.delegate.artifact.target import check_target, host_target
from ostinato.delegate.code.method_code import MethodCode

from ...modules import Recurrent
from ..helpers import eager_answers, step_inputs
from ..loading_cases import written

FILES = ("model.pte", "model.ptd")


@pytest.fixture
def folder(recurrent_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recurrent_artifact, tmp_path / "artifact"))


@pytest.fixture(autouse=True)
def limited_memory() -> Iterator[None]:
    """Limits the memory: a reader that believes a damaged count asks for gigabytes, and must fail here without harm to the
    machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load_all(folder: Path) -> bool:
    """Load every method. Return True if all load and give the right answers, False on an ArtifactError. Other errors are
    raised."""
    try:
        with load_program(folder) as program:
            prefill, decode = program.load_method("prefill"), program.load_method("decode")
            prompt = torch.tensor([[1, 2, 3]]), torch.arange(3)
            torch.testing.assert_close(prefill.execute(prompt)[0], Recurrent()(*prompt))
            torch.testing.assert_close(decode.execute(step_inputs(0))[0], eager_answers(1)[0])
        return True
    except ArtifactError as error:
        assert str(error)
        return False


def lengths(size: int) -> list[int]:
    """Lengths to which a file of `size` bytes is cut: several near its beginning and end, and 23 spread evenly."""
    middle = [size * part // 24 for part in range(1, 24)]
    return sorted({0, 1, 7, 8, 12, 31, 32, 47, 48, 63, 64, *middle, size - 129, size - 16, size - 1})


@pytest.mark.parametrize("name", FILES)
def test_truncated(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for length in lengths(len(content)):
        (folder / name).write_bytes(content[:length])
        with pytest.raises(ArtifactError, match=name):
            load_program(folder)


def flips(path: Path, offsets: list[int], check: Callable[[int], None]) -> None:
    """Call `check` with one bit flipped at each offset, one at a time."""
    pick = random.Random(3)
    with open(path, "r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            (byte,) = file.read(1)
            for value in (byte ^ 1 << pick.randrange(8), byte):
                file.seek(offset)
                file.write(bytes([value]))
                if value != byte:
                    check(offset)


def test_one_bit_of_the_program_flipped(folder: Path) -> None:
    path = folder / "model.pte"
    offsets = [*range(0, 128, 3), *random.Random(1).sample(range(path.stat().st_size), 200)]
    flips(path, offsets, lambda offset: pytest.fail(f"byte {offset} is not noticed") if load_all(folder) else None)
    assert load_all(folder)


@pytest.fixture
def code_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the compiled code only once. Only the constants are damaged, and most of a load's time goes into the
    libraries."""
    loaded: dict[str, MethodCode] = {}

    def load(record: MethodRecord, *rest: Any) -> MethodCode:
        if record.method not in loaded:
            loaded[record.method] = MethodCode(record, *rest)
        assert loaded[record.method].record == record
        return loaded[record.method]

    monkeypatch.setattr(program_module, "MethodCode", load)
    monkeypatch.setattr(MethodCode, "close", lambda self: None)


@pytest.mark.usefixtures("code_is_loaded_once")
def test_every_byte_of_the_constants_flipped(folder: Path) -> None:
    """Only bytes that nothing reads may be flipped unnoticed: padding, and marks of the format that no reader needs."""
    path = folder / "model.ptd"
    size, unnoticed = path.stat().st_size, []
    flips(path, list(range(size)), lambda offset: unnoticed.append(offset) if load_all(folder) else None)
    assert load_all(folder)
    assert len(unnoticed) < size // 2
    data = path.read_bytes()
    for blob in (Recurrent().embed, Recurrent().head):
        content = blob.detach().numpy().tobytes()
        begin = data.index(content)
        assert not set(range(begin, begin + len(content))) & set(unnoticed)


def test_every_bit_of_the_constants_layouts_flipped(folder: Path) -> None:
    """A flipped bit in a shape, dtype or dimension order is noticed: intact bytes would mean something else."""
    path = folder / "model.ptd"
    content = bytearray(path.read_bytes())
    layouts = [table for named in Table.root(memoryview(content)).tables(2) if (table := named.table(2)) is not None]
    assert len(layouts) == 3
    for layout in layouts:
        (sizes, rank), (order, _) = layout._vector(1, 4), layout._vector(2, 1)
        dtype = layout.position + layout._offset(0)
        for offset in (dtype, *range(sizes, sizes + 4 * rank), *range(order, order + rank)):
            for bit in range(8):
                content[offset] ^= 1 << bit
                path.write_bytes(content)
                assert not load_all(folder), f"bit {bit} of byte {offset}"
                content[offset] ^= 1 << bit


def test_the_programs_description_flipped_before_any_hash(folder: Path) -> None:
    """With one bit flipped anywhere in the FlatBuffers part, the reader raises ArtifactError or nothing. This matters for
    `verify=False` and for a foreign `.ptd`, where no hash is checked before."""
    path = folder / "model.pte"
    content = bytearray(path.read_bytes())
    end = min(bytes(content).index(b"\x7fELF"), 8192)
    pick = random.Random(2)
    for offset in range(end):
        content[offset] ^= (bit := 1 << pick.randrange(8))
        try:
            for method in parse_program(memoryview(content), path).methods.values():
                for spec in (*method.record.inputs, *method.record.outputs):
                    dtype_from_name(spec.dtype)
        except ArtifactError:
            pass
        content[offset] ^= bit


def test_an_unverified_program_still_has_its_code_checked(folder: Path) -> None:
    path = folder / "model.pte"
    content = bytearray(path.read_bytes())
    content[bytes(content).index(b"\x7fELF") + 5000] ^= 4
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model.pte is damaged: its SHA-256"):
        load_program(folder)
    with load_program(folder, verify=False) as program:
        damaged = 0
        for name in ("prefill", "decode"):
            try:
                program.load_method(name)
            except ArtifactError as error:
                assert f"the compiled code of method {name!r} in model.pte is damaged" in str(error)
                damaged += 1
        assert damaged == 1


def test_a_record_with_an_unknown_kind_of_state(folder: Path) -> None:
    path = folder / "model.pte"
    content = path.read_bytes()
    assert content.count(b'"kind": "other"') == 6
    path.write_bytes(content.replace(b'"kind": "other"', b'"kind": "0ther"'))
    for verify in (True, False):
        with pytest.raises(ArtifactError, match="unknown kind of state '0ther'"):
            load_program(folder, verify=verify)


def test_code_that_is_no_library(recurrent_artifact: Path) -> None:
    path = recurrent_artifact / "model.pte"
    record = parse_program(map_file(path), path).methods["decode"].record
    junk = memoryview(b"\x7fELF" + b"\0" * 1000)
    segment = replace(record.segments[0], code_sha256=hashlib.sha256(junk).hexdigest())
    with pytest.raises(ArtifactError, match="compiled code of method 'decode' cannot be loaded"):
        MethodCode(replace(record, segments=(segment,)), {segment.code_key: junk}, torch.device("cpu"))


def test_a_damaged_constant_names_itself(folder: Path) -> None:
    path = folder / "model.ptd"
    content = bytearray(path.read_bytes())
    content[bytes(content).index(Recurrent().head.detach().numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)
    with load_program(folder) as program, pytest.raises(ArtifactError, match=r"model\.ptd is damaged: constant 'head'"):
        program.load_method("decode")


def test_constants_of_another_export(chunked_artifact: Path, folder: Path, tmp_path: Path) -> None:
    """A program takes each file with its constants, whichever export wrote it, and no other file."""
    with load_program((folder / "model.pte", chunked_artifact / "model.ptd")) as program:
        program.load_method("decode")
    entries = open_constants(folder / "model.ptd").entries
    constants = {key: entry.tensor() + (key == "head") for key, entry in entries.items()}
    written(tmp_path / "model.ptd", constants)
    for verify in (True, False):
        with pytest.raises(ArtifactError, match=r"model\.ptd belongs to another export than"):
            load_program((folder / "model.pte", tmp_path / "model.ptd"), verify=verify)
    shutil.copyfile(tmp_path / "model.ptd", folder / "model.ptd")
    assert not load_all(folder)


def test_no_artifact(folder: Path, tmp_path: Path) -> None:
    for source, message in (
        (tmp_path / "nothing", "no such folder"),
        (tmp_path, "is not an artifact: it has no model.pte"),
        (folder / "model.ptd", "is not a folder"),
        (tmp_path / "nothing.pte", "no such|does not exist"),
        ((tmp_path / "a.pte", tmp_path / "a.ptd"), "does not exist"),
        ((folder / "model.ptd", folder / "model.pte"), "is not a FlatTensor file"),
        ((folder / "model.ptd", folder / "model.ptd"), "is not an ExecuTorch program"),
        ((folder, folder), "cannot be read"),
    ):
        with pytest.raises(ArtifactError, match=message):
            load_program(source)
    (folder / "model.ptd").unlink()
    with pytest.raises(ArtifactError, match=r"model.ptd does not exist"):
        load_program(folder)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 4096, b"\xff" * 4096, b"\0\0\0\0ET12" + b"\xff" * 200])
@pytest.mark.parametrize("name", FILES)
def test_junk(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name):
        load_program(folder)


HOST = host_target("cpu")
ELSEWHERE = [
    (replace(HOST, device="cuda", arch="sm_90"), "compiled for device 'cuda' \\(sm_90\\) and this machine has none"),
    (replace(HOST, arch="aarch64"), f"CPU architecture aarch64, this machine has {HOST.arch}"),
    (replace(HOST, isa=(*HOST.isa, "avx9000")), "instruction set that this one lacks: avx9000"),
    (
        replace(HOST, torch="1.0"),
        f"exported with torch 1.0, this environment has torch {re.escape(torch.__version__)}, .*"
        r"export it again here, or .* \(pip install 'torch==1.0.\*'\)",
    ),
    (replace(HOST, system="Plan9"), f"compiled for Plan9, this machine runs {HOST.system}"),
]


@pytest.mark.parametrize(("target", "message"), ELSEWHERE, ids=["device", "arch", "isa", "torch", "system"])
def test_compiled_elsewhere(target: Target, message: str) -> None:
    if target.device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TargetError, match=message):
        check_target(target)


def test_a_program_for_a_gpu_needs_its_cpu_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments on the host are code for the CPU."""
    monkeypatch.setattr(target_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target_module.torch.cuda, "get_device_capability", lambda: (9, 0))
    target = host_target("cuda")
    assert target.isa == HOST.isa
    with pytest.raises(TargetError, match="instruction set that this one lacks: avx9000"):
        check_target(replace(target, isa=(*target.isa, "avx9000")))


def test_an_older_cpu_can_be_compiled_for() -> None:
    check_target(replace(HOST, isa=HOST.isa[:3]))


@pytest.mark.parametrize(
    ("arch", "message"), [("sm_80", "GPU architecture sm_80, this machine has sm_90"), ("sm_90", "")]
)
def test_gpu_architecture(monkeypatch: pytest.MonkeyPatch, arch: str, message: str) -> None:
    monkeypatch.setattr(target_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target_module.torch.cuda, "get_device_capability", lambda: (9, 0))
    target = replace(host_target("cuda"), arch=arch)
    if not message:
        check_target(target)
        return
    with pytest.raises(TargetError, match=message):
        check_target(target)


@pytest.mark.usefixtures("no_compiler")
def test_an_artifact_compiled_elsewhere_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.export import export_program
    from ostinato.export import program as export_module

    foreign = replace(HOST, isa=("avx9000",))
    monkeypatch.setattr(export_module, "compile_target", lambda device: foreign)
    export_program({"forward": (torch.nn.ReLU(), (torch.zeros(2),), None)}, tmp_path / "artifact")
    with pytest.raises(TargetError, match=r"avx9000: compile it here .`ostinato recompile"):
        load_program(tmp_path / "artifact")
