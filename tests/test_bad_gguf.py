"""Damaged GGUF files at the command line: exit status 2 and one line, whatever is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from ostinato.delegate.errors import ExportError
from ostinato.export import model as export_module
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.runner.cli import main

from .export.gguf_files import mutated, write_gguf
from .export.models.dense_references import CASES, make_dense

REACHED = "the file is sound as far as an export needs it"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several formats, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("gguf")
    reference = make_dense(folder / "checkpoint", CASES["llama"])
    letters = [chr(33 + index) for index in range(reference.model.config.vocab_size - 1)] + ["He"]
    kinds = {"norm": "F32", "attn_v": "Q8_0", "attn": "Q4_0", "ffn_down": "Q5_0", "ffn": "Q4_1", "token_embd": "F16"}
    write_gguf(folder / "sound.gguf", reference.model, "llama", kinds, tokens=letters)
    return folder / "sound.gguf"


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export reads all weights, and ends where it would compile."""

    def reach(*arguments: Any, **_: Any) -> Any:
        weights: Mapping[str, Tensor] = arguments[5]
        for name in weights:
            weights[name]
        raise ExportError(REACHED)

    monkeypatch.setattr(export_module, "export_network", reach)


def first_tensor(path: Path) -> int:
    return min(tensor.offset for tensor in GgufFile(path).tensors.values())


def damaged(data: bytes, header: int, random: Random) -> bytes:
    """Damage the header, or a number among the weights: to infinity, NaN, or nearly 0."""
    if random.randrange(6):
        return mutated(data, header, random)
    at = random.randrange(header, len(data) - 2)
    return data[:at] + random.choice((b"\x00\x7c", b"\xff\xff", b"\x01\x00")) + data[at + 2 :]


@pytest.mark.usefixtures("nothing_compiled")
def test_a_thousand_mutations(sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random, data = Random(3), sound.read_bytes()
    header, path, output = first_tensor(sound), tmp_path / "mutated.gguf", tmp_path / "artifact"
    assert main(["export", "--model", str(sound), "--output", str(output)]) == 2
    assert capfd.readouterr().err.strip().endswith(REACHED)
    refused = 0
    for _ in range(1000):
        path.write_bytes(damaged(data, header, random))
        assert main(["export", "--model", str(path), "--output", str(output)]) == 2
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and not output.exists()
        refused += REACHED not in errors[0]
    assert refused > 500
