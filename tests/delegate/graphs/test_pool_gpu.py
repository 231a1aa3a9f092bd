"""The memory that graphs of a program share, on an NVIDIA GPU."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate import Method, Program, StepError, load_program
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.code.side_stream import side_stream
from ostinato.delegate.graphs.pool import GraphPool

from ..chain import WIDTH
from ..helpers import limited
from ..pair import GRAPH, Pair, inputs_of, refusing

pytestmark = pytest.mark.gpu

MB = 1 << 20
# Lengths of inputs whose temporaries have 16, 14 and 64 MiB, each of which torch allocates separately.
LENGTH, SHORTER, LONGER = 2048, 1900, 4096


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture
def native() -> None:
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("with this allocator each graph has a pool of its own")


class Wide(nn.Module):
    """`forward(x [T, 8]) -> [T, 8]`: counts its calls, and computes T x T temporary numbers."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return (x @ x.t()).sin() @ (x * self.scale)


@pytest.fixture(scope="module")
def wide(exported: Callable[..., Path]) -> Path:
    """The methods `one` and `two`, which are the same module."""
    from ostinato.export import export_program

    def build(path: Path) -> None:
        module, length = Wide(), torch.export.Dim("T", min=2, max=20000)
        methods = {name: (module, (torch.randn(5, 8),), ({0: length},)) for name in ("one", "two")}
        export_program(methods, path, device="cuda")

    return exported("wide-cuda", build, inspect.getsource(Wide) + inspect.getsource(wide_inputs))


def wide_inputs(length: int, seed: int) -> tuple[Tensor]:
    """Return inputs on the device, so that passing them waits for nothing."""
    x = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))
    return (0.1 * x.cuda(),)


def load(program: Program, name: str, **options: bool | int | str) -> Method:
    """Load a method with graphs, and with outputs that stay on the device."""
    names = ("enable_cuda_graph_for_method", "skip_copy_output_to_cpu_for_method")
    return program.load_method(name, {**dict.fromkeys(names, name), "cuda_graph_warmup_steps": 1, **options})


class Beside:
    """Steps of a program with graphs, each compared with the step of a program without graphs."""

    def __init__(self, path: Path) -> None:
        self.program, self.plain_program = load_program(path), load_program(path)
        self.one, self.two = load(self.program, "one"), load(self.program, "two")
        self.plain = self.plain_program.load_method("one")
        self.steps = 0

    def step(self, method: Method, length: int = LENGTH) -> None:
        self.steps += 1
        inputs = wide_inputs(length, self.steps)
        (expected,) = self.plain.execute(inputs)
        (found,) = method.execute(inputs)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        assert self.program.mutable_buffers["steps"].item() == self.steps

    def close(self) -> None:
        self.program.close()
        self.plain_program.close()


@pytest.fixture
def beside(wide: Path) -> Iterator[Beside]:
    made = Beside(wide)
    yield made
    made.close()


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pools() -> Counter[tuple[int, int]]:
    """Bytes of every pool that graphs were captured into, by its handle."""
    found: Counter[tuple[int, int]] = Counter()
    for segment in torch.cuda.memory_snapshot():
        found[tuple(segment["segment_pool_id"])] += segment["total_size"]
    del found[0, 0]
    return found


def pool_of(program: Program) -> GraphPool:
    assert program._graph_pool is not None
    return program._graph_pool


@pytest.mark.usefixtures("native")
def test_plans_and_methods_share_one_pool(beside: Beside) -> None:
    settle()
    before = pools()
    for method, length in ((beside.one, LENGTH), (beside.one, SHORTER), (beside.two, LENGTH)):
        for _ in range(3):
            beside.step(method, length)
    plans = [*beside.one.stats.plans, *beside.two.stats.plans]
    assert [plan.captured for plan in plans] == [1, 1, 1]
    first, *others = [plan.pool_bytes for plan in plans]
    assert first >= 16 * MB and all(grown <= 4 * MB for grown in others)
    (new,) = pools() - before
    assert new == pool_of(beside.program)._handle
    assert pools()[new] == pool_of(beside.program).nbytes == first + sum(others)
    # Graphs share memory for temporaries: in any order, no call disturbs another.
    for _ in range(3):
        for method, length in ((beside.two, LENGTH), (beside.one, SHORTER), (beside.one, LENGTH), (beside.two, LENGTH)):
            beside.step(method, length)


def test_an_output_outlives_what_others_do(beside: Beside) -> None:
    for _ in range(2):
        beside.step(beside.one)
    inputs = wide_inputs(LENGTH, 1)
    (kept,) = beside.one.execute(inputs)
    beside.steps += 1
    beside.plain.execute(inputs)
    copy = kept.clone()
    for length in (LENGTH, SHORTER):
        for _ in range(3):
            beside.step(beside.two, length)
    for _ in range(3):
        beside.step(beside.one, SHORTER)
    assert torch.equal(kept, copy)
    # The output is also a valid input, without a copy.
    (found,) = beside.two.execute((kept,))
    (expected,) = beside.plain.execute((copy,))
    # The sines of larger numbers are less exact.
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(kept, copy)


@pytest.mark.usefixtures("native")
def test_updates_need_no_more_memory(chain_artifact: Path) -> None:
    pair = Pair(chain_artifact)
    for _ in range(3):
        pair.step()
    states = [(program.new_state(), None) for program in (pair.program, pair.plain_program)]
    sizes = []
    for index in range(50):
        for program, state in zip((pair.program, pair.plain_program), states, strict=True):
            program.bind_state(state[index % 2])
        for _ in range(2):
            pair.step()
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pool_of(pair.program).nbytes))
    plan = pair.method.stats.plans[-1]
    assert plan.updates + plan.instantiations == 51
    assert pair.method.stats.next_phase == "replay"
    assert plan.pool_bytes == pool_of(pair.program).nbytes
    for early, late in zip(zip(*sizes[5:15], strict=True), zip(*sizes[40:], strict=True), strict=True):
        assert max(late) <= max(early)
    pair.close()


def reuses_memory() -> bool:
    """Return whether memory that another stream used can be allocated again once that stream has finished."""
    other, before = torch.cuda.Stream(), torch.cuda.memory_reserved()
    for _ in range(20):
        block = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
        block.record_stream(other)
        del block
        torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before <= 128 * MB


@pytest.mark.parametrize("segments", [{1}, {0, 1, 2}], ids=str)
def test_a_capture_that_fails_leaves_torch_whole(chain_artifact: Path, segments: set[int]) -> None:
    """After a failed capture, random numbers, memory and later captures work. Each of these breaks if the failure is not
    cleaned up."""
    refused = set(segments)
    with refusing(refused):
        pair = Pair(chain_artifact)
        for _ in range(4):
            pair.step(3)
        assert pair.method.stats.fallbacks == len(segments)
        assert torch.rand(4, device="cuda").max() <= 1
        torch.cuda.empty_cache()
        assert reuses_memory()
        torch.empty(1000, pin_memory=True)
        refused.clear()
        for _ in range(4):
            pair.step(5)
        plan = pair.method.stats.plans[-1]
        assert (plan.captured, plan.called, plan.given_up) == (1, 0, None)
        # An update goes to the new pool, also for a plan from before.
        pair.change_state()
        for length in (3, 5, 3, 5):
            pair.step(length)
        torch.rand(4, device="cuda")
        torch.cuda.empty_cache()
        pair.close()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("segments", [set(), {1}], ids=["all captured", "one refused"])
def test_everything_is_freed(chain_artifact: Path, segments: set[int]) -> None:
    settle()
    before, reserved = pools(), []
    with refusing(segments):
        # After the first round, workspaces of libraries stay allocated.
        for _ in range(3):
            pair = Pair(chain_artifact)
            for length in (3, 5):
                for _ in range(3):
                    pair.step(length)
            pair.change_state()
            pair.step(5)
            assert pools() - before
            pair.close()
            del pair
            settle()
            assert pools() == before
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[2]


def opaque(*_: object) -> NoReturn:
    raise RuntimeError("run_func_(container_handle_) API call failed at runner.cpp, line 1")


@pytest.mark.usefixtures("native")
def test_a_plan_that_does_not_fit(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot use the memory that torch holds for code without graphs. The plan is given up, and the step runs in
    that memory."""
    for _ in range(3):
        beside.step(beside.one, SHORTER)
    # The first call with this length, without a graph, in both programs.
    beside.step(beside.one, LONGER)
    with limited(8 * MB):
        for _ in range(3):
            beside.step(beside.one, LONGER)
        stats = beside.one.stats
        assert (stats.next_phase, stats.captures, stats.runs, stats.fallbacks) == ("disabled", 1, 3, 1)
        reason = (
            r"cuda:0 \(.*\) ran out of memory while capturing a graph for inputs of the shapes \[\[4096, 8\]\]"
            r".*; .* are free now\. Free memory on it, .*"
        )
        assert re.fullmatch(reason, stats.plans[-1].given_up or "")
        assert stats.fallback_reason == stats.plans[-1].given_up
        beside.step(beside.one, SHORTER)
        assert beside.one.stats.next_phase == "replay"
    torch.rand(4, device="cuda")
    for _ in range(3):
        beside.step(beside.two, LONGER)
    assert beside.two.stats.next_phase == "replay"
    # The failed allocation belongs to the capture, so this error has another cause.
    monkeypatch.setattr(MethodCode, "run", opaque)
    for method in (beside.one, beside.two):
        with pytest.raises(StepError, match="API call failed"):
            method.execute(wide_inputs(LONGER if method is beside.one else LENGTH, 1))


def test_launches_on_two_streams_are_ordered(beside: Beside) -> None:
    """The graphs share temporaries, so one launch must not begin before the other has ended."""
    for method in (beside.one, beside.two):
        for _ in range(3):
            beside.step(method)
    if not pool_of(beside.program)._is_shared:
        pytest.skip("with this allocator graphs share nothing")
    inputs, first, second = wide_inputs(LENGTH, 1), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(300_000_000)
        beside.one.execute(inputs)
        ended = first.record_event()
    with torch.cuda.stream(second):
        beside.two.execute(inputs)
    second.synchronize()
    assert ended.query()


def test_called_pieces_run_on_the_shared_stream(chain_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.cuda.Stream] = []
    run = MethodCode.run_segment

    def watched(self: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        if self.record.method == "split" and not torch.cuda.is_current_stream_capturing():
            seen.append(torch.cuda.current_stream())
        run(self, index, values)

    monkeypatch.setattr(MethodCode, "run_segment", watched)
    options = {**GRAPH, "enable_cuda_graph_for_method": "split", "use_shared_cuda_stream": True}
    with load_program(chain_artifact) as program, load_program(chain_artifact) as plain_program:
        split, plain = program.load_method("split", options), plain_program.load_method("step")
        for index in range(6):
            inputs = inputs_of(3, index)
            found, expected = split.execute(inputs), plain.execute(inputs)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert split.stats.plans[-1].called == 1
        # Three links without a graph; then one in the capture, and in each of four replays.
        assert len(seen) == 3 + 1 + 4
        assert all(stream == side_stream(program.device) for stream in seen)


def test_captures_have_a_stream_of_their_own() -> None:
    """torch gives out its 32 streams in turn. What another thread queues on the stream of a capture would be captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert side_stream(device).cuda_stream not in {torch.cuda.Stream(device).cuda_stream for _ in range(64)}


@pytest.mark.parametrize("end", ["updated again", "closed", "nobody closes"])
def test_a_capture_that_is_never_launched(chain_artifact: Path, end: str) -> None:
    """The process ends well. With cudaMallocAsync, torch's free of an output that no launch has allocated would end it."""
    code = f"""
import sys, torch
from ostinato.delegate import load_program
from ostinato.delegate.graphs.recorders import _CudaGraph
program = load_program(sys.argv[1])
method = program.load_method("step", {GRAPH!r})
def step():
    method.execute((torch.ones(3, {WIDTH}), torch.tensor([0])))
for _ in range(3):
    step()
assert method.stats.next_phase == "replay", method.stats
update = _CudaGraph.update
def interrupted(graph, work):
    update(graph, work)
    raise KeyboardInterrupt
_CudaGraph.update = interrupted
program.bind_state(program.new_state())
try:
    step()
except KeyboardInterrupt:
    print("interrupted")
_CudaGraph.update = update
end = {end!r}
if end == "updated again":
    program.bind_state()
    for _ in range(3):
        step()
    assert method.stats.next_phase == "replay", method.stats
if end != "nobody closes":
    program.close()
print(torch.cuda.get_allocator_backend())
"""
    assert with_malloc_async(code, chain_artifact) == ["interrupted", "cudaMallocAsync"]


def test_an_output_that_is_freed_during_a_capture(chain_artifact: Path) -> None:
    """The graph that is captured does not free it. With cudaMallocAsync, torch would take an output that another graph
    allocates for a part of this one, whose launches would then fail."""
    code = f"""
import sys, torch
from ostinato.delegate import load_program
from ostinato.delegate.code.method_code import MethodCode
options = {GRAPH | {"skip_copy_output_to_cpu_for_method": "step"}!r}
def step(method):
    return method.execute((torch.ones(3, {WIDTH}), torch.tensor([0])))
held = []
run = MethodCode.run_segment
def run_segment(code, index, values):
    if torch.cuda.is_current_stream_capturing():
        held.clear()
    run(code, index, values)
MethodCode.run_segment = run_segment
with load_program(sys.argv[1]) as first:
    method = first.load_method("step", options)
    for _ in range(2):
        step(method)
    held.extend(step(method))
assert held
with load_program(sys.argv[1]) as program, load_program(sys.argv[1]) as plain_program:
    method, plain = program.load_method("step", options), plain_program.load_method("step")
    for _ in range(6):
        assert all(torch.equal(one.cpu(), two) for one, two in zip(step(method), step(plain), strict=True))
    assert not held and method.stats.next_phase == "replay" and not method.stats.fallbacks, method.stats
print(torch.cuda.get_allocator_backend())
"""
    assert with_malloc_async(code, chain_artifact) == ["cudaMallocAsync"]


def with_malloc_async(code: str, artifact: Path) -> list[str]:
    """Run code in a process with that allocator, and return the words that it prints. Its argument is the artifact."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_ALLOC_CONF"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(artifact)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()
