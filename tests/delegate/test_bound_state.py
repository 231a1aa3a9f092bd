"""States that replace each other, compared with a program without graphs: plans follow, and nothing old is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import ClosedError, InputError, Program, StepError, load_program
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.graphs.plans import MAX_CHANGES
from ostinato.delegate.graphs.pool import Work

from .pair import GRAPH, Pair, inputs_of, refusing


@pytest.fixture
def program(chain_artifact: Path) -> Iterator[Program]:
    with load_program(chain_artifact) as loaded:
        yield loaded


def test_bound_to_another_state_and_back(pair: Pair) -> None:
    for _ in range(3):
        pair.step()
    own = {key: tensor.clone() for key, tensor in pair.program.mutable_buffers.items()}
    other, plain_other = pair.program.new_state(), pair.plain_program.new_state()
    pair.program.bind_state(other)
    pair.plain_program.bind_state(plain_other)
    assert all(pair.program.mutable_buffers[key] is tensor for key, tensor in other.items())
    for _ in range(3):
        pair.step()
    assert all(torch.equal(other[key], plain_other[key]) for key in other)
    plan = pair.method.stats.plans[-1]
    assert plan.updates + plan.instantiations == 2
    pair.program.bind_state()
    pair.plain_program.bind_state()
    assert all(torch.equal(tensor, own[key]) for key, tensor in pair.program.mutable_buffers.items())
    for _ in range(3):
        pair.step()
    assert plan.updates + plan.instantiations == 3
    assert (pair.method.stats.next_phase, pair.method.stats.captures) == ("replay", 1)
    # Bound away and back between two steps: the addresses are the same as before.
    pair.program.bind_state(other)
    pair.program.bind_state()
    pair.step()
    assert plan.updates + plan.instantiations == 3


def test_a_method_loaded_later_takes_the_bound_state(program: Program) -> None:
    step = program.load_method("step")
    state = program.new_state()
    program.bind_state(state)
    step.execute(inputs_of(2, 1))
    whole = program.load_method("whole")
    whole.execute(inputs_of(2, 2))
    steps = state["layers.1.steps"].clone()
    program.reset()
    assert (steps - state["layers.1.steps"]).item() == 4
    program.bind_state()
    assert torch.equal(program.mutable_buffers["layers.1.steps"], state["layers.1.steps"])


@pytest.mark.parametrize("end", ["bound away", "method closed", "program closed"])
def test_a_state_can_go(program: Program, end: str) -> None:
    """Nothing keeps the memory of a state that is no longer bound, whichever methods exist."""
    step = program.load_method("step", GRAPH)
    step.execute(inputs_of(2, 1))
    state = program.new_state()
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in state.values()]
    program.bind_state(state)
    whole = program.load_method("whole")
    for _ in range(3):
        step.execute(inputs_of(2, 1))
    del state
    if end != "program closed":
        program.bind_state()
        step.execute(inputs_of(2, 1))
    if end == "method closed":
        whole.close()
    if end == "program closed":
        program.close()
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_a_closed_program_has_no_state(program: Program) -> None:
    program.load_method("step")
    program.close()
    with pytest.raises(ClosedError):
        program.new_state()
    with pytest.raises(ClosedError):
        program.bind_state()


def test_a_state_that_changes_with_every_call(pair: Pair) -> None:
    states = [(pair.program.new_state(), pair.plain_program.new_state()) for _ in range(2)]
    for index in range(MAX_CHANGES + 4):
        pair.program.bind_state(states[index % 2][0])
        pair.plain_program.bind_state(states[index % 2][1])
        pair.step()
    stats = pair.method.stats
    assert (stats.next_phase, stats.captures, stats.replays) == ("disabled", 1, MAX_CHANGES)
    assert stats.plans[-1].given_up == f"constants or buffers were bound anew on more than {MAX_CHANGES} calls in a row"
    assert stats.fallback_reason == stats.plans[-1].given_up


def test_changes_that_are_not_in_a_row(pair: Pair) -> None:
    state, plain = pair.program.new_state(), pair.plain_program.new_state()
    for index in range(3 * MAX_CHANGES):
        pair.program.bind_state(state if index % 2 else None)
        pair.plain_program.bind_state(plain if index % 2 else None)
        pair.step()
        pair.step()
    assert pair.method.stats.next_phase == "replay"


def test_an_update_and_the_capture_after_it_that_fail(chain_artifact: Path) -> None:
    """The next call after the two failures makes the plan."""
    segments: set[int] = set()
    with refusing(segments):
        pair = Pair(chain_artifact)
        for _ in range(3):
            pair.step()
        segments.add(0)
        pair.change_state()

        def raising(self: MethodCode, index: int, values: dict[int, Tensor]) -> None:
            raise RuntimeError("no more memory for threads")

        with mock.patch.object(MethodCode, "run_segment", raising), pytest.raises(StepError, match="no more memory"):
            pair.method.execute(inputs_of(3, 1))
        pair.step()
        assert pair.method.stats.next_phase == "replay"
        pair.close()


def test_an_update_that_is_interrupted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the interruption some graphs have the new addresses, so the plan belongs to neither state."""
    for _ in range(3):
        pair.step()
    machine: Any = pair.method._state_machine
    (piece,) = machine._last.plan._pieces
    update = piece.graph.update

    def interrupted(work: Work) -> bool:
        update(work)
        raise KeyboardInterrupt

    state = pair.program.new_state()
    pair.program.bind_state(state)
    with monkeypatch.context() as patch:
        patch.setattr(piece.graph, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.method.execute(inputs_of(3, 1))
    pair.program.bind_state()
    for _ in range(3):
        pair.step()


def test_an_update_that_cannot_be_recorded(chain_artifact: Path) -> None:
    """The plan is captured again, and the segment is called."""
    segments: set[int] = set()
    with refusing(segments):
        pair = Pair(chain_artifact)
        for _ in range(3):
            pair.step()
        segments.add(2)
        pair.change_state()
        for _ in range(3):
            pair.step()
        (plan,) = pair.method.stats.plans
        assert (plan.pieces, plan.captured, plan.called) == (2, 1, 1)
        pair.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda state: state.pop("layers.0.state"),
            r"the state lacks the buffer 'layers.0.state': make it with `new_state`",
        ),
        (lambda state: state.update(more=torch.zeros(1)), "the state has, and the program does not, the buffer 'more'"),
        (
            lambda state: state.update({"layers.0.state": torch.zeros(5)}),
            r"another layout: shape \[5\], expected \[4\]",
        ),
        (
            lambda state: state.update({"layers.0.state": torch.zeros(8)[::2]}),
            r"'layers.0.state' has another layout: strides \[2\], expected \[1\]",
        ),
        (
            lambda state: state.update({"layers.0.state": torch.zeros(4, dtype=torch.float64)}),
            "dtype torch.float64, expected torch.float32",
        ),
        (lambda state: state.update({"layers.0.state": torch.zeros(4, device="meta")}), "device meta, expected c"),
    ],
)
def test_a_state_of_another_layout(pair: Pair, spoil: Callable[[dict[str, Tensor]], object], message: str) -> None:
    pair.step()
    state = pair.program.new_state()
    spoil(state)
    with pytest.raises(InputError, match=message):
        pair.program.bind_state(state)
    pair.step()


def test_a_state_at_an_odd_address(pair: Pair) -> None:
    state = pair.program.new_state()
    device = pair.program.device
    state["layers.0.state"] = torch.zeros(5, device=device)[1:]
    with pytest.raises(InputError, match="its address is not a multiple of 16"):
        pair.program.bind_state(state)
