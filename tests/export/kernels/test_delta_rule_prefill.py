"""The delta rule's Triton kernels against the definition in float64: compiled on a GPU, else interpreted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import launch
from ostinato.export.kernels.delta_rule import reference
from ostinato.export.kernels.delta_rule.limits import check_delta_rule
from ostinato.export.kernels.delta_rule.prefill_triton import gated_delta_rule
from ostinato.export.kernels.operands import Decay, RowIndex

from .conftest import run_compiled
from .runs import SLOT, SLOTS, padded, prompt_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 2, 32, 63, 64, 65, 127, 128, 256, 1000)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def columns(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


SMALL = Shape(1, 2, 16, 64)
FULL = Shape(16, 32, 128, 128)
MAIN = FULL if DEVICE == "cuda" else SMALL


@dataclass(frozen=True)
class Case:
    """Arguments of the function, in its order, except the last; the state of SLOT alone, [H, K, V]."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    decay: Decay
    state: Tensor
    index: RowIndex
    key_heads: int

    @property
    def tokens(self) -> int:
        return self.mixed.shape[0]

    def part(self, start: int, end: int, state: Tensor) -> Case:
        rows = {name: getattr(self, name)[start:end] for name in ("mixed", "a", "b")}
        index = RowIndex(*(values[start:end] for values in self.index))
        return replace(self, **rows, index=index, state=state)

    def arguments(self) -> tuple[Any, ...]:
        """With the state copied, so that a case can be used again; the states of other slots are NaN."""
        states = self.state.new_full((SLOTS, *self.state.shape), torch.nan)
        states[SLOT] = self.state
        return (self.mixed, self.a, self.b, self.decay, states, self.index, self.key_heads, self.tokens)


def draw(shape: Shape, tokens: int, dtype: torch.dtype, first: int = 7, seed: int = 0) -> Case:
    """Heads of slow and of fast decay, a state that is not zero, rows that are slices of rows with NaN between them."""
    generator = torch.Generator().manual_seed(seed + tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    rows = torch.full((tokens, shape.columns + 2 * shape.heads + 24), torch.nan)
    rows[:, 8 : 8 + shape.columns] = normal(tokens, shape.columns)
    gates = shape.columns + 16
    rows[:, gates : gates + 2 * shape.heads] = normal(tokens, 2 * shape.heads)
    rows = rows.to(DEVICE, dtype)
    return Case(
        rows[:, 8 : 8 + shape.columns],
        rows[:, gates : gates + shape.heads],
        rows[:, gates + shape.heads : gates + 2 * shape.heads],
        Decay(torch.linspace(-6, 2, shape.heads, device=DEVICE), normal(shape.heads).to(DEVICE)),
        normal(shape.heads, shape.key_dim, shape.value_dim).to(DEVICE),
        prompt_index(first, tokens),
        shape.key_heads,
    )


def run(case: Case) -> tuple[Tensor, Tensor]:
    """(output, state after)."""
    arguments = case.arguments()
    out = gated_delta_rule(*arguments)
    assert out.dtype == case.mixed.dtype
    return out, only_state(arguments)


def only_state(arguments: tuple[Any, ...]) -> Tensor:
    """That of SLOT; the others are untouched."""
    states = arguments[4]
    assert all(state.isnan().all() for slot, state in enumerate(states) if slot != SLOT)
    return states[SLOT]


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """The definition, in float64, of the same numbers."""
    heads, key_dim, value_dim = case.state.shape
    keys = case.key_heads * key_dim
    q, k, v = case.mixed.double().split((keys, keys, heads * value_dim), dim=1)

    def key_heads(x: Tensor) -> Tensor:
        x = reference.l2_normalize(x.unflatten(1, (case.key_heads, key_dim)))
        return x.repeat_interleave(heads // case.key_heads, dim=1).transpose(0, 1)

    g = -case.decay.a_log.double().exp() * F.softplus(case.a.double() + case.decay.dt_bias.double())
    out, state = reference.naive_gated_delta_rule(
        key_heads(q) * key_dim**-0.5,
        key_heads(k),
        v.unflatten(1, (heads, value_dim)).transpose(0, 1),
        g.t(),
        torch.sigmoid(case.b.double()).t(),
        torch.zeros_like(case.state, dtype=torch.float64) if case.index.positions[0] == 0 else case.state.double(),
    )
    return out.transpose(0, 1), state


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], out: float, state: float) -> None:
    """Relative errors, in the Frobenius norm, below those given for the output and for the state."""
    for name, ours, definition, limit in zip(("output", "state"), found, expected, (out, state), strict=True):
        assert ours.shape == definition.shape
        error = ((ours.double() - definition).norm() / definition.norm().clamp(min=1e-30)).item()
        assert error < limit, f"relative error of the {name} is {error:.1e}"


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_definition(dtype: torch.dtype, tokens: int) -> None:
    """A bfloat16 output has an error of 2e-3 by its rounding alone; the state has none."""
    shape = Shape(1, 1, 16, 32) if tokens == 1000 and DEVICE == "cpu" else MAIN
    case = draw(shape, tokens, dtype)
    check(run(case), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


@pytest.mark.parametrize("shape", (Shape(2, 4, 32, 32), Shape(1, 3, 64, 16), Shape(1, 1, 128, 128)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", (1, 70))
def test_shapes(shape: Shape, dtype: torch.dtype, tokens: int) -> None:
    case = draw(shape, tokens, dtype)
    check(run(case), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


@pytest.mark.parametrize("shared", (launch.MEDIUM, launch.SMALL))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_smaller_gpus(dtype: torch.dtype, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: shared)
    case = draw(MAIN, 150, dtype)
    check(run(case), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


@pytest.mark.parametrize("tokens", (1, 70))
def test_agrees_with_the_reference(tokens: int) -> None:
    """On the same arguments."""
    case = draw(MAIN, tokens, torch.float32)
    arguments = case.arguments()
    out = reference.gated_delta_rule(*arguments)
    check(run(case), (out.double(), only_state(arguments).double()), 1e-5, 1e-5)


@pytest.mark.parametrize("tokens", (1, 2, 70))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_position_zero_starts_anew(dtype: torch.dtype, tokens: int) -> None:
    case = draw(MAIN, tokens, dtype, first=0)
    poisoned = replace(case, state=torch.full_like(case.state, torch.nan))
    check(run(poisoned), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


@pytest.mark.parametrize("tokens", (1, 70))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows(dtype: torch.dtype, tokens: int) -> None:
    """The other tests' rows are slices."""
    case = draw(MAIN, tokens, dtype)
    packed = replace(case, mixed=case.mixed.clone(), a=case.a.clone(), b=case.b.clone())
    check(run(packed), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


@pytest.mark.parametrize("split", (1, 2, 64, 69))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_calls_are_one(dtype: torch.dtype, split: int) -> None:
    case = draw(MAIN, 70, dtype)
    first, state = run(case.part(0, split, case.state))
    second, state = run(case.part(split, 70, state))
    check((torch.cat((first, second)), state), exact(case), 1e-4 if dtype == torch.float32 else 1e-2, 1e-4)


def test_token_by_token() -> None:
    case = draw(MAIN, 40, torch.float32)
    state, outputs = case.state, []
    for t in range(case.tokens):
        out, state = run(case.part(t, t + 1, state))
        outputs.append(out)
    check((torch.cat(outputs), state), exact(case), 1e-5, 1e-5)


@pytest.mark.parametrize("tokens", (1, 2, 64, 65))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_that_nothing_touches(dtype: torch.dtype, tokens: int) -> None:
    """No decay and nothing written: the state stays as it is, whatever is behind the last token."""
    case = draw(MAIN, tokens, dtype)
    still = replace(case, a=torch.full_like(case.a, -80), b=torch.full_like(case.b, -80))
    torch.testing.assert_close(run(still)[1], case.state)


def hard(name: str, dtype: torch.dtype) -> Case:
    case = draw(MAIN, 150, dtype)
    width = MAIN.key_heads * MAIN.key_dim
    keys = slice(width, 2 * width)
    same, zero = case.mixed.clone(), case.mixed.clone()
    same[:, keys] = same[:1, keys]
    zero[:, : 2 * width] = 0
    signs = same.clone()
    signs[1::2, keys] *= -1
    token = torch.arange(case.tokens, device=DEVICE)[:, None]

    def full(value: float) -> Tensor:
        return torch.full_like(case.a, value)

    changes: dict[str, dict[str, Any]] = {
        "one key, written wholly, never forgotten": {"mixed": same, "b": full(9.0), "a": full(-40.0)},
        "one key, half written, never forgotten": {"mixed": same, "b": full(0.0), "a": full(-40.0)},
        "one key of changing sign": {"mixed": signs, "b": full(20.0), "a": full(-12.0)},
        "very strong decay": {"a": full(50.0)},
        "strong decay now and then": {"a": torch.where(token % 7 == 3, full(50.0), full(-9.0))},
        "slow decay": {"a": full(-16.0)},
        "all written": {"b": full(40.0)},
        "queries and keys of zeros": {"mixed": zero},
    }
    return replace(case, **changes[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    (
        "one key, written wholly, never forgotten",
        "one key, half written, never forgotten",
        "one key of changing sign",
        "very strong decay",
        "strong decay now and then",
        "slow decay",
        "all written",
        "queries and keys of zeros",
    ),
)
def test_hard_cases(name: str, dtype: torch.dtype) -> None:
    case = hard(name, dtype)
    check(run(case), exact(case), 1e-3 if dtype == torch.float32 else 1e-2, 1e-3)


@pytest.mark.parametrize("bad", ((2, 3, 32, 32), (0, 4, 32, 32), (2, 4, 8, 32), (2, 4, 32, 24), (2, 4, 256, 32)))
def test_other_shapes_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ExportError, match="kernels"):
        check_delta_rule(*bad)


def test_refusal_names_the_limit() -> None:
    with pytest.raises(ExportError, match="powers of two from 16 to 128, got a value head size of 24"):
        gated_delta_rule(*draw(Shape(1, 2, 32, 24), 2, torch.float32).arguments())


EXPORT = """
import torch
from ostinato.export.kernels.delta_rule.prefill_triton import gated_delta_rule
from ostinato.export.kernels.operands import Decay, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 4, 32, 32))

    def forward(self, rows, gates, positions):
        a, b = rows[:, 256:].chunk(2, dim=1)
        index = RowIndex(positions, positions, rows, rows)
        return gated_delta_rule(rows[:, :256], a, b, Decay(gates, gates), self.state, index, 2, 255)

for tokens in (130, 1):
    arguments = (torch.zeros(tokens, 264), torch.zeros(4), torch.arange(tokens))
    count = torch.export.Dim("T", min=2, max=255)
    dynamic = ({0: count}, None, {0: count}) if tokens > 1 else None
    program = torch.export.export(Layer(), arguments, dynamic_shapes=dynamic)
    assert "ostinato.gated_delta_rule" in str(program.graph), program.graph
    program = program.run_decompositions({})
    ranges = [(r.lower, r.upper) for r in program.range_constraints.values()]
    assert ranges == ([(2, 255)] if tokens > 1 else []), ranges
    assert list(program.graph_signature.buffers_to_mutate.values()) == ["state"]
"""


def test_export_keeps_the_number_of_tokens_symbolic() -> None:
    run_compiled(EXPORT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "rows"), [(1, 16), (16, 32), (33, 64), (65, 128), (70, 256)])
def test_padding(dtype: torch.dtype, length: int, rows: int) -> None:
    """Rows of NaN after the last token, at its position: output and state are as without them.

    All but bit by bit: for a number of 1 Triton compiles other code.
    """
    case = draw(MAIN, length, dtype)
    mixed, a, b = (padded(x, rows) for x in (case.mixed, case.a, case.b))
    wide = replace(case, mixed=mixed, a=a, b=b, index=prompt_index(7, length, rows))
    (alone, after), (out, after_padding) = run(case), run(wide)
    check((out[:length], after_padding), (alone.double(), after.double()), 1e-6, 1e-6)
