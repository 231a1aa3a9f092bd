"""Captures that run out of device memory: the plan is given up with a reason of one line, and the step still runs once. And
steps that run out of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from ostinato.delegate import DeviceMemoryError, StepError, load_program
from ostinato.delegate import memory as memory_module
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.graphs.recorders import CudaGraphRecorder, HostGraphRecorder, _CudaGraph, _HostGraph

from .helpers import limited
from .loading_cases import MB, OUT_OF_MEMORY, in_use
from .pair import GRAPH, Pair, inputs_of

Function = Callable[..., Any]
GIVEN_UP = r"c.* ran out of memory while capturing a graph for inputs of the shapes \[\[3, 4\], \[1\]\]"


def no_memory(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def opaque(*_: object) -> NoReturn:
    """Fail as compiled code does: the same error for every cause."""
    raise RuntimeError("run_func_(container_handle_) API call failed at runner.cpp, line 1")


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[None]]:
    """`fail(first)`: recording fails from graph number `first` on. The returned list grows by one entry per attempt."""

    def fail(first: int, failure: Function = no_memory) -> list[None]:
        attempts: list[None] = []

        def counted(record: Function) -> Function:
            def run(*arguments: object) -> Any:
                attempts.append(None)
                return record(*arguments) if len(attempts) <= first else failure()

            return run

        for recorder in (HostGraphRecorder, CudaGraphRecorder):
            monkeypatch.setattr(recorder, "record", counted(recorder.record))
        return attempts

    return fail


def test_the_shape_goes_on_without_graphs(pair: Pair, fail: Function) -> None:
    for _ in range(3):
        pair.step(5)
    attempts = fail(0)
    for _ in range(4):
        pair.step(3)
    # There is no second attempt around the failed segment, and none in later calls.
    assert len(attempts) == 1
    stats = pair.method.stats
    plan = stats.plans[-1]
    assert (stats.next_phase, stats.warmups, stats.captures, stats.replays, stats.runs) == ("disabled", 2, 1, 1, 3)
    assert (plan.pieces, plan.captured, plan.called, plan.launches) == (1, 0, 1, 1)
    whole = GIVEN_UP + r"; the allocation that failed was of 2\.00 GiB.*\. Free memory on it, .*"
    assert re.fullmatch(whole, plan.given_up or "")
    assert stats.fallback_reason == plan.given_up and plan.called_because == {0: plan.given_up}
    # The plan of the other shape stays.
    pair.step(5)
    stats = pair.method.stats
    assert (stats.next_phase, stats.replays, stats.plans[-1].given_up) == ("replay", 2, None)


def test_behind_a_piece_that_was_captured(chain_artifact: Path, fail: Function) -> None:
    """The first graph has been launched when the memory for the second is missing: the remaining segments are called."""
    attempts = fail(1)
    options = {**GRAPH, "enable_cuda_graph_for_method": "split"}
    with load_program(chain_artifact) as program, load_program(chain_artifact) as plain_program:
        split, plain = program.load_method("split", options), plain_program.load_method("step")
        for index in range(4):
            inputs = inputs_of(3, index)
            found, expected = split.execute(inputs), plain.execute(inputs)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        for key, tensor in plain_program.mutable_buffers.items():
            assert torch.equal(program.mutable_buffers[key], tensor)
        stats = split.stats
        assert len(attempts) == 2
        assert (stats.next_phase, stats.captures, stats.runs) == ("disabled", 0, 3)
        assert re.match(GIVEN_UP, stats.plans[-1].given_up or "") and set(stats.plans[-1].called_because) == {2}


def test_an_update(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        pair.step()
    for graph in (_HostGraph, _CudaGraph):
        monkeypatch.setattr(graph, "update", no_memory)
    pair.change_state()
    for _ in range(3):
        pair.step()
    stats = pair.method.stats
    assert (stats.next_phase, stats.captures, stats.replays, stats.runs) == ("disabled", 1, 1, 3)
    assert re.match(GIVEN_UP, stats.plans[-1].given_up or "")
    assert stats.fallback_reason == stats.plans[-1].given_up


def test_a_step_that_has_no_memory_either(pair: Pair, fail: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.step()
    attempts = fail(0)
    with monkeypatch.context() as patch:
        patch.setattr(MethodCode, "run_segment", no_memory)
        with pytest.raises(DeviceMemoryError, match=r"ran out of memory while running method 'step' with x \[3, 4\]"):
            pair.method.execute(inputs_of(3, 1))
    for _ in range(2):
        pair.step()
    stats = pair.method.stats
    assert (stats.next_phase, stats.runs, len(attempts)) == ("disabled", 2, 1)
    assert re.match(GIVEN_UP, stats.plans[-1].given_up or "")


def test_an_opaque_failure_counts_for_one_error(
    chain_artifact: Path, fail: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's count of failed allocations rose because of the capture, so later errors have another cause."""
    failures = 0

    def no_memory_opaque(*_: object) -> NoReturn:
        nonlocal failures
        failures += 1
        opaque()

    monkeypatch.setattr(memory_module, "allocation_failures", lambda device: failures)
    with load_program(chain_artifact) as program:
        step, whole = program.load_method("step", GRAPH), program.load_method("whole")
        step.execute(inputs_of(3, 0))
        fail(0, no_memory_opaque)
        step.execute(inputs_of(3, 1))
        assert re.match(GIVEN_UP, step.stats.plans[-1].given_up or "")
        monkeypatch.setattr(MethodCode, "run_segment", opaque)
        for method, length in ((step, 3), (whole, 2)):
            with pytest.raises(StepError, match="API call failed"):
                method.execute(inputs_of(length, 2))


def test_an_opaque_failure_that_is_another(pair: Pair, fail: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only failed allocation was earlier and somewhere else. So the segments count as segments that cannot be
    recorded."""
    pair.step()
    attempts = fail(0, opaque)
    monkeypatch.setattr(memory_module, "allocation_failures", lambda device: 1)
    pair.step()
    assert len(attempts) == 3
    assert set(pair.method.stats.plans[-1].called_because) == {0, 1, 2}


class Square(nn.Module):
    """Computes T x T products: `forward(x [T, 8]) -> [T, 8]`, whose temporaries grow with the square of T."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).sin() @ (x * self.scale)


@pytest.fixture(scope="module")
def square(exported: Callable[..., Path]) -> Path:
    from ostinato.export import export_program

    def build(path: Path) -> None:
        length = torch.export.Dim("T", min=2, max=20000)
        export_program({"forward": (Square(), (torch.randn(5, 8),), ({0: length},))}, path, device="cuda")

    return exported("square-cuda", build)


@pytest.mark.gpu
def test_memory_that_ends_during_a_step(square: Path) -> None:
    x = torch.randn(16384, 8, generator=torch.Generator().manual_seed(1))
    with load_program(square) as program:
        forward = program.load_method("forward")
        torch.testing.assert_close(forward.execute((x[:100],))[0], Square()(x[:100]), rtol=1e-3, atol=1e-3)
        # What torch holds of other tests without using it would come on top.
        torch.cuda.empty_cache()
        with limited(300 * MB):
            before = in_use()
            with pytest.raises(DeviceMemoryError, match=r"while running method 'forward' with x \[16384, 8\]"):
                forward.execute((x,))
            assert in_use() == before
            torch.testing.assert_close(forward.execute((x[:100],))[0], Square()(x[:100]), rtol=1e-3, atol=1e-3)
        assert forward.execute((x,))[0].shape == (16384, 8)
