"""Tests of the private parts of Inductor that the export relies on: one test per part, named after it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.torch_internals import load_container
from ostinato.export.compile import inductor_internals


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


def generated(folder: Path) -> inductor_internals.Generated:
    example = (torch.ones(3, 4),)
    with torch.no_grad():
        module = torch.export.export(Solve(), example, strict=False).module(check_guards=False)
        return inductor_internals.generate_library(module, example, "cpu", folder, {})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[inductor_internals.Generated, list[Path], Any]:
    """The generated code, the library's files that exist at that time, and the library after it was built and loaded."""
    found = generated(tmp_path_factory.mktemp("built"))
    files = list(found.path.parent.rglob("*"))
    made = [path for path in files if path.name.endswith((".kernel.o", ".wrapper.o", ".so"))]
    return found, made, load_built(found)


def test_generate_library(built: tuple[inductor_internals.Generated, list[Path], Any]) -> None:
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
        inductor_internals.generate_library(module, example, "cpu", tmp_path, {}, grows)
    kernels = "".join(path.read_text() for path in tmp_path.glob("kernel.cpp"))
    assert "out_ptr" in kernels and ("index out of bounds" not in kernels) is grows


def load_built(found: inductor_internals.Generated) -> Any:
    assert found.interface is not None
    (found.path.parent / found.interface.SOURCE).write_text(found.interface.source)
    for command in (*found.objects, found.interface.command, (*found.link, found.interface.OBJECT)):
        subprocess.run(command, cwd=found.path.parent, check=True, capture_output=True)
    return load_container(str(found.path), torch.device("cpu"))


def test_constant_names(built: tuple[inductor_internals.Generated, list[Path], Any]) -> None:
    """A buffer of one element keeps its name. If it were folded into the code as a number, its value could never change."""
    _, _, container = built
    assert set(inductor_internals.constant_names(container).values()) == {"lower", "count"}


def test_compilers_run_by(tmp_path: Path) -> None:
    """A build and a precompiled header go through the functions that `compilers_run_by` patches and then restores."""
    from torch._inductor import codecache, cpp_builder

    before = cpp_builder.run_compile_cmd, codecache._worker_compile_cpp
    commands: list[Sequence[str]] = []
    started: list[tuple[Any, ...]] = []

    def run(command: Sequence[str], folder: str) -> None:
        commands.append(command)

    with inductor_internals.compilers_run_by(run, lambda *work: started.append(work)):
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

    inductor_internals.choose_vector_instructions()
    chosen = cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list() in ([chosen], [])
    assert chosen is cpu_vec_isa.pick_vec_isa()


def test_forget_vector_instructions() -> None:
    """All that work are known again, and the best of them is the one that was chosen."""
    from torch._inductor import cpu_vec_isa

    inductor_internals.choose_vector_instructions()
    chosen, known = cpu_vec_isa.pick_vec_isa(), cpu_vec_isa.valid_vec_isa_list()
    inductor_internals.forget_vector_instructions()
    assert cpu_vec_isa.pick_vec_isa() is chosen
    assert cpu_vec_isa.valid_vec_isa_list()[:1] == known


def test_threads_assumed() -> None:
    from torch._inductor.utils import parallel_num_threads

    with inductor_internals.threads_assumed(7):
        assert parallel_num_threads() == 7
    assert parallel_num_threads() == torch.get_num_threads()


def test_kept_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert inductor_internals.kept_folder() == Path(cache_dir(), "ostinato")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = inductor_internals.kept_folder()
    assert folder.is_dir() and folder.parent == tmp_path / "cache"


def settings_elsewhere(*imports: str, **variables: str) -> str:
    """`inductor_settings` of a new process, which imports these modules first."""
    code = f"""
import sys
{"".join(f"import {name}; " for name in imports)}
from ostinato.export.compile.inductor_internals import inductor_settings, kept_folder
print(inductor_settings(), kept_folder().name)
if not {imports}:
    assert not {{"torch._inductor", "torch._dynamo"}} & sys.modules.keys()
"""
    environment = os.environ | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.removesuffix(" ostinato\n")


def test_inductor_settings() -> None:
    """Equal settings have equal texts, also in other processes, and with Inductor imported or not; another setting has
    another text. Inductor is not imported for it."""
    from torch._inductor import config

    here = inductor_internals.inductor_settings()
    assert here == settings_elsewhere() == settings_elsewhere("torch._inductor.config")
    with config.patch({"max_autotune": not config.max_autotune}):
        assert inductor_internals.inductor_settings() != here
    assert inductor_internals.inductor_settings() == here


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_DELAY_REALIZE_CHEAP_OUTPUTS"])
def test_inductor_settings_in_the_environment(name: str) -> None:
    """Also those that Inductor's module for settings reads from the environment."""
    there = settings_elsewhere(**{name: "1"})
    assert there == settings_elsewhere("torch._inductor.config", **{name: "1"}) != settings_elsewhere()


def test_choose_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton gets the ptxas that stands beside torch's own code, in the one or the other place, depending on the version."""
    compile_tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
    tools = [tmp_path / "torch" / folder / "ptxas" for folder in ("bin", "_inductor/bin")]
    for tool in tools:
        tool.parent.mkdir(parents=True)
        tool.touch(mode=0o755)
    monkeypatch.setattr(
        compile_tasks, "__file__", str(tmp_path / "torch" / "_inductor" / "runtime" / "compile_tasks.py")
    )
    # Set first, so that whatever the call sets is undone behind the test.
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    compile_tasks._set_triton_ptxas_path.cache_clear()
    inductor_internals.choose_ptxas()
    compile_tasks._set_triton_ptxas_path.cache_clear()
    assert os.environ["TRITON_PTXAS_PATH"] in map(str, tools)


def test_is_reserved_name() -> None:
    """The rule for reserved names is in the source of Inductor's wrapper, in the form that is repeated here."""
    from torch._inductor.codegen import wrapper

    assert 'r"^(workspace|semaphore)"' in inspect.getsource(wrapper)
    names = ("workspace", "workspace_0", "semaphore", "my_workspace", "scratch")
    assert [name for name in names if inductor_internals.is_reserved_name(name)] == list(names[:3])


def test_one_process_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that measure at the same time do so one after the other, and no further processes compile kernels."""
    triton_heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    events: list[str] = []

    def measure(tuner: str) -> None:
        events.append(f"{tuner} begins")
        time.sleep(0.1)
        events.append(f"{tuner} ends")

    tuner = triton_heuristics.CachingAutotuner
    monkeypatch.setattr(tuner, "benchmark_all_configs", measure)
    with inductor_internals.one_process_of_several(tmp_path / "timing.lock"):
        assert torch._inductor.config.compile_threads == 1
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(tuner.benchmark_all_configs, ("one", "two")))
    first, second = events[0].split()[0], events[2].split()[0]
    assert events == [f"{name} {what}" for name in (first, second) for what in ("begins", "ends")]
    assert tuner.benchmark_all_configs is measure


def test_load_inductor() -> None:
    code = """
import sys, torch
from ostinato.export.compile.inductor_internals import load_inductor
load_inductor()
print({"torch._inductor.graph", "torch._inductor.codegen.cpp", "torch._inductor.codegen.triton"} <= sys.modules.keys())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
