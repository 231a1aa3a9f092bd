"""The decode step of the gated delta rule with its norm, against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.delta_rule import reference, step_triton
from ostinato.export.kernels.operands import Decay, RowIndex

from ...comparison import relative_error
from .conftest import traced_layer
from .runs import SLOT, SLOTS, prompt_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# (key heads, heads, K, V)
SHAPES = [(1, 2, 16, 64), (2, 4, 32, 32), (1, 3, 64, 16), (5, 5, 16, 16)]
if DEVICE == "cuda":
    SHAPES += [(16, 32, 128, 128), (3, 9, 128, 64), (16, 16, 64, 128)]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Arguments of the function, in its order; the state of SLOT alone, [H, K, V]."""

    mixed: Tensor
    gates: Tensor
    decay: Decay
    state: Tensor
    index: RowIndex
    norm_weight: Tensor
    key_heads: int

    def run(self, step: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """(out, squares summed over P, state after); the case can be used again."""
        states = self.state.new_full((SLOTS, *self.state.shape), torch.nan)
        states[SLOT] = self.state
        out, squares = step(**vars(self) | {"state": states})
        heads, _, value_dim = self.state.shape
        assert out.dtype == self.mixed.dtype and out.shape == (1, heads * value_dim)
        assert squares.dtype == torch.float32 and squares.shape[0] == heads and squares.dim() == 2
        assert all(state.isnan().all() for slot, state in enumerate(states) if slot != SLOT)
        return out, squares.sum(1), states[SLOT]

    @property
    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `run` should give, in float64."""
        heads, key_dim, value_dim = self.state.shape
        keys, values = self.key_heads * key_dim, heads * value_dim
        q, k, v, z = self.mixed[0].double().split((keys, keys, values, values))
        b, a = self.gates[0].double().chunk(2)

        def of_heads(x: Tensor) -> Tensor:
            return reference.l2_normalize(x.view(-1, key_dim)).repeat_interleave(heads // self.key_heads, dim=0)

        g = -self.decay.a_log.double().exp() * F.softplus(a + self.decay.dt_bias.double())
        before = torch.zeros_like(self.state) if self.index.positions[0] == 0 else self.state
        o, after = reference.recurrent_step(
            of_heads(q) * key_dim**-0.5, of_heads(k), v.view(heads, -1), g, b.sigmoid(), before.double()
        )
        out = o * self.norm_weight.double() * F.silu(z.view(heads, -1))
        return out.view(1, -1), o.square().sum(1), after


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype, position: int = 7) -> Case:
    """Heads of slow and of fast decay, a state that is not zero."""
    key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator(DEVICE).manual_seed(heads + position)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE)

    return Case(
        normal(1, 2 * key_heads * key_dim + 2 * heads * value_dim).to(dtype),
        normal(1, 2 * heads),
        Decay(torch.linspace(-6, 2, heads, device=DEVICE), normal(heads)),
        normal(heads, key_dim, value_dim),
        prompt_index(position, 1),
        normal(value_dim),
        key_heads,
    )


def check(found: tuple[Tensor, Tensor, Tensor], case: Case, dtype: torch.dtype) -> None:
    limits = {"out": TOLERANCE[dtype], "squares": TOLERANCE[torch.float32], "state": TOLERANCE[torch.float32]}
    for (name, limit), ours, exact in zip(limits.items(), found, case.exact, strict=True):
        error = relative_error(ours, exact)
        assert error < limit, f"relative error of {name} is {error:.1e}"


@pytest.mark.parametrize("position", (0, 1, 300))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(shape: tuple[int, int, int, int], dtype: torch.dtype, position: int) -> None:
    case = draw(shape, dtype, position)
    check(case.run(step_triton.delta_step), case, dtype)


@pytest.mark.parametrize("values", (4, 8, 16))
@pytest.mark.parametrize("warps", (1, 2, 4))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_configurations(dtype: torch.dtype, values: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_triton, "CONFIG", step_triton.DeltaConfig(values, warps))
    case = draw(SHAPES[-1], dtype)
    check(case.run(step_triton.delta_step), case, dtype)


@pytest.mark.parametrize("position", (0, 5))
def test_the_reference_agrees(position: int) -> None:
    case = draw((2, 4, 32, 16), torch.float32, position)
    check(case.run(reference.delta_step), case, torch.float32)
    rounded = draw((2, 4, 32, 16), torch.bfloat16, position)
    out = rounded.run(reference.delta_step)[0]
    # The rule's output is rounded before the norm too.
    assert relative_error(out, rounded.exact[0]) < 2 * TOLERANCE[torch.bfloat16]


def test_divided_by_the_root_mean_square_it_is_the_gated_norm() -> None:
    case = draw((2, 4, 32, 32), torch.float32)
    heads, _, value_dim = case.state.shape
    out, squares, _ = case.run(step_triton.delta_step)
    qkv, z = case.mixed.split((case.mixed.shape[1] - heads * value_dim, heads * value_dim), dim=1)
    b, a = case.gates.chunk(2, dim=1)
    rest = (
        case.decay,
        case.state[None].clone(),
        prompt_index(7, 1)._replace(slots=torch.zeros(1, dtype=torch.int64, device=DEVICE)),
        case.key_heads,
        1,
    )
    normed = F.rms_norm(reference.gated_delta_rule(qkv, a, b, *rest)[0], (value_dim,), case.norm_weight, EPS)
    expected = normed * F.silu(z.view(heads, value_dim))
    scaled = out.view(heads, value_dim) * (squares / value_dim + EPS).rsqrt()[:, None]
    assert relative_error(scaled, expected.double()) < TOLERANCE[torch.float32]


def test_position_zero_starts_anew() -> None:
    case = draw(SHAPES[0], torch.float32, position=0)
    poisoned = replace(case, state=torch.full_like(case.state, torch.nan))
    check(poisoned.run(step_triton.delta_step), case, torch.float32)


@pytest.mark.parametrize("step", [step_triton.delta_step, reference.delta_step], ids=["kernel", "reference"])
def test_padding_leaves_no_trace(step: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = draw(SHAPES[0], torch.float32)
    padding = replace(case, index=case.index._replace(slots=torch.tensor([-1], device=DEVICE)))
    assert torch.equal(padding.run(step)[2], case.state)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_repeated_bit_for_bit(dtype: torch.dtype) -> None:
    case = draw(SHAPES[-1], dtype)
    first, second = (case.run(step_triton.delta_step) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_queries_and_keys_of_zeros() -> None:
    case = draw(SHAPES[0], torch.bfloat16)
    case.mixed[:, : 2 * case.key_heads * case.state.shape[1]] = 0
    out, squares, state = case.run(step_triton.delta_step)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(squares, torch.zeros_like(squares))
    assert relative_error(state, case.exact[2]) < TOLERANCE[torch.float32]


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ExportError, match="a value head size of 24"):
        draw((1, 2, 16, 24), torch.float32).run(step_triton.delta_step)


LAYER = """
import torch
from ostinato.export.kernels.delta_rule.step_triton import delta_step
from ostinato.export.kernels.operands import Decay, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 4, 32, 32))

    def forward(self, mixed, gates, head, norm, positions):
        index = RowIndex(positions, positions, mixed, mixed)
        return delta_step(mixed, gates, Decay(head, head), self.state, index, norm, 2)

shapes = ((1, 384), (1, 8), (4,), (32,))
inputs = (*map(torch.zeros, shapes), torch.arange(1))
"""


def test_traced() -> None:
    operators, buffers, shapes = traced_layer(LAYER)
    assert operators == ["ostinato.delta_step.default"]
    assert buffers == ["state"]
    assert shapes == [(1, 128), (4, 4)]
