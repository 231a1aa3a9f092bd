"""Tests of the private parts of executorch that the export relies on: one test per part, named after it."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.ptd import parse_constants
from ostinato.export.artifact import executorch_internals


def test_every_function_has_its_test() -> None:
    functions = [
        name
        for name, value in vars(executorch_internals).items()
        if inspect.isfunction(value) and value.__module__ == executorch_internals.__name__
    ]
    assert functions
    assert [name for name in functions if f"test_{name}" not in globals()] == []


def test_edge_config() -> None:
    from executorch.exir import to_edge

    class Complex(nn.Module):
        """Uses an operator that exir's validity check does not know."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs()

    program = torch.export.export(Complex(), (torch.ones(8),), strict=False)
    assert to_edge(program, compile_config=executorch_internals.edge_config()).methods == {"forward"}


def test_delegated_module() -> None:
    from executorch.exir import to_edge

    class Shell(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    config = executorch_internals.edge_config()
    shell = to_edge(torch.export.export(Shell(), (torch.ones(3),), strict=False), compile_config=config)
    module = executorch_internals.delegated_module(
        shell.exported_program(), "SomeBackend", b"processed", {"key": b"value"}, {"data": b"12345"}
    )

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lowered = module

        def forward(self, x: Tensor) -> Tensor:
            return self.lowered(x)

    called = torch.export.export(Call(), (torch.ones(3),), strict=False)
    program = bytes(to_edge(called, compile_config=config).to_executorch().buffer)
    assert all(part in program for part in (b"SomeBackend", b"processed", b"12345", b"value"))


def test_write_flat_tensor() -> None:
    """Blobs are asked for in order, while the file is written."""
    from ostinato.delegate.artifact.names import MANIFEST_KEY
    from ostinato.delegate.artifact.records import Manifest

    asked: list[str] = []
    manifest = Manifest({"a": "hash"}).to_bytes()

    def blob(key: str, data: bytes, like: Tensor | None) -> executorch_internals.Blob:
        def write(file: BinaryIO) -> None:
            asked.append(key)
            file.write(data)

        return executorch_internals.Blob(key, len(data), write, like)

    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7], dtype=torch.int64)}
    blobs = [blob(key, value.numpy().tobytes(), torch.empty_like(value)) for key, value in values.items()]
    blobs.append(blob(MANIFEST_KEY, manifest, None))
    file = io.BytesIO()
    executorch_internals.write_flat_tensor(file, blobs, 128)
    assert asked == ["a", "b", MANIFEST_KEY]
    found = parse_constants(memoryview(bytearray(file.getvalue())), Path("model.ptd"))
    assert found.manifest.constants == {"a": "hash"}
    for key, value in values.items():
        assert torch.equal(found.entries[key].tensor(), value)
