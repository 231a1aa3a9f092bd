"""Tests of the private parts of torch that the export relies on: one test per part, named after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.export.compile import inductor_internals, torch_internals

from ..kernels.conftest import run_compiled
from . import test_inductor_internals


class Scale(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return torch.cat([x, x]) * 2


def traced(dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("T", min=2, max=9)},) if dynamic else None
    with torch.no_grad():
        return torch.export.export(Scale(), (torch.ones(4, 3),), dynamic_shapes=shapes, strict=False)


def output_size(program: torch.export.ExportedProgram) -> torch.SymInt:
    output = next(node for node in program.graph.nodes if node.op == "output")
    size = output.args[0][-1].meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def test_every_function_has_its_test() -> None:
    """Here, or in the file of Inductor's."""
    functions = [
        name
        for module in (torch_internals, inductor_internals)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and name[0].islower()
    ]
    assert len(functions) > 10
    tests = {*globals(), *vars(test_inductor_internals)}
    assert [name for name in functions if f"test_{name}" not in tests] == []


def test_early_kernels_analysed_as_pure() -> None:
    """The patched names exist, are used by torch's own analysis, and are restored."""
    pytest.importorskip("triton")
    from torch._higher_order_ops import triton_kernel_wrap

    before = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.Op
    with torch_internals.early_kernels_analysed_as_pure():
        assert triton_kernel_wrap.generate_ttir is not before[0]
        operation = triton_kernel_wrap.Op("name", None, [], triton_kernel_wrap.Intermediate(0), is_pure=False)
        assert operation.is_pure is False
    assert (triton_kernel_wrap.generate_ttir, triton_kernel_wrap.Op) == before
    source = Path(triton_kernel_wrap.__file__).read_text()
    assert "generate_ttir(" in source and "is_pure" in source


def test_failed_analyses_raised() -> None:
    """An export with a kernel that torch cannot analyse ends with an error of one line, which names the kernel."""
    pytest.importorskip("triton")
    report = json.loads(run_compiled(f"from {__package__}.opaque_kernel import print_report\nprint_report()"))
    assert report["written"] == ["out"]
    assert "kernel 'opaque_kernel' writes" in report["refused"] and "is_pure=True" in report["refused"]
    assert len(report["refused"].splitlines()) == 1


def test_is_metadata_check() -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float64) + 1

    program = torch.export.export(Cast(), (torch.ones(3),), strict=False)
    assert any(torch_internals.is_metadata_check(node) for node in program.graph.nodes)
    assert not all(torch_internals.is_metadata_check(node) for node in program.graph.nodes)


def test_storage_key() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert torch_internals.storage_key(x) == torch_internals.storage_key(x[1:].view(3, 1))
    assert torch_internals.storage_key(x) != torch_internals.storage_key(y)
    tensors = {node.name: node.meta["val"] for node in traced().graph.nodes if "val" in node.meta}
    keys = [torch_internals.storage_key(tensor) for tensor in tensors.values()]
    assert len(set(keys)) < len(keys)


def test_written_arguments() -> None:
    program = traced()
    written = [node for one in program.graph.nodes for node in torch_internals.written_arguments(one)]
    assert "total" in {node.name.removeprefix("b_") for node in written}


def test_size_expression() -> None:
    assert "2*" in str(torch_internals.size_expression(output_size(traced(dynamic=True))))


def test_size_example() -> None:
    assert torch_internals.size_example(output_size(traced(dynamic=True))) == 8


def test_size_bounds() -> None:
    program = traced(dynamic=True)
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    low, high = torch_internals.size_bounds(torch_internals.size_expression(output_size(program)), ranges)
    assert (int(low), int(high)) == (4, 18)


def test_upper_bound() -> None:
    """The upper bound is available during a trace, where the traced code depends on it."""
    found = []

    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append([torch_internals.upper_bound(size) <= 18 for size in (*x.shape, 2 * x.shape[0])])
            return x + 1

    rows = torch.export.Dim("R", min=2, max=18)
    torch.export.export(Bounded(), (torch.ones(4, 3),), dynamic_shapes=({0: rows},), strict=False)
    torch.export.export(Bounded(), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim("R")},), strict=False)
    assert found == [[True, True, False], [False, True, False]]


def test_lower_bound() -> None:
    found = []

    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append([torch_internals.lower_bound(size) > 4 for size in (*x.shape, 2 * x.shape[0])])
            return x + 1

    rows = torch.export.Dim("R", min=3, max=18)
    torch.export.export(Bounded(), (torch.ones(4, 5),), dynamic_shapes=({0: rows},), strict=False)
    assert found == [[False, True, True]]
