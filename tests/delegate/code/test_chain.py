"""A method whose code is a chain: three layers of one kind, each with weights and state of its own, compiled once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import ArtifactError, Dim, Method, Program, load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.records import MethodRecord
from ostinato.delegate.code import method_code
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.torch_internals import Container

from ..chain import CONSTANTS, STATE, WIDTH, Stack, layers, step_inputs


@pytest.fixture
def record(chain_artifact: Path) -> MethodRecord:
    return open_artifact(*artifact_paths(chain_artifact))[0].methods["step"].record


@pytest.fixture
def named_data(chain_artifact: Path) -> dict[str, memoryview]:
    return dict(open_artifact(*artifact_paths(chain_artifact))[0].named_data)


def check_steps(method: Method, eager: Stack, indices: range) -> None:
    for index in indices:
        seen, x = method.execute(step_inputs(index))
        expected, expected_seen = eager(*step_inputs(index))
        torch.testing.assert_close(x, expected)
        assert torch.equal(seen, expected_seen), index


def check_state(program: Program, eager: Stack) -> None:
    expected = dict(eager.named_buffers())
    for key, tensor in program.mutable_buffers.items():
        torch.testing.assert_close(tensor.cpu(), expected[key])


@pytest.mark.parametrize("options", [{}, {"weight_sharing_across_methods": False}], ids=["shared", "private"])
def test_several_steps_equal_eager(chain_artifact: Path, options: dict[str, Any]) -> None:
    eager = Stack(layers())
    with load_program(chain_artifact) as program:
        step = program.load_method("step", options)
        check_steps(step, eager, range(7))
        check_state(program, eager)
        program.reset()
        check_steps(step, Stack(layers()), range(4))


def test_replayed_steps_equal_eager(chain_artifact: Path) -> None:
    """All calls have one shape, so that they share a graph."""
    eager = Stack(layers())
    with load_program(chain_artifact) as program:
        step = program.load_method("step", {"enable_cuda_graph_for_method": "step"})
        for index in range(8):
            inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index)), torch.tensor([index])
            seen, x = step.execute(inputs)
            torch.testing.assert_close((x, seen), eager(*inputs))
        check_state(program, eager)
        assert (step.stats.captures, step.stats.fallbacks, step.stats.next_phase) == (1, 0, "replay")


def test_a_chain_and_a_module_share_their_state(chain_artifact: Path) -> None:
    eager = Stack(layers())
    with load_program(chain_artifact) as program:
        step, whole = program.load_method("step"), program.load_method("whole")
        assert program.stats.shared == 9
        for index in range(4):
            check_steps(step, eager, range(index, index + 1))
            x, seen = torch.full((2, WIDTH), 0.1 * index), torch.tensor([index])
            torch.testing.assert_close(whole.execute((x, seen)), eager(x, seen))
        check_state(program, eager)


def test_names_of_constants_and_state(chain_artifact: Path, record: MethodRecord) -> None:
    """Each link's constants and state are stored under its prefix, and what links share is stored once."""
    file = open_artifact(*artifact_paths(chain_artifact))[1]
    own = {f"layers.{index}.{name}" for index in range(3) for name in CONSTANTS}
    (table,) = set(record.constants.values()) - own
    assert own < set(record.constants.values())
    assert len(record.constants) == 3 * len(record.segments) + 3
    assert set(record.buffers.values()) == set(record.buffer_specs)
    assert set(record.buffers.values()) == {f"layers.{index}.{name}" for index in range(3) for name in STATE}
    initialised = {key for key, spec in record.buffer_specs.items() if spec.initialised}
    assert initialised == {f"layers.{index}.steps" for index in range(3)}
    # `whole` has three tables of its own.
    assert len(set(file.entries) - (own | initialised | {table})) == 3
    for index, layer in enumerate(layers()):
        for name in (*CONSTANTS, "steps"):
            assert torch.equal(file.entries[f"layers.{index}.{name}"].tensor(), getattr(layer, name)), (index, name)
        for name, key in {**record.constants, **record.buffers}.items():
            if key != table and key.startswith(f"layers.{index}."):
                assert name.startswith(record.segments[index].prefix)


def test_the_record_of_a_chain(record: MethodRecord) -> None:
    assert [(spec.name, spec.shape_text) for spec in record.inputs] == [("x", "[T=2..8, 4]"), ("seen", "[1]")]
    assert [(spec.name, spec.shape_text) for spec in record.outputs] == [("seen", "[1]"), ("x", "[T=2..8, 4]")]
    assert record.outputs[1].shape[0] == Dim(2, 8, "T") and record.inputs[1].value_range == (0, 99)
    assert [segment.inputs for segment in record.segments] == [(0, 1), (2, 3), (4, 5)]
    assert [segment.outputs for segment in record.segments] == [(2, 3), (4, 5), (6, 7)]
    assert record.results == (7, 6)
    assert len({segment.prefix for segment in record.segments}) == 3


def test_one_library_serves_three_segments(
    record: MethodRecord, named_data: dict[str, memoryview], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    load = method_code.load_container

    def remember(path: str, device: torch.device) -> Any:
        paths.append(path)
        return load(path, device)

    monkeypatch.setattr(method_code, "load_container", remember)
    MethodCode(record, named_data, device)
    assert len(paths) == 3 and len(set(paths)) == 1
    assert len({segment.code_key for segment in record.segments}) == 1
    # One library for `step` and one for `whole`.
    assert sum(bytes(data[:4]) == b"\x7fELF" for data in named_data.values()) == 2


def last(record: MethodRecord, **changes: Any) -> MethodRecord:
    """Return the record with changes in the last segment."""
    return replace(record, segments=(*record.segments[:-1], replace(record.segments[-1], **changes)))


def test_missing_and_damaged_code(
    record: MethodRecord, named_data: dict[str, memoryview], device: torch.device
) -> None:
    key = record.segments[0].code_key
    with pytest.raises(ArtifactError, match=r"model\.pte lacks the compiled code of method 'step'"):
        MethodCode(record, {k: data for k, data in named_data.items() if k != key}, device)
    damaged = bytearray(named_data[key])
    damaged[5000] ^= 4
    with pytest.raises(ArtifactError, match=r"compiled code of method 'step' in model\.pte is damaged: SHA-256"):
        MethodCode(record, {**named_data, key: memoryview(damaged)}, device)
    junk = memoryview(b"\x7fELF" + b"\0" * 1000)
    hashed = replace(record.segments[0], code_sha256=hashlib.sha256(junk).hexdigest())
    with pytest.raises(ArtifactError, match="compiled code of method 'step' cannot be loaded"):
        MethodCode(replace(record, segments=(hashed,)), {key: junk}, device)


def test_one_segment_of_many_lacks_its_code(
    record: MethodRecord, named_data: dict[str, memoryview], device: torch.device
) -> None:
    with pytest.raises(ArtifactError, match="lacks the compiled code of method 'step'"):
        MethodCode(last(record, code_key="ostinato.code.other"), named_data, device)
    with pytest.raises(ArtifactError, match="lacks the list of operators that method 'step' calls"):
        other = {"ostinato.code.other": named_data[record.segments[0].code_key]}
        MethodCode(
            last(record, code_key="ostinato.code.other", extern_key="ostinato.extern.other"), named_data | other, device
        )
    damaged = bytearray(named_data[record.segments[0].code_key])
    damaged[5000] ^= 4
    with pytest.raises(ArtifactError, match=r"compiled code of method 'step' in model\.pte is damaged"):
        MethodCode(
            last(record, code_key="ostinato.code.other"),
            {**named_data, "ostinato.code.other": memoryview(damaged)},
            device,
        )


class Watched:
    """A segment's container that records its outputs, and at each call which outputs of all segments are still alive."""

    def __init__(self, container: Container, given: list[list[StorageWeakRef]], alive: list[list[list[bool]]]) -> None:
        self._container, self._given, self._alive = container, given, alive

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self._alive.append([[not storage.expired() for storage in storages] for storages in self._given])
        outputs: list[Tensor] = self._container.run(inputs)
        self._given.append([StorageWeakRef(tensor.untyped_storage()) for tensor in outputs])
        return outputs


def watch(method: Method) -> tuple[list[list[StorageWeakRef]], list[list[list[bool]]]]:
    given: list[list[StorageWeakRef]] = []
    alive: list[list[list[bool]]] = []
    assert method._code is not None
    containers = method._code._containers
    method._code._containers = [Watched(container, given, alive) for container in containers]
    return given, alive


def test_intermediate_values_are_freed_when_nobody_takes_them(chain_artifact: Path) -> None:
    with load_program(chain_artifact) as program:
        step = program.load_method("step", {"skip_copy_output_to_cpu_for_method": "step"})
        given, alive = watch(step)
        results = step.execute(step_inputs(0))
        assert alive == [[], [[True, True]], [[False, False], [True, True]]]
        assert [[storage.expired() for storage in storages] for storages in given] == [
            [True, True],
            [True, True],
            [False, False],
        ]
        torch.testing.assert_close((results[1].cpu(), results[0].cpu()), Stack(layers())(*step_inputs(0)))


def test_a_value_that_nobody_takes_is_freed_at_once(
    record: MethodRecord, chain_artifact: Path, device: torch.device
) -> None:
    with load_program(chain_artifact) as program:
        step = program.load_method("step")
        code = step._code
        assert code is not None
        first, second, third = record.segments
        # The second link takes the method's own `seen`, and the third takes the method's `x`.
        code.record = replace(
            record,
            segments=(first, replace(second, inputs=(2, 1)), replace(third, inputs=(0, 5))),
            results=(7, 6, 2),
        )
        code._last_uses = method_code._last_uses(code.record)
        assert code._last_uses == [(3,), (1, 4), (0, 5)]
        _, alive = watch(step)
        x, seen = step_inputs(0)
        _, _, kept = code.run([x.to(device), seen.to(device)])
        assert alive == [[], [[True, False]], [[True, False], [False, True]]]
        assert kept.shape == x.shape


def test_closing_lets_all_containers_go(chain_artifact: Path) -> None:
    with load_program(chain_artifact) as program:
        step = program.load_method("step")
        code = step._code
        assert code is not None and len(code._containers) == 3
        step.close()
        assert not code._containers
        assert program.stats.constants == 0
        check_steps(program.load_method("step"), Stack(layers()), range(2))
