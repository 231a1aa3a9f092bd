"""The gated delta rule in plain PyTorch against transformers' functions, and properties of its parts."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from ostinato.export.kernels.delta_rule.reference import (
    chunked_gated_delta_rule,
    invert_unit_lower,
    recurrent_step,
)

from ...comparison import relative_error
from .delta_rule_cases import delta_rule

LENGTHS = (1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 200, 256, 1000)
HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24


@dataclass(frozen=True)
class Case:
    """Arguments of the delta rule, in its order: q, k [H, T, K], v [H, T, V], g, beta [H, T], state [H, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    def double(self) -> Case:
        return Case(*(x.double() for x in astuple(self)))

    def part(self, begin: int, end: int) -> Case:
        """Some of the tokens, after the same state."""
        q, k, v, g, beta = (x[:, begin:end] for x in astuple(self)[:5])
        return Case(q, k, v, g, beta, self.state)


def make(tokens: int, seed: int = 0) -> Case:
    """Normalised keys, scaled queries, slow and fast decays, a state that is not zero; float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(HEADS, tokens, KEY_DIM), dim=-1) for _ in range(2))
    slowness = torch.tensor([1e-4, 1e-2, 1.0])[:, None]
    return Case(
        q * KEY_DIM**-0.5,
        k,
        normal(HEADS, tokens, VALUE_DIM),
        -slowness * normal(HEADS, tokens).exp(),
        torch.sigmoid(normal(HEADS, tokens)),
        normal(HEADS, KEY_DIM, VALUE_DIM),
    )


def chunked(case: Case, max_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    return chunked_gated_delta_rule(case.q, case.k, case.v, case.g, case.beta, case.state, max_tokens or case.tokens)


def definition(case: Case) -> tuple[Tensor, Tensor]:
    return delta_rule(*astuple(case))


def theirs(function: object, case: Case) -> tuple[Tensor, Tensor]:
    """transformers' function; it scales q itself, and has batch and tokens before heads."""
    assert callable(function)
    q, k, v, g, beta = (x.transpose(0, 1)[None] for x in astuple(case)[:5])
    out, state = function(
        q * KEY_DIM**0.5, k, v, g=g, beta=beta, initial_state=case.state[None], output_final_state=True
    )
    return out[0].transpose(0, 1), state[0]


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float, what: str) -> None:
    for name, ours, exact in zip(("output", "state"), found, expected, strict=True):
        assert ours.shape == exact.shape
        error = relative_error(ours, exact)
        assert error < tolerance, f"{what}: relative error of the {name} is {error:.1e}"


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_is_the_definition(tokens: int) -> None:
    case = make(tokens, seed=tokens)
    exact = definition(case.double())
    check(chunked(case.double()), exact, 1e-10, "float64")
    check(chunked(case), exact, 1e-5, "float32")


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_agrees_with_transformers(tokens: int) -> None:
    case = make(tokens, seed=tokens)
    check(chunked(case), theirs(torch_chunk_gated_delta_rule, case), 1e-5, "their chunked form")
    check(chunked(case), theirs(torch_recurrent_gated_delta_rule, case), 1e-5, "their recurrent form")


@pytest.mark.parametrize("spare", (1, 60, 64, 300, 4096))
@pytest.mark.parametrize("tokens", (1, 64, 65, 193, 256))
def test_more_room_than_tokens(tokens: int, spare: int) -> None:
    case = make(tokens).double()
    check(chunked(case, tokens + spare), definition(case), 1e-10, f"room for {tokens + spare}")


@pytest.mark.parametrize("tokens", range(1, 330, 11))
def test_state_remembers_the_beginning(tokens: int) -> None:
    """Nothing decays and nothing is written: the state that came in goes out, whatever the number of chunks."""
    case = make(tokens)
    zero = torch.zeros_like(case.g)
    out, state = chunked(replace(case, g=zero, beta=zero))
    torch.testing.assert_close(state, case.state)
    torch.testing.assert_close(out, case.q @ case.state)


@pytest.mark.parametrize("tokens", (2, 65, 128, 200))
def test_two_calls_are_one(tokens: int) -> None:
    whole = make(tokens).double()
    for split in {1, tokens // 2, tokens - 1}:
        first, state = chunked(whole.part(0, split), tokens)
        second, state = chunked(replace(whole.part(split, tokens), state=state), tokens)
        check((torch.cat((first, second), dim=1), state), definition(whole), 1e-10, f"split at {split}")


def test_recurrent_step() -> None:
    case = make(40)
    state, outputs = case.state, []
    for t in range(case.tokens):
        q, k, v, g, beta = (x[:, t] for x in astuple(case)[:5])
        out, state = recurrent_step(q, k, v, g, beta, state)
        outputs.append(out)
    found = (torch.stack(outputs, 1), state)
    check(found, definition(case.double()), 1e-6, "the definition in float64")
    check(found, theirs(torch_recurrent_gated_delta_rule, case), 1e-6, "transformers' recurrent form")
    check(found, theirs(torch_chunk_gated_delta_rule, case), 1e-5, "transformers' chunked form")


def hard(name: str, tokens: int) -> Case:
    case = make(tokens, seed=7)
    same = case.k[:, :1].expand_as(case.k)
    changes = {
        "identical keys, written wholly, never forgotten": {
            "k": same,
            "beta": torch.full_like(case.beta, 0.9999),
            "g": torch.zeros_like(case.g),
        },
        "identical keys, half written": {
            "k": same,
            "beta": torch.full_like(case.beta, 0.5),
            "g": torch.zeros_like(case.g),
        },
        "keys that alternate in sign": {
            "k": same * (-1.0) ** torch.arange(tokens)[None, :, None],
            "beta": torch.ones_like(case.beta),
            "g": torch.zeros_like(case.g),
        },
        "very strong decay": {"g": torch.full_like(case.g, -50.0)},
        "decay that is strong now and then": {
            "g": torch.where(torch.arange(tokens) % 7 == 3, -50.0, -1e-3).expand(3, -1)
        },
        "nothing written": {"beta": torch.zeros_like(case.beta)},
        "all written": {"beta": torch.ones_like(case.beta)},
        "no decay": {"g": torch.zeros_like(case.g)},
        "keys of zeros": {"k": torch.zeros_like(case.k)},
    }
    return replace(case, **changes[name])


HARD = (
    "identical keys, written wholly, never forgotten",
    "identical keys, half written",
    "keys that alternate in sign",
    "very strong decay",
    "decay that is strong now and then",
    "nothing written",
    "all written",
    "no decay",
    "keys of zeros",
)


@pytest.mark.parametrize("tokens", (2, 63, 64, 65, 129, 256, 300))
@pytest.mark.parametrize("name", HARD)
def test_hard_cases(name: str, tokens: int) -> None:
    case = hard(name, tokens)
    exact = definition(case.double())
    check(chunked(case.double()), exact, 1e-9, "float64")
    check(chunked(case), exact, 1e-4, "float32")
    check(chunked(case), theirs(torch_chunk_gated_delta_rule, case), 1e-4, "transformers' chunked form")


@pytest.mark.parametrize("n", (1, 2, 4, 8, 16, 32, 64))
def test_invert_unit_lower(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    # The diagonal and what is above it are not to be looked at.
    matrix = torch.randn(2, 3, n, n, generator=generator, dtype=torch.float64) / n**0.5
    expected = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + matrix.tril(-1))
    assert relative_error(invert_unit_lower(matrix), expected) < 1e-10


def test_invert_unit_lower_of_ones_in_float32() -> None:
    """One token repeated: the Neumann series has terms as large as binomials here, the inverse has entries of one."""
    ones = torch.ones(64, 64)
    expected = torch.linalg.inv((torch.eye(64) + ones.tril(-1)).double())
    assert relative_error(invert_unit_lower(ones), expected) < 1e-6
