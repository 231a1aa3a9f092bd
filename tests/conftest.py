"""Fixtures shared by all tests. Artifacts are exported once and kept in pytest's cache until their sources change."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, which torch may do, and at each kernel's definition.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where flash-linear-attention is installed, transformers takes its GPU kernels even for a model on the CPU, and fails.
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]

ROOT = Path(__file__).resolve().parent.parent
CAPITALS = ROOT / "tests" / "assets" / "capitals"

Fails = Callable[..., str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    why = "no NVIDIA GPU" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def exported(pytestconfig: pytest.Config) -> Callable[[str, Callable[[Path], object], str], Path]:
    """`exported(name, build, extra)`: the artifact that `build(path)` makes, from the cache if nothing changed.

    `extra` is whatever the artifact depends on besides the sources of export/ and delegate/.
    """
    cache = pytestconfig.cache
    assert cache is not None
    base = Path(cache.mkdir("artifacts"))
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("export", "delegate"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for path in (ROOT / "tests" / "modules.py", *sorted(CAPITALS.iterdir())):
        digest.update(path.read_bytes())

    def get(name: str, build: Callable[[Path], object], extra: str = "") -> Path:
        state = digest.copy()
        state.update(extra.encode())
        path = base / f"{name}-{state.hexdigest()[:16]}"
        if not path.exists():
            for old in base.glob(f"{name}-" + "[0-9a-f]" * 16):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            build(path)
        return path

    return get


@pytest.fixture(scope="session")
def capitals_checkpoint() -> Path:
    return CAPITALS


@pytest.fixture(scope="session")
def capitals_artifact(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on the CPU: float32, max_seq_len 256. Do not write to it: copy it."""
    from ostinato.export import export_model

    return exported("capitals", lambda path: export_model(CAPITALS, path, max_seq_len=256))


@pytest.fixture(scope="session")
def recurrent_artifact(exported: Callable[..., Path]) -> Path:
    """The toy module of tests/modules.py on the CPU, in two methods. Do not write to it: copy it."""
    from ostinato.export import export_program

    from .modules import MAX_SEQ_LEN, VOCAB, Recurrent, recurrent_methods

    def build(path: Path) -> None:
        export_program(
            recurrent_methods(Recurrent()),
            path,
            metadata={"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB, "get_eos_ids": [3]},
            value_ranges={"tokens": (0, VOCAB - 1), "input_pos": (0, MAX_SEQ_LEN - 1)},
            output_names=("logits",),
        )

    return exported("recurrent", build)


@pytest.fixture(scope="session")
def chunked_artifact(exported: Callable[..., Path]) -> Path:
    """The toy module, with a prefill of 2 to 8 tokens: longer prompts go through in chunks. It says what a step reads."""
    from ostinato.export import export_program

    from .modules import MAX_SEQ_LEN, VOCAB, Recurrent, recurrent_methods

    def build(path: Path) -> None:
        metadata = {"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB}
        metadata |= {"get_decode_bytes": 1000, "get_kv_bytes_per_token": 24}
        export_program(recurrent_methods(Recurrent(), longest=8), path, metadata=metadata)

    return exported("chunked", build)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(word, ...)`: run the command in this process, expect exit status 2; returns the one error line."""
    from ostinato.runner.cli import main

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        return lines[0]

    return run
