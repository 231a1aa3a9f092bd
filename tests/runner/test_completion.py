"""Completion in a shell: the printed scripts, and what bash offers with one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ostinato.runner.cli import COMMANDS, main
from ostinato.runner.completion import SHELLS

from ..processes import PATIENCE


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of `words`, with the script loaded."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '"$(complete -p ostinato | sed "s/.*-F \\([^ ]*\\).*/\\1/")" ostinato "${!#}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", program, "bash", str(script), "ostinato", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=script.parent)
    assert done.stderr == ""
    return [line.strip() for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--print-completion", "bash"])
    assert stop.value.code == 0
    (tmp_path / "artifact").mkdir()
    (tmp_path / "article.txt").touch()
    script = tmp_path / "ostinato.bash"
    script.write_text(capsys.readouterr().out)
    assert set(completed(script, "")) >= set(COMMANDS)
    assert completed(script, "ins") == ["inspect"]
    assert completed(script, "run", "--prompt-f") == ["--prompt-file"]
    assert completed(script, "export", "--device", "cu") == ["cuda"]
    assert completed(script, "run", "art") == ["artifact"]
    assert completed(script, "run", "--prompt-file", "artic") == ["article.txt"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_all_options(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([f"--print-completion={shell}"])
    assert stop.value.code == 0
    script = capsys.readouterr().out
    for option in ("max-seq-len", "chat-template-kwargs", "prefill-buckets", "top", "version"):
        assert option in script
