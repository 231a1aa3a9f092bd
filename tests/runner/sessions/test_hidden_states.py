"""Hidden states of a session, compared with transformers' `output_hidden_states` in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import InputError
from ostinato.export import export_model
from ostinato.export.kernels import kernels_for
from ostinato.runner import Engine

from ...comparison import relative_error
from ...conftest import CAPITALS, CAPITALS_LENGTH, only_methods

pytestmark = pytest.mark.skipif(not kernels_for("cpu").max_rows, reason="this CPU takes the references")
TOKENS = [(7 * place + 3) % 1500 for place in range(CAPITALS_LENGTH - 8)]
States = Callable[[list[int]], Tensor]


@pytest.fixture(scope="module")
def states() -> States:
    """A function that returns transformers' hidden states [layers + 1, tokens, hidden]."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()

    @torch.no_grad()
    def after(tokens: list[int]) -> Tensor:
        return torch.cat(model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states)

    return after


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    path = request.getfixturevalue("capitals_cuda" if request.param == "cuda" else "capitals_artifact")
    with Engine.load(path, sessions=2, cuda_graph=True, warmup_steps=1) as loaded:
        yield loaded


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether every layer's states are those of transformers."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    return all(relative_error(ours.cpu(), theirs) < 1e-4 for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, len(TOKENS)])
def test_of_every_token_and_layer(engine: Engine, states: States, count: int) -> None:
    expected = states(TOKENS[:count])
    with engine.open_session() as session:
        assert close(session.hidden_states(TOKENS[:count], range(len(expected))), expected)
        assert session.tokens == TOKENS[:count]
    with engine.open_session() as session:
        found = session.hidden_states(TOKENS[:count])
        assert found.shape == (1, count, expected.shape[2]) and close(found, expected[-1:])


def test_in_the_middle_of_an_answer(engine: Engine, states: States) -> None:
    """States of each sampled token, in the layers asked for, of a session with a neighbour. They change no token."""
    prompt = engine.encode_prompt("What is the capital of France?")
    answer = list(engine.generate_tokens(prompt, max_new_tokens=6, ignore_eos=True))
    expected = states(prompt + answer)
    with engine.open_session() as session, engine.open_session() as other:
        other.prefill(TOKENS[:9])
        session.prefill(prompt[:-2])
        found = [session.hidden_states(prompt[-2:], (1, -1, 0))]
        while len(session.tokens) < len(prompt) + len(answer):
            engine.step([session, other])
            found.append(session.hidden_states(layers=(1, -1, 0)))
        assert session.tokens == prompt + answer
    assert [part.shape[1] for part in found] == [2] + [1] * len(answer)
    assert close(torch.cat(found, 1), expected[[1, -1, 0], len(prompt) - 2 :])


def test_what_cannot_be_done(engine: Engine) -> None:
    """A refused call changes nothing."""
    with engine.open_session() as session:
        session.prefill(TOKENS[:3])
        count = engine.program.load_method("rows_hidden").outputs[1:]
        wrong: list[tuple[list[int], tuple[int, ...], str]] = [
            ([], (-1,), "no token"),
            ([5], (len(count),), "layers are numbers from 0 to"),
            ([5], (-1 - len(count),), "layers are numbers from 0 to"),
            ([5], (), "layers are numbers from 0 to"),
            ([-1], (-1,), "values must lie in"),
            ([10**6], (-1,), "values must lie in"),
            (TOKENS * 2, (-1,), "max_seq_len"),
        ]
        for tokens, layers, complaint in wrong:
            with pytest.raises(InputError, match=complaint):
                session.hidden_states(tokens, layers)
        assert session.tokens == TOKENS[:3]
        expected = session.logits.clone()
        session.hidden_states([7])
    with engine.open_session() as session:
        session.prefill(TOKENS[:3])
        assert torch.equal(session.logits, expected)


def test_a_program_without_them(exported: Callable[..., Path]) -> None:
    def build(path: Path) -> None:
        with only_methods("prefill", "decode"):
            export_model(CAPITALS, path, max_seq_len=CAPITALS_LENGTH)

    with Engine.load(exported("no-hidden", build)) as engine:
        session = engine.open_session()
        with pytest.raises(InputError, match="has no method 'rows_hidden'"):
            session.hidden_states([5])
