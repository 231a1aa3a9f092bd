"""`ostinato inspect --verify`, and `--digest` of the commands that load an artifact."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from ostinato.delegate import ArtifactError, verify_artifact
from ostinato.delegate.code import method_code
from ostinato.runner import AsyncEngine, Engine
from ostinato.runner.cli import main

from ...conftest import Fails
from ..conftest import SMALL, run_here, standard_input

QUESTION = "What is the capital of France?"
OTHER = "sha256:" + "0" * 64
ONE_MODE = ("-r", "1", "--cuda_graph=off")
COMMANDS = {
    "run": ("--prompt", QUESTION),
    "chat": (),
    "bench": (*SMALL[:2], "-n", "2", *ONE_MODE),
    "bench --batch": ("--batch", "2", "-p", "4", "-n", "2", *ONE_MODE),
    "bench --mixed": ("--mixed", "2+4", "-p", "4", *ONE_MODE),
    "bench --load": ("--load", "--concurrency", "1", "--requests", "1", "-p", "4", "-n", "2", "--cuda_graph=off"),
}


@pytest.fixture
def folder(capitals_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(capitals_artifact, tmp_path / "artifact"))


def digest_of(folder: Path) -> str:
    digest = verify_artifact(folder).digest
    assert digest is not None
    return digest


def test_verify(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    digest = digest_of(folder)
    assert run_here(capsys, "inspect", folder, "--verify") == f"digest: {digest}\n"
    assert json.loads(run_here(capsys, "inspect", folder, "--verify", "--json")) == {"digest": digest, "problems": []}
    content = bytearray((folder / "model.pte").read_bytes())
    content[bytes(content).index(b"\x7fELF") + 5000] ^= 4
    (folder / "model.pte").write_bytes(content)
    for options in ((), ("--json",)):
        assert main(["inspect", str(folder), "--verify", *options]) == 1
    out, err = capsys.readouterr()
    *lines, data = out.splitlines()
    assert err == "" and lines == json.loads(data)["problems"]
    assert json.loads(data)["digest"] is None
    assert lines[0] == f"{folder}/model.pte is damaged: its SHA-256 is not the one at its end"
    assert len(lines) == 2 and " in model.pte is damaged: SHA-256 " in lines[1]


def test_verify_no_artifact(fails: Fails, tmp_path: Path) -> None:
    assert "is not an artifact" in fails("inspect", tmp_path, "--verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_another_digest_is_refused(
    fails: Fails, capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(method_code, "load_container", lambda *_: pytest.fail("code is mapped"))
    words = command.split()[0], capitals_artifact, *COMMANDS[command]
    with standard_input(b""):
        line = fails(*words, "--digest", OTHER)
    assert f"its digest is {digest_of(capitals_artifact)}, not {OTHER}: get the " in line


@pytest.mark.parametrize("command", COMMANDS)
def test_its_own_digest_is_taken(capsys: pytest.CaptureFixture[str], capitals_artifact: Path, command: str) -> None:
    words = command.split()[0], capitals_artifact, *COMMANDS[command]
    with standard_input(QUESTION.encode()):
        out = run_here(capsys, *words, "--digest", digest_of(capitals_artifact))
    assert out.strip() == "Paris" if command in ("run", "chat") else out


def test_no_digest(fails: Fails, capitals_artifact: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        fails("run", capitals_artifact, "--prompt", QUESTION, "--digest", "abc")


def test_files_that_change_behind_the_load(folder: Path) -> None:
    """The tokenizer may be read long after the program was loaded, and in another process."""
    digest = digest_of(folder)
    (folder / "chat_template.jinja").touch()
    empty = digest_of(folder)

    async def asked() -> str:
        async with AsyncEngine(folder, digest=digest) as engine:
            (folder / "chat_template.jinja").touch()
            return (await engine.answer(QUESTION)).text

    message = f"its digest is {empty}, not {digest}"
    with pytest.raises(ArtifactError, match=message):
        Engine.load(folder, digest=digest)
    (folder / "chat_template.jinja").unlink()
    with Engine.load(folder, digest=digest) as engine:
        assert "".join(engine.generate(QUESTION)) == "Paris"
    with Engine.load(folder, digest=digest) as engine:
        (folder / "chat_template.jinja").touch()
        with pytest.raises(ArtifactError, match=message):
            engine.generate(QUESTION)
        engine.swap(folder, digest=empty)
        assert engine.encode_prompt("Paris", raw=True)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ArtifactError, match=message):
        asyncio.run(asked())
