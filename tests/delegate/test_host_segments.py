"""Programs that run partly on the host: what passes between it and the device, in all phases.

Without a GPU both are the CPU, over the same plans and buffers.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import InputError, Method, StepError, load_program, method_code
from ostinato.delegate.artifact import MethodRecord
from ostinato.delegate.files import artifact_paths, open_artifact
from ostinato.delegate.method_code import MethodCode
from ostinato.delegate.torch_internals import Container
from ostinato.delegate.transfers import PinnedPool, Transfers, starts

from .chain import ON_HOST, mixed_chains
from .pair import GRAPH, NOT_RECORDED, Pair, failing, inputs_of, refusing

METHODS = ("step", "inner", "ahead", "host")


@pytest.fixture
def mixed(mixed_artifact: Path) -> Iterator[Pair]:
    made = Pair(mixed_artifact)
    yield made
    made.close()


def record_of(artifact: Path, name: str) -> MethodRecord:
    return open_artifact(*artifact_paths(artifact))[0].methods[name].record


def with_graphs(name: str) -> dict[str, bool | int | str]:
    return {**GRAPH, "enable_cuda_graph_for_method": name}


def test_records_say_where_segments_run(mixed_artifact: Path, device: torch.device) -> None:
    record = record_of(mixed_artifact, "step")
    assert [segment.on_host for segment in record.segments] == [index in ON_HOST for index in range(7)]
    assert len({segment.code_key for segment in record.segments if segment.on_host}) == 1
    assert record.host_names == {
        name
        for index in ON_HOST
        for name in (*record.constants, *record.buffers)
        if name.startswith(record.segments[index].prefix)
    }


@pytest.mark.parametrize(
    ("name", "pieces"),
    [("step", "host graph host graph host"), ("inner", "graph host graph"), ("ahead", "host graph")],
)
def test_pieces(mixed_artifact: Path, name: str, pieces: str) -> None:
    """Neighbours on the host are one piece; several shapes, each with a plan."""
    pair = Pair(mixed_artifact, name)
    for _ in range(5):
        for length in (3, 8, 2):
            pair.step(length)
    stats = pair.method.stats
    assert (stats.phase, stats.warmups, stats.captures, stats.replays, stats.fallbacks) == ("replay", 3, 3, 9, 0)
    for plan in stats.plans:
        assert (plan.pieces, plan.captured) == (len(pieces.split()), pieces.count("graph"))
        assert plan.called == plan.on_host == pieces.count("host")
        assert (plan.called_because, plan.given_up) == ({}, None)
    pair.close()


def test_a_method_on_the_host_alone_has_no_graph(mixed_artifact: Path) -> None:
    pair = Pair(mixed_artifact, "host")
    for _ in range(4):
        pair.step()
    stats = pair.method.stats
    assert (stats.phase, stats.captures, stats.runs, stats.fallbacks) == ("disabled", 0, 3, 0)
    assert stats.last_plan.given_up == "no segment may be captured"
    pair.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_equal_eager(mixed_artifact: Path, graphs: bool) -> None:
    """Methods in turn, over one state."""
    eager = mixed_chains()
    with load_program(mixed_artifact) as program:
        methods = {name: program.load_method(name, with_graphs(name) if graphs else {}) for name in METHODS}
        for index in range(8):
            for name, method in methods.items():
                inputs = inputs_of(2 + 3 * (index % 2), index)
                values = dict(zip(eager[name].inputs, inputs, strict=True))
                for link in eager[name].links:
                    link.run(values)
                expected = tuple(values[output] for output in eager[name].outputs)
                # The GPU adds up in another order.
                torch.testing.assert_close(method.execute(inputs), expected, rtol=1e-4, atol=1e-4)
        for link in eager["step"].links:
            for name, tensor in link.module.named_buffers():
                if name != "bias":
                    torch.testing.assert_close(program.mutable_buffers[link.prefix + name].cpu(), tensor)


def test_constants_and_state_are_where_they_are_used(mixed_artifact: Path, device: torch.device) -> None:
    file = open_artifact(*artifact_paths(mixed_artifact))[1]
    with load_program(mixed_artifact) as program:
        total = program.bytes_to_load("step")
        step = program.load_method("step")
        assert program.bytes_to_load("step") == 0 and total > 0
        record = step._entry.record
        for name, tensor in step._bound.items():
            assert tensor.device.type == ("cpu" if name in record.host_names else device.type), name
        # On the host they lie on the file's map, as in a program for the CPU.
        loaded = program._pool._file.entries
        for name, key in record.constants.items():
            if name in record.host_names:
                assert step._bound[name].data_ptr() == loaded[key].tensor().data_ptr()
        for state in (program.mutable_buffers, program.new_state()):
            assert {key: tensor.device.type for key, tensor in state.items()} == {
                f"layers.{index}.{name}": "cpu" if index in ON_HOST else device.type
                for index in range(7)
                for name in ("state", "steps")
            }
        # Layers 0 and 1 have one weight.
        shared = {step._bound[name] for name, key in record.constants.items() if key == "layers.0.weight"}
        assert len({tensor.data_ptr() for tensor in shared}) == (1 if device.type == "cpu" else 2)
        assert program.stats.constants == len(set(record.constants.values())) + (device.type == "cuda")
        expected = sum(file.entries[key].nbytes for key in set(record.constants.values()))
        assert (
            program.stats.constant_bytes == expected + (device.type == "cuda") * file.entries["layers.0.weight"].nbytes
        )


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[int, int]]]:
    """Each time that values pass: the way, and the addresses at which they arrive."""
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
    """Through the same buffers in each step, also when the graphs have been updated."""
    mixed.step()
    assert not passed
    first: list[dict[int, int]] = []
    for index in range(6):
        passed.clear()
        mixed.step()
        # 0 and 1 are the inputs; each layer gives the next two.
        assert [(way, set(there)) for way, there in passed] == [
            # `early`, and not the inputs, which nobody else takes.
            ("to_device", {2, 3}),
            ("arrived", {6, 7}),
            # `middle` and `seen`; `early` was on the host, and `x` stays there.
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


@pytest.mark.parametrize(
    ("segments", "pieces"),
    [
        ({1}, "host call graph host graph host"),
        ({2, 5}, "host graph call host call host"),
        ({1, 2}, "host call call host graph host"),
    ],
    ids=str,
)
def test_a_segment_that_cannot_be_recorded(mixed_artifact: Path, segments: set[int], pieces: str) -> None:
    with refusing(segments):
        pair = Pair(mixed_artifact)
        for _ in range(6):
            pair.step()
        (plan,) = pair.method.stats.plans
        assert (plan.pieces, plan.captured, plan.on_host) == (len(pieces.split()), pieces.count("graph"), 3)
        assert plan.called == 3 + pieces.count("call") and set(plan.called_because) == segments
        pair.close()


def test_where_nothing_can_be_recorded_there_is_no_graph(mixed_artifact: Path) -> None:
    with refusing({1, 2, 5}):
        pair = Pair(mixed_artifact)
        for _ in range(4):
            pair.step()
        stats = pair.method.stats
        assert (stats.phase, stats.captures, stats.fallbacks) == ("disabled", 0, 3)
        assert re.search(NOT_RECORDED, stats.last_plan.given_up or "")
        pair.close()


@pytest.mark.parametrize("segment", sorted(ON_HOST))
@pytest.mark.parametrize("phase", ["warmup", "capture", "replay"])
def test_a_segment_on_the_host_that_raises(mixed: Pair, phase: str, segment: int) -> None:
    """It is said; the next call makes a step, in the same phase."""
    while mixed.method.stats.phase != phase:
        mixed.step()
    with failing(segment), pytest.raises(StepError, match=r"'step' failed with .*no more threads.*`Program.reset`"):
        mixed.method.execute(inputs_of(3, 1))
    assert mixed.method.stats.phase == phase
    mixed.reset()
    for _ in range(4):
        mixed.step()
    stats = mixed.method.stats
    assert (stats.phase, stats.captures, stats.fallbacks) == ("replay", 1, 0)


def test_a_state_that_is_bound(mixed: Pair) -> None:
    for _ in range(3):
        mixed.step()
    own = {key: tensor.clone() for key, tensor in mixed.program.mutable_buffers.items()}
    for _ in range(2):
        mixed.change_state()
        for _ in range(2):
            mixed.step()
    plan = mixed.method.stats.last_plan
    # Two graphs, made once and changed twice.
    assert plan.updates + plan.instantiations == 6
    for program in (mixed.program, mixed.plain_program):
        program.bind_state()
    assert all(torch.equal(tensor, own[key]) for key, tensor in mixed.program.mutable_buffers.items())
    mixed.step()
    assert (mixed.method.stats.phase, mixed.method.stats.captures) == ("replay", 1)


def test_a_state_in_another_place(mixed: Pair, device: torch.device) -> None:
    for index, other in ((0, device), (1, torch.device("cpu"))):
        state = mixed.program.new_state()
        key = f"layers.{index}.state"
        state[key] = state[key].to(other if device.type == "cuda" else "meta")
        with pytest.raises(InputError, match=rf"'{key}' has another layout: device "):
            mixed.program.bind_state(state)
    mixed.step()


@pytest.mark.parametrize("name", METHODS)
def test_inputs_on_the_device(mixed_artifact: Path, device: torch.device, name: str) -> None:
    """Also those that the host alone takes."""
    pair = Pair(mixed_artifact, name)
    for index in range(5):
        inputs = inputs_of(4, index)
        found = pair.method.execute([tensor.to(device) for tensor in inputs])
        expected = pair.plain.execute([tensor.to(device) for tensor in inputs] if index % 2 else inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    pair.close()


def test_inputs_that_only_the_host_takes_are_there(mixed_artifact: Path, device: torch.device) -> None:
    for name, place in (("step", "cpu"), ("ahead", "cpu"), ("inner", device.type)):
        pair = Pair(mixed_artifact, name)
        for _ in range(3):
            pair.step(3)
        static = pair.method.static_inputs
        assert [tensor.device.type for tensor in static] == [place, place]
        for index in range(3):
            inputs = inputs_of(3, index)
            for tensor, given in zip(static, inputs, strict=True):
                tensor.copy_(given)
            found, expected = pair.method.execute(static), pair.plain.execute(inputs)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        pair.close()


@pytest.mark.parametrize("name", METHODS)
def test_outputs(mixed_artifact: Path, device: torch.device, name: str) -> None:
    """The caller's own; or on the device, wherever they were computed."""
    with load_program(mixed_artifact) as program, load_program(mixed_artifact) as other:
        method = program.load_method(name, with_graphs(name))
        skipping = other.load_method(name, {**with_graphs(name), "skip_copy_output_to_cpu_for_method": name})
        kept = []
        for index in range(5):
            outputs = method.execute(inputs_of(3, index))
            kept.append((outputs, [tensor.clone() for tensor in outputs]))
            on_device = skipping.execute(inputs_of(3, index))
            assert all(tensor.is_cpu for tensor in outputs)
            assert all(tensor.device == device for tensor in on_device)
            assert all(torch.equal(one, two.cpu()) for one, two in zip(outputs, on_device, strict=True))
        assert all(torch.equal(one, two) for pair in kept for one, two in zip(*pair, strict=True))


def fall_behind(device: torch.device) -> None:
    """Have the GPU begin late with what comes next: by 0.3 TFLOP."""
    if device.type == "cuda":
        square = torch.ones(4096, 4096, device=device)
        torch.mm(torch.mm(square, square), square)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["step", "inner", "ahead"])
def test_a_device_that_is_behind(
    mixed_artifact: Path, device: torch.device, name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads nothing before it has come, overwrites nothing that is on its way, and waits for no more than that.

    On a GPU the caller changes streams, and takes no output to the host, which would wait for all.
    """
    options: dict[str, bool | int | str] = {"skip_copy_output_to_cpu_for_method": name}
    options |= with_graphs(name) if graphs else {"use_shared_cuda_stream": True}
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def step(method: Method, index: int) -> None:
        if not streams:
            method.execute(inputs_of(3, index))
            return
        now, before = streams[index % 2], streams[1 - index % 2]
        now.wait_stream(before)
        with torch.cuda.stream(now):
            fall_behind(device)
            method.execute(inputs_of(3, index))

    with load_program(mixed_artifact) as program, load_program(mixed_artifact) as plain_program:
        method, plain = program.load_method(name, options), plain_program.load_method(name)
        for index in range(3):
            step(method, index)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits for the whole device"))
            for index in range(3, 12):
                step(method, index)
        for index in range(12):
            plain.execute(inputs_of(3, index))
        if device.type == "cuda":
            torch.cuda.synchronize()
        found, expected = program.mutable_buffers, plain_program.mutable_buffers
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert method.stats.replays == (10 if graphs else 0)


def test_a_capture_that_fails_half_way_leaves_what_was_counted(mixed_artifact: Path) -> None:
    """A segment is refused, and then one on the host raises: the plan's numbers are those of the last capture that ended."""
    pair = Pair(mixed_artifact)
    for _ in range(3):
        pair.step()
    (before,) = pair.method.stats.plans
    pieces, called = before.pieces, before.called
    pair.change_state()
    with refusing({1}), failing(3), pytest.raises(StepError):
        pair.method.execute(inputs_of(3, 1))
    (after,) = pair.method.stats.plans
    assert (after.pieces, after.called, after.called_because) == (pieces, called, {})
    pair.reset()
    pair.step()
    pair.close()


@dataclass(frozen=True)
class Part:
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def test_what_the_host_can_begin_early() -> None:
    parts = [
        Part((0, 1), (2, 3)),
        Part((2,), (4,)),
        # From where 3 is made on.
        Part((3, 0), (5,)),
        Part((4, 5), (6, 7)),
        Part((6,), (8,)),
        # It needs nothing of the device that the one before it does not wait for.
        Part((8, 7), (9,)),
        # Nothing of the device at all.
        Part((9,), (10,)),
    ]
    assert starts(parts, {2, 4, 5, 6}) == {0: 2, 3: 4}


def test_single_runs_take_the_same_memory_again(mixed_artifact: Path) -> None:
    """What is sent to the host lies in pieces that later runs take too, also for other sizes up to a power of two."""
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
    """Compiled code returns parts of its inputs without a copy, and the memory of those is taken again."""
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
    """One to the host, in a graph: several small values are written to pinned memory by a kernel. Back none but for what the
    method returns, as the device reads the pinned memory."""
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
        inside = (step.stats.last_plan.graph_nodes or {}).get("memcpy", 0)
    copies = Counter(event.name for event in profiler.events() if event.name.startswith("Memcpy"))
    assert copies == Counter({"Memcpy DtoH (Device -> Pinned)": 1, "Memcpy HtoD (Pinned -> Device)": 2})
    assert inside == 1
