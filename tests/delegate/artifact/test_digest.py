"""The digest of an artifact: each byte that is used is in it, and an artifact with another one is refused."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ostinato.delegate import ArtifactError, OptionError, load_program, verify_artifact
from ostinato.delegate.artifact.digest import parse_digest
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.ptd import parse_constants
from ostinato.delegate.artifact.seal import Seal

from ...processes import PATIENCE
from ..helpers import eager_answers, step_inputs

CONSTANT = "lm_head.weight"


@pytest.fixture
def folder(capitals_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(capitals_artifact, tmp_path / "artifact"))


def digest_of(folder: Path) -> str:
    found = verify_artifact(folder)
    assert found.problems == () and found.digest is not None
    return found.digest


def flip(path: Path, text: bytes, place: int = 0) -> None:
    """Flip a bit in the byte number `place` of a text that the file has."""
    content = bytearray(path.read_bytes())
    content[content.index(text) + place] ^= 4
    path.write_bytes(content)


def flip_named_data(folder: Path, begin: str) -> None:
    """Flip a bit in the middle of the first data of the program whose name begins so."""
    named_data = open_artifact(*artifact_paths(folder))[0].named_data
    data = bytes(next(data for name, data in named_data.items() if name.startswith(begin)))
    flip(folder / "model.pte", data, len(data) // 2)


def flip_constant(folder: Path) -> None:
    data = bytes(open_artifact(*artifact_paths(folder))[1].entries[CONSTANT].data)
    flip(folder / "model.ptd", data, len(data) // 2)


def flip_manifest(folder: Path) -> None:
    flip(folder / "model.ptd", open_artifact(*artifact_paths(folder))[1].manifest.constants[CONSTANT].encode())


def seal_again(folder: Path) -> None:
    """Change the program, and its seal with it, as one does who wants it to run."""
    path = folder / "model.pte"
    flip(path, b"get_vocab_size")
    program, seal = Seal.split(memoryview(path.read_bytes()))
    path.write_bytes(bytes(program) + Seal(hashlib.sha256(program).hexdigest(), seal.constants).to_bytes())


# What is changed, and the problem that is found; "" if only the digest is another.
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (
        lambda folder: flip_named_data(folder, "ostinato.code."),
        r"the compiled code of method '\w+' in model\.pte is damaged: SHA-256",
    ),
    "kernels": (
        lambda folder: flip_named_data(folder, "ostinato.kernels."),
        r"the kernels of method '\w+' in model\.pte is damaged: SHA-256",
    ),
    "program": (lambda folder: flip(folder / "model.pte", b"get_vocab_size"), r"model\.pte is damaged: its SHA"),
    "seal": (lambda folder: flip(folder / "model.pte", b'{"constants": "'), r"the seal of model\.pte cannot be read"),
    "manifest": (flip_manifest, r"model\.ptd belongs to another export"),
    "sealed again": (seal_again, ""),
    "config": (lambda folder: flip(folder / "config.json", b"vocab_size"), ""),
    "tokenizer": (lambda folder: flip(folder / "tokenizer.json", b"vocab"), ""),
    "template": (lambda folder: flip(folder / "tokenizer_config.json", b"content"), ""),
    "another template": (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), ""),
    "no generation config": (lambda folder: (folder / "generation_config.json").unlink(), ""),
}


@pytest.mark.parametrize(("change", "problem"), CHANGES.values(), ids=CHANGES)
def test_another_artifact_is_found_and_refused(folder: Path, change: Callable[[Path], object], problem: str) -> None:
    digest = digest_of(folder)
    load_program(folder, digest=digest).close()
    change(folder)
    found = verify_artifact(folder)
    if problem:
        assert found.digest is None and any(re.search(problem, text) for text in found.problems), found
    else:
        assert found.problems == () and found.digest not in (None, digest)
        message = f"its digest is {found.digest}, not {digest}: get the artifact"
        with pytest.raises(ArtifactError, match=re.escape(message)):
            load_program(folder, digest=digest)
    with pytest.raises(ArtifactError):
        load_program(folder, digest=digest)


def test_a_constant_is_found_and_refused_when_it_is_loaded(folder: Path) -> None:
    digest = digest_of(folder)
    flip_constant(folder)
    (problem,) = verify_artifact(folder).problems
    assert f"model.ptd is damaged: constant '{CONSTANT}' has SHA-256" in problem
    with load_program(folder, digest=digest) as program, pytest.raises(ArtifactError, match=re.escape(problem)):
        program.load_method("decode")
    with pytest.raises(OptionError, match="leave out verify=False"):
        load_program(folder, verify=False, digest=digest)


def test_all_problems_are_named(folder: Path) -> None:
    flip_constant(folder)
    flip_named_data(folder, "ostinato.kernels.")
    found = verify_artifact(folder)
    assert found.digest is None and len(found.problems) == 3
    (folder / "model.ptd").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert [text.partition(" ")[0].rpartition("/")[2] for text in verify_artifact(folder).problems] == [
        "model.pte",
        "the",
        "config.json",
        "model.ptd",
    ]


def test_a_constant_that_one_of_the_two_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest and the tensors of a file are lists of their own."""

    def without_and_with(data: memoryview, path: Path) -> object:
        file = parse_constants(data, path)
        file.entries["stranger"] = file.entries.pop(CONSTANT)
        return file

    monkeypatch.setattr("ostinato.delegate.artifact.files.parse_constants", without_and_with)
    lacking, stranger = sorted(verify_artifact(folder).problems, key=lambda text: "stranger" in text)
    assert lacking.endswith(f"lacks the constant {CONSTANT!r}, which its manifest lists")
    assert "constant 'stranger' has SHA-256" in stranger and "the manifest says nothing..." in stranger


def test_only_contents_count(folder: Path, tmp_path: Path) -> None:
    digest = digest_of(folder)
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "model.pte").rename(other / "named.pte")
    (other / "model.ptd").rename(other / "named.ptd")
    (other / "notes.txt").write_text("nothing reads this")
    assert digest_of(other / "named.pte") == digest
    for text in (digest, digest.removeprefix("sha256:").upper()):
        load_program(other / "named.pte", digest=text).close()


@pytest.mark.parametrize(
    "text", ["", "sha256:", "ab", "sha256:" + "g" * 64, "sha512:" + "a" * 64, "a" * 65, "a" * 63, 3]
)
def test_no_digest(recurrent_artifact: Path, text: object) -> None:
    for take in (parse_digest, lambda text: load_program(recurrent_artifact, digest=text)):
        with pytest.raises(OptionError, match=r"a digest is sha256: and 64 hexadecimal digits, .*; got "):
            take(text)


def test_a_program_that_is_written_while_it_is_used(recurrent_artifact: Path, tmp_path: Path) -> None:
    """What was checked is what is mapped."""
    folder = Path(shutil.copytree(recurrent_artifact, tmp_path / "artifact"))
    with load_program(folder, digest=digest_of(folder)) as program:
        size = (folder / "model.pte").stat().st_size
        with open(folder / "model.pte", "r+b") as file:
            file.write(b"?" * size)
        decode = program.load_method("decode")
        torch.testing.assert_close(decode.execute(step_inputs(0))[0], eager_answers(1)[0])


_LOAD = """
import sys
from ostinato.delegate import ArtifactError, load_program

folder, digest, temporary = sys.argv[1:]
try:
    program = load_program(folder, digest=digest)
    program.load_method("decode")
    print("loaded")
except ArtifactError as error:
    print(error)
with open("/proc/self/maps") as maps:
    print(any(line.split(maxsplit=5)[-1].startswith(temporary) for line in maps))
"""


def test_no_code_of_another_artifact_is_mapped(recurrent_artifact: Path, tmp_path: Path) -> None:
    digest = digest_of(recurrent_artifact)
    other = "sha256:" + "0" * 64
    said = []
    for wanted in (digest, other):
        command = [sys.executable, "-c", _LOAD, str(recurrent_artifact), wanted, str(tmp_path)]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        said += done.stdout.splitlines()
    assert said[:2] == ["loaded", "True"]
    assert f"its digest is {digest}, not {other}" in said[2] and said[3:] == ["False"]
