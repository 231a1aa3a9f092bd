"""Nodes of a captured CUDA graph, and the change that lets its kernels start before the kernel ahead of them has ended.

A *program* is one thread block of a kernel here (Triton's word). A capture joins kernels by full edges: the next kernel
starts when the last program of the kernel ahead has ended and its writes can be read. Behind a programmatic edge a kernel
starts as soon as there is room for it, and waits inside for the rest (CUDA C++ Programming Guide, "Programmatic Dependent
Launch and Synchronization"). AOTInductor launches without this, so the edges are changed here, after the capture.
`start_early` changes the edge between two *marked* kernels, which have `names.EARLY_KERNEL` in their names, if it is the only
edge into the second kernel.

Marked kernels keep these rules, with the functions of export/kernels/early_start_triton.py:

R1. Every program calls `start_next` once. It calls `wait_for_previous` before it writes, or reads what R2 forbids. A program
    that does neither may end without a wait, but at least one program of each launch waits.
    Why: the next kernel starts when all programs have called `start_next` or have ended. If no program of a kernel waited,
    the kernel could end before the kernel ahead. Kernels behind it could then read what is not written yet.
R2. Before its wait a program writes nothing. It reads only constants, cells of state that no kernel ahead of its own writes,
    and data that only unmarked kernels write.
    Why: marked kernels ahead of it may still be running. Unmarked ones have ended: the edges from and to them are full.
R3. A *late* kernel calls `start_next` directly after its wait, and all its programs wait, those of padding too. All other
    kernels call `start_next` before anything else.
    Why: R4 needs this for `experts_gate_up_early` and `gate_up_fixed_rows_early`. `fixed_rows_early` is late because it is
    faster that way; nothing relies on it.
R4. The kernel directly behind a late kernel may also read, before its wait, data that kernels ahead of the late kernel wrote.
    It reads past the first-level cache (`cache_modifier=".cg"`). Nothing stands between the two kernels, and neither of them
    writes that data.
    Why: when the kernel starts, every program of the late kernel is past its wait. So all kernels ahead of the late kernel
    have ended, with their writes in memory. This holds whichever of the edges are programmatic. The first-level cache may
    hold old data: only a kernel's own wait is known to renew it.
R5. A kernel that relies on R4 stands directly behind the late kernel: `experts_down_early` behind `experts_gate_up_early`,
    `down_fixed_rows_early` behind `gate_up_fixed_rows_early`.
    `start_early` checks this on the captured graph (`names.REQUIRED_AHEAD`): anywhere else the edge into such a kernel stays
    full.

Why no kernel reads too early or writes too early. A stream's capture is a chain; take its kernels in order.

1. A kernel ends only after all kernels ahead have ended. Behind a full edge it starts only then. Behind a programmatic edge
   one of its programs waits for the kernel directly ahead to end (R1). By this same step, that kernel ends after all kernels
   ahead of it.
2. So whatever a kernel does after its wait, or behind a full edge, comes after all writes and reads of all kernels ahead.
3. The data that a marked kernel reads before its wait (R2) is already written. The last unmarked kernel ahead of it is
   followed by a full edge, and no kernel starts before the kernel ahead of it has started. So all unmarked kernels ahead have
   ended.
4. A kernel behind a late kernel starts when every program of the late kernel has called `start_next` or has ended. Both come
   after that program's wait (R3). So by step 1 all kernels ahead of the late kernel have ended, and their writes are in
   memory (R4).
5. Before its wait a kernel writes nothing (R2), so it disturbs no kernel ahead.
6. The graph has ended when its last kernel has, and by step 1 all others have ended then.

A multiprocessor has one memory for its first-level cache and its shared memory. The driver divides this memory for each
kernel. A program only starts on a multiprocessor with the division of its kernel. With another division, a kernel that starts
early has to wait until the kernel ahead has left. Its programs also crowd on the few multiprocessors that the kernel ahead
has left first: 512 of `delta_step_early` stood on 40 of 132. Each program takes some shared memory even if it asks for none,
so a small division spreads them. So `start_early` asks for a division for marked kernels (`SHARED_MEMORY`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostinato.delegate.artifact.names import EARLY_KERNEL, REQUIRED_AHEAD, ROWS_KERNEL
from ostinato.delegate.cuda_driver import DriverError, call_driver, cuda_driver
from ostinato.delegate.errors import first_line

# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC of cuda.h: the edge opens when all programs have called `start_next` or have ended.
_WHEN_ALL_PROGRAMS_SAY_SO = 1
_TYPE_PREFIX = "CU_GRAPH_NODE_TYPE_"
# A kernel's shared memory in percent of its maximum, by what stands in its name ahead of `names.EARLY_KERNEL`. A kernel that
# needs more gets more. Of an H200's 228 KB these are 0, 8, 16, 64, 100, 164 and 228 KB. Other kernels of several rows get
# _OTHERS_OF_ROWS, others what the driver chooses.
#
# Found by trying all of these, kernel by kernel, for whole layers of several models together (H200, 2026-11-28; `direct_*`
# 2026-11-29, and 2026-11-30 the long one, which needs more cache than others for its loads: a layer of an 8B in bfloat16 with
# 4 and 8 rows takes 118 and 122 us, with _OTHERS_OF_ROWS 141 and 150). `gate_up_fixed_rows` 2026-12-01: layers of the
# flagship with 32, 64 and 128 rows take 144.3, 201.9 and 282.2 us, with _OTHERS_OF_ROWS 146.7, 202.0 and 283.8.
SHARED_MEMORY = {
    "attend_combine": 0,
    "attend_split": 43,
    "conv_rows": 7,
    "delta_rows": 43,
    "delta_step": 0,
    "direct_integers_rows": 7,
    "direct_long_floats_rows": 28,
    "direct_rows": 7,
    "direct_unpacked_rows": 0,
    "experts_down": 0,
    "experts_gate_up": 0,
    "gate_up_fixed_rows": 100,
    "linear_add": 60,
    "norm_linear": 28,
    "norm_linear_conv": 43,
    "norm_swiglu": 43,
    "prepare_direct_rows": 7,
    "route_logits": 0,
}
# The same for a launch with several rows, which are the last dimension of its grid.
SHARED_MEMORY_OF_ROWS = SHARED_MEMORY | {
    "attend_combine": 3,
    "experts_down": 7,
    "experts_gate_up": 3,
    "route_logits": 7,
}
# A delta-net layer with experts at 8, 64 and 128 sessions and for a prompt of 128 took 73.0, 239.2, 352.2 and 224.7 us; with
# 50 % 70.7, 233.9, 353.5 and 232.7, with 80 % 72.3, 235.5, 351.7 and 223.5 (H200, 2026-11-23).
_OTHERS_OF_ROWS = 60


class _Kernel(NamedTuple):
    """The kernel of a node. Without one, or if it does not tell its name, the name is "".

    Attributes:
        several: whether its grid's last dimension is more than one.
    """

    name: str = ""
    several: bool = False


@dataclass(frozen=True)
class GraphNodes:
    """Facts about a captured graph.

    Attributes:
        by_type: number of nodes of each type ("kernel", "memcpy", "memset", ...); None if the graph could not be inspected.
        early: number of kernels that start before the kernel ahead has ended.
        note: why the graph could not be inspected, or why some edges were not changed; None if nothing went wrong.
    """

    by_type: dict[str, int] | None = None
    early: int = 0
    note: str | None = None

    @property
    def kernels(self) -> int | None:
        """Number of kernels that one launch runs; None if unknown."""
        return None if self.by_type is None else self.by_type.get("kernel", 0)


@dataclass(frozen=True)
class EarlyStarts:
    """Result of `start_early`: `count` kernels now start early. `note` names kernels that do not because of rule R5."""

    count: int
    note: str | None = None


def inspect_graph(graph: int) -> GraphNodes:
    """Return the numbers of nodes of a graph. If they cannot be counted, the result's `note` has the reason.

    Args:
        graph: the `cudaGraph_t` as a number, from `torch.cuda.CUDAGraph.raw_cuda_graph`.
    """
    try:
        driver = cuda_driver()
        nodes = _nodes(driver, driver.CUgraph(graph))
        return GraphNodes(dict(Counter(_node_type(driver, node) for node in nodes).most_common()))
    except Exception as error:  # Whatever is wrong with the package, the graph itself is right.
        return GraphNodes(note=first_line(error))


def start_early(graph: int, required_ahead: Mapping[str, str] = REQUIRED_AHEAD) -> EarlyStarts:
    """Make the edge into a marked kernel programmatic if the kernel ahead is marked too and R5 allows it.

    Also ask for a division of a multiprocessor's memory for the marked kernels.

    Args:
        graph: as in `inspect_graph`; not instantiated yet, and for a GPU of compute capability 9.0 or newer.
        required_ahead: pairs of names for R5. An empty mapping is only right for a graph whose kernels depend on nothing
            ahead of them, as in a benchmark of one kernel.

    Raises:
        DriverError: the driver refused a call. An edge may be missing, so the graph must not be used.
    """
    driver = cuda_driver()
    programmatic = driver.CUgraphEdgeData()
    programmatic.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    programmatic.from_port = _WHEN_ALL_PROGRAMS_SAY_SO
    handle = driver.CUgraph(graph)
    nodes, edges = _nodes(driver, handle), _edges(driver, handle)
    kernels = {int(node): _kernel_of(driver, node) for node in nodes}
    ways_in = Counter(int(after) for _, after, _ in edges)
    changed = 0
    misplaced: list[str] = []
    for before, after, data in edges:
        # An edge of another type comes from a launch with its own attributes, and stays as it is.
        if data.type or EARLY_KERNEL not in (name := kernels[int(after)].name):
            continue
        ahead = kernels[int(before)].name
        required = next((other for marked, other in required_ahead.items() if marked in name), "")
        if required not in ahead:
            misplaced.append(f"{name} stands behind {ahead or 'a node without a name'}, not behind {required}")
            continue
        if ways_in[int(after)] > 1 or EARLY_KERNEL not in ahead:
            continue
        call_driver(driver, "cuGraphRemoveDependencies", handle, [before], [after], [data], 1)
        call_driver(driver, "cuGraphAddDependencies", handle, [before], [after], [programmatic], 1)
        changed += 1
    for node in nodes:
        _divide(driver, node, kernels[int(node)])
    return EarlyStarts(changed, _note(misplaced))


def _divide(driver: Any, node: Any, kernel: _Kernel) -> None:
    """Ask for a division of a multiprocessor's memory for the kernel of a node, if it is a marked one."""
    name, marked, _ = kernel.name.partition(EARLY_KERNEL)
    sizes = SHARED_MEMORY_OF_ROWS if kernel.several else SHARED_MEMORY
    percent = sizes.get(name, _OTHERS_OF_ROWS if ROWS_KERNEL in kernel.name else None)
    if not marked or percent is None:
        return
    value = driver.CUkernelNodeAttrValue()
    value.sharedMemCarveout = percent
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    call_driver(driver, "cuGraphKernelNodeSetAttribute", node, kind, value)


def update_executable(executable: int, graph: int) -> bool:
    """Make an executable graph do what `graph` does, from its next launch on, if both have the same topology.

    Args:
        executable: the `cudaGraphExec_t` as a number, from `torch.cuda.CUDAGraph.raw_cuda_graph_exec`.
        graph: as in `inspect_graph`.

    Returns:
        Whether the driver updated the executable. If not, the executable is unchanged.
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
    """Return (node ahead, node after, data) for every edge."""
    count = call_driver(driver, "cuGraphGetEdges", handle, 0)[-1]
    if not count:
        return []
    before, after, data, _ = call_driver(driver, "cuGraphGetEdges", handle, count)
    return list(zip(before, after, data, strict=True))


def _node_type(driver: Any, node: Any) -> str:
    """`CU_GRAPH_NODE_TYPE_MEMCPY` -> "memcpy"."""
    return str(call_driver(driver, "cuGraphNodeGetType", node)[0].name).removeprefix(_TYPE_PREFIX).lower()


def _kernel_of(driver: Any, node: Any) -> _Kernel:
    if _node_type(driver, node) != "kernel":
        return _Kernel()
    (params,) = call_driver(driver, "cuGraphKernelNodeGetParams", node)
    # The node of a kernel has a function of a module, or a kernel of a library, which belongs to no context yet.
    error, name = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
    # The kernels of some libraries do not tell their names; those are not ours.
    told = name.decode(errors="replace") if error == driver.CUresult.CUDA_SUCCESS else ""
    return _Kernel(told, params.gridDimZ > 1)
