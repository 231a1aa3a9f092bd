"""Plans: one for each shape, with pieces that are captured or called; compared with a program without graphs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from ostinato.delegate import StepError, load_program
from ostinato.delegate.code.side_stream import Code

from ..chain import ON_HOST, WIDTH
from ..pair import GRAPH, NOT_RECORDED, SEGMENTS, Pair, failing, inputs_of, refusing

# The number of segments of the longest method that `test_random_sequences` runs.
MAX_SEGMENTS = 7


def test_each_shape_has_a_plan(pair: Pair) -> None:
    for _ in range(4):
        for length in (2, 5, 8):
            pair.step(length)
    stats = pair.method.stats
    assert (stats.warmups, stats.captures, stats.replays, stats.fallbacks) == (3, 3, 6, 0)
    assert [plan.shapes for plan in stats.plans] == [[[length, WIDTH], [1]] for length in (2, 5, 8)]
    for plan in stats.plans:
        assert (plan.pieces, plan.captured, plan.called, plan.launches) == (1, 1, 0, 3)
        assert (plan.updates, plan.instantiations, plan.given_up) == (0, 1, None)
        assert plan.record_us > 0


def test_the_plan_used_last_stays(chain_artifact: Path) -> None:
    pair = Pair(chain_artifact, cuda_graph_max_plans=2)
    for length in (2, 3, 4):
        for _ in range(3):
            pair.step(length)
    stats = pair.method.stats
    assert ([plan.shapes[0][0] for plan in stats.plans], stats.dropped) == ([3, 4], 1)
    pair.step(3)
    # A shape that comes only once replaces no plan.
    for length in (5, 6, 7, 8):
        pair.step(length)
    assert ([plan.shapes[0][0] for plan in pair.method.stats.plans], pair.method.stats.dropped) == ([4, 3], 1)
    for _ in range(2):
        pair.step(5)
    assert ([plan.shapes[0][0] for plan in pair.method.stats.plans], pair.method.stats.dropped) == ([3, 5], 2)
    # Its plan is gone, so the shape starts again.
    pair.step(4)
    assert pair.method.stats.next_phase == "capture"
    pair.close()


@pytest.mark.parametrize(
    ("segments", "pieces"),
    [
        ({0}, "call graph"),
        ({1}, "graph call graph"),
        ({2}, "graph call"),
        ({0, 2}, "call graph call"),
        ({0, 1}, "call call graph"),
    ],
    ids=str,
)
def test_a_segment_that_cannot_be_recorded_is_called(chain_artifact: Path, segments: set[int], pieces: str) -> None:
    with refusing(segments):
        pair = Pair(chain_artifact)
        for _ in range(6):
            pair.step()
        stats = pair.method.stats
        (plan,) = stats.plans
        assert (stats.next_phase, stats.captures, stats.replays, stats.fallbacks) == ("replay", 1, 4, len(segments))
        assert plan.pieces == len(pieces.split()) and plan.called == pieces.count("call")
        assert plan.captured == pieces.count("graph")
        assert set(plan.called_because) == segments
        assert stats.fallback_reason in plan.called_because.values()
        assert re.search(NOT_RECORDED, stats.fallback_reason or "")
        pair.close()


def test_a_link_that_is_not_captured(chain_artifact: Path) -> None:
    """The program itself says that the link is not captured: this is no failure."""
    options = {**GRAPH, "enable_cuda_graph_for_method": "split"}
    with load_program(chain_artifact) as program, load_program(chain_artifact) as plain_program:
        split, plain = program.load_method("split", options), plain_program.load_method("step")
        for index in range(6):
            for length in (2, 7):
                inputs = inputs_of(length, index)
                found, expected = split.execute(inputs), plain.execute(inputs)
                assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        stats = split.stats
        assert (stats.next_phase, stats.captures, stats.replays, stats.fallbacks) == ("replay", 2, 8, 0)
        for plan in stats.plans:
            assert (plan.pieces, plan.captured, plan.called, plan.called_because) == (3, 2, 1, {})


def test_where_called_pieces_run(chain_artifact: Path) -> None:
    with load_program(chain_artifact) as program:
        split = program.load_method("split", {**GRAPH, "enable_cuda_graph_for_method": "split"})
        taken: list[int] = []

        def call(run: Code, inputs: Sequence[Tensor]) -> list[Tensor]:
            taken.append(len(inputs))
            return run(inputs)

        split._state_machine._call = call
        for index in range(4):
            split.execute(inputs_of(3, index))
        # The middle link's number of inputs, in the capture and in two replays.
        assert taken == [2, 2, 2]


def test_where_nothing_can_be_recorded_there_is_no_graph(chain_artifact: Path) -> None:
    with refusing(set(range(SEGMENTS))):
        pair = Pair(chain_artifact)
        for _ in range(5):
            pair.step()
        stats = pair.method.stats
        assert (stats.next_phase, stats.captures, stats.runs, stats.fallbacks) == ("disabled", 0, 4, SEGMENTS)
        assert re.search(NOT_RECORDED, stats.plans[-1].given_up or "")
        pair.close()


def test_a_called_segment_that_raises(chain_artifact: Path) -> None:
    with refusing({1}):
        pair = Pair(chain_artifact)
        for _ in range(4):
            pair.step()
        with (
            failing(1),
            pytest.raises(
                StepError, match=r"'step' failed with x \[3, 4\], seen \[1\]: RuntimeError: no more.*`Program.reset`"
            ),
        ):
            pair.method.execute(inputs_of(3, 1))
        pair.reset()
        pair.step()
        assert pair.method.stats.next_phase == "replay"
        pair.close()


@pytest.mark.parametrize("order", ["method first", "program first", "nobody closes"])
def test_ends_in_any_order(chain_artifact: Path, order: str) -> None:
    """A process that ends with graphs, also after another state was bound, ends well and prints nothing."""
    code = f"""
import sys, torch
from ostinato.delegate import load_program
program = load_program(sys.argv[1])
method = program.load_method("step", {GRAPH!r})
for length in (2, 3):
    for _ in range(3):
        method.execute((torch.zeros(length, {WIDTH}), torch.tensor([0])))
program.bind_state(program.new_state())
method.execute((torch.zeros(3, {WIDTH}), torch.tensor([0])))
assert method.stats.replays == 3
order = {order!r}
if order == "method first":
    method.close()
    program.close()
elif order == "program first":
    program.close()
    method.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(chain_artifact)], capture_output=True, text=True, timeout=120
    )
    complaints = re.sub(r"\[W.*CUDAMallocAsyncAllocator.*(\n.*)*?freeAsync\)\n", "", done.stderr)
    assert (done.returncode, complaints) == (0, "")


class Plans(RuleBasedStateMachine):
    """Random shapes, states, failures and closings, beside a program that has no graphs."""

    states = Bundle("states")
    artifact: Path
    on_host: frozenset[int]

    @initialize(max_plans=st.integers(1, 4), warmups=st.integers(1, 3))
    def load(self, max_plans: int, warmups: int) -> None:
        self.refused: set[int] = set()
        self.options: dict[str, bool | int | str] = {
            "cuda_graph_max_plans": max_plans,
            "cuda_graph_warmup_steps": warmups,
        }
        self.patches = refusing(self.refused)
        self.patches.__enter__()
        self.pair = Pair(self.artifact, **self.options)
        self.calls = 0

    @rule(length=st.integers(2, 8), times=st.integers(1, 4))
    def step(self, length: int, times: int) -> None:
        for _ in range(times):
            self.pair.step(length)
            self.calls += 1

    @rule(target=states)
    def make_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.pair.program.new_state(), self.pair.plain_program.new_state()

    @rule(state=states)
    def bind(self, state: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        self.pair.program.bind_state(state[0])
        self.pair.plain_program.bind_state(state[1])

    @rule()
    def bind_own(self) -> None:
        self.pair.program.bind_state()
        self.pair.plain_program.bind_state()

    @rule(segments=st.sets(st.integers(0, MAX_SEGMENTS - 1)))
    def refuse(self, segments: set[int]) -> None:
        self.refused.clear()
        self.refused.update(segments)

    @precondition(lambda self: self.on_host)
    @rule(length=st.integers(2, 8), which=st.integers(0, MAX_SEGMENTS - 1))
    def fail_on_the_host(self, length: int, which: int) -> None:
        segment = sorted(self.on_host)[which % len(self.on_host)]
        with failing(segment), pytest.raises(StepError, match=r"no more threads.*`Program.reset`"):
            self.pair.method.execute(inputs_of(length, 1))
        self.pair.reset()

    @rule()
    def reset(self) -> None:
        self.pair.reset()

    @rule()
    def load_again(self) -> None:
        """Another handle goes on where the closed one stopped."""
        self.pair.method.close()
        self.pair.method = self.pair.program.load_method("step", {**GRAPH, **self.options})
        self.calls = 0

    @invariant()
    def every_call_is_counted(self) -> None:
        if not hasattr(self, "pair"):
            return
        stats = self.pair.method.stats
        assert stats.runs + stats.warmups + stats.captures + stats.replays == self.calls
        assert sum(plan.given_up is None for plan in stats.plans) <= int(self.options["cuda_graph_max_plans"])
        for plan in stats.plans:
            assert plan.pieces == plan.captured + plan.called
            assert plan.called >= plan.on_host + len(plan.called_because)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()
            self.patches.__exit__(None, None, None)


@pytest.mark.parametrize("on_host", [frozenset(), ON_HOST], ids=["on the device", "partly on the host"])
def test_random_sequences(
    chain_artifact: Path, mixed_artifact: Path, device: torch.device, on_host: frozenset[int]
) -> None:
    if device.type == "cuda":
        pytest.skip("thousands of captures; the host makes the same plans")
    machine = type("PlansOf", (Plans,), {"artifact": mixed_artifact if on_host else chain_artifact, "on_host": on_host})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
