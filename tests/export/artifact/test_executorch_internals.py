"""Tests of the private parts of executorch that the export relies on: one test per part, named after it."""

from __future__ import annotations

import inspect
from pathlib import Path

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


class Shell(nn.Module):
    """Has a dtype that exir's portable operators do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.uint16)


def called() -> torch.export.ExportedProgram:
    shell = torch.export.export(Shell(), (torch.ones(3),), strict=False)
    module = executorch_internals.delegated_module(
        shell, "SomeBackend", b"processed", {"key": b"value"}, {"data": b"12345"}
    )

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lowered = module

        def forward(self, x: Tensor) -> Tensor:
            return self.lowered(x)

    return torch.export.export(Call(), (torch.ones(3),), strict=False)


def test_delegated_module() -> None:
    (call,) = [node for node in called().graph.nodes if "executorch_call_delegate" in str(node.target)]
    assert call.meta["val"][0].dtype == torch.uint16


def test_emit_program() -> None:
    program = executorch_internals.emit_program({"forward": called()}, {"answer": 42})
    assert all(part in program for part in (b"SomeBackend", b"processed", b"12345", b"value", b"forward", b"answer"))


def test_flat_tensor_parts() -> None:
    from ostinato.delegate.artifact.names import MANIFEST_KEY
    from ostinato.delegate.artifact.records import Manifest

    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7], dtype=torch.int64)}
    data = {key: value.numpy().tobytes() for key, value in values.items()}
    data[MANIFEST_KEY] = Manifest({"a": "hash"}).to_bytes()
    likes = {key: torch.empty_like(value) for key, value in values.items()}
    entries = [executorch_internals.Entry(key, len(some), likes.get(key)) for key, some in data.items()]
    parts = executorch_internals.flat_tensor_parts(entries, 128)
    assert [part for part in parts if isinstance(part, str)] == ["a", "b", MANIFEST_KEY]
    file = b"".join(part if isinstance(part, bytes) else data[part] for part in parts)
    found = parse_constants(memoryview(bytearray(file)), Path("model.ptd"))
    assert found.manifest.constants == {"a": "hash"}
    for key, value in values.items():
        assert torch.equal(found.entries[key].tensor(), value)
