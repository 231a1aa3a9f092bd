"""warmup -> capture -> replay, as a table, over real compiled code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate import ClosedError, InputError, Method, Program, load_program
from ostinato.delegate.graphs.recorders import HostGraphRecorder
from ostinato.delegate.graphs.state_machine import StateMachine

from ...modules import MAX_SEQ_LEN, VOCAB
from ..helpers import (
    GRAPH,
    STATIC,
    FunctionCode,
    bring_to,
    counters,
    eager_answers,
    same_state,
    state,
    step_inputs,
    steps_made,
)

PHASES = ("disabled", "warmup", "capture", "replay")

# (phase, warmup_steps, event, next phase, counters that move). With warmup_steps 2 the first call stays in warmup.
TABLE = [
    ("disabled", 1, "call", "disabled", {"runs": 1}),
    ("disabled", 1, "failing capture", "disabled", {"runs": 1}),
    ("disabled", 1, "mismatch", "disabled", {}),
    ("warmup", 1, "call", "capture", {"warmups": 1}),
    ("warmup", 2, "call", "warmup", {"warmups": 1}),
    ("warmup", 1, "failing capture", "capture", {"warmups": 1}),
    ("warmup", 1, "mismatch", "warmup", {}),
    ("capture", 1, "call", "replay", {"captures": 1}),
    ("capture", 1, "failing capture", "disabled", {"runs": 1, "fallbacks": 1}),
    ("capture", 1, "mismatch", "capture", {}),
    ("replay", 1, "call", "replay", {"replays": 1}),
    ("replay", 1, "failing capture", "replay", {"replays": 1}),
    ("replay", 1, "mismatch", "replay", {}),
]


def fail_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: object) -> NoReturn:
        raise RuntimeError("injected")

    monkeypatch.setattr(HostGraphRecorder, "record", record)


def decode_of(program: Program, phase: str, warmup_steps: int) -> Method:
    options = {} if phase == "disabled" else GRAPH
    return program.load_method("decode", {**options, "cuda_graph_warmup_steps": warmup_steps})


@pytest.fixture
def program(recurrent_artifact: Path) -> Iterator[Program]:
    with load_program(recurrent_artifact) as loaded:
        yield loaded


@pytest.mark.parametrize(("phase", "warmup_steps", "event", "next_phase", "moved"), TABLE)
def test_table(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    warmup_steps: int,
    event: str,
    next_phase: str,
    moved: dict[str, int],
) -> None:
    method = decode_of(program, phase, warmup_steps)
    made = bring_to(method, phase)
    before, counted = state(program), counters(method)
    if event == "failing capture":
        fail_captures(monkeypatch)
    if event == "mismatch":
        with pytest.raises(InputError, match="input_pos"):
            method.execute((torch.tensor([[1]]), torch.tensor([0, 1])))
        assert same_state(before, state(program))
    else:
        (logits,) = method.execute(step_inputs(made))
        assert steps_made(program) == made + 1
        torch.testing.assert_close(logits, eager_answers(made + 1)[-1])
    assert method.stats.next_phase == next_phase
    assert {key: value - counted[key] for key, value in counters(method).items() if value != counted[key]} == moved


@pytest.mark.parametrize("phase", PHASES)
def test_close_in_each_phase(program: Program, phase: str) -> None:
    method = decode_of(program, phase, 1)
    made = bring_to(method, phase)
    before = state(program)
    method.close()
    method.close()
    with pytest.raises(ClosedError, match="decode"):
        method.execute(step_inputs(made))
    assert same_state(before, state(program))
    # The state belongs to the program: another handle goes on where this one stopped.
    (logits,) = program.load_method("decode").execute(step_inputs(made))
    torch.testing.assert_close(logits, eager_answers(made + 1)[-1])


@pytest.mark.parametrize("warmup_steps", [1, 3, 5])
def test_phases_in_order_and_state_moves_once_a_call(program: Program, warmup_steps: int) -> None:
    method = decode_of(program, "warmup", warmup_steps)
    expected = ["warmup"] * warmup_steps + ["capture"] + ["replay"] * 4
    for index, (phase, answer) in enumerate(zip(expected, eager_answers(len(expected)), strict=True)):
        assert method.stats.next_phase == phase
        (logits,) = method.execute(step_inputs(index))
        assert steps_made(program) == index + 1
        torch.testing.assert_close(logits, answer)
    assert counters(method) == {"runs": 0, "warmups": warmup_steps, "captures": 1, "replays": 4, "fallbacks": 0}


def test_failed_capture_answers_and_goes_on_without_a_graph(
    recurrent_artifact: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_captures(monkeypatch)
    method = decode_of(program, "warmup", 2)
    with load_program(recurrent_artifact) as reference_program:
        reference = reference_program.load_method("decode")
        for index in range(8):
            (logits,), (expected,) = method.execute(step_inputs(index)), reference.execute(step_inputs(index))
            assert torch.equal(logits, expected)
            assert same_state(state(program), state(reference_program))
    assert method.stats.next_phase == "disabled"
    assert method.stats.fallback_reason is not None
    assert "injected" in method.stats.fallback_reason
    assert counters(method) == {"runs": 6, "warmups": 2, "captures": 0, "replays": 0, "fallbacks": 1}


def test_one_methods_failed_capture_leaves_another_its_graph(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_captures(patch)
        first = decode_of(program, "warmup", 1)
        for index in range(2):
            first.execute(step_inputs(index))
    second = decode_of(program, "warmup", 1)
    answers = eager_answers(6)
    for index in range(2, 6):
        torch.testing.assert_close(second.execute(step_inputs(index))[0], answers[index])
    assert (first.stats.next_phase, second.stats.next_phase) == ("disabled", "replay")


def test_interrupted_capture_is_made_by_the_next_call(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    method = decode_of(program, "capture", 1)
    bring_to(method, "capture")
    before = state(program)

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostGraphRecorder, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            method.execute(step_inputs(1))
    assert same_state(before, state(program))
    torch.testing.assert_close(method.execute(step_inputs(1))[0], eager_answers(2)[1])
    assert method.stats.next_phase == "replay"


def test_replay_is_bit_equal_to_disabled(recurrent_artifact: Path, program: Program) -> None:
    method = decode_of(program, "warmup", 3)
    with load_program(recurrent_artifact) as other:
        disabled = other.load_method("decode")
        for index in range(2 * MAX_SEQ_LEN + 4):
            (logits,), (expected,) = method.execute(step_inputs(index)), disabled.execute(step_inputs(index))
            assert torch.equal(logits, expected), f"step {index}"
            assert same_state(state(program), state(other)), f"step {index}"
    assert counters(method)["replays"] == 2 * MAX_SEQ_LEN


def test_replay_is_bit_equal_to_disabled_on_a_language_model(capitals_artifact: Path) -> None:
    options: dict[str, str | int] = {**GRAPH, "cuda_graph_warmup_steps": 1}
    with load_program(capitals_artifact) as program, load_program(capitals_artifact) as other:
        method, disabled = program.load_method("decode", options), other.load_method("decode")
        token = 5
        for index in range(66):
            inputs = torch.tensor([[token]]), torch.tensor([index]), torch.tensor([0])
            (logits,), (expected,) = method.execute(inputs), disabled.execute(inputs)
            assert torch.equal(logits, expected), f"step {index}"
            token = int(logits.argmax())
        assert counters(method)["replays"] == 64
        assert same_state(state(program), state(other))


def test_outputs_belong_to_the_caller(program: Program) -> None:
    method = decode_of(program, "warmup", 1)
    kept = [method.execute(step_inputs(index))[0] for index in range(6)]
    for logits, answer in zip(kept, eager_answers(6), strict=True):
        torch.testing.assert_close(logits, answer)
    assert len({logits.data_ptr() for logits in kept}) == 6
    kept[-1].zero_()
    torch.testing.assert_close(method.execute(step_inputs(6))[0], eager_answers(7)[-1])


def test_skip_copy_hands_out_the_static_buffer(program: Program) -> None:
    method = program.load_method("decode", {**GRAPH, **STATIC, "cuda_graph_warmup_steps": 1})
    answers = eager_answers(6)
    method.execute(step_inputs(0))
    (captured,) = method.execute(step_inputs(1))
    torch.testing.assert_close(captured, answers[1])
    for index in range(2, 6):
        (logits,) = method.execute(step_inputs(index))
        assert logits.data_ptr() == captured.data_ptr()
        torch.testing.assert_close(captured, answers[index])


def test_static_inputs_are_read_in_place(program: Program) -> None:
    method = decode_of(program, "warmup", 1)
    answers = eager_answers(6)
    assert method.static_inputs == ()
    for index in range(2):
        method.execute(step_inputs(index))
    static: tuple[Tensor, ...] = method.static_inputs
    assert [list(tensor.shape) for tensor in static] == [[1, 1], [1]]
    for index in range(2, 6):
        for buffer, wanted in zip(static, step_inputs(index), strict=True):
            buffer.copy_(wanted)
        # One input is the static buffer, the other one is copied.
        inputs = (static[0], step_inputs(index)[1]) if index == 3 else static
        torch.testing.assert_close(method.execute(inputs)[0], answers[index])
    torch.testing.assert_close(method.execute(step_inputs(6))[0], eager_answers(7)[6])
    static[1].fill_(MAX_SEQ_LEN)
    with pytest.raises(InputError, match="input_pos"):
        method.execute(static)
    method.close()
    assert method.static_inputs == ()


def test_inputs_stay_the_callers(program: Program) -> None:
    """The graph does not see what the caller does to a tensor after the call."""
    method = decode_of(program, "warmup", 1)
    tokens, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for index, answer in enumerate(eager_answers(6)):
        for mine, wanted in zip((tokens, position), step_inputs(index), strict=True):
            mine.copy_(wanted)
        (logits,) = method.execute((tokens, position))
        assert (tokens.item(), position.item()) == tuple(int(t) for t in step_inputs(index))
        tokens.fill_(VOCAB - 1)
        position.fill_(0)
        torch.testing.assert_close(logits, answer)


@pytest.mark.parametrize("graph", [False, True])
def test_two_threads(program: Program, graph: bool) -> None:
    method = decode_of(program, "warmup" if graph else "disabled", 3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for index in range(200):
                method.execute(step_inputs(index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert steps_made(program) == 400
    expected = {"warmups": 3, "captures": 1, "replays": 396} if graph else {"runs": 400}
    assert {key: value for key, value in counters(method).items() if value} == expected


class Walk(nn.Module):
    """`forward() -> next token [1]`: takes no inputs, because its token and its position are state."""

    token: Tensor
    position: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("token", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.tensor([4, 2, 0, 1, 3]))

    def forward(self) -> Tensor:
        token = self.table[(self.token + self.position) % 5]
        self.token.copy_(token)
        self.position.add_(1)
        return token + 0


def test_a_method_without_inputs(exported: Callable[..., Path]) -> None:
    from ostinato.export import export_program

    artifact = exported("walk", lambda path: export_program({"decode": (Walk(), (), None)}, path))
    module = Walk()
    with load_program(artifact) as program:
        method = program.load_method("decode", {**GRAPH, "cuda_graph_warmup_steps": 2})
        assert method.inputs == ()
        for index in range(12):
            assert method.execute(())[0].tolist() == module().tolist(), f"step {index}"
        assert program.mutable_buffers["position"].item() == 12
        assert counters(method) == {"runs": 0, "warmups": 2, "captures": 1, "replays": 9, "fallbacks": 0}
        with pytest.raises(InputError, match="takes a sequence of 0 inputs"):
            method.execute((torch.zeros(1),))


def accumulate(total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    total.add_(inputs[0])
    return [total * 2]


def test_alone_replays_over_static_buffers() -> None:
    """`StateMachine` over a plain function: a replay refuses wrong inputs, and launches read the static buffers."""
    total = torch.zeros(2)
    seen: list[int] = []

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        seen.append(inputs[0].data_ptr())
        return accumulate(total, inputs)

    machine = StateMachine(FunctionCode(run), HostGraphRecorder(), torch.device("cpu"), ["x"], warmup_steps=1)
    assert (machine.stats.next_phase, machine.has_static_outputs) == ("warmup", False)
    for index in range(4):
        (out,) = machine([torch.full((2,), float(index))])
        assert out.tolist() == [2.0 * sum(range(index + 1))] * 2
    assert machine.has_static_outputs
    assert len(set(seen[1:])) == 1
    for bad, what in (
        (torch.zeros(2, dtype=torch.float64), "got torch.float64"),
        (torch.zeros(2, device="meta"), "is on meta"),
    ):
        with pytest.raises(InputError, match=f"'x'.*{what}"):
            machine([bad])
    assert total.tolist() == [6.0, 6.0]
    assert (machine.stats.next_phase, machine.stats.replays) == ("replay", 2)
    machine.release()
    assert not machine.has_static_outputs


def test_alone_copies_nothing_into_itself() -> None:
    """A caller that fills the static buffers and passes them gets the same step, without a copy."""
    total = torch.zeros(2)
    code = FunctionCode(lambda inputs: accumulate(total, inputs))
    machine = StateMachine(code, HostGraphRecorder(), torch.device("cpu"), ["x"], warmup_steps=1)
    assert list(machine.static_inputs) == []
    for _ in range(2):
        machine([torch.ones(2)])
    (static,) = machine.static_inputs
    version = static._version
    assert machine([static])[0].tolist() == [6.0, 6.0]
    assert static._version == version
    static.fill_(5.0)
    assert machine([static])[0].tolist() == [16.0, 16.0]
    machine.release()
    assert list(machine.static_inputs) == []


def test_alone_without_inputs() -> None:
    """All that the step reads is state. It changes once per call, in every phase."""
    position = torch.zeros(1)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        assert len(inputs) == 0
        position.add_(1)
        return [position * 10]

    machine = StateMachine(FunctionCode(run, 0), HostGraphRecorder(), torch.device("cpu"), [], warmup_steps=2)
    assert [machine([])[0].item() for _ in range(6)] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    stats = machine.stats
    assert (stats.warmups, stats.captures, stats.replays) == (2, 1, 3)
    # There is no CUDA graph to look into.
    plan = stats.plans[-1]
    assert (plan.graph_nodes, plan.graph_kernels, plan.early_kernels, plan.graph_note) == (None, None, None, None)


def test_without_recorder_stays_disabled() -> None:
    total = torch.zeros(1)
    code = FunctionCode(lambda inputs: accumulate(total, inputs))
    machine = StateMachine(code, None, torch.device("cpu"), ["x"], warmup_steps=1)
    for _ in range(3):
        machine([torch.ones(1)])
    assert (machine.stats.next_phase, machine.stats.runs, total.item()) == ("disabled", 3, 3.0)
