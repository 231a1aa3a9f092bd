"""One graph -> AOTInductor code: what is refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export import Progress
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
