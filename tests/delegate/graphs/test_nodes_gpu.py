"""Tests on real captured graphs: which kernels start before the kernel ahead has ended, and that results do not change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.delegate.code.side_stream import side_stream
from ostinato.delegate.code.used_streams import UsedStreams
from ostinato.delegate.cuda_driver import DriverError, call_driver
from ostinato.delegate.graphs import nodes as graph_nodes
from ostinato.delegate.graphs import recorders as graph_recorders
from ostinato.delegate.graphs.nodes import start_early
from ostinato.delegate.graphs.pool import GraphPool
from ostinato.delegate.graphs.recorders import CudaGraphRecorder
from ostinato.delegate.graphs.state_machine import StateMachine

from ..helpers import FULL, GRAPH, PROGRAMMATIC, FunctionCode, use_driver

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    # Imported only here: a kernel that Triton meets before TRITON_INTERPRET is set could not be interpreted by other tests.
    from . import early_kernels

    return early_kernels


def random_input(kernels: ModuleType) -> Tensor:
    return torch.randint(-(2**31), 2**31, (kernels.SIZE,), dtype=torch.int32, device="cuda")


@pytest.fixture
def weight(kernels: ModuleType) -> Tensor:
    """Odd numbers: with an even factor, results would forget their input after a few turns."""
    return random_input(kernels) | 1


def captured(
    run: Callable[[Sequence[Tensor]], list[Tensor]], inputs: Sequence[Tensor], early_kernels: bool = True
) -> StateMachine:
    """Return a state machine after one call without a graph and one call that captures; its next call replays."""
    device = torch.device("cuda", torch.cuda.current_device())
    names = [f"input_{number}" for number in range(len(inputs))]
    code = FunctionCode(run, len(inputs))
    recorder = CudaGraphRecorder(GraphPool(side_stream(device), UsedStreams(device)), early_kernels)
    machine = StateMachine(code, recorder, device, names, warmup_steps=1)
    for _ in range(2):
        machine(inputs)
    assert machine.stats.next_phase == "replay", machine.stats.fallback_reason
    return machine


def graph_of(machine: StateMachine) -> int:
    """Return the handle of the one captured graph."""
    plan: Any = machine._last.plan
    (piece,) = plan._pieces
    return int(piece.graph._last.graph.raw_cuda_graph())


def edges_of(machine: StateMachine) -> list[tuple[str, tuple[int, int, int]]]:
    """Return one entry per node of the chain, without the first node: (name of its kernel, or its type if it is no kernel;
    (type, from_port, to_port) of the edge into it)."""
    from cuda.bindings import driver

    edges = graph_nodes._edges(driver, driver.CUgraph(graph_of(machine)))
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
    """Return the result of a replay, after filling the output with other values."""
    plan: Any = machine._last.plan
    plan._pieces[0].graph.outputs[0].fill_(-1)
    return machine([x])[0].clone()


def test_marked_kernels_start_early(kernels: ModuleType, weight: Tensor) -> None:
    early, plain = kernels.turn_early, kernels.turn_plainly
    chain = [early, early, plain, early, early, plain, plain, early]
    machine = captured(lambda inputs: [kernels.run_chain(chain, inputs[0], weight)], [random_input(kernels)])
    opened = PROGRAMMATIC if kernels.starts_early() else FULL
    expected = [
        (kernel.__name__, opened if early is kernel is ahead else FULL) for ahead, kernel in itertools.pairwise(chain)
    ]
    assert edges_of(machine) == expected
    stats = machine.stats
    assert (stats.plans[-1].graph_kernels, stats.plans[-1].early_kernels) == (8, 2 if kernels.starts_early() else 0)
    assert (stats.plans[-1].graph_nodes, stats.plans[-1].graph_note) == ({"kernel": 8}, None)


def test_a_kernel_has_its_division_of_the_memory(
    kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.starts_early():
        pytest.skip("this GPU starts no kernel early")
    from cuda.bindings import driver

    monkeypatch.setitem(graph_nodes.SHARED_MEMORY, "turn", 43)
    chain = [kernels.turn_early, kernels.turn_plainly, kernels.turn_early]
    machine = captured(lambda inputs: [kernels.run_chain(chain, inputs[0], weight)], [random_input(kernels)])
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    found: dict[str, set[int]] = {}
    for node in graph_nodes._nodes(driver, driver.CUgraph(graph_of(machine))):
        (value,) = call_driver(driver, "cuGraphKernelNodeGetAttribute", node, kind)
        found.setdefault(graph_nodes._kernel_of(driver, node).name, set()).add(value.sharedMemCarveout)
    assert found["turn_early"] == {43}
    assert found["turn_plainly"] != found["turn_early"]
    x = random_input(kernels)
    expected = x
    for _ in chain:
        expected = kernels.turned(expected, weight)
    assert torch.equal(replayed(machine, x), expected)


def test_the_cache_fetches_lines(kernels: ModuleType) -> None:
    from cuda.bindings import driver

    side_stream(random_input(kernels).device)
    (granularity,) = call_driver(driver, "cuCtxGetLimit", driver.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY)
    assert granularity == 128


def test_results_are_those_of_torch_and_the_same_each_time(kernels: ModuleType, weight: Tensor) -> None:
    chain = [kernels.turn_plainly if number % 7 == 3 else kernels.turn_early for number in range(40)]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [kernels.run_chain(chain, inputs[0], weight)]

    machine, full = captured(run, [random_input(kernels)]), captured(run, [random_input(kernels)], early_kernels=False)
    assert {edge for _, edge in edges_of(full)} == {FULL}
    assert (
        full.stats.plans[-1].graph_kernels,
        full.stats.plans[-1].early_kernels,
        full.stats.plans[-1].graph_note,
    ) == (40, 0, None)
    for _ in range(5):
        x = random_input(kernels)
        expected = x
        for _ in chain:
            expected = kernels.turned(expected, weight)
        assert torch.equal(run([x])[0], expected)
        assert torch.equal(replayed(full, x), expected)
        for _ in range(10):
            assert torch.equal(replayed(machine, x), expected)


def test_a_kernel_in_the_wrong_place_keeps_its_full_edge(
    kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule R5 on a real graph: the edge stays full behind a kernel of another name, and changes behind the required one."""
    x = random_input(kernels)
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
    assert (machine.stats.plans[-1].early_kernels, machine.stats.plans[-1].graph_note) == (0, note if early else None)
    assert torch.equal(replayed(machine, x), expected)
    require("turn_early")
    machine = captured(run, [x])
    assert edges_of(machine) == [("turn_early", PROGRAMMATIC if early else FULL)] * 2
    assert (machine.stats.plans[-1].early_kernels, machine.stats.plans[-1].graph_note) == (2 if early else 0, None)
    assert torch.equal(replayed(machine, x), expected)


def test_a_copy_between_kernels_keeps_its_full_edges(kernels: ModuleType, weight: Tensor) -> None:
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        y = kernels.run_chain([kernels.turn_early], inputs[0], weight)
        return [kernels.run_chain([kernels.turn_early], torch.empty_like(y).copy_(y), weight)]

    x = random_input(kernels)
    machine = captured(run, [x])
    assert edges_of(machine) == [("CU_GRAPH_NODE_TYPE_MEMCPY", FULL), ("turn_early", FULL)]
    assert (machine.stats.plans[-1].graph_nodes, machine.stats.plans[-1].early_kernels) == (
        {"kernel": 2, "memcpy": 1},
        0,
    )
    assert torch.equal(replayed(machine, x), kernels.turned(kernels.turned(x, weight), weight))


@pytest.mark.parametrize("function", ["cuGraphRemoveDependencies", "cuGraphAddDependencies"])
def test_a_refused_change_leaves_a_whole_graph(
    kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    if not kernels.starts_early():
        pytest.skip("this GPU starts no kernel early")
    call = graph_nodes.call_driver
    calls = []

    def refuse_the_second(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
        calls.append(name)
        if name == function and calls.count(name) == 2:
            raise DriverError(f"{name}: injected")
        return call(driver, name, *arguments)

    monkeypatch.setattr(graph_nodes, "call_driver", refuse_the_second)
    x = random_input(kernels)
    machine = captured(lambda inputs: [kernels.run_chain([kernels.turn_early] * 5, inputs[0], weight)], [x])
    assert calls.count(function) == 2
    assert edges_of(machine) == [("turn_early", FULL)] * 4
    stats = machine.stats
    assert (stats.captures, stats.fallbacks, stats.plans[-1].graph_kernels, stats.plans[-1].early_kernels) == (
        1,
        0,
        5,
        0,
    )
    assert stats.plans[-1].graph_note == f"DriverError: {function}: injected"
    expected = x
    for _ in range(5):
        expected = kernels.turned(expected, weight)
    assert torch.equal(replayed(machine, x), expected)


def test_a_graph_without_cuda_bindings(kernels: ModuleType, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, None)
    x = random_input(kernels)
    machine = captured(lambda inputs: [kernels.run_chain([kernels.turn_early], inputs[0], weight)], [x])
    assert (machine.stats.plans[-1].graph_kernels, machine.stats.plans[-1].early_kernels, machine.stats.captures) == (
        None,
        None,
        1,
    )
    assert "cuda-bindings" in (machine.stats.plans[-1].graph_note or "")
    assert torch.equal(replayed(machine, x), kernels.turned(x, weight))


def test_a_step_without_inputs(kernels: ModuleType, weight: Tensor) -> None:
    """All that the step reads is state. Each call changes the state once, in every phase."""
    first = random_input(kernels)
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


def test_compiled_code_keeps_the_mark(kernels: ModuleType, weight: Tensor, tmp_path: Path) -> None:
    """In an artifact, AOTInductor's own kernels keep full edges, and a marked kernel behind a marked kernel starts early."""
    from ostinato.export import export_program

    module, example = kernels.Turning(weight.cpu()), torch.zeros(kernels.SIZE, dtype=torch.int32)
    export_program({"decode": (module, (example,), None)}, tmp_path / "turning", device="cuda")
    x = random_input(kernels)
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
        assert method.stats.plans[-1].early_kernels == (1 if kernels.starts_early() else 0)
        assert (full.stats.plans[-1].early_kernels, full.stats.plans[-1].graph_kernels) == (
            0,
            method.stats.plans[-1].graph_kernels,
        )
        assert (method.stats.plans[-1].graph_kernels or 0) >= 4
