"""Long imports: what they do to the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import nullcontext

import pytest

from ostinato.runner.imports import long_imports

from ..processes import PATIENCE


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is looked for when the imports have ended, with an error or without, and not in what they made."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    try:
        with pytest.raises(ImportError) if fails else nullcontext(), long_imports():
            assert not gc.isenabled()
            if fails:
                raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_with_torch_loaded_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    frozen = gc.get_freeze_count()
    with long_imports():
        assert gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_caller_without_a_collector_keeps_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gc.disable()
    try:
        with long_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("words", [["--help"], ["no folder", "--prompt", "x"], ["no folder"]])
def test_what_run_refuses_at_once(words: list[str]) -> None:
    """A mistake is refused before torch is imported, which takes a second."""
    code = (
        "import sys\nfrom ostinato.runner.cli import main\n"
        "try:\n    main(['run', *sys.argv[1:]])\nexcept SystemExit:\n    pass\n"
        "sys.exit(sorted({'torch', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules)) != [])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
