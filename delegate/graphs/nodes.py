"""What a captured CUDA graph consists of, and how its kernels are made to start before the one ahead of them has ended.

A capture joins kernels by full edges: the next one starts when the last program of the one ahead has ended and its writes can
be read. Over a programmatic edge it starts as soon as there is room for it, and waits inside for the rest (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization"). AOTInductor launches without that, so the edges are
changed here, after the capture: `start_early` changes the edge between two *marked* kernels, those with
`names.EARLY_KERNEL` in their names, where it is the one way into the latter.

Marked kernels keep these rules, with the functions of export/kernels/early_start_triton.py:

R1. Every program calls `start_next` once, and `wait_for_previous` before it writes or reads what R2 forbids; a program that
    does neither may end without a wait, but at least one of each launch waits.
    Why: the next kernel starts when all programs have called `start_next` or have ended. And a kernel none of whose programs
    waited could end before the kernel ahead, so that kernels behind it could read what is not written yet.
R2. Before its wait a program writes nothing, and reads only constants, cells of state that no kernel ahead of its own
    writes, and what only unmarked kernels write.
    Why: marked kernels ahead of it may still be running. Unmarked ones have ended: the edges from and to them are full.
R3. A *late* kernel calls `start_next` directly after its wait, which all its programs have; all others call it first.
    Why: R4 needs it of `experts_gate_up_early` and `gate_up_fixed_rows_early`. `fixed_rows_early` is late because it is
    faster so; nothing relies on that.
R4. The kernel directly behind a late one may also read, before its wait, what kernels ahead of the late one wrote, past the
    first-level cache (`cache_modifier=".cg"`). Nothing stands between the two, and neither of them writes that.
    Why: when it starts, every program of the late kernel is past its wait, so all kernels ahead of the late one have ended
    with their writes in memory. This holds whichever of the edges are programmatic. The first-level cache may be old: only a
    kernel's own wait is known to renew it.
R5. A kernel that relies on R4 stands directly behind the late one: `experts_down_early` behind `experts_gate_up_early`,
    `down_fixed_rows_early` behind `gate_up_fixed_rows_early`.
    `start_early` checks it on the captured graph (`names.REQUIRED_AHEAD`): anywhere else the edge into them stays full.

Why no kernel reads too early or writes too early. A stream's capture is a chain; take its kernels in order.

1. A kernel ends only after all kernels ahead have ended. Behind a full edge it starts after that; behind a programmatic one
   a program of it waits for the kernel ahead to end (R1), which by this same step ended after all those ahead of it.
2. So whatever a kernel does after its wait, or behind a full edge, comes after all writes and reads of all kernels ahead.
3. What a marked kernel reads before its wait is there (R2): the last unmarked kernel ahead of it is followed by a full edge,
   and no kernel starts before the one ahead of it has started. So all unmarked kernels ahead have ended.
4. Behind a late kernel: it starts when every program of the late one has called `start_next` or has ended, which is after
   that program's wait (R3). So by step 1 all kernels ahead of the late one have ended, and what they wrote is there (R4).
5. Before its wait a kernel writes nothing (R2), so it disturbs no kernel ahead.
6. The graph has ended when its last kernel has, and by step 1 all others have ended then.

A multiprocessor has one memory for its first-level cache and its shared memory. The driver divides it for each kernel, and a
program only starts on a multiprocessor that is divided for its kernel: a kernel that starts early would have to wait until
the one ahead has left. So `start_early` asks for one division for the marked kernels of rows (`names.ROWS_KERNEL`). Those
of one row need little shared memory, and read the faster the larger the cache is: they are left to the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.delegate.artifact.names import EARLY_KERNEL, REQUIRED_AHEAD, ROWS_KERNEL
from ostinato.delegate.cuda_driver import DriverError, call_driver, cuda_driver
from ostinato.delegate.errors import first_line

# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC of cuda.h: the edge opens when all programs have said so, or have ended.
_WHEN_ALL_PROGRAMS_SAY_SO = 1
_TYPE_PREFIX = "CU_GRAPH_NODE_TYPE_"
# Of the largest shared memory, in percent; a kernel that needs more gets more. H200, 2026-11-23: one delta-net layer with
# experts at 8, 64 and 128 sessions and for a prompt of 128 takes 73.0, 239.2, 352.2 and 224.7 us; with 50 % 70.7, 233.9,
# 353.5 and 232.7, with 80 % 72.3, 235.5, 351.7 and 223.5; as the driver divides it 76.7, 245.5, 360.8 and 233.4. With 60 %
# for the kernels of one row too, one session has 981 tokens/s in place of 1,066.
_SHARED_MEMORY = 60


@dataclass(frozen=True)
class GraphNodes:
    """What is known about a captured graph.

    Attributes:
        by_type: how many nodes of each type ("kernel", "memcpy", "memset", ...) it has; None if it could not be looked into.
        early: how many of its kernels start before the one ahead has ended.
        note: why it could not be looked into, or why edges of it were not changed; None if nothing went wrong.
    """

    by_type: dict[str, int] | None = None
    early: int = 0
    note: str | None = None

    @property
    def kernels(self) -> int | None:
        """Kernels that one launch runs; None if that is not known."""
        return None if self.by_type is None else self.by_type.get("kernel", 0)


@dataclass(frozen=True)
class EarlyStarts:
    """What `start_early` did: how many kernels now start early, and in `note` which ones do not because of rule R5."""

    count: int
    note: str | None = None


def look_into(graph: int) -> GraphNodes:
    """Count the nodes of a graph, or say in `note` why that cannot be done.

    Args:
        graph: the `cudaGraph_t` as a number, what `torch.cuda.CUDAGraph.raw_cuda_graph` gives.
    """
    try:
        driver = cuda_driver()
        nodes = _nodes(driver, driver.CUgraph(graph))
        return GraphNodes(dict(Counter(_node_type(driver, node) for node in nodes).most_common()))
    except Exception as error:  # Whatever is wrong with the package, the step itself is right.
        return GraphNodes(note=first_line(error))


def start_early(graph: int, required_ahead: Mapping[str, str] = REQUIRED_AHEAD) -> EarlyStarts:
    """Make the edge into each marked kernel programmatic where it comes from a marked one that may stand there (R5), and have
    those of rows divide a multiprocessor's memory alike.

    Args:
        graph: as in `look_into`; not instantiated yet, and of a GPU of compute capability 9.0 or newer.
        required_ahead: R5's pairs of names. Only a graph whose kernels depend on nothing ahead of them, as in a benchmark of
            one kernel, may do without.

    Raises:
        DriverError: the driver refused a call. An edge may be missing: the graph must not be used.
    """
    driver = cuda_driver()
    programmatic = driver.CUgraphEdgeData()
    programmatic.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    programmatic.from_port = _WHEN_ALL_PROGRAMS_SAY_SO
    handle = driver.CUgraph(graph)
    nodes, edges = _nodes(driver, handle), _edges(driver, handle)
    names = {int(node): _kernel_name(driver, node) for node in nodes}
    ways_in = Counter(int(after) for _, after, _ in edges)
    changed = 0
    misplaced: list[str] = []
    for before, after, data in edges:
        # An edge of another type was made by a launch with attributes of its own.
        if data.type or EARLY_KERNEL not in (name := names[int(after)]):
            continue
        ahead = names[int(before)]
        required = next((other for marked, other in required_ahead.items() if marked in name), "")
        if required not in ahead:
            misplaced.append(f"{name} stands behind {ahead or 'a node without a name'}, not behind {required}")
            continue
        if ways_in[int(after)] > 1 or EARLY_KERNEL not in ahead:
            continue
        call_driver(driver, "cuGraphRemoveDependencies", handle, [before], [after], [data], 1)
        call_driver(driver, "cuGraphAddDependencies", handle, [before], [after], [programmatic], 1)
        changed += 1
    _divide_alike(driver, [node for node in nodes if ROWS_KERNEL in names[int(node)]])
    return EarlyStarts(changed, _note(misplaced))


def _divide_alike(driver: Any, kernels: list[Any]) -> None:
    """Ask for one division of a multiprocessor's memory for these kernels' nodes."""
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    value = driver.CUkernelNodeAttrValue()
    value.sharedMemCarveout = _SHARED_MEMORY
    for node in kernels:
        call_driver(driver, "cuGraphKernelNodeSetAttribute", node, kind, value)


def update_executable(executable: int, graph: int) -> bool:
    """Have an executable graph do what `graph` does from its next launch on, if the two have one topology.

    Args:
        executable: the `cudaGraphExec_t` as a number, what `torch.cuda.CUDAGraph.raw_cuda_graph_exec` gives.
        graph: as in `look_into`.

    Returns:
        Whether the driver did it. If not, the executable is as it was.
    """
    try:
        driver = cuda_driver()
    except DriverError:
        return False
    error = driver.cuGraphExecUpdate(driver.CUgraphExec(executable), driver.CUgraph(graph))[0]
    return bool(error == driver.CUresult.CUDA_SUCCESS)


def _note(misplaced: list[str]) -> str | None:
    if not misplaced:
        return None
    others = f" (and {len(misplaced) - 1} more)" if len(misplaced) > 1 else ""
    return f"{misplaced[0]}{others}: it does not start early"


def _nodes(driver: Any, graph: Any) -> list[Any]:
    count = call_driver(driver, "cuGraphGetNodes", graph, 0)[-1]
    return list(call_driver(driver, "cuGraphGetNodes", graph, count)[0]) if count else []


def _edges(driver: Any, handle: Any) -> list[tuple[Any, Any, Any]]:
    """(node ahead, node after, data) of every edge."""
    count = call_driver(driver, "cuGraphGetEdges", handle, 0)[-1]
    if not count:
        return []
    before, after, data, _ = call_driver(driver, "cuGraphGetEdges", handle, count)
    return list(zip(before, after, data, strict=True))


def _node_type(driver: Any, node: Any) -> str:
    """`CU_GRAPH_NODE_TYPE_MEMCPY` -> "memcpy"."""
    return str(call_driver(driver, "cuGraphNodeGetType", node)[0].name).removeprefix(_TYPE_PREFIX).lower()


def _kernel_name(driver: Any, node: Any) -> str:
    """The name of a kernel's function; "" for a node that is not a kernel, and for a kernel that does not tell its name."""
    if _node_type(driver, node) != "kernel":
        return ""
    (params,) = call_driver(driver, "cuGraphKernelNodeGetParams", node)
    # A kernel is known by a function of a module, or by one of a library, which belongs to no context yet.
    error, name = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
    # The kernels of some libraries do not tell their names; those are not ours.
    return name.decode(errors="replace") if error == driver.CUresult.CUDA_SUCCESS else ""
