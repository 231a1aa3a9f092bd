"""Programs that are kept between exports: a later export of the same config only writes its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.artifact.target import host_target
from ostinato.export import export_model, program, recompile_model
from ostinato.export.artifact import kept_programs
from ostinato.export.artifact.kept_programs import UnsealedProgram, keep_program, program_path, read_program
from ostinato.runner import Engine

from ...conftest import only_methods

OWN = {"table": torch.arange(5.0), "index": torch.tensor([[3]], dtype=torch.int64)}
MADE = UnsealedProgram(
    b"program", OWN | {"w": torch.zeros(2, 3).bfloat16()}, [b"head", "index", b"\0" * 7, "w"], {"decode": "int main()"}
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(kept_programs, "kept_folder", lambda: folder)
    return folder


def test_what_is_read_is_what_was_kept(folder: Path) -> None:
    path = folder / "some.program"
    assert read_program(path) is read_program(None) is None
    keep_program(path, MADE, ["w"])
    found = read_program(path)
    assert found is not None
    assert (found.program, found.layout, found.sources) == (MADE.program, MADE.layout, MADE.sources)
    assert list(found.stored) == list(MADE.stored)
    assert all(torch.equal(found.stored[key], value) for key, value in OWN.items())
    weight = found.stored["w"]
    assert (weight.device.type, weight.shape, weight.dtype) == ("meta", (2, 3), torch.bfloat16)
    path.write_bytes(path.read_bytes()[:-30])
    assert read_program(path) is None


def test_what_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "some.program"
    monkeypatch.setattr(kept_programs, "_MOST_BYTES", 27)
    keep_program(path, MADE, ["w"])
    keep_program(None, MADE, ["w"])
    keep_program(folder / "nowhere" / "some.program", MADE, MADE.stored)
    assert not any(folder.iterdir())


def test_paths() -> None:
    target = host_target("cpu", None)
    path = program_path("one", "cpu", target)
    assert path == program_path("one", "cpu", target)
    assert program_path(None, "cpu", target) is None
    others = [program_path("two", "cpu", target), program_path("one", "cpu", replace(target, arch="other"))]
    assert len({path, *others}) == 3


def traces_nothing() -> Any:
    return mock.patch.object(program, "_trace_all", side_effect=AssertionError)


def test_another_export_of_the_same_config(folder: Path, capitals_checkpoint: Path, tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    options: dict[str, Any] = {"max_seq_len": 251}
    report = export_model(capitals_checkpoint, first, **options)
    with traces_nothing():
        kept = export_model(capitals_checkpoint, again, **options)
        # Other weights.
        export_model(capitals_checkpoint, other, **options, load_format="dummy")
        recompile_model(first, tmp_path / "recompiled")
    assert (kept.sources, kept.program_bytes) == (report.sources, report.program_bytes)
    for name in ("model.pte", "model.ptd"):
        assert (
            (first / name).read_bytes() == (again / name).read_bytes() == (tmp_path / "recompiled" / name).read_bytes()
        )
    assert (first / "model.ptd").read_bytes() != (other / "model.ptd").read_bytes()
    with load_program(other) as loaded:
        loaded.load_method("decode")
    with Engine.load(again) as engine:
        assert "".join(engine.generate("What is the capital of France?")).strip() == "Paris"
    with traces_nothing(), pytest.raises(AssertionError):
        export_model(capitals_checkpoint, again, max_seq_len=250)


def test_another_family_is_not_kept(folder: Path, capitals_checkpoint: Path, tmp_path: Path) -> None:
    with only_methods("decode"):
        export_model(capitals_checkpoint, tmp_path / "few", max_seq_len=251)
    assert not any(folder.iterdir())
