"""The shell scripts up to where pip would install: which environment they make, and what they refuse before that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT
from .processes import PATIENCE

sys.path.append(str(ROOT / "scripts"))

import e2e

DEVICE = ["--device", "cuda"]
FOR_A_GPU = (["bench_flagship.sh"], ["bench_hybrid.sh"], ["sanitize.sh"], ["e2e.sh", *DEVICE], ["test.sh", *DEVICE])
Done = subprocess.CompletedProcess[str]
# nvidia-smi on a machine with a driver, and without a GPU.
NO_GPU = "#!/bin/sh\necho No devices found.; exit 6\n"
GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n"
# An interpreter that installs nothing. `-m venv FOLDER` makes a folder with the same interpreter; other calls are kept.
PYTHON = """#!/bin/sh
echo "$0 $*" >>"{calls}"
case "$*" in
*version_info\\[:2\\]\\)) echo {version} ;;
"-m venv "*)
    for folder in "$@"; do :; done
    case "$*" in *--clear*) rm -rf "$folder" ;; esac
    mkdir -p "$folder/bin" "$folder/lib/python{version}" && cp "$0" "$folder/bin/python"
    ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that scripts read before anything is installed."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_python(clone: Path, version: str = "3.11") -> Path:
    """Return an interpreter that keeps its calls in `clone`/calls."""
    return program(clone / f"python{version}", PYTHON.format(calls=clone / "calls", version=version))


def bash(clone: Path, *words: str, nvidia_smi: str = NO_GPU, python: Path | None = None) -> Done:
    """Run a script of `clone`."""
    program(clone / "bin" / "nvidia-smi", nvidia_smi)
    environment = {name: value for name, value in os.environ.items() if name not in ("OSTINATO_PYTHON", "PYTHON")}
    environment["PATH"] = f"{clone / 'bin'}:{environment['PATH']}"
    if python:
        environment["PYTHON"] = str(python)
    script, *others = words
    command = ["bash", str(clone / "scripts" / script), *others]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def folders(clone: Path) -> set[str]:
    return {path.name for path in clone.iterdir() if path.is_dir()} - {"scripts", "bin"}


@pytest.mark.parametrize("words", FOR_A_GPU, ids=lambda words: words[0])
def test_a_script_for_a_gpu_looks_for_one_first(clone: Path, words: list[str]) -> None:
    done = bash(clone, *words, python=fake_python(clone))
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this needs an NVIDIA GPU, and there is none ('nvidia-smi -L' lists none)")
    assert folders(clone) == set() and not (clone / "calls").exists()


@pytest.mark.parametrize("words", [["e2e.sh", "--device", "tpu"], ["test.sh", "--device", "tpu"]])
def test_an_unknown_device(clone: Path, words: list[str]) -> None:
    done = bash(clone, *words, python=fake_python(clone))
    assert (done.returncode, done.stderr) == (2, "error: --device takes cpu or cuda, got 'tpu'\n")


def test_each_device_has_its_environment(clone: Path) -> None:
    python = fake_python(clone)
    done = bash(clone, "test.sh", python=python)
    assert done.returncode == 0, done.stderr
    assert "needs the network" in done.stderr and "of disk" in done.stderr
    assert folders(clone) == {".venv"}
    done = bash(clone, "test.sh", "--device", "cuda", nvidia_smi=GPU, python=python)
    assert done.returncode == 0, done.stderr
    assert folders(clone) == {".venv", ".venv-cuda"}
    calls = (clone / "calls").read_text()
    assert f"{clone}/.venv/bin/python -m pip" in calls and f"{clone}/.venv-cuda/bin/python -m pip" in calls
    # Both are there now, and are used again.
    for device in ("cpu", "cuda"):
        (clone / "calls").unlink()
        done = bash(clone, "test.sh", "--device", device, nvidia_smi=GPU, python=python)
        assert (done.returncode, done.stderr) == (0, "")
        assert " -m pytest" in (clone / "calls").read_text() and " -m pip" not in (clone / "calls").read_text()


def test_another_python(clone: Path) -> None:
    """PYTHON makes the environment anew if its version is another one; nothing of the old one stays."""
    for version, made in (("3.11", True), ("3.13", True), ("3.13", False)):
        done = bash(clone, "test.sh", python=fake_python(clone, version))
        assert done.returncode == 0, done.stderr
        assert ("making" in done.stderr) == made
        assert [path.name for path in (clone / ".venv" / "lib").iterdir()] == [f"python{version}"]


def test_a_python_that_is_too_old(clone: Path) -> None:
    python = program(clone / "old", "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.18\nexit 1\n")
    done = bash(clone, "e2e.sh", python=python)
    assert done.returncode == 2 and "is Python 3.9.18; ostinato needs Python 3.10 to 3" in done.stderr.splitlines()[-1]


def test_what_e2e_says_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e, "ROOT", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    artifact = tmp_path / "artifacts" / "capitals"
    program(programs / "activate", "")
    assert e2e.next_commands(artifact, programs) == [
        "source .venv/bin/activate",
        "ostinato run artifacts/capitals --prompt 'What is the capital of France?' --cuda_graph",
        "ostinato run artifacts/capitals --prompt 'What is the capital of Japan?'",
    ]
    assert "\n".join(e2e.next_commands(artifact, programs)) in (ROOT / "README.md").read_text(encoding="utf-8")
    # An interpreter outside an environment has nothing to activate.
    first, _ = e2e.next_commands(Path("/some where/else"), tmp_path)
    assert first.startswith("ostinato run '/some where/else' --prompt")


def test_git_ignores_what_scripts_leave() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv/", ".venv-cuda/", "artifacts/"} <= set(ignored)
    assert all(path.parent == ROOT / "artifacts" for path in e2e.ARTIFACTS.values())
