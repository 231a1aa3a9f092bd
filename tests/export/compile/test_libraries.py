"""Several compilers at a time: their results do not depend on which is first, and none runs on after the export."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export import Progress
from ostinato.export.compile import libraries as libraries_module
from ostinato.export.compile import native
from ostinato.export.compile.compilers import CompilerError, Compilers, CompilersStopped
from ostinato.export.compile.inductor_internals import Interface
from ostinato.export.compile.libraries import Libraries
from ostinato.export.compile.native import NativeLibrary
from ostinato.export.compile.toolchain import find_compiler
from ostinato.export.compile.trace import TracedGraph, trace_method

pytestmark = pytest.mark.usefixtures("nothing_is_kept")


class Add(nn.Module):
    weight: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer(name, torch.ones(3))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer(self.name)


def graphs(*names: str) -> list[TracedGraph]:
    """Return one graph for each name, with a buffer of that name."""
    return [trace_method(name, (Add(name), (torch.ones(3),), None)).links[0].graph for name in names]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The place of temporary folders during the test, except for Inductor's folder, whose place is chosen at import."""
    importlib.import_module("torch._inductor.codecache")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def compile_wrappers_by(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make a bash script run before each wrapper is compiled: $0 is the compiler, $1 the wrapper."""
    run = Compilers.run

    def scripted(compilers: Compilers, command: Sequence[str], folder: Path) -> None:
        is_wrapper = any(word == "wrapper.cpp" for word in command)
        run(compilers, ["bash", "-c", f'{script}\nexec "$0" "$@"', *command] if is_wrapper else command, folder)

    monkeypatch.setattr(Compilers, "run", scripted)


def test_codes_are_in_the_order_of_the_graphs(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Codes are in the order of the graphs, also if the first graph is compiled last."""
    compile_wrappers_by(monkeypatch, 'grep -q first_weight "$1" && sleep 3')
    progress = Progress()
    with Libraries("cpu", progress) as libraries:
        libraries.generate(graphs("first_weight", "second", "third"))
        codes = libraries.codes()
    assert [list(code.names.values()) for code in codes] == [["first_weight"], ["second"], ["third"]]
    assert list(progress.seconds) == ["compile first_weight", "compile second", "compile third"]
    assert progress.seconds["compile first_weight"] > 3
    assert list(temporary.glob("ostinato-*")) == []


def test_a_graph_is_compiled_for_its_own_device(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    devices: list[str] = []

    def refuse(graph: TracedGraph, device: str, *_: object) -> None:
        devices.append(device)
        raise ExportError("enough")

    monkeypatch.setattr(libraries_module, "generate_code", refuse)
    monkeypatch.setattr(libraries_module, "code_path", lambda *_: None)
    (graph,) = graphs("weight")
    for one in (graph, replace(graph, device="cpu")):
        with pytest.raises(ExportError), Libraries("cuda", Progress()) as compiling:
            compiling.generate([one])
    assert devices == ["cuda", "cpu"]


def test_the_interface_is_kept_for_the_next_export(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, tmp_path: Path
) -> None:
    """The interface is compiled once, by the first of two exports. If it cannot be kept, each export compiles it."""
    compiled: list[Path] = []
    run = Compilers.run

    def counted(compilers: Compilers, command: Sequence[str], folder: Path) -> None:
        compiled.append(folder)
        run(compilers, command, folder)

    def export(kept: Path) -> bytes:
        command = (find_compiler(), "-c", Interface.SOURCE, "-o", Interface.OBJECT)
        with Libraries("cpu", Progress()) as libraries:
            libraries._ready.result()
            compiled.clear()
            interface = Interface("int shared() { return 1; }", command, kept)
            made = [libraries._interface(interface).result() for _ in range(3)]
            assert len(set(made)) == 1
            return made[0].read_bytes()

    monkeypatch.setattr(Compilers, "run", counted)
    counts, objects = [], set()
    for kept in (tmp_path / "kept.o", tmp_path / "kept.o", tmp_path / "nowhere" / "kept.o"):
        objects.add(export(kept))
        counts.append(len(compiled))
    assert counts == [1, 0, 1] and len(objects) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.o", "temporary"]


@pytest.fixture
def doubling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    """The only library, of one operator, with one line of C++."""
    monkeypatch.setattr(native, "_LIBRARIES", {})
    folder = tmp_path / "doubling"
    folder.mkdir()
    (folder / "twice_cpu.cpp").write_text('extern "C" int aoti_torch_cpu_twice(void*, void**) { return 1; }\n')
    library = NativeLibrary(f"doubling_{os.getpid()}", folder, ("twice_cpu.cpp",))
    library.operator("twice(Tensor x) -> Tensor")(torch.empty_like)
    return library


def test_operators_are_kept_for_the_next_export(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, tmp_path: Path, doubling: NativeLibrary
) -> None:
    """The operators' library is compiled by the first of two exports, from its beginning. If it cannot be kept, each export
    compiles it."""
    compiled: list[Sequence[str]] = []
    run = Compilers.run

    def counted(compilers: Compilers, command: Sequence[str], folder: Path) -> None:
        if any(word.endswith("twice_cpu.cpp") for word in command):
            compiled.append(command)
        run(compilers, command, folder)

    def export() -> bytes:
        with Libraries("cpu", Progress()) as libraries:
            library = libraries._kernels[doubling.name].result()
            assert library.name == doubling.build().library and libraries._folder in library.parents
            return library.read_bytes()

    monkeypatch.setattr(Compilers, "run", counted)
    kept = tmp_path / "kept"
    kept.mkdir()
    made = []
    for folder in (kept, kept, tmp_path / "nowhere"):
        monkeypatch.setattr(libraries_module, "kept_folder", lambda folder=folder: folder)
        made.append(export())
    assert len(compiled) == 2
    (path,) = kept.iterdir()
    assert path.name == doubling.build().library and {path.read_bytes()} == set(made[:2])


def test_code_is_the_same_from_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which graph is generated where, and by how many threads, cannot be seen in the code."""

    def compiled() -> list[tuple[bytes, dict[str, str]]]:
        with Libraries("cpu", Progress()) as libraries:
            libraries.generate(graphs("one", "two", "three", "four"))
            return [(code.library, code.names) for code in libraries.codes()]

    found = compiled()
    # A process that has started CUDA is not forked.
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert compiled() == found
    assert [*map(list, (names.values() for _, names in found))] == [["one"], ["two"], ["three"], ["four"]]


def test_what_may_begin_when_no_process_is_forked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called once: with many graphs, with one, without any, and where no process can be forked."""
    calls: list[str] = []

    def counted(*names: str) -> int:
        calls.clear()
        with Libraries("cpu", Progress()) as libraries:
            libraries.generate(graphs(*names), forked=lambda: calls.append("forked"))
        return len(calls)

    monkeypatch.setattr(Libraries, "_finish_some", lambda _: None)
    assert [counted("one", "two", "three"), counted("one"), counted()] == [1, 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert counted("one", "two", "three") == 1


def test_first_failure_in_other_processes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_code = libraries_module.generate_code

    def failing(graph: TracedGraph, *arguments: Any) -> Any:
        if graph.label in ("two", "four"):
            raise RuntimeError(f"target: aten.{graph.label}.default is not there")
        return generate_code(graph, *arguments)

    monkeypatch.setattr(libraries_module, "generate_code", failing)
    with (
        pytest.raises(ExportError, match=r"method 'two': the model cannot be lowered: .*\(operator aten.two.default\)"),
        Libraries("cpu", Progress()) as libraries,
    ):
        libraries.generate(graphs("one", "two", "three", "four"))


FAILING = """
grep -q weight_slow "$1" && sleep 2 && echo "x.cpp:1:1: warning: w" && echo "x.cpp:7:9: error: slow one" && exit 1
grep -q weight_quick "$1" && echo "x.cpp:3:2: error: quick one" && exit 1
grep -q weight_killed "$1" && kill -KILL $$
"""


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (
            ("fine", "weight_quick"),
            "method 'weight_quick': the model cannot be lowered: bash failed: x.cpp:3:2: error: ",
        ),
        (("weight_slow", "weight_quick", "fine"), "method 'weight_slow': .*bash failed: x.cpp:7:9: error: slow one$"),
        (("fine", "weight_killed"), r"method 'weight_killed': .*was killed \(SIGKILL\): .* too little memory$"),
    ],
)
def test_the_first_graph_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, names: tuple[str, ...], complaint: str
) -> None:
    compile_wrappers_by(monkeypatch, FAILING)
    with pytest.raises(ExportError, match=complaint) as raised, Libraries("cpu", Progress()) as libraries:
        libraries.generate(graphs(*names))
        libraries.codes()
    assert "\n" not in str(raised.value)
    assert list(temporary.glob("ostinato-*")) == []


def children() -> set[int]:
    """Return the running descendants of this process."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    found = {os.getpid()}
    while True:
        more = {
            int(pid) for pid, parent, state, name in rows if int(parent) in found and "Z" not in state and name != "ps"
        }
        if more <= found:
            return found - {os.getpid()}
        found |= more


def test_interrupted(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Ctrl-C while compilers run leaves nothing, although the compilers are in process groups of their own."""
    compile_wrappers_by(monkeypatch, "sleep 300")
    before, threads = children(), threading.active_count()

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(temporary.glob("ostinato-*/*/wrapper.cpp")):
            time.sleep(0.1)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt), Libraries("cpu", Progress()) as libraries:
            libraries.generate(graphs("one", "two"))
            libraries.codes()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert children() <= before
    assert list(temporary.glob("ostinato-*")) == []
    interrupter.join()
    assert threading.active_count() == threads


def test_a_compiler_is_ended_with_its_parts(tmp_path: Path) -> None:
    """The child of a compiler driver is ended too."""
    before, stopped = children(), []

    def work(compilers: Compilers) -> None:
        try:
            compilers.run(["bash", "-c", "sleep 300; true"], tmp_path)
        except CompilersStopped as error:
            stopped.append(error)

    with Compilers() as compilers:
        compilers.start(work, compilers)
        while not children() - before:
            time.sleep(0.05)
    assert len(stopped) == 1
    assert children() <= before
    with pytest.raises(CompilersStopped):
        compilers.run(["true"], tmp_path)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (
            "echo a.cpp:1: warning: w; echo a.cpp:2: error: no such name; echo note; exit 1",
            "a.cpp:2: error: no such name",
        ),
        ("echo ld: cannot find -lx; exit 1", "ld: cannot find -lx"),
        ("exit 3", "exit status 3"),
        ("kill -KILL $$", r"killed \(SIGKILL\)"),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1", r"killed \(SIGKILL\)"),
    ],
)
def test_complaint(script: str, complaint: str, tmp_path: Path) -> None:
    with Compilers() as compilers, pytest.raises(CompilerError, match=complaint):
        compilers.run(["bash", "-c", script], tmp_path)
