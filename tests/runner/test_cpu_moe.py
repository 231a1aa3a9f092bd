"""The shipped model with all routed experts on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ostinato.delegate import OptionError
from ostinato.delegate.code.method_code import MethodCode
from ostinato.export import export_model
from ostinato.runner import Engine
from ostinato.runner.model.streamed import EACH_TOKEN, MIN_STREAMED_TOKENS, READING, streamed_experts

from ..comparison import logits_of, relative_error
from ..conftest import CAPITALS, CAPITALS_LENGTH

LAYERS = 4


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        export_model(CAPITALS, path, max_seq_len=CAPITALS_LENGTH, cpu_moe=True)

    return exported("capitals-cpu-moe", build, str(CAPITALS_LENGTH))


@pytest.mark.parametrize("graph", [False, True])
def test_it_says_paris(artifact: Path, graph: bool) -> None:
    with Engine.load(artifact, cuda_graph=graph) as engine:
        assert engine.program.metadata["get_n_cpu_moe"] == LAYERS
        answer = engine.generate("What is the capital of France?")
        assert "".join(answer) == "Paris"
        assert answer.result.finish_reason == "stop"


def test_a_long_answer_with_and_without_graph_is_the_same(artifact: Path) -> None:
    answers = []
    for graph in (False, True):
        with Engine.load(artifact, cuda_graph=graph) as engine:
            prompt = engine.encode_prompt("What is the capital of Japan?")
            answers.append(list(engine.generate_tokens(prompt, max_new_tokens=60, ignore_eos=True)))
            stats = engine.model.method_stats["decode_sample"]
            assert (stats["replays"] > 50) is graph and stats["fallbacks"] == 0
            assert [plan["on_host"] for plan in stats["plans"]] == ([LAYERS] if graph else [])
    assert answers[0] == answers[1]


def test_prompts_in_buckets_and_on_both_sides(artifact: Path, capitals_artifact: Path) -> None:
    """Prompts have the logits of a program that keeps all on the device. Short ones are padded, long ones go through
    `prefill_streamed`."""
    with (
        Engine.load(artifact, cuda_graph=True, prefill_buckets=(16, 32)) as engine,
        Engine.load(capitals_artifact) as one,
    ):
        for length in (3, 16, 17, 32, MIN_STREAMED_TOKENS - 1, MIN_STREAMED_TOKENS, 100):
            tokens = torch.randint(60, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            for _ in range(4):
                found = logits_of(engine.model, tokens)
            assert relative_error(found, logits_of(one.model, tokens)) < 1e-5, length
        stats = engine.model.method_stats
        short = stats[engine.model.prompt_method(16)]
        assert [plan["shapes"][1] for plan in short["plans"]] == [[rows] for rows in (16, 32)]
        # Prompts that neither fit a bucket nor are long.
        assert (short["runs"], stats["prefill_streamed"]["runs"]) == (4, 8)


def test_prompts_of_several_sessions_on_both_sides(artifact: Path, capitals_artifact: Path) -> None:
    """Prompts of several sessions, and beside them one that decodes: 48 rows or more go through `rows_streamed`."""
    found = []
    for path in (artifact, capitals_artifact):
        with Engine.load(path, sessions=3, kv_tokens=1024) as engine:
            first, *others = [engine.open_session() for _ in range(3)]
            first.prefill([5, 7, 11])
            rows = [[(37 * place + 5) % 900 for place in range(count)] for count in (20, MIN_STREAMED_TOKENS)]
            engine.step([first], prefill=dict(zip(others, rows, strict=True)))
            runs = {name: stats["runs"] for name, stats in engine.model.method_stats.items()}
            assert runs.get("rows_streamed") == (1 if path == artifact else None)
            found.append(torch.stack([session.logits.clone() for session in (first, *others)]))
    assert relative_error(*found) < 1e-5


def test_logits_of_all_tokens(artifact: Path, capitals_artifact: Path) -> None:
    """A prompt whose last token alone would go through `prefill_streamed`."""
    tokens = [(37 * place + 5) % 900 for place in range(2 * MIN_STREAMED_TOKENS)]
    found = []
    for path in (artifact, capitals_artifact):
        with Engine.load(path) as engine, engine.open_session() as session:
            found.append(torch.tensor([one.logprob for one in session.prompt_logprobs(tokens) if one is not None]))
    assert len(found[0]) == len(tokens) - 1
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


def test_the_shared_expert_is_queued_while_the_host_computes(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, order = threading.Event(), []
    run = MethodCode.run_segment

    def watched(code: MethodCode, index: int, values: dict[int, torch.Tensor]) -> None:
        if code.segments[index].on_host:
            order.append("host")
            begun.set()
        elif index + 1 in code.on_host:
            # This segment stands before the host's, but runs only after the host's has begun.
            assert begun.wait(20)
            begun.clear()
            order.append("device")
        run(code, index, values)

    monkeypatch.setattr(MethodCode, "run_segment", watched)
    with Engine.load(artifact) as engine:
        logits_of(engine.model, list(range(5)))
    assert order == ["host", "device"] * LAYERS


def test_a_bucket_that_no_prompt_would_reach(artifact: Path) -> None:
    with pytest.raises(
        OptionError, match="prefill bucket 64: with experts on the host, prompts of 48 tokens or more go to"
    ):
        Engine.load(artifact, cuda_graph=True, prefill_buckets=(16, 64))


@pytest.mark.parametrize("tokens", (48, 64, 512, 2048, 100_000))
def test_how_many_experts_are_streamed(tokens: int) -> None:
    """With more tokens, more experts are streamed. The bus and the CPU finish at the same time."""
    found = streamed_experts(tokens, 256)
    assert 256 // 3 < found <= 256 and found <= streamed_experts(tokens + 100, 256)
    per_expert = READING + EACH_TOKEN * tokens
    assert abs(found - (256 - found) * per_expert) <= (1 + per_expert) / 2
