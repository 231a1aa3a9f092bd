"""The shipped model with all routed experts on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.delegate import OptionError
from ostinato.export import export_model
from ostinato.runner import Engine

from ..conftest import CAPITALS, CAPITALS_LENGTH

LAYERS = 4


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        export_model(CAPITALS, path, max_seq_len=CAPITALS_LENGTH, cpu_moe=None)

    return exported("capitals-cpu-moe", build, str(CAPITALS_LENGTH))


@pytest.mark.parametrize("graph", [False, True])
def test_it_says_paris(artifact: Path, graph: bool) -> None:
    with Engine.load(artifact, cuda_graph=graph) as engine:
        assert engine.program.metadata["get_n_cpu_moe"] == LAYERS
        assert "".join(engine.generate("What is the capital of France?")) == "Paris"
        assert engine.last.finish_reason == "stop"


def test_a_long_answer_with_and_without_graph_is_the_same(artifact: Path) -> None:
    answers = []
    for graph in (False, True):
        with Engine.load(artifact, cuda_graph=graph) as engine:
            prompt = engine.encode_prompt("What is the capital of Japan?")
            answers.append(list(engine.generate_tokens(prompt, max_new_tokens=60, ignore_eos=True)))
            stats = engine.last.methods["decode_sample"]
            assert (stats["replays"] > 50) is graph and stats["fallbacks"] == 0
            assert [plan["on_host"] for plan in stats["plans"]] == ([LAYERS] if graph else [])
    assert answers[0] == answers[1]


def test_prefill_buckets_are_refused(artifact: Path) -> None:
    """The host would compute experts for rows of padding."""
    with pytest.raises(OptionError, match=r"prefill buckets need a program whose 'prefill' takes rows of padding"):
        Engine.load(artifact, cuda_graph=True, prefill_buckets=(16, 32))
    with Engine.load(artifact, cuda_graph=True) as engine:
        assert engine.model.prefill_buckets == ()
