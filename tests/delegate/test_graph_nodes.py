"""What a captured graph consists of, and which of its kernels start before the one ahead has ended.

Without a GPU the edges are those of a driver made for the test: no real one can be had there.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import graph_nodes, graph_recorders, load_program
from ostinato.delegate.artifact import EARLY_KERNEL, REQUIRED_AHEAD
from ostinato.delegate.graph_nodes import DriverError, EarlyStarts, GraphNodes, look_into, start_early
from ostinato.delegate.graph_recorders import CudaGraphRecorder, side_stream
from ostinato.delegate.state_machine import StateMachine

from .helpers import GRAPH

FULL, PROGRAMMATIC = (0, 0, 0), (1, 1, 0)

# --- over a driver made for the test


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801


class NodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1


class EdgeData:
    """`CUgraphEdgeData`."""

    def __init__(self) -> None:
        self.type = self.from_port = self.to_port = 0

    def __repr__(self) -> str:
        return f"({self.type}, {self.from_port}, {self.to_port})"


class Driver:
    """As much of `cuda.bindings.driver` as is used, over one graph.

    Args:
        nodes: their kernels' names; "" for a copy, None for a kernel that does not tell its name.
        edges: (node ahead, node after), counted from 1.
        suffix: "_v2" for the functions of cuda-bindings 12.
        refuses: the function that refuses its second call.
    """

    CUresult = Result
    CUgraphEdgeData = EdgeData
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)

    def __init__(
        self, nodes: Sequence[str | None], edges: Sequence[tuple[int, int]], suffix: str = "", refuses: str = ""
    ) -> None:
        self._nodes = nodes
        self.edges = {edge: EdgeData() for edge in edges}
        self._refuses = refuses
        self._refused_calls = 0
        for name in ("GetEdges", "AddDependencies", "RemoveDependencies"):
            setattr(self, f"cuGraph{name}{suffix}", getattr(self, f"_{name}"))
            if suffix:
                # Those without the suffix take no data of edges.
                setattr(self, f"cuGraph{name}", None)

    def CUgraph(self, graph: int) -> int:
        return graph

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, list(range(1, len(self._nodes) + 1))[:count], len(self._nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, NodeType(self._nodes[node - 1] == "")

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        # Every other kernel belongs to a library.
        func, kern = (0, node) if node % 2 else (node, 0)
        return Result.CUDA_SUCCESS, SimpleNamespace(func=func, kern=kern)

    def cuFuncGetName(self, node: int) -> tuple[Any, ...]:
        name = self._nodes[node - 1] if node else None
        return (Result.CUDA_SUCCESS, name.encode()) if name else (Result.CUDA_ERROR_INVALID_VALUE, None)

    cuKernelGetName = cuFuncGetName

    def _GetEdges(self, graph: int, count: int) -> tuple[Any, ...]:
        edges = list(self.edges.items())[:count]
        before, after = [edge[0] for edge, _ in edges], [edge[1] for edge, _ in edges]
        return Result.CUDA_SUCCESS, before, after, [data for _, data in edges], len(self.edges)

    def _AddDependencies(self, graph: int, *rest: Any) -> tuple[Any, ...]:
        (before,), (after,), (data,), _ = rest
        if self._is_refused("cuGraphAddDependencies") or (before, after) in self.edges:
            return (Result.CUDA_ERROR_NOT_SUPPORTED,)
        self.edges[before, after] = data
        return (Result.CUDA_SUCCESS,)

    def _RemoveDependencies(self, graph: int, *rest: Any) -> tuple[Any, ...]:
        (before,), (after,), (data,), _ = rest
        if self._is_refused("cuGraphRemoveDependencies") or self.edges.get((before, after)) is not data:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        del self.edges[before, after]
        return (Result.CUDA_SUCCESS,)

    def _is_refused(self, name: str) -> bool:
        self._refused_calls += name == self._refuses
        return name == self._refuses and self._refused_calls == 2

    def types(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        return {edge: (data.type, data.from_port, data.to_port) for edge, data in sorted(self.edges.items())}


def use(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    """Have `from cuda.bindings import driver` give `driver`; None: the package is missing."""
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings if driver else None)  # type: ignore[arg-type]


def line(count: int) -> list[tuple[int, int]]:
    return [(node, node + 1) for node in range(1, count)]


@pytest.mark.parametrize("suffix", ["", "_v2"])
def test_edges_between_marked_kernels_change(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    names = [
        "",
        "a_early_0",
        "b_early_1",
        "c_early",
        "triton_poi_fused_add_0",
        "d_early",
        "e_early_0_1",
        None,
        "f_early",
        "",
    ]
    driver = Driver(names, line(len(names)), suffix)
    use(monkeypatch, driver)
    assert look_into(7) == GraphNodes({"kernel": 8, "memcpy": 2})
    assert look_into(7).kernels == 8
    assert set(driver.types().values()) == {FULL}
    assert start_early(7) == EarlyStarts(3)
    assert {edge for edge, kind in driver.types().items() if kind == PROGRAMMATIC} == {(2, 3), (3, 4), (6, 7)}
    assert set(driver.types().values()) == {FULL, PROGRAMMATIC}
    assert list(driver.types()) == line(len(names))
    # What has been changed is left as it is.
    assert start_early(7) == EarlyStarts(0)


def test_a_kernel_with_two_ways_into_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(["a_early", "b_early", "c_early", "d_early"], [(1, 2), (1, 3), (2, 4), (3, 4)])
    use(monkeypatch, driver)
    assert start_early(7) == EarlyStarts(2)
    assert driver.types() == {(1, 2): PROGRAMMATIC, (1, 3): PROGRAMMATIC, (2, 4): FULL, (3, 4): FULL}


GATE_UP, DOWN = "experts_gate_up_early_3", "experts_down_early_4"


@pytest.mark.parametrize("ahead", ["a_early", "experts_gate_up", "triton_poi_fused_add_0", None, ""])
def test_a_kernel_that_must_stand_behind_another_one(monkeypatch: pytest.MonkeyPatch, ahead: str | None) -> None:
    """Rule R5: `experts_down_early` keeps its full edge behind anything but `experts_gate_up_early`, and that is said."""
    driver = Driver(["a_early", GATE_UP, DOWN, "b_early", ahead, DOWN, "c_early"], line(7))
    use(monkeypatch, driver)
    early = start_early(7)
    changed = {edge for edge, kind in driver.types().items() if kind == PROGRAMMATIC}
    expected = {(1, 2), (2, 3), (3, 4), (6, 7)} | ({(4, 5)} if ahead == "a_early" else set())
    assert changed == expected
    assert early.count == len(expected)
    stands_behind = ahead or "a node without a name"
    assert (
        early.note == f"{DOWN} stands behind {stands_behind}, not behind experts_gate_up_early: it does not start early"
    )


def test_all_kernels_in_the_wrong_place_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([GATE_UP, "a_early", DOWN, GATE_UP, "b_early", DOWN], line(6))
    use(monkeypatch, driver)
    early = start_early(7)
    assert driver.types()[2, 3] == driver.types()[5, 6] == FULL
    assert early.count == 3
    assert early.note == (
        f"{DOWN} stands behind a_early, not behind experts_gate_up_early (and 1 more): it does not start early"
    )
    # Another kernel may stand behind the one that is required.
    driver = Driver([GATE_UP, "a_early"], line(2))
    use(monkeypatch, driver)
    assert start_early(7) == EarlyStarts(1)


def test_a_benchmark_of_one_kernel_does_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is a chain of the same kernel, which is to start early as it does behind the right one."""
    use(monkeypatch, Driver([DOWN, DOWN, DOWN], line(3)))
    assert start_early(7).count == 0
    assert start_early(7, required_ahead={}) == EarlyStarts(2)


def test_every_required_kernel_is_a_marked_one() -> None:
    """The edges of others never change, so that nothing would be checked for them."""
    assert all(EARLY_KERNEL in name for pair in REQUIRED_AHEAD.items() for name in pair)


def test_graphs_without_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Driver([], []))
    assert (look_into(7), look_into(7).kernels, start_early(7)) == (GraphNodes({}), 0, EarlyStarts(0))
    use(monkeypatch, Driver(["a_early"], []))
    assert (look_into(7).kernels, start_early(7)) == (1, EarlyStarts(0))


@pytest.mark.parametrize("function", ["cuGraphRemoveDependencies", "cuGraphAddDependencies"])
def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    use(monkeypatch, Driver(["a_early", "b_early", "c_early"], line(3), refuses=function))
    with pytest.raises(DriverError, match=f"{function}: CUDA_ERROR_"):
        start_early(7)


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    nodes = look_into(7)
    assert (nodes.by_type, nodes.kernels, nodes.early) == (None, None, 0)
    assert "cuda-bindings" in (nodes.note or "")
    # A package of another make is no reason to stop either.
    use(monkeypatch, SimpleNamespace())
    assert "CUgraph" in (look_into(7).note or "")


# --- on a GPU


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    # Only here: a kernel that Triton meets before TRITON_INTERPRET is set could not be interpreted by other tests.
    from . import early_kernels

    return early_kernels


def draw(kernels: ModuleType) -> Tensor:
    return torch.randint(-(2**31), 2**31, (kernels.SIZE,), dtype=torch.int32, device="cuda")


@pytest.fixture
def weight(kernels: ModuleType) -> Tensor:
    """Odd numbers: a few turns by an even one forget what they began with."""
    return draw(kernels) | 1


def captured(
    run: Callable[[Sequence[Tensor]], list[Tensor]], inputs: Sequence[Tensor], early_kernels: bool = True
) -> StateMachine:
    """After one call without a graph and the one that captures; the next replays."""
    device = torch.device("cuda", torch.cuda.current_device())
    names = [f"input_{number}" for number in range(len(inputs))]
    machine = StateMachine(run, CudaGraphRecorder(side_stream(device), early_kernels), device, names, warmup_steps=1)
    for _ in range(2):
        machine(inputs)
    assert machine.stats.phase == "replay", machine.stats.fallback_reason
    return machine


def edges_of(machine: StateMachine) -> list[tuple[str, tuple[int, int, int]]]:
    """Along the chain, each node but the first: its kernel's name or its type, and (type, ports) of the edge into it."""
    from cuda.bindings import driver

    graph: Any = machine._graph
    edges = graph_nodes._edges(driver, driver.CUgraph(graph._graph.raw_cuda_graph()))
    following = {int(before): (after, data) for before, after, data in edges}
    assert len(following) == len(edges), "the graph is not a chain"
    (node,) = set(following) - {int(after) for _, after, _ in edges}
    found = []
    while node in following:
        after, data = following[node]
        node = int(after)
        error, kind = driver.cuGraphNodeGetType(after)
        assert error == driver.CUresult.CUDA_SUCCESS
        name = kind.name
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            error, params = driver.cuGraphKernelNodeGetParams(after)
            assert error == driver.CUresult.CUDA_SUCCESS
            name = driver.cuFuncGetName(params.func)[1].decode()
        found.append((name, (data.type, data.from_port, data.to_port)))
    return found


def replayed(machine: StateMachine, x: Tensor) -> Tensor:
    """What a replay gives, over an output that held something else."""
    graph: Any = machine._graph
    graph._outputs[0].fill_(-1)
    return machine([x])[0].clone()


@pytest.mark.gpu
def test_marked_kernels_start_early(kernels: ModuleType, weight: Tensor) -> None:
    early, plain = kernels.turn_early, kernels.turn_plainly
    chain = [early, early, plain, early, early, plain, plain, early]
    machine = captured(lambda inputs: [kernels.run_chain(chain, inputs[0], weight)], [draw(kernels)])
    opened = PROGRAMMATIC if kernels.starts_early() else FULL
    expected = [
        (kernel.__name__, opened if early is kernel is ahead else FULL) for ahead, kernel in itertools.pairwise(chain)
    ]
    assert edges_of(machine) == expected
    stats = machine.stats
    assert (stats.graph_kernels, stats.early_kernels) == (8, 2 if kernels.starts_early() else 0)
    assert (stats.graph_nodes, stats.graph_note) == ({"kernel": 8}, None)


@pytest.mark.gpu
def test_results_are_those_of_torch_and_the_same_each_time(kernels: ModuleType, weight: Tensor) -> None:
    chain = [kernels.turn_plainly if number % 7 == 3 else kernels.turn_early for number in range(40)]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [kernels.run_chain(chain, inputs[0], weight)]

    machine, full = captured(run, [draw(kernels)]), captured(run, [draw(kernels)], early_kernels=False)
    assert {edge for _, edge in edges_of(full)} == {FULL}
    assert (full.stats.graph_kernels, full.stats.early_kernels, full.stats.graph_note) == (40, 0, None)
    for _ in range(5):
        x = draw(kernels)
        expected = x
        for _ in chain:
            expected = kernels.turned(expected, weight)
        assert torch.equal(run([x])[0], expected)
        assert torch.equal(replayed(full, x), expected)
        for _ in range(10):
            assert torch.equal(replayed(machine, x), expected)


@pytest.mark.gpu
def test_a_kernel_in_the_wrong_place_keeps_its_full_edge(
    kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule R5 on a real graph: with another name required ahead of it, and with its own."""
    x = draw(kernels)
    expected = x
    for _ in range(3):
        expected = kernels.turned(expected, weight)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [kernels.run_chain([kernels.turn_early] * 3, inputs[0], weight)]

    def require(ahead: str) -> None:
        monkeypatch.setattr(graph_recorders, "start_early", partial(start_early, required_ahead={"turn_early": ahead}))

    require("turn_late_early")
    machine = captured(run, [x])
    assert edges_of(machine) == [("turn_early", FULL)] * 2
    note = "turn_early stands behind turn_early, not behind turn_late_early (and 1 more): it does not start early"
    early = kernels.starts_early()
    assert (machine.stats.early_kernels, machine.stats.graph_note) == (0, note if early else None)
    assert torch.equal(replayed(machine, x), expected)
    require("turn_early")
    machine = captured(run, [x])
    assert edges_of(machine) == [("turn_early", PROGRAMMATIC if early else FULL)] * 2
    assert (machine.stats.early_kernels, machine.stats.graph_note) == (2 if early else 0, None)
    assert torch.equal(replayed(machine, x), expected)


@pytest.mark.gpu
def test_a_copy_between_kernels_keeps_its_full_edges(kernels: ModuleType, weight: Tensor) -> None:
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        y = kernels.run_chain([kernels.turn_early], inputs[0], weight)
        return [kernels.run_chain([kernels.turn_early], torch.empty_like(y).copy_(y), weight)]

    x = draw(kernels)
    machine = captured(run, [x])
    assert edges_of(machine) == [("CU_GRAPH_NODE_TYPE_MEMCPY", FULL), ("turn_early", FULL)]
    assert (machine.stats.graph_nodes, machine.stats.early_kernels) == ({"kernel": 2, "memcpy": 1}, 0)
    assert torch.equal(replayed(machine, x), kernels.turned(kernels.turned(x, weight), weight))


@pytest.mark.gpu
@pytest.mark.parametrize("function", ["cuGraphRemoveDependencies", "cuGraphAddDependencies"])
def test_a_refused_change_leaves_a_whole_graph(
    kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    if not kernels.starts_early():
        pytest.skip("this GPU starts no kernel early")
    call = graph_nodes._call
    calls = []

    def refuse_the_second(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
        calls.append(name)
        if name == function and calls.count(name) == 2:
            raise DriverError(f"{name}: injected")
        return call(driver, name, *arguments)

    monkeypatch.setattr(graph_nodes, "_call", refuse_the_second)
    x = draw(kernels)
    machine = captured(lambda inputs: [kernels.run_chain([kernels.turn_early] * 5, inputs[0], weight)], [x])
    assert calls.count(function) == 2
    assert edges_of(machine) == [("turn_early", FULL)] * 4
    stats = machine.stats
    assert (stats.captures, stats.fallbacks, stats.graph_kernels, stats.early_kernels) == (1, 0, 5, 0)
    assert stats.graph_note == f"DriverError: {function}: injected"
    expected = x
    for _ in range(5):
        expected = kernels.turned(expected, weight)
    assert torch.equal(replayed(machine, x), expected)


@pytest.mark.gpu
def test_a_graph_without_cuda_bindings(kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    x = draw(kernels)
    machine = captured(lambda inputs: [kernels.run_chain([kernels.turn_early], inputs[0], weight)], [x])
    assert (machine.stats.graph_kernels, machine.stats.early_kernels, machine.stats.captures) == (None, None, 1)
    assert "cuda-bindings" in (machine.stats.graph_note or "")
    assert torch.equal(replayed(machine, x), kernels.turned(x, weight))


@pytest.mark.gpu
def test_a_step_without_inputs(kernels: ModuleType, weight: Tensor) -> None:
    """Its state is all that it reads; each call moves it once, whatever the call does."""
    first = draw(kernels)
    state = first.clone()

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        assert not inputs
        state.copy_(kernels.run_chain([kernels.turn_early] * 2, state, weight))
        return [state + 0]

    machine = captured(run, [])
    expected = first
    for _ in range(2 * 2):
        expected = kernels.turned(expected, weight)
    assert torch.equal(state, expected)
    for _ in range(5):
        expected = kernels.turned(kernels.turned(expected, weight), weight)
        assert torch.equal(machine([])[0], expected)


@pytest.mark.gpu
def test_compiled_code_keeps_the_mark(kernels: ModuleType, weight: Tensor, tmp_path: Path) -> None:
    """Through an artifact: AOTInductor's own kernels keep full edges, a marked one behind a marked one starts early."""
    from ostinato.export import export_program

    module, example = kernels.Turning(weight.cpu()), torch.zeros(kernels.SIZE, dtype=torch.int32)
    export_program({"decode": (module, (example,), None)}, tmp_path / "turning", device="cuda")
    x = draw(kernels)
    expected = x + 3
    for _ in range(3):
        expected = kernels.turned(expected, weight)
    options: dict[str, bool | int | str] = {**GRAPH, "cuda_graph_warmup_steps": 1}
    with load_program(tmp_path / "turning") as program:
        method = program.load_method("decode", options)
        full = program.load_method("decode", {**options, "cuda_graph_early_kernels": False})
        for _ in range(6):
            for one in (method, full):
                assert torch.equal(one.execute((x,))[0].cuda(), expected)
        marked = [edge for name, edge in edges_of(method._state_machine) if "turn_early" in name]
        others = [edge for name, edge in edges_of(method._state_machine) if "turn_early" not in name]
        assert marked == [FULL, PROGRAMMATIC if kernels.starts_early() else FULL]
        assert set(others) == {FULL}
        assert method.stats.early_kernels == (1 if kernels.starts_early() else 0)
        assert (full.stats.early_kernels, full.stats.graph_kernels) == (0, method.stats.graph_kernels)
        assert (method.stats.graph_kernels or 0) >= 4
