"""Fixtures and helpers that the tests of the commands and of `Engine` share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.runner.bench import device
from ostinato.runner.cli import main

from ..modules import MAX_SEQ_LEN, VOCAB, Recurrent, Stateless

# Prompts of 5 and of 2 tokens and answers of 4, at depths 0 and 6, timed twice.
SMALL = ["-p", "5,2", "-n", "4", "-d", "0,6", "-r", "2"]

EOS = 3

Bench = Callable[..., str]
ForwardArtifact = Callable[[str], Path]


@pytest.fixture(scope="session")
def forward_artifact(exported: Callable[..., Path]) -> ForwardArtifact:
    """Programs with the one method `forward`. "static" takes one token per call, and does not state its vocabulary size;
    "dynamic" takes any number of tokens; "stateless" does too, and has no state."""

    def get(kind: str) -> Path:
        length = torch.export.Dim("T", min=1, max=MAX_SEQ_LEN)
        one = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        many = (torch.zeros(1, 5, dtype=torch.int64), torch.arange(5))
        spec: Any = {
            "static": (Recurrent(), one, None),
            "dynamic": (Recurrent(), many, ({1: length}, {0: length})),
            "stateless": (Stateless(), many[:1], ({1: length},)),
        }[kind]
        metadata = {"get_max_seq_len": MAX_SEQ_LEN, "get_eos_ids": [EOS]}
        if kind != "static":
            metadata["get_vocab_size"] = VOCAB

        def build(path: Path) -> None:
            from ostinato.export import export_program

            export_program({"forward": spec}, path, metadata=metadata)

        return exported(f"forward-{kind}", build, str(metadata))

    return get


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinks the copies that measure the memory's speed: 256 MiB would take most of the tests' time."""
    monkeypatch.setattr(device, "_HOST_COPY_BYTES", 1 << 20)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """`bench(word, ...)`: run the command in this process; returns its stdout."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main(["bench", *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Bench:
    """`refused(word, ...)`: run the command, expect exit status 2 and an empty stdout; return the one error line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main(["bench", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in err
        return line

    return run


def records(bench: Bench, *words: object) -> list[dict[str, Any]]:
    return json.loads(bench(*words, "--output", "json"))


def run_here(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command in this process and return what it prints; it must succeed."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@contextmanager
def standard_input(data: bytes) -> Iterator[None]:
    """Let this process read `data` from its standard input."""
    kept = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
