"""Steps that sample on the device: the tokens are those of logits sampled on the host, and a seed repeats them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.runner import Engine, Sampling
from ostinato.runner.stepping import DeviceSteps, HostSteps

PROMPT = [5, 99, 7, 1200, 31]
COUNT = 24
HOT = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=11)


def answer(engine: Engine, sampling: Sampling, count: int = COUNT) -> list[int]:
    return list(engine.generate_tokens(PROMPT, max_new_tokens=count, sampling=sampling, ignore_eos=True))


def test_greedy_tokens_are_those_of_the_logits(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        assert isinstance(engine.steps, DeviceSteps)
        found = answer(engine, Sampling())
        host = HostSteps(engine, engine.program.device)
        expected = [host.begin(PROMPT, Sampling())]
        expected += [host.next(more=False) for _ in range(COUNT - 1)]
    assert found == expected


@pytest.mark.parametrize("graph", [False, True])
def test_a_seed_repeats(capitals_artifact: Path, graph: bool) -> None:
    with Engine.load(capitals_artifact) as plain, Engine.load(capitals_artifact, cuda_graph=graph) as engine:
        expected = answer(plain, HOT)
        assert answer(engine, HOT) == expected
        # Once more, from the state that the first answer has left, and now replayed from its first step.
        assert answer(engine, HOT) == expected
        assert answer(engine, Sampling(1.5, 40, 0.95, seed=12)) != expected
        # A shorter answer is the beginning of the longer one: noise depends on the place, not on the number of steps.
        assert answer(engine, HOT, 7) == expected[:7]
        assert engine.last.methods["decode_sample"]["fallbacks"] == 0


def test_without_a_seed_answers_differ(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        assert answer(engine, Sampling(temperature=2.0)) != answer(engine, Sampling(temperature=2.0))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_seeds(capitals_artifact: Path, seed: int) -> None:
    sampling = Sampling(temperature=1.5, seed=seed)
    with Engine.load(capitals_artifact) as engine:
        assert answer(engine, sampling, 8) == answer(engine, sampling, 8)


def test_options_change_without_a_new_capture(capitals_artifact: Path) -> None:
    """They are data of the captured step."""
    with Engine.load(capitals_artifact, cuda_graph=True) as engine:
        greedy = answer(engine, Sampling())
        assert answer(engine, HOT) != greedy
        assert answer(engine, Sampling(temperature=3.0, top_k=1, seed=5)) == greedy
        assert answer(engine, Sampling()) == greedy
        assert engine.last.methods["decode_sample"]["captures"] == 1


def test_resuming_goes_on_where_an_answer_was(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        expected = answer(engine, HOT)
        engine.prefill([*PROMPT, *expected[:9]])
        engine.steps.resume([*PROMPT, *expected[:9]], expected[9], HOT)
        assert [engine.steps.next(more=False) for _ in range(10)] == expected[10:20]


def test_logits_are_there_for_who_asks(capitals_artifact: Path) -> None:
    """`decode_sample` gives the logits that `decode` gives, and draws from them."""
    tokens, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))
    greedy = torch.zeros(1), torch.tensor([0]), torch.ones(1), torch.tensor([0])
    with load_program(capitals_artifact) as program:
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        (logits,) = prefill.execute((tokens, positions))
        (first,) = program.load_method("sample").execute((logits, torch.tensor([len(PROMPT)]), *greedy))
        assert int(first) == int(logits.argmax())
        second, after = program.load_method("decode_sample").execute(())
        assert int(second) == int(after.argmax())
        assert int(program.mutable_buffers["sampling.token"]) == int(second)
        assert int(program.mutable_buffers["sampling.position"]) == len(PROMPT) + 1
        prefill.execute((tokens, positions))
        (expected,) = decode.execute((first, torch.tensor([len(PROMPT)])))
        assert torch.equal(after, expected)
