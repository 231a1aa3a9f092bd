"""Every code block of every README runs as it stands. What needs a GPU is only parsed, and downloads come from a fixture."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner.cli import COMMANDS

from .conftest import CAPITALS, ROOT
from .processes import PATIENCE

sys.path.append(str(ROOT / "scripts"))

from server_client import serving

READMES = [
    "README.md",
    "delegate/README.md",
    "export/README.md",
    "export/kernels/README.md",
    "runner/README.md",
    "runner/scheduler/README.md",
    "runner/sessions/README.md",
    "runner/server/README.md",
    "scripts/FIGURES.md",
    "tests/assets/configs/README.md",
    "tests/assets/templates/README.md",
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Each takes minutes, and other tests run what it runs.
SCRIPTS = {"scripts/e2e.sh", "scripts/test.sh"}


def test_every_readme_is_here() -> None:
    found = {path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.parts)}
    assert {str(path.relative_to(ROOT)) for path in found} == {*READMES, "CONTRIBUTING.md"}


def test_ten_minutes_are_enough() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 12_000


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    page = ROOT / readme
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, heading


@pytest.mark.parametrize("readme", READMES)
def test_code_blocks_run(readme: str, capitals_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, from top to bottom, with the shipped checkpoint for any other."""
    monkeypatch.chdir(tmp_path)
    Path("tests").symlink_to(ROOT / "tests")
    Path("artifacts").mkdir()
    Path("artifacts/capitals").symlink_to(capitals_artifact)
    names: dict[str, Any] = {}
    for language, code in BLOCK.findall((ROOT / readme).read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, readme, "exec"), names)
        elif language == "bash":
            with ExitStack() as servers:
                for line in code.replace("\\\n", " ").splitlines():
                    run(shlex.split(line, comments=True), servers)
        else:
            assert language == "", f"a code block in {language}, which this test does not run"


def run(command: list[str], servers: ExitStack) -> None:
    match command:
        case []:
            pass
        case ["source", ".venv/bin/activate"]:
            pass
        case ["bash", script] if script in SCRIPTS:
            assert (ROOT / script).exists()
        case ["hf", "download", _, "--local-dir", folder]:
            shutil.copytree(CAPITALS, folder)
            config = Path(folder) / "config.json"
            # As long as published models.
            config.write_text(re.sub(r'("max_position_embeddings": )\d+', r"\g<1>262144", config.read_text()))
        case ["pip", "install", *words]:
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], check=True)
        case ["ostinato", name, *words] if "cuda" in words or "artifacts/35B" in words:
            module = importlib.import_module(COMMANDS[name][0])
            parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
            module.add_arguments(parser)
            parser.parse_args(words)
        case ["ostinato", "serve", artifact, *words, "&"]:
            servers.enter_context(serving(Path(artifact), Path("server.log"), words, port=None, patience=PATIENCE))
        case ["curl", *words]:
            done = subprocess.run(["curl", "--fail-with-body", *words], capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
        case ["ostinato", *words]:
            ostinato(words)
        case ["printf", text, "|", "ostinato", *words]:
            ostinato(words, subprocess.run(["printf", text], capture_output=True, text=True, check=True).stdout)
        case _:
            raise AssertionError(f"a command that this test does not know: {shlex.join(command)}")


def ostinato(words: list[str], given: str = "") -> None:
    command = [sys.executable, "-m", "ostinato.runner.cli", *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "--output" in words
