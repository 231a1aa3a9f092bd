"""What a captured CUDA graph consists of, and how its kernels come to start before the one ahead of them has ended.

A capture joins kernels by full edges: the next one starts when the last program of the one ahead has ended and its writes can
be read. Over a programmatic edge it starts as soon as there is room for it, and waits inside for the rest (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization"). AOTInductor launches plainly, so the edges are
changed here, after the capture.

Why that is safe. Only an edge between two kernels with `artifact.EARLY_KERNEL` in their names is changed, and only where it
is the one way into the latter. Every program of such a kernel waits until the kernel ahead has ended and its writes can be
read (export/kernels/early_triton.py). So it cannot end before the kernel ahead has, and neither can any kernel after it: one
with the mark waits for it inside, any other has kept its full edge. By induction along the chain that a stream's capture is,
whoever reads or writes after its wait comes after all that stands ahead of it, and the graph has ended when its last node
has. Before its wait a marked kernel reads only what no marked kernel of the step writes: the first marked kernel after one
without the mark has kept its full edge, so what unmarked ones wrote ahead of it (the position of the step, say) is there. Or
it stands directly behind a kernel that starts the next one after its own wait, and reads what was written ahead of that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .artifact import EARLY_KERNEL
from .errors import OstinatoError

# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC of cuda.h: the edge opens when all programs have said so, or have ended.
_WHEN_ALL_PROGRAMS_SAY_SO = 1
_TYPE_PREFIX = "CU_GRAPH_NODE_TYPE_"


class DriverError(OstinatoError):
    """The CUDA driver refused a call on a captured graph. The runtime then captures again and leaves the graph alone."""


@dataclass(frozen=True)
class GraphNodes:
    """What is known of a captured graph.

    Attributes:
        by_type: how many nodes of each type ("kernel", "memcpy", "memset", ...) it has; None if it could not be looked into.
        early: how many of its kernels start before the one ahead has ended.
        note: why it could not be looked into or not be changed, None if nothing went wrong.
    """

    by_type: dict[str, int] | None = None
    early: int = 0
    note: str | None = None

    @property
    def kernels(self) -> int | None:
        """Kernels that one launch runs; None if that is not known."""
        return None if self.by_type is None else self.by_type.get("kernel", 0)


def look_into(graph: int) -> GraphNodes:
    """Count the nodes of a graph, or say in `note` why that cannot be done.

    Args:
        graph: the `cudaGraph_t` as a number, what `torch.cuda.CUDAGraph.raw_cuda_graph` gives.
    """
    try:
        driver = _driver()
        count = _call(driver, "cuGraphGetNodes", driver.CUgraph(graph), 0)[-1]
        nodes = _call(driver, "cuGraphGetNodes", driver.CUgraph(graph), count)[0] if count else []
        return GraphNodes(dict(Counter(_node_type(driver, node) for node in nodes).most_common()))
    except Exception as error:  # Whatever ails the package, the step itself is well.
        return GraphNodes(note=first_line(error))


def start_early(graph: int) -> int:
    """Make the edge into each marked kernel programmatic where it comes from a marked one; returns how many were changed.

    Args:
        graph: as in `look_into`; not instantiated yet, and of a GPU of compute capability 9.0 or newer.

    Raises:
        DriverError: the driver refused a call. An edge may be missing: the graph must not be used.
    """
    driver = _driver()
    programmatic = driver.CUgraphEdgeData()
    programmatic.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    programmatic.from_port = _WHEN_ALL_PROGRAMS_SAY_SO
    handle = driver.CUgraph(graph)
    edges = _edges(driver, handle)
    ways_in = Counter(int(after) for _, after, _ in edges)
    changed = 0
    for before, after, data in edges:
        # An edge of another type was made by a launch with attributes of its own.
        if data.type or ways_in[int(after)] > 1 or not _is_marked(driver, after) or not _is_marked(driver, before):
            continue
        _call(driver, "cuGraphRemoveDependencies", handle, [before], [after], [data], 1)
        _call(driver, "cuGraphAddDependencies", handle, [before], [after], [programmatic], 1)
        changed += 1
    return changed


def first_line(error: Exception) -> str:
    """`RuntimeError: what it says`, without the rest of what it says."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _driver() -> Any:
    """The CUDA driver's functions, from a package that CUDA builds of torch depend on."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the graph cannot be looked into without the package cuda-bindings ({error})") from error
    return driver


def _edges(driver: Any, handle: Any) -> list[tuple[Any, Any, Any]]:
    """(node ahead, node after, data) of every edge."""
    count = _call(driver, "cuGraphGetEdges", handle, 0)[-1]
    if not count:
        return []
    before, after, data, _ = _call(driver, "cuGraphGetEdges", handle, count)
    return list(zip(before, after, data, strict=True))


def _node_type(driver: Any, node: Any) -> str:
    """`CU_GRAPH_NODE_TYPE_MEMCPY` -> "memcpy"."""
    return str(_call(driver, "cuGraphNodeGetType", node)[0].name).removeprefix(_TYPE_PREFIX).lower()


def _is_kernel(driver: Any, node: Any) -> bool:
    return _node_type(driver, node) == "kernel"


def _is_marked(driver: Any, node: Any) -> bool:
    """Whether a node is a kernel with the mark in its name."""
    if not _is_kernel(driver, node):
        return False
    (params,) = _call(driver, "cuGraphKernelNodeGetParams", node)
    # A kernel is known by a function of a module, or by one of a library, which belongs to no context yet.
    error, name = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
    # The kernels of some libraries keep their names to themselves; those are not ours.
    return error == driver.CUresult.CUDA_SUCCESS and EARLY_KERNEL.encode() in name


# Their forms that take the data of edges have a suffix in cuda-bindings 12, and none in 13, where the others are gone.
_OF_EDGES = ("cuGraphGetEdges", "cuGraphRemoveDependencies", "cuGraphAddDependencies")


def _call(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call the driver's `name`; returns what it gives besides the error code."""
    newer = getattr(driver, f"{name}_v2", None) if name in _OF_EDGES else None
    error, *results = (newer or getattr(driver, name))(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: {getattr(error, 'name', error)}")
    return tuple(results)
