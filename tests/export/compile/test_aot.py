"""One graph -> AOTInductor code: what is refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export import Progress
from ostinato.export.compile import aot
from ostinato.export.compile.aot import generate_code
from ostinato.export.compile.libraries import Libraries
from ostinato.export.compile.trace import trace_method


class Counter(nn.Module):
    workspace: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("workspace", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.workspace.add_(1)


def test_tensor_whose_name_the_compiler_keeps_for_itself(tmp_path: Path) -> None:
    """A buffer called `workspace` is refused for a GPU: in the generated code this name would be a variable that nothing
    sets."""
    (link,) = trace_method("forward", (Counter(), (torch.ones(3),), None)).links
    with pytest.raises(ExportError, match="has tensors called workspace: the compiler keeps names"):
        generate_code(link.graph, "cuda", tmp_path, {})
    with Libraries("cpu", Progress()) as libraries:
        libraries.generate([link.graph])
        (code,) = libraries.codes()
    assert set(code.names.values()) == {"workspace"}


class Raised(nn.Module):
    """Adds to its parameter before it multiplies by it, as norms do. Inductor runs this addition to find its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight + 1)


@pytest.mark.gpu
def test_parameter_has_its_memory_while_its_graph_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generate_library = aot.generate_library
    sizes: list[int] = []

    def seen(module: nn.Module, *arguments: Any) -> Any:
        sizes.extend(parameter.untyped_storage().nbytes() for parameter in module.parameters())
        return generate_library(module, *arguments)

    monkeypatch.setattr(aot, "generate_library", seen)
    (link,) = trace_method("forward", (Raised(), (torch.ones(1024),), None)).links
    before = torch.cuda.memory_allocated()
    generate_code(link.graph, "cuda", tmp_path, {})
    assert sizes == [4 << 20]
    assert torch.cuda.memory_allocated() - before < 1 << 20
