"""Values that pass between the device and code on the host, and the memory that they pass through.

Without a GPU both are the CPU, with the same plans and buffers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.delegate.code import method_code
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.code.transfers import PinnedPool, Transfers, starts
from ostinato.delegate.torch_internals import Container

from ..chain import ON_HOST
from ..helpers import SegmentValues
from ..pair import Pair, inputs_of, with_graphs


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[int, int]]]:
    """A list that records each transfer: its direction, and the addresses at which the values arrive."""
    seen: list[tuple[str, dict[int, int]]] = []

    def watched(way: str) -> Callable[[Transfers, Collection[int]], dict[int, Tensor]]:
        run = getattr(Transfers, way)

        def transfer(self: Transfers, values: Collection[int]) -> dict[int, Tensor]:
            there: dict[int, Tensor] = run(self, values)
            if values:
                seen.append((way, {number: tensor.data_ptr() for number, tensor in there.items()}))
            return there

        return transfer

    for way in ("arrived", "to_device"):
        monkeypatch.setattr(Transfers, way, watched(way))
    return seen


def test_a_value_passes_once_and_only_where_it_must(mixed: Pair, passed: list[tuple[str, dict[int, int]]]) -> None:
    """Values pass through the same buffers in each step, also after the graphs were updated."""
    mixed.step()
    assert not passed
    first: list[dict[int, int]] = []
    for index in range(6):
        passed.clear()
        mixed.step()
        # Values 0 and 1 are the inputs; each layer gives the next two.
        assert [(way, set(there)) for way, there in passed] == [
            # `early`; the inputs do not pass, because no other layer takes them.
            ("to_device", {2, 3}),
            ("arrived", {6, 7}),
            # `middle` and `seen`. `early` is on the host already, and `x` is only used on the host.
            ("to_device", {8, 11}),
            ("arrived", {13}),
            # Results.
            ("to_device", {14, 15}),
        ]
        addresses = [there for _, there in passed]
        first = first or addresses
        assert addresses == first
        if index == 3:
            mixed.change_state()


def test_what_the_host_can_begin_early() -> None:
    parts = [
        SegmentValues((0, 1), (2, 3)),
        SegmentValues((2,), (4,)),
        # The host can begin once value 3 is made.
        SegmentValues((3, 0), (5,)),
        SegmentValues((4, 5), (6, 7)),
        SegmentValues((6,), (8,)),
        # This part waits for the one before it, which already waits for all that it needs from the device.
        SegmentValues((8, 7), (9,)),
        # This part needs nothing from the device.
        SegmentValues((9,), (10,)),
    ]
    assert starts(parts, {2, 4, 5, 6}) == {0: 2, 3: 4}


def test_single_runs_take_the_same_memory_again(mixed_artifact: Path) -> None:
    """Values that are sent to the host lie in blocks that later runs use again, also for other sizes up to a power of two."""
    with load_program(mixed_artifact) as program:
        method = program.load_method("step")
        assert method._code is not None
        free = method._code._pool._free
        for index in range(3):
            method.execute(inputs_of(3, index))
        held = {size: [piece.data_ptr() for piece in pieces] for size, pieces in free.items()}
        assert held and all(held.values())
        for length in (3, 2, 3):
            method.execute(inputs_of(length, 1))
        assert {size: [piece.data_ptr() for piece in free[size]] for size in held} == held


def test_what_a_segment_gives_may_lie_in_what_it_took(mixed_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right although compiled code returns parts of its inputs, whose memory is used again, without a copy."""
    now = threading.local()
    run_segment, run_container = MethodCode.run_segment, method_code.run_container

    def watched(code: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        now.in_place = code is method._code and index in ON_HOST - {0}
        run_segment(code, index, values)

    def in_place(container: Container, inputs: list[Tensor]) -> list[Tensor]:
        outputs = run_container(container, inputs)
        if not now.in_place:
            return outputs
        return [taken.copy_(given).view_as(given) for taken, given in zip(inputs, outputs, strict=True)]

    monkeypatch.setattr(MethodCode, "run_segment", watched)
    monkeypatch.setattr(method_code, "run_container", in_place)
    options = {"skip_copy_output_to_cpu_for_method": "step"}
    with load_program(mixed_artifact) as program, load_program(mixed_artifact) as plain_program:
        method, plain = program.load_method("step", options), plain_program.load_method("step")
        kept = [(method.execute(inputs_of(3, index)), plain.execute(inputs_of(3, index))) for index in range(5)]
        assert all(torch.equal(one.cpu(), two) for pair in kept for one, two in zip(*pair, strict=True))


def test_runs_that_send_nothing_keep_no_memory(mixed_artifact: Path) -> None:
    with load_program(mixed_artifact) as program:
        method = program.load_method("ahead")
        assert method._code is not None
        held = []
        for index in range(4):
            method.execute(inputs_of(3, index))
            held.append(len(method._code._read_last))
        assert held == held[:1] * 4


def test_pieces_of_pinned_memory() -> None:
    pool = PinnedPool(torch.device("cpu"))
    first, second = pool.take(100), pool.take(128)
    assert (first.nbytes, second.nbytes, pool.take(129).nbytes, pool.take(0).nbytes) == (128, 128, 256, 1)
    pool.give(first)
    assert pool.take(65) is first
    pool.give(second)
    pool.clear()
    assert pool.take(128) is not second


@pytest.mark.gpu
def test_copies_on_a_gpu(mixed_artifact: Path, device: torch.device) -> None:
    """There is one copy to the host, within a graph: a kernel writes several small values to pinned memory. Only results are
    copied back, because the device reads the pinned memory directly."""
    if device.type != "cuda":
        pytest.skip("there is one device")
    from torch.profiler import ProfilerActivity, profile

    options = {**with_graphs("step"), "skip_copy_output_to_cpu_for_method": "step"}
    with load_program(mixed_artifact) as program:
        step = program.load_method("step", options)
        for index in range(4):
            step.execute(inputs_of(3, index))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            step.execute(inputs_of(3, 4))
            torch.cuda.synchronize()
        inside = (step.stats.plans[-1].graph_nodes or {}).get("memcpy", 0)
    copies = Counter(event.name for event in profiler.events() if event.name.startswith("Memcpy"))
    assert copies == Counter({"Memcpy DtoH (Device -> Pinned)": 1, "Memcpy HtoD (Pinned -> Device)": 2})
    assert inside == 1
