"""The nodes of a captured graph, and which of its kernels start before the kernel ahead has ended.

The edges come from a fake driver, so the tests need no GPU; `test_nodes_gpu.py` has real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.delegate.artifact.names import EARLY_KERNEL, REQUIRED_AHEAD, ROWS_KERNEL
from ostinato.delegate.cuda_driver import DriverError
from ostinato.delegate.graphs.nodes import (
    SHARED_MEMORY_OF_ROWS,
    EarlyStarts,
    GraphNodes,
    inspect_graph,
    start_early,
)

from ...conftest import ROOT
from ..helpers import FULL, PROGRAMMATIC, use_driver


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801


class NodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1


class EdgeData:
    """Stands in for `CUgraphEdgeData`."""

    def __init__(self) -> None:
        self.type = self.from_port = self.to_port = 0

    def __repr__(self) -> str:
        return f"({self.type}, {self.from_port}, {self.to_port})"


class Driver:
    """A fake `cuda.bindings.driver` with the functions that we use, over one graph.

    Args:
        nodes: the names of the nodes' kernels; "" for a copy, None for a kernel whose name cannot be read.
        edges: (node ahead, node after), counted from 1.
        suffix: "_v2" for the functions of cuda-bindings 12.
        refuses: name of the function that fails in its second call.
        rows: the last dimension of all kernels' grids.
    """

    CUresult = Result
    CUgraphEdgeData = EdgeData
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=14)
    CUkernelNodeAttrValue = SimpleNamespace

    def __init__(
        self,
        nodes: Sequence[str | None],
        edges: Sequence[tuple[int, int]],
        suffix: str = "",
        refuses: str = "",
        rows: int = 1,
    ) -> None:
        self._nodes = nodes
        self._rows = rows
        self.edges = {edge: EdgeData() for edge in edges}
        # Node -> percentage of the shared memory that it prefers.
        self.divided: dict[int, int] = {}
        self._refuses = refuses
        self._refused_calls = 0
        for name in ("GetEdges", "AddDependencies", "RemoveDependencies"):
            setattr(self, f"cuGraph{name}{suffix}", getattr(self, f"_{name}"))
            if suffix:
                # Functions without the suffix take no edge data.
                setattr(self, f"cuGraph{name}", None)

    def CUgraph(self, graph: int) -> int:
        return graph

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, list(range(1, len(self._nodes) + 1))[:count], len(self._nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, NodeType(self._nodes[node - 1] == "")

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        # Every second kernel belongs to a library, and has `kern` instead of `func`.
        func, kern = (0, node) if node % 2 else (node, 0)
        return Result.CUDA_SUCCESS, SimpleNamespace(func=func, kern=kern, gridDimZ=self._rows)

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

    def cuGraphKernelNodeSetAttribute(self, node: int, kind: int, value: Any) -> tuple[Any, ...]:
        if self._is_refused("cuGraphKernelNodeSetAttribute") or kind != 14:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self.divided[node] = value.sharedMemCarveout
        return (Result.CUDA_SUCCESS,)

    def _is_refused(self, name: str) -> bool:
        self._refused_calls += name == self._refuses
        return name == self._refuses and self._refused_calls == 2

    def types(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        return {edge: (data.type, data.from_port, data.to_port) for edge, data in sorted(self.edges.items())}


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
    use_driver(monkeypatch, driver)
    assert inspect_graph(7) == GraphNodes({"kernel": 8, "memcpy": 2})
    assert inspect_graph(7).kernels == 8
    assert set(driver.types().values()) == {FULL}
    assert start_early(7) == EarlyStarts(3)
    assert {edge for edge, kind in driver.types().items() if kind == PROGRAMMATIC} == {(2, 3), (3, 4), (6, 7)}
    assert set(driver.types().values()) == {FULL, PROGRAMMATIC}
    assert list(driver.types()) == line(len(names))
    # Edges that are changed already stay as they are.
    assert start_early(7) == EarlyStarts(0)


def test_a_kernel_with_two_ways_into_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(["a_early", "b_early", "c_early", "d_early"], [(1, 2), (1, 3), (2, 4), (3, 4)])
    use_driver(monkeypatch, driver)
    assert start_early(7) == EarlyStarts(2)
    assert driver.types() == {(1, 2): PROGRAMMATIC, (1, 3): PROGRAMMATIC, (2, 4): FULL, (3, 4): FULL}


GATE_UP, DOWN = "experts_gate_up_early_3", "experts_down_early_4"


@pytest.mark.parametrize("ahead", ["a_early", "experts_gate_up", "triton_poi_fused_add_0", None, ""])
def test_a_kernel_that_must_stand_behind_another_one(monkeypatch: pytest.MonkeyPatch, ahead: str | None) -> None:
    """Rule R5: `experts_down_early` keeps its full edge behind any kernel but `experts_gate_up_early`, and a note says so."""
    driver = Driver(["a_early", GATE_UP, DOWN, "b_early", ahead, DOWN, "c_early"], line(7))
    use_driver(monkeypatch, driver)
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
    use_driver(monkeypatch, driver)
    early = start_early(7)
    assert driver.types()[2, 3] == driver.types()[5, 6] == FULL
    assert early.count == 3
    assert early.note == (
        f"{DOWN} stands behind a_early, not behind experts_gate_up_early (and 1 more): it does not start early"
    )
    # Any kernel may stand behind the required one.
    driver = Driver([GATE_UP, "a_early"], line(2))
    use_driver(monkeypatch, driver)
    assert start_early(7) == EarlyStarts(1)


def test_a_benchmark_of_one_kernel_does_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is a chain of one kernel, which must start early here as it does behind the required kernel."""
    use_driver(monkeypatch, Driver([DOWN, DOWN, DOWN], line(3)))
    assert start_early(7).count == 0
    assert start_early(7, required_ahead={}) == EarlyStarts(2)


def test_every_required_kernel_is_a_marked_one() -> None:
    """The edges of unmarked kernels never change, so the rule would check nothing for them."""
    assert all(EARLY_KERNEL in name for pair in REQUIRED_AHEAD.items() for name in pair)
    assert EARLY_KERNEL in ROWS_KERNEL


def test_graphs_without_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, Driver([], []))
    assert (inspect_graph(7), inspect_graph(7).kernels, start_early(7)) == (GraphNodes({}), 0, EarlyStarts(0))
    use_driver(monkeypatch, Driver(["a_early"], []))
    assert (inspect_graph(7).kernels, start_early(7)) == (1, EarlyStarts(0))


@pytest.mark.parametrize(("rows", "gate_up"), [(1, 0), (4, 3)])
def test_each_marked_kernel_has_a_division_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, rows: int, gate_up: int
) -> None:
    names = [
        "sum_rows_early",
        "norm_linear_early",
        "",
        "delta_rows_early_2",
        "triton_poi_rows_0",
        None,
        GATE_UP,
        "a_early",
    ]
    driver = Driver(names, line(len(names)), rows=rows)
    use_driver(monkeypatch, driver)
    assert start_early(7) == EarlyStarts(2)
    assert driver.divided == {1: 60, 2: 28, 4: 43, 7: gate_up}


def test_divisions_are_those_of_marked_kernels() -> None:
    """A name that no kernel has would do nothing."""
    sources = ROOT.glob("export/kernels/*/*_triton.py")
    defined = "\n".join(path.read_text() for path in sources)
    assert [name for name in SHARED_MEMORY_OF_ROWS if f"def {name}{EARLY_KERNEL}(" not in defined] == []


@pytest.mark.parametrize(
    "function", ["cuGraphRemoveDependencies", "cuGraphAddDependencies", "cuGraphKernelNodeSetAttribute"]
)
def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    use_driver(monkeypatch, Driver(["a_rows_early", "b_rows_early", "c_rows_early"], line(3), refuses=function))
    with pytest.raises(DriverError, match=f"{function}: CUDA_ERROR_"):
        start_early(7)


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, None)
    nodes = inspect_graph(7)
    assert (nodes.by_type, nodes.kernels, nodes.early) == (None, None, 0)
    assert "cuda-bindings" in (nodes.note or "")
    # A package without the driver's functions is no error either.
    use_driver(monkeypatch, SimpleNamespace())
    assert "CUgraph" in (inspect_graph(7).note or "")
