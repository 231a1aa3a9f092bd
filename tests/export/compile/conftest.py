"""What several files here use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.export.compile import kept_code


@pytest.fixture
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test takes no code of another test or of an earlier run."""
    monkeypatch.setattr(kept_code, "kept_folder", lambda: tmp_path / "nowhere")
