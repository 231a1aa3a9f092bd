"""Programs and methods that are closed at any moment; without a GPU no work is ever under way."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import ClosedError, OstinatoError, Program, load_program
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.graphs.pool import GraphPool

from ..conftest import ROOT
from . import closings
from .chain import Layer
from .closings import Closings, answering, methods
from .pair import GRAPH, Pair, inputs_of, with_graphs

Test = Callable[..., None]
ALLOCATORS = ("backend:native", "expandable_segments:True", "backend:cudaMallocAsync")


def on_gpu(test: Test) -> Test:
    """Run a test on a GPU only: elsewhere no work is ever under way."""
    return pytest.mark.gpu(pytest.mark.parametrize("device", ["cuda"], indirect=True)(test))


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path], device: torch.device) -> Path:
    from ostinato.export import export_program

    def build(path: Path) -> None:
        export_program(methods(), path, device=device.type)

    text = inspect.getsource(Layer) + inspect.getsource(closings.Scale) + inspect.getsource(methods)
    return exported(f"closings-{device.type}", build, text)


def storages(program: Program) -> list[StorageWeakRef]:
    """The memory that the program's methods are bound to."""
    return [StorageWeakRef(t.untyped_storage()) for method in program._methods for t in method._bound.values()]


def all_freed(memory: list[StorageWeakRef]) -> bool:
    gc.collect()
    return bool(memory) and all(storage.expired() for storage in memory)


def test_a_program_that_nobody_closes(artifact: Path) -> None:
    """torch's containers would keep the memory of all tensors that were bound to them."""
    program = load_program(artifact)
    method = program.load_method("step", GRAPH)
    for index in range(3):
        method.execute(inputs_of(3, index))
    memory = storages(program)
    del program
    gc.collect()
    method.execute(inputs_of(3, 4))
    del method
    assert all_freed(memory)


@pytest.mark.parametrize("pre_dispatch", [True, False], ids=["as exported", "as compiled"])
def test_dropped_in_the_middle_of_a_trace(artifact: Path, pre_dispatch: bool) -> None:
    """As when an export's process collects an older program: nothing of it may come into what is traced."""
    program = load_program(artifact)
    program.load_method("step")
    memory, held = storages(program), [program]
    del program

    def traced(x: Tensor) -> Tensor:
        held.clear()
        gc.collect()
        return x + 1

    graph = make_fx(traced, tracing_mode="fake", pre_dispatch=pre_dispatch)(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
    assert all_freed(memory)


@pytest.mark.parametrize("part", ["code", "graph pool"])
def test_an_error_does_not_keep_the_rest(artifact: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_program(artifact)
    opened = [program.load_method(name, with_graphs(name)) for name in ("step", "host", "streamed")]
    for method in opened:
        method.execute(inputs_of(3, 1))
    memory = storages(program)
    close = MethodCode.close

    def fails(code: MethodCode) -> None:
        close(code)
        if code.record.method == "host":
            raise ZeroDivisionError

    if part == "code":
        monkeypatch.setattr(MethodCode, "close", fails)
    elif program.device.type == "cuda":
        monkeypatch.setattr(GraphPool, "close", lambda pool: 1 // 0)
    else:
        pytest.skip("graphs of the host have no pool")
    with pytest.raises(ZeroDivisionError):
        program.close()
    assert program.closed
    assert all_freed(memory)
    for method in opened:
        with pytest.raises(ClosedError):
            method.execute(inputs_of(3, 1))
    program.close()


def test_random_closings(artifact: Path) -> None:
    """Some closings in this process; `test_random_closings_with_each_allocator` has many on a GPU."""
    made = Closings(artifact, Random(1))
    with answering(artifact, seed=2):
        made.run(60)
    assert len(made.ways) == 5


@on_gpu
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_random_closings_with_each_allocator(artifact: Path, allocator: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_ALLOC_CONF"}
    # With cudaMallocAsync torch warns of memory that one thread allocates or frees while another captures, most often by
    # Python's warnings.
    warns = "Async" in allocator
    quiet = ["-W", "ignore::UserWarning"] if warns else []
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", *quiet, "-m", "tests.delegate.closings", str(artifact), "1000"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTORCH_CUDA_ALLOC_CONF": allocator},
    )
    freed = (
        "uncaptured free of a captured allocation|function freeAsync|on an uncaptured allocation during graph capture"
    )
    complaints = "\n".join(line for line in done.stderr.splitlines() if not (warns and re.search(freed, line)))
    assert not done.returncode and not complaints, complaints
    assert done.stdout.split()[0] == ("cudaMallocAsync" if warns else "native")


@on_gpu
@pytest.mark.parametrize("how", ["program", "method", "nobody"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("name", ["step", "host", "streamed"])
@pytest.mark.parametrize("where", ["own stream", "default stream"])
def test_work_under_way_is_waited_for(artifact: Path, where: str, name: str, graph: bool, how: str) -> None:
    stream = torch.cuda.Stream() if where == "own stream" else torch.cuda.default_stream()
    program = load_program(artifact)
    options: dict[str, bool | int | str] = with_graphs(name) if graph else {}
    method = program.load_method(name, options | {"skip_copy_output_to_cpu_for_method": name})
    with torch.cuda.stream(stream):
        for index in range(3):
            method.execute(inputs_of(3, index))
        torch.cuda._sleep(300_000_000)
        # A step with a layer on the host waits for what is ahead of that layer.
        method.execute(inputs_of(3, 4))
        torch.cuda._sleep(300_000_000)
    assert not stream.query()
    if how == "nobody":
        del program, method
        gc.collect()
    else:
        (program if how == "program" else method).close()
    assert stream.query()


@contextmanager
def waits_in_capture(name: str, during: Callable[[], None]) -> Iterator[None]:
    """Call `during` in the middle of each capture of a method."""
    run = MethodCode.run_segment

    def run_segment(code: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        if code.record.method == name and index == 1 and torch.cuda.is_current_stream_capturing():
            during()
        run(code, index, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MethodCode, "run_segment", run_segment)
        yield


def used(path: Path) -> Program:
    """A program with a graph in replay."""
    program = load_program(path)
    method = program.load_method("host", with_graphs("host"))
    for index in range(3):
        method.execute(inputs_of(3, index))
    return program


@on_gpu
def test_a_capture_of_another_thread_goes_on(artifact: Path) -> None:
    program, pair = used(artifact), Pair(artifact)
    pair.step()
    closes = threading.Thread(target=program.close)

    def during() -> None:
        # It waits for this capture.
        closes.start()
        closes.join(0.5)

    with waits_in_capture("step", during):
        pair.step()
    closes.join()
    assert program.closed
    for _ in range(3):
        pair.step()
    assert (pair.method.stats.fallbacks, pair.method.stats.next_phase) == (0, "replay")
    pair.close()


@on_gpu
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_within_a_capture(artifact: Path, how: str) -> None:
    """Closing is refused there. A dropped program waits for the next that is loaded or closed."""
    programs, pair = [used(artifact)], Pair(artifact)
    memory = storages(programs[0])
    pair.step()

    def during() -> None:
        if how == "dropped":
            programs.clear()
            gc.collect()
            return
        for close in (programs[0].close, *[method.close for method in programs[0]._methods]):
            with pytest.raises(OstinatoError, match="nothing can be closed while this thread captures a CUDA graph"):
                close()
        assert not programs[0].closed

    with waits_in_capture("step", during):
        pair.step()
    assert not all_freed(memory)
    for _ in range(3):
        pair.step()
    assert (pair.method.stats.fallbacks, pair.method.stats.next_phase) == (0, "replay")
    pair.close()
    if programs:
        programs[0].close()
    assert all_freed(memory)
