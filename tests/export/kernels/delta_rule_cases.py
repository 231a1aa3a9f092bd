"""What every form of the gated delta rule is held to: its definition in float64, over states that are NaN where no token
needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.delta_rule.reference import whole_states
from ostinato.export.kernels.operands import PENDING_UPDATES, Decay, RecurrentState, RowIndex, runs_of

from .runs import DEVICE, SLOT, SLOTS, Run, real_rows, rows_index, same_bits

F32, BF16 = torch.float32, torch.bfloat16
# Key heads, heads, K, V.
Shape = tuple[int, int, int, int]
# `delta_step`, or `gated_delta_rule` by way of `of_prompt`.
Rule = Callable[..., Any]
# Relative errors in the Frobenius norm, by results and the dtype of outputs. Squares and states are float32.
Limits = dict[tuple[str, torch.dtype], float]
LIMITS: Limits = {(name, dtype): 1e-5 for name in ("o", "out", "squares", "state") for dtype in (F32, BF16)} | {
    ("o", BF16): 4e-3,
    ("out", BF16): 4e-3,
}
# Those of the reference, whose outputs are rounded before their squares are added up.
REFERENCE_LIMITS = LIMITS | {("squares", BF16): 4e-3}


@dataclass(frozen=True)
class Case:
    """Arguments of `delta_step`, in its order."""

    mixed: Tensor
    gates: Tensor
    decay: Decay
    state: RecurrentState
    index: RowIndex
    norm_weight: Tensor
    key_heads: int

    def run(self, rule: Rule) -> dict[str, Tensor]:
        """Return results by their names in `exact`. The case can be used again."""
        return replace(self, state=copied(self.state)).run_in_place(rule)

    def run_in_place(self, rule: Rule) -> dict[str, Tensor]:
        """`run`, which writes the case's state. No state of a slot without rows is written."""
        rows, (heads, _, value_dim) = len(self.mixed), self.state.stored.shape[1:]
        before = copied(self.state)
        found = rule(**vars(self))
        others = [slot for slot in range(SLOTS) if slot not in self.index.slots]
        assert all(same_bits(x[others], y[others]) for x, y in zip(tensors(self.state), tensors(before), strict=True))
        state = whole(self.state)
        if isinstance(found, Tensor):
            assert found.dtype == self.mixed.dtype and found.shape == (rows, heads, value_dim)
            return {"o": found, "state": state}
        out, squares = found
        assert out.dtype == self.mixed.dtype and out.shape == (rows, heads * value_dim)
        assert squares.dtype == F32 and squares.dim() == 2 and len(squares) == rows * heads
        return {"out": out.view(rows, heads, value_dim), "squares": squares.sum(1).view(rows, heads), "state": state}

    def exact(self) -> dict[str, Tensor]:
        """Return the definition in float64. Rows of padding are NaN.

        Returns:
            o: [rows, H, V], the outputs of a prompt.
            out: [rows, H, V], o times the norm's weight and gate.
            squares: [rows, H], sums of o^2.
            state: [slots, H, K, V], after the call.
        """
        heads, key_dim, value_dim = self.state.stored.shape[1:]
        widths = 2 * [self.key_heads * key_dim] + 2 * [heads * value_dim]
        q, k, v, z = self.mixed.double().split(widths, dim=1)
        q, k = (
            normalized(x.unflatten(1, (-1, key_dim))).repeat_interleave(heads // self.key_heads, dim=1) for x in (q, k)
        )
        v, z = v.unflatten(1, (heads, -1)), z.unflatten(1, (heads, -1))
        b, a = self.gates.double().chunk(2, dim=1)
        g = -self.decay.a_log.double().exp() * F.softplus(a + self.decay.dt_bias.double())
        q, k, values, g, beta = (x.transpose(0, 1) for x in (q * key_dim**-0.5, k, v, g, b.sigmoid()))
        o, state = torch.full_like(v, torch.nan), whole(self.state, torch.float64)
        for slot, rows in runs_of(self.index.slots):
            if self.index.positions[rows.start] == 0:
                state[slot] = 0
            outputs, state[slot] = delta_rule(
                q[:, rows], k[:, rows], values[:, rows], g[:, rows], beta[:, rows], state[slot]
            )
            o[rows] = outputs.transpose(0, 1)
        out = o * self.norm_weight.double() * F.silu(z)
        return {"o": o, "out": out, "squares": o.square().sum(-1), "state": state}

    def part(self, begin: int, end: int, state: RecurrentState) -> Case:
        """Return some of the rows, after another state."""
        index = RowIndex(*(values[begin:end] for values in self.index))
        return replace(self, mixed=self.mixed[begin:end], gates=self.gates[begin:end], index=index, state=state)


def tensors(state: RecurrentState) -> list[Tensor]:
    return [value for value in vars(state).values() if value is not None]


def copied(state: RecurrentState) -> RecurrentState:
    return RecurrentState(*(value.clone() for value in tensors(state)))


def whole(state: RecurrentState, dtype: torch.dtype = F32) -> Tensor:
    """Return all states with their pending updates, [slots, H, K, V]."""
    stored = state.stored.to(dtype)
    return whole_states(replace(state, stored=stored), torch.arange(len(stored), device=stored.device))


def counts(state: RecurrentState) -> Tensor:
    """Return the numbers of pending updates, [slots], NaN where they mean nothing. All counts of a slot are equal."""
    assert state.updates is not None
    found = state.updates[:, :, -1, -(state.updates.shape[-1] // 8) :].flatten(1)
    assert torch.equal(found.isnan().any(1), found.isnan().all(1)) and not (found != found[:, :1])[~found.isnan()].any()
    return found[:, 0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: q, k [H, T, K], v [H, T, V], g, beta [H, T], state [H, K, V] -> outputs, state."""
    outputs = []
    for q_t, k_t, v_t, kept, written in zip(*(x.unbind(1) for x in (q, k, v, g.exp(), beta)), strict=True):
        state = kept[:, None, None] * state
        wrong = v_t - (k_t[:, None] @ state)[:, 0]
        state = state + k_t[:, :, None] * (written[:, None] * wrong)[:, None]
        outputs.append((q_t[:, None] @ state)[:, 0])
    return torch.stack(outputs, dim=1), state


def normalized(x: Tensor) -> Tensor:
    """`x / |x|` over the last dimension, with 1e-6 under the root."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def of_prompt(rule: Callable[..., Tensor], packed: bool = False) -> Rule:
    """Return `gated_delta_rule` as a function of the arguments of `delta_step`.

    Its inputs are slices of rows that hold NaN before, between and behind them; tensors of their own if `packed`.
    """

    def run(
        mixed: Tensor,
        gates: Tensor,
        decay: Decay,
        state: RecurrentState,
        index: RowIndex,
        norm_weight: Tensor,
        key_heads: int,
    ) -> Tensor:
        heads, _, value_dim = state.stored.shape[1:]
        nothing = mixed.new_full((len(mixed), 8), torch.nan)
        # Values in `gates` are those of the prompt's dtype.
        b, a = gates.to(mixed.dtype).chunk(2, dim=1)
        parts = nothing, mixed[:, : -heads * value_dim], nothing, a, b, nothing
        _, inputs, _, a, b, _ = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
        if packed:
            inputs, a, b = inputs.contiguous(), a.contiguous(), b.contiguous()
        return rule(inputs, a, b, decay, state, index, key_heads, len(mixed))

    return run


def prompt(length: int, first: int, rows: int | None = None) -> dict[str, list[Run]]:
    """A prompt by its name, perhaps padded to a number of rows."""
    run = Run(SLOT, first, length)
    if rows is None:
        return {f"{length} from {first}": [run]}
    return {f"{length} of {rows} from {first}": [run, Run(-1, run.end - 1, rows - length)]}


def make(
    shape: Shape,
    runs: Sequence[Run],
    dtype: torch.dtype,
    gates: torch.dtype | None = None,
    device: str = DEVICE,
    pending: int = PENDING_UPDATES,
) -> Case:
    """Make random arguments: heads of slow and of fast decay; NaN in rows of padding and in states that no row needs.

    Slots have different numbers of pending updates.

    Args:
        pending: how many updates of a state may be pending.
        gates: dtype to which the gates are rounded; they stay float32. None: float32.
    """
    key_heads, heads, key_dim, value_dim = shape
    index = rows_index(runs, device=device)
    rows = len(index.slots)
    generator = torch.Generator().manual_seed(rows + heads)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    mixed = normal(rows, 2 * (key_heads * key_dim + heads * value_dim)).to(dtype)
    gate = normal(rows, 2 * heads).to(gates or F32).float()
    for values in (mixed, gate):
        values[index.slots < 0] = torch.nan
    zeros = RecurrentState.zeros(SLOTS, (key_heads, heads), (key_dim, value_dim), pending, dtype)
    state = RecurrentState(*(torch.full_like(value, torch.nan, device=device) for value in tensors(zeros)))
    for run in runs:
        if run.slot >= 0 and run.first:
            state.stored[run.slot] = normal(heads, key_dim, value_dim)
            if state.keys is not None and state.updates is not None:
                count = (run.first + 3 * run.slot) % (pending + 1)
                state.keys[run.slot, :, :count] = normal(key_heads, count, key_dim).to(dtype)
                updates = state.updates[run.slot]
                updates[:, :count] = normal(heads, count, value_dim) * key_dim**-0.5
                updates[:, -1, :count] = -normal(heads, count).mul(2).exp()
                updates[:, -1, -(value_dim // 8) :] = count
    decay = Decay(torch.linspace(-6, 2, heads, device=device), normal(heads))
    return Case(mixed, gate, decay, state, index, normal(value_dim), key_heads)


def check(case: Case, rule: Rule, limits: Limits = LIMITS) -> None:
    """Hold a form to the definition: the results of all rows that are tokens, and no other state is written."""
    compare(case, case.run(rule), limits)


def compare(case: Case, found: dict[str, Tensor], limits: Limits = LIMITS) -> None:
    """Hold results, by their names in `Case.exact`, to the definition."""
    exact, rows = case.exact(), real_rows(case.index)
    slots = case.index.slots[rows].unique().tolist()
    for name, values in found.items():
        limit = limits[name, case.mixed.dtype]
        # Outputs together; each state by itself.
        for part in slots if name == "state" else [rows]:
            ours, theirs = values[part].double(), exact[name][part]
            error = (ours - theirs).norm()
            assert error <= limit * theirs.norm(), f"relative error of {name} is {error / theirs.norm():.1e}"


def as_padding(case: Case) -> Case:
    """The same rows, but they belong to nobody."""
    return replace(case, index=case.index._replace(slots=torch.full_like(case.index.slots, -1)))
