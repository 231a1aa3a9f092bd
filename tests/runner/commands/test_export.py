"""`ostinato export` when it is cut short: Ctrl-C, kill, a full disk. The output folder is a whole artifact or does not
exist."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch import nn

from ostinato.delegate import ExportError, load_program
from ostinato.runner.cli import main

from ...processes import INTERRUPTIBLE_CLI, PATIENCE

TINY = {"forward": (nn.ReLU(), (torch.zeros(2),), None)}


@pytest.fixture
def nothing_kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports in other processes compile all code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


def start_export(model: Path, output: Path, **environment: str) -> subprocess.Popen[str]:
    """Start an export in a process group of its own, as a shell does; return it while it compiles."""
    words = [*INTERRUPTIBLE_CLI, "export", "--model", str(model), "--output", str(output), "--max-seq-len", "32"]
    export = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    assert export.stderr is not None
    for line in export.stderr:
        if "trace decode" in line:
            time.sleep(2)
            assert export.poll() is None
            return export
    raise AssertionError(f"the export ended with {export.wait()}")


def finish(export: subprocess.Popen[str]) -> str:
    """Wait for the end; return what stderr held since the start."""
    try:
        return export.communicate(timeout=PATIENCE)[1]
    finally:
        if export.poll() is None:
            export.kill()


@pytest.mark.usefixtures("nothing_kept")
def test_interrupted(capitals_checkpoint: Path, recurrent_artifact: Path, tmp_path: Path) -> None:
    """Ctrl-C while the compiler runs leaves the artifact that had the name before."""
    output = tmp_path / "parent" / "artifact"
    shutil.copytree(recurrent_artifact, output)
    export = start_export(capitals_checkpoint, output)
    os.killpg(export.pid, signal.SIGINT)
    error = finish(export)
    assert export.returncode == 130, error
    assert error.splitlines()[-1] == "interrupted"
    assert "Traceback" not in error
    assert [path.name for path in output.parent.iterdir()] == ["artifact"]
    with load_program(output) as program:
        assert program.method_names == {"prefill", "decode"}


@pytest.mark.usefixtures("nothing_kept")
def test_terminated(capitals_checkpoint: Path, tmp_path: Path) -> None:
    """SIGTERM, as `timeout` sends it to the process alone, ends the compilers too and leaves no folders."""
    output, scratch = tmp_path / "artifact", tmp_path / "scratch"
    scratch.mkdir()
    export = start_export(capitals_checkpoint, output, TMPDIR=str(scratch))
    assert list(scratch.glob("ostinato-*"))
    export.terminate()
    assert finish(export).splitlines()[-1] == "terminated"
    assert export.returncode == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
    assert not list(scratch.glob("ostinato-*"))
    working = [path for path in Path("/proc").glob("[0-9]*/cwd") if points_below(path, scratch)]
    assert working == []


def points_below(link: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(link)).is_relative_to(folder)
    except OSError:
        return False


@pytest.mark.usefixtures("nothing_kept")
def test_killed(capitals_checkpoint: Path, tmp_path: Path) -> None:
    """After kill -9 nothing can clean up, but no folder has the name, and the next export deletes what is left."""
    from ostinato.export.artifact.writer import atomic_folder

    output = tmp_path / "artifact"
    export = start_export(capitals_checkpoint, output)
    os.killpg(export.pid, signal.SIGKILL)
    finish(export)
    assert not output.exists()
    with atomic_folder(output) as folder:
        (folder / "model.pte").write_bytes(b"next")
        assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_running_exports_folder_is_left_alone(tmp_path: Path) -> None:
    from ostinato.export.artifact.writer import atomic_folder

    theirs = tmp_path / f".artifact.partial-{os.getppid()}"
    theirs.mkdir()
    with atomic_folder(tmp_path / "artifact"):
        pass
    assert theirs.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    words = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if mount is None or subprocess.run([mount, *words], capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("no_compiler")
def test_disk_full(small_disk: Path) -> None:
    from ostinato.export import export_program

    output = small_disk / "parent" / "artifact"
    with pytest.raises(ExportError, match=rf"no room on the disk to write {output} \(\d+\.?\d* k?B free\)"):
        export_program(TINY, output)
    assert list(output.parent.iterdir()) == []


def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    """It is said before anything is compiled."""
    from ostinato.export import export_program

    module, example = nn.Linear(256, 64).eval(), (torch.zeros(2, 256),)
    with (
        mock.patch("ostinato.export.program._compile_all", side_effect=AssertionError),
        pytest.raises(ExportError, match=r"B free, its constants take 65.8 kB\); nothing was left"),
    ):
        export_program({"forward": (module, example, None)}, small_disk / "artifact")
    assert list(small_disk.iterdir()) == []


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_while_constants_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recurrent_artifact: Path, number: int
) -> None:
    """The artifact that had the name survives. The error is simulated, so nothing must be mounted."""
    from ostinato.export import export_program
    from ostinato.export.artifact import writer

    def full(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    output = tmp_path / "parent" / "artifact"
    shutil.copytree(recurrent_artifact, output)
    monkeypatch.setattr(writer, "write_constants", full)
    with pytest.raises(ExportError, match="no room on the disk"):
        export_program(TINY, output)
    assert [path.name for path in output.parent.iterdir()] == ["artifact"]
    with load_program(output) as program:
        program.load_method("decode")


def test_output_is_somebody_elses(
    capsys: pytest.CaptureFixture[str], capitals_checkpoint: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "photos", tmp_path / "notes"
    folder.mkdir()
    (folder / "cat.jpg").write_text("cat")
    file.write_text("notes")
    for output in (folder, file):
        assert main(["export", "--model", str(capitals_checkpoint), "--output", str(output)]) == 2
        assert "exists and is not an artifact: choose another --output" in capsys.readouterr().err
    assert (folder / "cat.jpg").read_text() == "cat"
    assert file.read_text() == "notes"
    for output in (file / "below", Path("/proc/nothing/artifact"), tmp_path / ("long" * 100)):
        assert main(["export", "--model", str(capitals_checkpoint), "--output", str(output)]) == 2
        assert "cannot be written" in capsys.readouterr().err
