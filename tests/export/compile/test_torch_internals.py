"""Tests of the private parts of torch and Inductor that the export relies on: one test per part, named after it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.torch_internals import load_container
from ostinato.export.compile import torch_internals

from ..kernels.conftest import run_compiled


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


class Solve(nn.Module):
    """Has an operator without a C entry point, and a buffer of one element."""

    lower: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lower", torch.eye(3))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.linalg.solve_triangular(self.lower, x, upper=False) + self.count


def generated(folder: Path) -> torch_internals.Generated:
    example = (torch.ones(3, 4),)
    with torch.no_grad():
        module = torch.export.export(Solve(), example, strict=False).module(check_guards=False)
        return torch_internals.generate_library(module, example, "cpu", folder, {})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch_internals.Generated, list[Path], Any]:
    """The generated code, the library's files that exist at that time, and the library after it was built and loaded."""
    found = generated(tmp_path_factory.mktemp("built"))
    files = list(found.path.parent.rglob("*"))
    made = [path for path in files if path.name.endswith((".kernel.o", ".wrapper.o", ".so"))]
    return found, made, load_built(found)


def test_generate_library(built: tuple[torch_internals.Generated, list[Path], Any]) -> None:
    """The result has the source, the operators that it calls by name, and commands that build a library from nothing."""
    found, made, container = built
    assert made == []
    assert "AOTInductorModel::run_impl" in found.source
    targets = {node["node"]["target"] for node in json.loads(found.extern)["nodes"]}
    assert targets == {"aten::linalg_solve_triangular"}
    # This version's wrappers contain the text that is compiled once for all libraries.
    assert found.interface is not None
    (wrapper,) = found.path.parent.glob("wrapper.cpp")
    assert "AOTInductorModelContainerCreateWithDevice(" not in wrapper.read_text()
    assert len(found.objects) == 2
    assert container.get_call_spec()


class Table(nn.Module):
    """Writes rows by an index that is an input, and reads other rows by the same index."""

    rows: Tensor
    others: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2))
        self.register_buffer("others", torch.zeros(2, 3))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, index, x)
        return self.others.index_select(0, index)[:, 0] + x


@pytest.mark.parametrize("grows", [False, True])
def test_generate_library_for_what_grows(tmp_path: Path, grows: bool) -> None:
    """With `grows`, the code compares no index with the example's size."""
    length = {0: torch.export.Dim("T", min=2, max=40)}
    example = (torch.zeros(20, dtype=torch.int64), torch.zeros(20))
    with torch.no_grad():
        program = torch.export.export(Table(), example, dynamic_shapes=(length, length), strict=False)
        module = program.module(check_guards=False)
        torch_internals.generate_library(module, example, "cpu", tmp_path, {}, grows)
    kernels = "".join(path.read_text() for path in tmp_path.glob("kernel.cpp"))
    assert "out_ptr" in kernels and ("index out of bounds" not in kernels) is grows


def load_built(found: torch_internals.Generated) -> Any:
    assert found.interface is not None
    (found.path.parent / found.interface.SOURCE).write_text(found.interface.source)
    for command in (*found.objects, found.interface.command, (*found.link, found.interface.OBJECT)):
        subprocess.run(command, cwd=found.path.parent, check=True, capture_output=True)
    return load_container(str(found.path), torch.device("cpu"))


def test_constant_names(built: tuple[torch_internals.Generated, list[Path], Any]) -> None:
    """A buffer of one element keeps its name. If it were folded into the code as a number, its value could never change."""
    _, _, container = built
    assert set(torch_internals.constant_names(container).values()) == {"lower", "count"}


def test_compilers_run_by(tmp_path: Path) -> None:
    """A build and a precompiled header go through the functions that `compilers_run_by` patches and then restores."""
    from torch._inductor import codecache, cpp_builder

    before = cpp_builder.run_compile_cmd, codecache._worker_compile_cpp
    commands: list[Sequence[str]] = []
    started: list[tuple[Any, ...]] = []

    def run(command: Sequence[str], folder: str) -> None:
        commands.append(command)

    with torch_internals.compilers_run_by(run, lambda *work: started.append(work)):
        options = cpp_builder.CppTorchOptions(compile_only=True)
        cpp_builder.CppBuilder("x", str(tmp_path / "x.cpp"), options, str(tmp_path)).build()
        codecache._worker_compile_cpp("lock", ())
    assert (cpp_builder.run_compile_cmd, codecache._worker_compile_cpp) == before
    (command,) = commands
    assert str(tmp_path / "x.o") in command
    assert started == [(before[1], "lock", ())]
    assert "_worker_compile_cpp(" in inspect.getsource(codecache._precompile_header)


def test_choose_vector_instructions() -> None:
    from torch._inductor import cpu_vec_isa

    torch_internals.choose_vector_instructions()
    chosen = cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list() in ([chosen], [])
    assert chosen is cpu_vec_isa.pick_vec_isa()


def test_forget_vector_instructions() -> None:
    """All that work are known again, and the best of them is the one that was chosen."""
    from torch._inductor import cpu_vec_isa

    torch_internals.choose_vector_instructions()
    chosen, known = cpu_vec_isa.pick_vec_isa(), cpu_vec_isa.valid_vec_isa_list()
    torch_internals.forget_vector_instructions()
    assert cpu_vec_isa.pick_vec_isa() is chosen
    assert cpu_vec_isa.valid_vec_isa_list()[:1] == known


def test_threads_assumed() -> None:
    from torch._inductor.utils import parallel_num_threads

    with torch_internals.threads_assumed(7):
        assert parallel_num_threads() == 7
    assert parallel_num_threads() == torch.get_num_threads()


def test_every_function_has_its_test() -> None:
    functions = [
        name
        for name, value in vars(torch_internals).items()
        if callable(value) and getattr(value, "__module__", "") == torch_internals.__name__ and name[0].islower()
    ]
    assert len(functions) > 10
    assert [name for name in functions if f"test_{name}" not in globals()] == []


def test_kept_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = torch_internals.kept_folder()
    assert folder.is_dir() and folder.parent == tmp_path / "cache"


def test_inductor_settings() -> None:
    """Equal settings have equal texts, also in other processes; another setting has another text."""
    from torch._inductor import config

    code = "from ostinato.export.compile.torch_internals import inductor_settings\nprint(inductor_settings())"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert elsewhere == torch_internals.inductor_settings() + "\n"
    with config.patch({"max_autotune": not config.max_autotune}):
        assert torch_internals.inductor_settings() + "\n" != elsewhere


def test_is_reserved_name() -> None:
    """The rule for reserved names is in the source of Inductor's wrapper, in the form that is repeated here."""
    from torch._inductor.codegen import wrapper

    assert 'r"^(workspace|semaphore)"' in inspect.getsource(wrapper)
    names = ("workspace", "workspace_0", "semaphore", "my_workspace", "scratch")
    assert [name for name in names if torch_internals.is_reserved_name(name)] == list(names[:3])


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
