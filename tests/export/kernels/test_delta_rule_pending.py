"""Pending updates of recurrent states: when they are kept, when they are added, and what that does to precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.export.kernels.cuda import CudaKernels
from ostinato.export.kernels.delta_rule import prefill_triton, reference, rows_triton, step_triton
from ostinato.export.kernels.operands import PENDING_UPDATES, RecurrentState, RowIndex

from ...comparison import relative_error
from .delta_rule_cases import (
    BF16,
    F32,
    LIMITS,
    REFERENCE_LIMITS,
    Case,
    Rule,
    check,
    copied,
    counts,
    make,
    of_prompt,
    tensors,
    whole,
)
from .runs import DEVICE, SLOT, Run, same_bits

SHAPE = (16, 32, 128, 128) if DEVICE == "cuda" else (2, 4, 16, 32)
each_dtype = pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
prompt_rule = of_prompt(prefill_triton.gated_delta_rule)


def with_count(case: Case, count: int) -> Case:
    """The case with this many updates pending in slot SLOT, whose arguments are all numbers."""
    state = copied(case.state)
    assert state.keys is not None and state.updates is not None
    generator = torch.Generator().manual_seed(count)
    _, heads, key_dim, value_dim = state.stored.shape
    for target, scale in ((state.keys, 1.0), (state.updates, key_dim**-0.5)):
        values = torch.randn(target[SLOT].shape, generator=generator) * scale
        target[SLOT] = values.to(target)
        target[SLOT, :, count:PENDING_UPDATES] = torch.nan
    decays = state.updates[SLOT, :, -1]
    decays[:] = torch.nan
    decays[:, :count] = -torch.randn(heads, count, generator=generator).mul(2).exp().to(decays)
    decays[:, -(value_dim // 8) :] = count
    return replace(case, state=state)


@each_dtype
@pytest.mark.parametrize("count", range(PENDING_UPDATES + 1))
def test_a_row_beside_any_number_of_updates(count: int, dtype: torch.dtype) -> None:
    """A row among others is kept beside the state as long as there is room. Alone it is added, as runs and prompts are."""
    runs = {
        (Run(SLOT, 7), Run(0, 0)): rows_triton.delta_rows,
        (Run(SLOT, 7),): step_triton.delta_step,
        (Run(SLOT, 7, 3), Run(0, 0)): rows_triton.delta_rows,
        (Run(SLOT, 7, 20), Run(0, 0)): rows_triton.delta_rows,
    }
    for some, rule in runs.items():
        case = with_count(make(SHAPE, some, dtype), count)
        check(case, rule)
        before = copied(case.state)
        case.run_in_place(rule)
        kept = some[0].length == 1 and len(some) > 1 and count < PENDING_UPDATES
        assert counts(case.state)[SLOT] == (count + 1 if kept else 0)
        assert same_bits(case.state.stored[SLOT], before.stored[SLOT]) == kept
    case = with_count(make(SHAPE, [Run(SLOT, 7, 3)], dtype, gates=dtype), count)
    check(case, prompt_rule, LIMITS | {("state", dtype): 1e-4})
    case.run_in_place(prompt_rule)
    assert counts(case.state)[SLOT] == 0


@pytest.mark.parametrize(
    "rule", (rows_triton.delta_rows, step_triton.delta_step, prompt_rule), ids=("rows", "step", "prompt")
)
@pytest.mark.parametrize("length", (1, 3))
def test_a_new_sequence_leaves_a_whole_state(rule: Rule, length: int) -> None:
    """Whatever the slot's last session left there."""
    if rule is step_triton.delta_step and length > 1:
        pytest.skip("a step has one row")
    case = with_count(make((1, 2, 16, 16), [Run(SLOT, 0, length)], F32), 5)
    check(case, rule)
    case.run_in_place(rule)
    assert counts(case.state)[SLOT] == 0 and case.state.stored[SLOT].isfinite().all()


def test_the_reference_leaves_nothing_pending() -> None:
    case = with_count(make((2, 4, 16, 16), [Run(SLOT, 7), Run(0, 0)], F32, device="cpu"), 5)
    case.run_in_place(reference.delta_step)
    assert counts(case.state)[[SLOT, 0]].tolist() == [0, 0]


def test_states_without_room_for_updates() -> None:
    """They are for CPUs. The GPU's kernels say that they need the room."""
    state = RecurrentState.zeros(2, (1, 2), (16, 16), 0, BF16)
    assert state.keys is None and state.updates is None
    case = make((1, 2, 16, 16), [Run(SLOT, 7), Run(0, 0)], F32, pending=0)
    with pytest.raises(AssertionError, match="no room for pending updates"):
        case.run(rows_triton.delta_rows)


# (name of the rule, number of rows); "fork" copies the slot, and goes on with both.
Calls = Sequence[tuple[str, int]]
CONVERSATIONS: dict[str, Calls] = {
    "single rows": [("rows", 1)] * 19,
    "a prompt, then single rows": [("prompt", 21), *[("rows", 1)] * 9],
    "alone now and then": [("rows", 1), ("step", 1), *[("rows", 1)] * 3, ("step", 1), ("step", 1), *[("rows", 1)] * 2],
    "runs between": [
        ("rows", 3),
        *[("rows", 1)] * 4,
        ("rows", 2),
        *[("rows", 1)] * 2,
        ("rows", 19),
        *[("rows", 1)] * 3,
    ],
    "a prompt between": [*[("rows", 1)] * 5, ("prompt", 9), *[("rows", 1)] * 2, ("prompt", 1), ("rows", 1)],
    "a fork in the middle": [
        ("prompt", 5),
        *[("rows", 1)] * 4,
        ("fork", 0),
        *[("rows", 1)] * 6,
        ("step", 1),
        ("rows", 1),
    ],
    "a fork of what is full": [("rows", 1), *[("rows", 1)] * 7, ("fork", 0), *[("rows", 1)] * 2],
}
FORK = 6


@each_dtype
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(name: str, dtype: torch.dtype) -> None:
    """A session's calls together are one run from position 0. A fork's rows are those of its source, in the same call."""
    calls = CONVERSATIONS[name]
    length = sum(rows for _, rows in calls)
    case = make((1, 2, 32, 16), [Run(SLOT, 0, length)], dtype, gates=dtype)
    state, done = copied(case.state), 0
    found: list[Tensor] = []
    forked: list[Tensor] = []
    for rule, rows in calls:
        if rule == "fork":
            for value in tensors(state):
                value[FORK] = value[SLOT]
            forked = list(found)
            continue
        part = case.part(done, done + rows, state)
        done += rows
        if rule == "prompt":
            found.append(gated(part, part.run_in_place(prompt_rule)["o"]))
            assert not forked
        elif rule == "step":
            found.append(part.run_in_place(CudaKernels.delta_step)["out"])
            if forked:
                forked.append(at_slot(part, FORK).run_in_place(CudaKernels.delta_step)["out"])
        else:
            # Another session begins beside it, and the fork's rows stand behind.
            beside = joined(at_slot(part, 8, first=0), part, *[at_slot(part, FORK)] * bool(forked))
            out = beside.run_in_place(rows_triton.delta_rows)["out"].split(rows)
            found.append(out[1])
            if forked:
                forked.append(out[2])
    exact = case.exact()
    for slot, outputs in ((SLOT, found), (FORK, forked)):
        if outputs:
            assert relative_error(torch.cat(outputs), exact["out"]) < LIMITS["out", dtype]
            assert relative_error(whole(state)[slot], exact["state"][SLOT]) < 2 * LIMITS["state", dtype]


def gated(case: Case, o: Tensor) -> Tensor:
    """A prompt's outputs with the norm's weight and gate, as `out` of a step."""
    z = case.mixed[:, -o[0].numel() :].float().unflatten(1, o.shape[1:])
    return (o.float() * case.norm_weight * torch.nn.functional.silu(z)).to(o.dtype)


def at_slot(case: Case, slot: int, first: int | None = None) -> Case:
    """The same rows for another slot, from position `first` on."""
    positions = case.index.positions
    if first is not None:
        positions = torch.arange(first, first + len(positions), device=positions.device)
    return replace(case, index=case.index._replace(slots=torch.full_like(case.index.slots, slot), positions=positions))


def joined(*cases: Case) -> Case:
    """One call with the rows of all, which have the same state."""
    index = RowIndex(*(torch.cat(parts) for parts in zip(*(case.index for case in cases), strict=True)))
    mixed, gates = (torch.cat([getattr(case, name) for case in cases]) for name in ("mixed", "gates"))
    return replace(cases[0], mixed=mixed, gates=gates, index=index)


def in_bfloat16(case: Case) -> Case:
    """The case with its stored matrices in bfloat16."""
    return replace(case, state=replace(case.state, stored=case.state.stored.bfloat16()))


# A stored matrix is off by up to 2^-9 of each of its elements once it is written.
ROUNDED = {("state", F32): 2e-3, ("state", BF16): 2e-3}


@each_dtype
def test_states_in_bfloat16(dtype: torch.dtype) -> None:
    """States in bfloat16 are computed with in float32, and rounded where they are written. A single row, alone too, leaves
    its update pending."""
    several = [(Run(SLOT, 7), Run(0, 0)), (Run(SLOT, 7, 3), Run(0, 0)), (Run(SLOT, 7, 20), Run(0, 0))]
    for some in (*several, (Run(SLOT, 7),)):
        for rule, device, limits in (
            (CudaKernels.delta_step, DEVICE, LIMITS),
            (reference.delta_step, "cpu", REFERENCE_LIMITS),
        ):
            case = in_bfloat16(with_count(make(SHAPE, some, dtype, device=device), 4))
            check(case, rule, limits | ROUNDED)
            before = copied(case.state)
            case.run_in_place(rule)
            kept = rule is CudaKernels.delta_step and some[0].length == 1
            assert counts(case.state)[SLOT] == (5 if kept else 0)
            assert same_bits(case.state.stored[SLOT], before.stored[SLOT]) == kept
    case = in_bfloat16(with_count(make(SHAPE, [Run(SLOT, 7, 3)], dtype, gates=dtype), 4))
    check(case, prompt_rule, LIMITS | ROUNDED)


# The interpreter takes 30 ms for a step.
STEPS = 10_000 if DEVICE == "cuda" else 150


def conversations(case: Case) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Take STEPS steps of two sessions, once with updates that are kept pending ("pending"), once by the reference, which
    writes the state in each step ("written").

    Returns:
        (outputs and states of both; the exact ones).
    """
    pending, written = copied(case.state), copied(case.state)
    # Where both begin with the same matrix.
    written.stored.copy_(whole(written))
    for state in (written, pending):
        assert state.updates is not None
        state.updates[[SLOT, 0], :, -1, -2:] = 0
    pending.stored.copy_(written.stored)
    outputs: dict[str, list[Tensor]] = {"pending": [], "written": []}
    for step in range(STEPS):
        rows = joined(case.part(step, step + 1, pending), case.part(STEPS + step, STEPS + step + 1, pending))
        outputs["pending"].append(rows_triton.delta_rows(**vars(rows))[0])
        outputs["written"].append(reference.delta_step(**vars(rows) | {"state": written})[0])
    exact = case.exact()
    found = {
        name: {"out": torch.stack(outputs[name]), "state": whole(state)[[SLOT, 0]]}
        for name, state in (("pending", pending), ("written", written))
    }
    wanted = {"out": exact["out"].view(2, STEPS, -1).transpose(0, 1), "state": exact["state"][[SLOT, 0]]}
    return found, wanted


def test_long_conversations_are_as_precise_as_states_written_in_each_step() -> None:
    """Held to float64, over steps with slow, fast and very fast decays. The state that is written is the reference's."""
    case = make((1, 2, 16, 16), [Run(SLOT, 1, STEPS), Run(0, 1, STEPS)], F32)
    case.gates[::7, 2:] = 50
    found, wanted = conversations(case)
    for result, exact in wanted.items():
        pending, written = (relative_error(found[name][result], exact) for name in ("pending", "written"))
        assert pending < 2 * written + 1e-7 and pending < LIMITS[result, F32]


def test_long_conversations_in_bfloat16() -> None:
    """The errors of rounding do not add up without end: a step reads what it is about to write anew. Written in every eighth
    step, a state is three times as precise as written in each."""
    found, wanted = conversations(in_bfloat16(make((1, 2, 16, 16), [Run(SLOT, 1, STEPS), Run(0, 1, STEPS)], F32)))
    pending, written = (relative_error(found[name]["out"], wanted["out"]) for name in ("pending", "written"))
    assert pending < 4e-3 and pending < written / 2
