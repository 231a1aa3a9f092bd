"""Perplexity over a text, compared with transformers window by window; and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ostinato.delegate import InputError
from ostinato.runner import Engine
from ostinato.runner.bench.perplexity import perplexity, windows
from ostinato.runner.cli import main

from ...comparison import relative_error
from ...conftest import CAPITALS

TEXT = "What is the capital of France? Paris. What is the capital of Japan? Tokyo. "


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = "capitals_cuda" if request.param == "cuda" else "capitals_artifact"
    with Engine.load(request.getfixturevalue(name), sessions=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def logits() -> Callable[[list[int]], torch.Tensor]:
    """transformers' logits after each of the tokens."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()

    @torch.no_grad()
    def get(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    return get


@pytest.mark.parametrize(
    ("count", "window", "stride", "expected"),
    [
        (10, 4, 2, [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]),
        (7, 4, 4, [(0, 4, 1), (4, 7, 5)]),
        (5, 8, 3, [(0, 5, 1)]),
        (6, 3, 1, [(0, 3, 1), (1, 4, 3), (2, 5, 4), (3, 6, 5)]),
    ],
)
def test_windows(count: int, window: int, stride: int, expected: list[tuple[int, int, int]]) -> None:
    assert list(windows(count, window, stride)) == expected


@pytest.mark.parametrize(("window", "stride"), [(200, 100), (64, 64), (65, 7), (2, 1)])
def test_as_transformers(engine: Engine, logits: Callable[[list[int]], torch.Tensor], window: int, stride: int) -> None:
    """Every window's tokens, each predicted once, by labels that are ignored where another window predicts them."""
    tokens = engine.encode_prompt(TEXT * 8, raw=True)[: 300 if window > 2 else 20]
    nats, count, done = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        labels = torch.tensor(tokens[begin:end])
        labels[: max(0, len(labels) - (end - done))] = -100
        kept = int((labels[1:] != -100).sum())
        if kept:
            nats += F.cross_entropy(logits(tokens[begin:end])[:-1], labels[1:], reduction="sum").item()
        count, done = count + kept, end
        if end == len(tokens):
            break
    seen: list[int] = []
    found = perplexity(engine.sessions, tokens, window, stride, seen.append)
    assert found.tokens == count == sum(seen)
    assert found.value == pytest.approx(math.exp(nats / count), rel=1e-4)


def test_logits_of_a_session(engine: Engine, logits: Callable[[list[int]], torch.Tensor]) -> None:
    """They go on from its history, and the session goes on from them."""
    tokens = engine.encode_prompt(TEXT * 8, raw=True)[:150]
    expected = logits(tokens)
    with engine.open_session() as session:
        session.prefill(tokens[:3])
        parts = []
        for part in session.prefill_logits(tokens[3:]):
            parts.append(part.cpu().clone())
            assert session.position == 3 + sum(map(len, parts))
        assert [len(part) for part in parts] == [64, 64, 19]
        assert relative_error(torch.cat(parts), expected[3:]) < 1e-4
        (token,) = engine.step([session])
        assert token == int(expected[-1].argmax())
        # The sampled token is seen first.
        (after,) = session.prefill_logits(tokens[:1])
        again = logits([*tokens, token, tokens[0]])
        assert relative_error(after[0].cpu(), again[-1]) < 1e-4
        with pytest.raises(InputError, match="max_seq_len"):
            list(session.prefill_logits(tokens * 10))


def test_the_logits_after_the_last_token(engine: Engine, logits: Callable[[list[int]], torch.Tensor]) -> None:
    """After a prompt and after every step; looking at them changes no token."""
    prompt = engine.encode_prompt("What is the capital of France?")
    expected = list(engine.generate_tokens(prompt, max_new_tokens=4, ignore_eos=True))
    with engine.open_session() as session:
        with pytest.raises(InputError, match="no token"):
            _ = session.logits
        session.prefill(prompt)
        for token in expected:
            found = session.logits
            assert session.logits is found and found.shape == (engine.program.metadata["get_vocab_size"],)
            assert relative_error(found.cpu(), logits(session.tokens)[-1]) < 1e-4
            assert engine.step([session]) == [token]
        with engine.open_session() as other:
            other.prefill(prompt)
            engine.step([session, other])
            assert relative_error(session.logits.cpu(), logits(session.tokens)[-1]) < 1e-4
        tokens = session.tokens[-1:]
        for _ in range(2):
            tokens += engine.step([session], more=True)
        if engine.sessions.steps.goes_ahead:
            with pytest.raises(InputError, match="more=True has gone ahead"):
                _ = session.logits


def test_the_command(capitals_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT * 8)
    words = ["eval", str(capitals_artifact), "--text", str(tmp_path / "text"), "--limit", "120"]
    assert main([*words, "--window", "100", "--stride", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["windows"], found["window"], found["stride"]) == (119, 2, 100, 50)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("perplexity ") and " over 119 tokens, in " in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", 1], "--window must be 2 to "),
        (["--window", 9999], "--window must be 2 to "),
        (["--window", 10, "--stride", 11], "--stride must be 1 to 10, the window; got 11"),
        (["--limit", 1], "--limit must be 2 or more, got 1"),
    ],
)
def test_options(
    fails: Callable[..., str], capitals_artifact: Path, tmp_path: Path, words: list[object], message: str
) -> None:
    (tmp_path / "text").write_text(TEXT)
    assert message in fails("eval", capitals_artifact, "--text", tmp_path / "text", *words)


def test_texts_that_are_refused(fails: Callable[..., str], capitals_artifact: Path, tmp_path: Path) -> None:
    assert "No such file" in fails("eval", capitals_artifact, "--text", tmp_path / "nothing")
    (tmp_path / "text").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in fails("eval", capitals_artifact, "--text", tmp_path / "text")
    (tmp_path / "text").write_text("")
    assert "text is empty" in fails("eval", capitals_artifact, "--text", tmp_path / "text")
    (tmp_path / "text").write_text("a")
    assert "a text of 2 tokens or more is needed" in fails("eval", capitals_artifact, "--text", tmp_path / "text")
