"""Tests of what an export learns about the GPU without starting CUDA, so that it can fork processes that use the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.artifact.target import host_target
from ostinato.delegate.errors import TargetError
from ostinato.export.compile import gpu
from ostinato.export.compile.gpu import GpuProperties, compile_target, gpu_properties, gpus_counted_by_nvml
from ostinato.export.kernels import launch

from ...conftest import ROOT
from ..kernels.conftest import run_compiled

H200 = GpuProperties("NVIDIA H200", (9, 0), 132, 227 * 1024, 50 << 20, 139 << 30)
L4 = GpuProperties("NVIDIA L4", (8, 9), 58, 99 * 1024, 48 << 20, 22 << 30)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[GpuProperties | None], None]:
    """`said(properties)`: from now on another process says that this is the GPU."""

    def say(found: GpuProperties | None) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(gpu, "_asked_elsewhere", lambda: found)

    return say


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a build without CUDA")
def test_a_build_without_cuda_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "call_in_processes", None)
    assert gpu_properties() is None
    with pytest.raises(TargetError, match=r"a CUDA build of torch; torch [^ ]+ is a build without"):
        compile_target("cuda")


def test_what_depends_on_the_gpu(said: Callable[[GpuProperties | None], None]) -> None:
    said(H200)
    assert compile_target("cuda").arch == "sm_90" and compile_target("cpu") == host_target("cpu")
    assert launch.starts_early() and launch.shared_memory() == launch.LARGE
    said(L4)
    assert compile_target("cuda").arch == "sm_89"
    assert not launch.starts_early() and launch.shared_memory() == launch.SMALL


def test_without_an_answer_torch_is_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have asked CUDA something, without that torch knows: then those that it forks get no answer."""
    monkeypatch.setattr(gpu, "call_in_processes", lambda *_: [(0, None, 0.0)])
    monkeypatch.setattr(gpu, "_asked", lambda: L4)
    assert gpu._asked_elsewhere.__wrapped__() == L4


def test_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with gpus_counted_by_nvml():
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


# Runs where Triton's kernels are compiled, not interpreted.
TRACED = """
import torch, triton
from unittest import mock
from ostinato.export.compile import gpu
from ostinato.export.compile.trace import trace_method
from tests.delegate.graphs.early_kernels import SIZE, Turning
from tests.export.compile.test_gpu import H200

def no(*_, **__):
    raise AssertionError("CUDA was started")

triton.runtime.driver._active = None
x = torch.zeros(SIZE, dtype=torch.int32)
with (
    mock.patch.object(torch.version, "cuda", "13.0"),
    mock.patch.object(torch.cuda, "_lazy_init", no),
    mock.patch.object(type(triton.runtime.driver), "default", property(no)),
    mock.patch.object(gpu, "_asked_elsewhere", lambda: H200),
    gpu.triton_target("cuda"),
):
    (graph,) = trace_method("forward", (Turning(x.clone()), (x,), None)).graphs.values()
    print(triton.runtime.driver.active.get_current_target().arch)
assert triton.runtime.driver._active is None
print(sorted(graph.read), sorted(graph.written))
"""


def test_tracing_a_kernel_starts_no_cuda() -> None:
    assert run_compiled(TRACED).splitlines() == ["90", "['weight'] []"]


# A fresh process, as the command is.
EXPORT = """
import sys, torch
from pathlib import Path
from unittest import mock
from ostinato.export import export_program
from ostinato.export.compile import libraries
from tests.export.compile.test_libraries import Add

started, processes = [], []
call = libraries.call_in_processes

def called(work, numbers, count, forked):
    def checked():
        processes.append(min(len(numbers), count))
        started.append(torch.cuda.is_initialized())
        forked()
    return call(work, numbers, count, checked)

def here(self, number, tasks):
    raise AssertionError("generated in this process")

with (
    mock.patch.object(libraries, "call_in_processes", called),
    mock.patch.object(libraries.Libraries, "_generate_here", here),
):
    methods = {name: (Add(name), (torch.ones(3),), None) for name in ("one", "two", "three", "four")}
    export_program(methods, Path(sys.argv[1]), device="cuda")
print(started, processes)
"""


@pytest.mark.gpu
def test_code_is_generated_in_processes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXPORT, str(tmp_path / "artifact")],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    started, processes = run.stdout.split()
    assert started == "[False]" and int(processes.strip("[]")) > 1
    with load_program(tmp_path / "artifact") as program:
        (found,) = program.load_method("three").execute((torch.ones(3),))
        assert found.tolist() == [2, 2, 2]


@pytest.mark.gpu
def test_properties_are_those_of_torch() -> None:
    code = """
import torch
from ostinato.export.compile.gpu import gpu_properties
print(gpu_properties())
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    torch.cuda.init()
    assert run.stdout.strip() == str(gpu_properties())
