"""scripts/check_clients.py up to where it needs the clients, which tests do not install."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import check_clients


def test_the_questions() -> None:
    """Each country has its capital once among four."""
    found = check_clients.questions()
    assert len(found) == len(check_clients.CAPITALS.read_text(encoding="utf-8").splitlines()) - 1
    assert all(row["choices"][row["right"]] == row["capital"] and len(set(row["choices"])) == 4 for row in found)
    assert {row["right"] for row in found} == {0, 1, 2, 3} and found == check_clients.questions()


def test_no_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_clients.main([str(tmp_path), "--clients", str(tmp_path)])
    assert ended.value.code == 2 and "has no aiperf: see check_clients.sh" in capsys.readouterr().err


def test_what_litellm_got(tmp_path: Path) -> None:
    """Its last line counts, and an answer that is not the right one is a finding."""
    said = json.dumps([("chat", ["Paris"], ["Paris"]), ("n", "Oslo", "Paris")])
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho advice\necho '{said}'\n")
    python.chmod(0o755)
    good, bad = check_clients.litellm(tmp_path, "http://x")
    assert good.held and not bad.held and (bad.what, bad.found, bad.wanted) == ("litellm: n", "Oslo", "Paris")


def test_a_client_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_clients.run(sys.executable, "-c", "import sys; print('why'); sys.exit(3)")
    assert ended.value.code == 2 and "exit status 3:\nwhy" in capsys.readouterr().err
