"""Log-probabilities of a prompt's tokens: those of the logits after the tokens before, in chunks, anywhere in a history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ostinato.delegate import InputError, OptionError
from ostinato.delegate.logits_processing import logprob_tensors, token_logprobs
from ostinato.delegate.sampling_params import TokenLogprobs
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.cli import main
from ostinato.runner.sessions import prompt_logprobs
from ostinato.runner.sessions.session import Session

from ..conftest import ForwardArtifact

PROMPT = [(37 * place + 5) % 900 for place in range(150)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = "capitals_cuda" if request.param == "cuda" else "capitals_artifact"
    with Engine.load(request.getfixturevalue(name), sessions=2, cuda_graph=request.param == "cuda") as engine:
        yield engine


def check(found: list[TokenLogprobs | None], logits: torch.Tensor, tokens: list[int], count: int) -> None:
    """Hold records of all tokens but the first to the logits after the tokens before them."""
    numbers = logprob_tensors(logits.float().cpu(), torch.tensor(tokens[1:]))
    assert len(found) == len(tokens) and found[0] is None
    for one, expected in zip(found[1:], token_logprobs(tokens[1:], numbers, count), strict=True):
        assert one is not None and (one.token, one.rank) == (expected.token, expected.rank)
        assert one.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in expected.top]
        values = [value for _, value in expected.top]
        assert [value for _, value in one.top] == pytest.approx(values, abs=1e-3) and len(values) == count


def logits_of(session: Session, tokens: list[int]) -> torch.Tensor:
    return torch.cat([part.clone() for part in session.prefill_logits(tokens)])[:-1]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
@pytest.mark.parametrize("count", [0, 3])
def test_in_chunks(engine: Engine, length: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_GPU_LOGITS", 64)
    tokens = PROMPT[:length]
    with engine.open_session() as session, engine.open_session() as other:
        check(session.prompt_logprobs(tokens, count), logits_of(other, tokens), tokens, count)
        # The session goes on as after `prefill`.
        assert session.tokens == other.tokens == tokens
        assert engine.step([session]) == engine.step([other])


def test_after_a_history(engine: Engine) -> None:
    """After a prompt, after a step, whose token the model has not seen, and after a token of the caller's."""
    with engine.open_session() as session, engine.open_session() as other:
        session.prefill(PROMPT[:20])
        found = session.prompt_logprobs(PROMPT[20:30], 2)
        (token,) = engine.step([session])
        found += session.prompt_logprobs(PROMPT[30:31], 2)
        tokens = session.tokens
        logits = logits_of(other, tokens)
        check([None, *found[:10]], logits[19:29], tokens[19:30], 2)
        check([None, *found[10:]], logits[30:], [token, PROMPT[30]], 2)


def test_what_is_refused(engine: Engine) -> None:
    """Nothing has changed then."""
    with engine.open_session() as session:
        with pytest.raises(InputError, match="no token to prefill"):
            session.prompt_logprobs([])
        with pytest.raises(OptionError, match="prompt_logprobs must be 0 to 20, got 21"):
            session.prompt_logprobs(PROMPT, 21)
        with pytest.raises(InputError, match=r"values must lie in 0\.\."):
            session.prompt_logprobs([*PROMPT, 10**6])
        with pytest.raises(InputError, match="max_seq_len"):
            session.prompt_logprobs(PROMPT * 20)
        assert session.tokens == []
        session.prefill(PROMPT[:5])
        if engine.sessions.steps.goes_ahead:
            engine.step([session], more=True)
            with pytest.raises(InputError, match="more=True has gone ahead"):
                session.prompt_logprobs(PROMPT)


@pytest.mark.parametrize("kind", ["dynamic", "stateless"])
def test_programs_that_only_give_logits(forward_artifact: ForwardArtifact, kind: str) -> None:
    tokens = [5, 2, 7, 1, 3, 3, 4]
    with Engine.load(forward_artifact(kind)) as engine:
        logits = []
        for end in range(1, len(tokens)):
            with engine.open_session() as session:
                session.prefill(tokens[:end])
                logits.append(session.logits.clone())
        with engine.open_session() as session:
            found = session.prompt_logprobs(tokens[:3], 2) + session.prompt_logprobs(tokens[3:], 2)
        check(found, torch.stack(logits), tokens, 2)


def test_of_an_answer(engine: Engine) -> None:
    params = SamplingParams(prompt_logprobs=2, logprobs=1)
    stream = engine.generate_tokens(PROMPT, max_new_tokens=3, sampling_params=params, ignore_eos=True)
    tokens = list(stream)
    plain = engine.generate_tokens(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert list(plain) == tokens and plain.result.prompt_logprobs == []
    with engine.open_session() as session:
        check(stream.result.prompt_logprobs, logits_of(session, PROMPT), PROMPT, 2)
    assert len(stream.result.logprobs) == 3


def test_the_command(capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(capitals_artifact), "--raw", "--prompt", "Paris is", "--max-new-tokens", "1", "--json"]
    assert main([*words, "--prompt-logprobs", "1"]) == 0
    given = json.loads(capsys.readouterr().out)["prompt_logprobs"]
    assert given[0] is None and len(given) > 1
    assert all(set(one) == {"token", "logprob", "rank", "top"} and len(one["top"]) == 1 for one in given[1:])
