"""Compiling an artifact's code again, without its checkpoint: what stays the same, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import CONSTANTS_FILE, PROGRAM_FILE
from ostinato.delegate.errors import ArtifactError, ExportError
from ostinato.export import Progress, export_program, recompile_model
from ostinato.export import model as model_module
from ostinato.export import recompile as recompile_module
from ostinato.export.artifact import kept_programs, writer
from ostinato.export.artifact.options import ExportOptions, ExportRecord
from ostinato.export.compile.libraries import Libraries
from ostinato.export.formats.quantization import Quantization
from ostinato.export.kernels import Kernels
from ostinato.runner.cli import main


@pytest.fixture(autouse=True)
def no_kept_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are traced and put together again, although the artifact's export has kept its program."""
    monkeypatch.setattr(kept_programs, "kept_folder", lambda: tmp_path / "nowhere")


@pytest.fixture
def artifact(capitals_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(capitals_artifact, tmp_path / "artifact"))


def refused(artifact: Path, kind: type[Exception] = ExportError) -> str:
    """The error of compiling again, which comes before anything is generated."""
    output = artifact.with_name("again")
    with mock.patch.object(Libraries, "generate", side_effect=AssertionError), pytest.raises(kind) as caught:
        recompile_model(artifact, output)
    assert not output.exists()
    return str(caught.value)


def test_same_program_over_the_same_file(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the machine of the export, every file is equal, and the constants are one file on the disk."""
    output = tmp_path / "again"
    assert main(["recompile", str(artifact), "--output", str(output)]) == 0
    assert str(output) in capsys.readouterr().err
    names = {path.name for path in output.iterdir()}
    assert names >= {PROGRAM_FILE, CONSTANTS_FILE, "config.json", "tokenizer.json"}
    assert [name for name in names if (output / name).read_bytes() != (artifact / name).read_bytes()] == []
    assert (output / CONSTANTS_FILE).samefile(artifact / CONSTANTS_FILE)


def test_another_disk(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.os, "link", mock.Mock(side_effect=OSError))
    given = open_artifact(artifact / PROGRAM_FILE, artifact / CONSTANTS_FILE)[1]
    assert writer.take_constants(artifact / "taken", given, []) == given.manifest
    assert (artifact / "taken").read_bytes() == (artifact / CONSTANTS_FILE).read_bytes()


def test_another_order_of_the_weights(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without the instructions of the C++ kernels reads weights in rows."""
    for name in ("kernels_for", "host_kernels_for"):
        monkeypatch.setattr(model_module, name, lambda device: Kernels)
    message = refused(artifact)
    assert "is stored in panels, code for this machine reads rows: export the checkpoint again" in message
    assert "parameter 'lm_head.weight' is" in message


def test_another_shape(artifact: Path) -> None:
    config = json.loads((artifact / "config.json").read_text())
    config["vocab_size"] += 64
    (artifact / "config.json").write_text(json.dumps(config))
    message = refused(artifact)
    assert f"in {artifact / CONSTANTS_FILE}, the code needs [" in message


def test_another_value(artifact: Path) -> None:
    """A number that the code was made with is stored, too."""
    given = open_artifact(artifact / PROGRAM_FILE, artifact / CONSTANTS_FILE)[1]
    key, entry = next(iter(given.entries.items()))
    assert entry.dtype is not None
    value = torch.zeros(entry.shape, dtype=entry.dtype)
    writer.check_constants(given, {key: entry.tensor()})
    writer.check_constants(given, {key: value}, by_shape={key})
    with pytest.raises(ExportError, match=f"constant {key!r} has another value"):
        writer.check_constants(given, {key: value})
    with pytest.raises(ExportError, match="has no constant 'new'"):
        writer.take_constants(artifact / "taken", given, [key, "new"])


def test_a_family_that_has_changed(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said. The weights still fit, so it goes on."""
    notes: list[str] = []
    progress = mock.create_autospec(Progress, instance=True)
    progress.note.side_effect = notes.append
    changed = ExportRecord.of

    def of(*arguments):  # type: ignore[no-untyped-def]
        record = changed(*arguments)
        return ExportRecord(record.options, record.family, "0" * 64, record.panels)

    monkeypatch.setattr(ExportRecord, "of", of)
    monkeypatch.setattr(recompile_module, "export_network", lambda *arguments, **named: None)
    recompile_model(artifact, artifact.with_name("again"), progress=progress)
    assert any("is not as it was at the export" in note for note in notes)


def test_artifacts_that_cannot_be(artifact: Path, tmp_path: Path) -> None:
    (artifact / "config.json").unlink()
    assert "has no config.json, from which the code is made" in refused(artifact)
    assert "no such folder" in refused(tmp_path / "nothing", ArtifactError)
    with (artifact / PROGRAM_FILE).open("r+b") as file:
        file.seek(200)
        file.write(b"damage")
    assert "damaged" in refused(artifact, ArtifactError)
    other = tmp_path / "other"
    export_program({"forward": (torch.nn.Linear(3, 3), (torch.ones(3),), None)}, other)
    with load_program(other) as program:
        assert "get_export_options" not in program.metadata
    assert "does not say how it was exported: it is older" in refused(other, ArtifactError)


def test_options_are_read_as_they_were_written() -> None:
    options = ExportOptions("cpu", "float32", 64, 32, Quantization(32, hqq=True), 2)
    record = ExportRecord.of(options, "ostinato.export.models.qwen3_5", ["b", "a"])
    narrow = replace(record, options=replace(options, device="cuda", state_dtype="bfloat16"))
    for one in (record, narrow):
        assert ExportRecord.from_metadata({"get_export_options": one.to_json()}, "x") == one
    assert str(narrow.options) == f"cuda, float32, {options.quant}, states in bfloat16"
    # Older artifacts do not say what their states are.
    older = record.to_json().replace(', "state_dtype": "float32"', "")
    assert older != record.to_json() and ExportRecord.from_metadata({"get_export_options": older}, "x") == record
    for text in ("{", "[]", "{}", record.to_json().replace('"hqq"', '"hqqq"'), record.to_json().replace("32", '"a"')):
        with pytest.raises((ArtifactError, ExportError)):
            ExportRecord.from_metadata({"get_export_options": text}, "x")
