"""Programs that run partly on the host, in all phases.

Without a GPU both are the CPU, over the same plans and buffers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ostinato.delegate import InputError, Method, StepError, load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.records import MethodRecord

from ..chain import ON_HOST, mixed_chains
from ..pair import NOT_RECORDED, Pair, failing, inputs_of, refusing, with_graphs

METHODS = ("step", "inner", "ahead", "host")


def record_of(artifact: Path, name: str) -> MethodRecord:
    return open_artifact(*artifact_paths(artifact))[0].methods[name].record


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
    """Neighbouring segments on the host are one piece. Each of several shapes has a plan."""
    pair = Pair(mixed_artifact, name)
    for _ in range(5):
        for length in (3, 8, 2):
            pair.step(length)
    stats = pair.method.stats
    assert (stats.next_phase, stats.warmups, stats.captures, stats.replays, stats.fallbacks) == ("replay", 3, 3, 9, 0)
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
    assert (stats.next_phase, stats.captures, stats.runs, stats.fallbacks) == ("disabled", 0, 3, 0)
    assert stats.plans[-1].given_up == "no segment may be captured"
    pair.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_equal_eager(mixed_artifact: Path, graphs: bool) -> None:
    """The methods take turns, over one state."""
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
        # On the host the constants lie on the file's map, as in a program for the CPU.
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
        assert (stats.next_phase, stats.captures, stats.fallbacks) == ("disabled", 0, 3)
        assert re.search(NOT_RECORDED, stats.plans[-1].given_up or "")
        pair.close()


@pytest.mark.parametrize("segment", sorted(ON_HOST))
@pytest.mark.parametrize("phase", ["warmup", "capture", "replay"])
def test_a_segment_on_the_host_that_raises(mixed: Pair, phase: str, segment: int) -> None:
    """The error is reported. After a reset the next calls run, from the same phase."""
    while mixed.method.stats.next_phase != phase:
        mixed.step()
    with failing(segment), pytest.raises(StepError, match=r"'step' failed with .*no more threads.*`Program.reset`"):
        mixed.method.execute(inputs_of(3, 1))
    assert mixed.method.stats.next_phase == phase
    mixed.reset()
    for _ in range(4):
        mixed.step()
    stats = mixed.method.stats
    assert (stats.next_phase, stats.captures, stats.fallbacks) == ("replay", 1, 0)


def test_a_state_that_is_bound(mixed: Pair) -> None:
    for _ in range(3):
        mixed.step()
    own = {key: tensor.clone() for key, tensor in mixed.program.mutable_buffers.items()}
    for _ in range(2):
        mixed.change_state()
        for _ in range(2):
            mixed.step()
    plan = mixed.method.stats.plans[-1]
    # Two graphs, made once and updated twice.
    assert plan.updates + plan.instantiations == 6
    for program in (mixed.program, mixed.plain_program):
        program.bind_state()
    assert all(torch.equal(tensor, own[key]) for key, tensor in mixed.program.mutable_buffers.items())
    mixed.step()
    assert (mixed.method.stats.next_phase, mixed.method.stats.captures) == ("replay", 1)


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
    """Inputs may be on the device, even where only the host takes them."""
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
    """Outputs belong to the caller. If the copy to the host is skipped, all outputs are on the device."""
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
    """Keep the GPU busy with 0.3 TFLOP, so that later work on it begins late."""
    if device.type == "cuda":
        square = torch.ones(4096, 4096, device=device)
        torch.mm(torch.mm(square, square), square)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["step", "inner", "ahead"])
def test_a_device_that_is_behind(
    mixed_artifact: Path, device: torch.device, name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads no value before it has arrived, overwrites no value that is still in use, and waits for nothing else.

    On a GPU the caller changes streams, and copies no output to the host, because that would wait for all work.
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
    """An update fails: one segment is refused, and one on the host raises. The plan keeps the numbers of the last capture
    that succeeded."""
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
