"""Steps from token to token: the device and the host sample the same tokens, and a seed repeats them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.delegate import ArtifactError, InputError, Program, StateKind, load_program
from ostinato.delegate.logits_processing import bitmask, logprob_tensors, token_logprobs, words_of
from ostinato.delegate.sampling import sample
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.model.batch import Outputs, Run
from ostinato.runner.model.model import Model
from ostinato.runner.model.steps import DeviceSteps, HostSteps, _HostTokens
from ostinato.runner.sessions.session import Session
from ostinato.runner.sessions.sessions import Sessions

PROMPT = [5, 99, 7, 1200, 31]
COUNT = 24
HOT = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=11)


def answer(engine: Engine, sampling: SamplingParams, count: int = COUNT) -> list[int]:
    return list(engine.generate_tokens(PROMPT, max_new_tokens=count, sampling_params=sampling, ignore_eos=True))


def on_the_host(model: Model) -> Sessions:
    """Return sessions whose tokens are sampled on the host, of a model that samples on the device."""
    sessions = Sessions(model)
    assert isinstance(sessions.steps, DeviceSteps)
    sessions.steps = HostSteps(model)
    return sessions


def walk(sessions: Sessions, sampling: SamplingParams, count: int = COUNT) -> list[int]:
    with sessions.open(sampling) as session:
        session.prefill(PROMPT)
        return steps_of(sessions, session, count)


def steps_of(sessions: Sessions, session: Session, count: int) -> list[int]:
    return [token for _ in range(count) for token in sessions.step([session])]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        HOT,
        SamplingParams(1.0, seed=3),
        SamplingParams(3.0, top_k=5, seed=4),
        SamplingParams(2.0, top_p=0.5, seed=2**64 - 1),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={7: 10.0}),
        SamplingParams(3.0, top_p=0.9, seed=5, presence_penalty=1.0, min_tokens=9, stop_token_ids=range(0, 1500, 3)),
        SamplingParams(2.0, 60, 0.9, 6, 0.001, 1.2, 0.5, 0.3, {3: 2.0, 900: 5.0, 901: -2.0}),
    ],
    ids=lambda params: params.seed,
)
def test_the_host_samples_what_the_device_samples(capitals_artifact: Path, sampling: SamplingParams) -> None:
    """A program that samples gives the tokens that the host samples from logits."""
    with Engine.load(capitals_artifact) as engine:
        found = answer(engine, sampling)
        sessions = on_the_host(engine.model)
        # A token of `stop_token_ids` ends the answer, and is not one of these.
        assert found == walk(sessions, sampling)[: len(found)] and len(found) >= 9
        if sampling.processes:
            return
        # A session that continues in the middle of the answer gets the same tokens.
        with sessions.open(sampling) as session:
            session.prefill([*PROMPT, *found[:9]])
            session.append(found[9])
            assert steps_of(sessions, session, 10) == found[10:20]


def test_who_is_sampled_later(capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps sample from processed logits by themselves. Only a bitmask that is not known before a step is left for later."""
    monkeypatch.setattr(Model, "sample", sample_spy := Spy(Model.sample))
    with Engine.load(capitals_artifact, sessions=3) as engine:
        vocab = engine.model.vocab
        options = (HOT, replace(HOT, frequency_penalty=0.5, min_tokens=30), SamplingParams(2.0, seed=8))
        sessions = [engine.open_session(params) for params in options]
        sessions[2].token_bitmask = lambda tokens: bitmask(range(len(tokens), len(tokens) + 40), vocab)
        for session in sessions:
            session.prefill(PROMPT)
        assert not sample_spy.slots
        # The bitmask depends on the prompt's last token, which was not in the history when the step began.
        engine.step(sessions)
        assert sample_spy.slots == [[sessions[2].slot]]
        for _ in range(5):
            engine.step(sessions)
        assert len(sample_spy.slots) == 1
        steps: Any = engine.sessions.steps
        steps.goes_ahead, steps._pending = True, _HostTokens
        for _ in range(5):
            engine.step(sessions, more=True)
        assert sample_spy.slots[1:] == [[-1, -1, sessions[2].slot]] * 4
        engine.step(sessions)
        tokens = [session.tokens for session in sessions]
        assert all(place <= token < place + 40 for place, token in enumerate(tokens[2]) if place >= len(PROMPT))
    with Engine.load(capitals_artifact) as engine:
        host = on_the_host(engine.model)
        for place, params in enumerate(options):
            with host.open(params) as session:
                session.prefill(PROMPT)
                if place == 2:
                    session.token_bitmask = lambda tokens: bitmask(range(len(tokens), len(tokens) + 40), vocab)
                steps_of(host, session, 12)
                assert session.tokens == tokens[place]


class Spy:
    """Stands in for `Model.sample`, and notes the slots of its calls."""

    def __init__(self, sample: Callable[..., torch.Tensor]) -> None:
        self.slots: list[list[int]] = []
        self._sample = sample

    def __get__(self, model: Model, _: type[Model]) -> Callable[..., torch.Tensor]:
        def call(outputs: Outputs, positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
            self.slots.append(list(slots))
            return self._sample(model, outputs, positions, slots)

        return call


@pytest.mark.parametrize("graph", [False, True])
def test_each_output_counts_once(capitals_artifact: Path, graph: bool) -> None:
    """Rows that nobody asked for, and padding of a bucket, count nothing and keep no token."""
    params = SamplingParams(frequency_penalty=0.25, temperature=1.0, seed=1)
    with Engine.load(
        capitals_artifact,
        cuda_graph=graph,
        sessions=3,
        prefill_buckets=(8, 32) if graph else None,
        row_buckets=(4,) if graph else None,
    ) as engine:
        model = engine.model

        def state(name: str) -> torch.Tensor:
            (found,) = (
                value
                for kind in (StateKind.SAMPLING, StateKind.LOGITS_PROCESSING)
                for key, value in engine.program.buffers_of(kind).items()
                if key.endswith(f".{name}")
            )
            return found

        sessions = [engine.open_session(params) for _ in range(3)]
        for session in sessions[:2]:
            session.prefill(PROMPT)
        for turn in range(5):
            engine.step(sessions[:2])
            engine.step(sessions[:2], prefill={sessions[2]: PROMPT[turn:]})
        for session in sessions[:2]:
            outputs = torch.tensor(session.tokens[len(PROMPT) :]).bincount(minlength=model.vocab)
            assert len(session.tokens) == len(PROMPT) + 10
            assert torch.equal(state("output_counts")[session.slot], outputs.int())
        # The token after the prompt is sampled, and not taken.
        assert state("output_counts")[sessions[2].slot].sum() == 1
        before = {name: state(name).clone() for name in ("output_counts", "token", "position")}
        model.step([Run(sessions[0].slot, PROMPT, 0, outputs=0)])
        runs = [Run(sessions[0].slot, PROMPT, 5, outputs=0), Run(sessions[1].slot, PROMPT[:2], 0, outputs=0)]
        model.step(runs)
        for name, value in before.items():
            assert torch.equal(state(name), value), name
        model.step([runs[0], replace(runs[1], outputs=2)])
        counted = (state("output_counts") - before["output_counts"]).sum(1)
        assert counted.tolist() == [int(slot == sessions[1].slot) for slot in range(len(counted))]


def test_an_answer_with_all_there_is(capitals_artifact: Path) -> None:
    """Log-probabilities of each token, on the device and on the host; an answer of `min_tokens` that `stop_token_ids` end."""
    with Engine.load(capitals_artifact) as engine:
        tokens = answer(engine, HOT)
        place = next(place for place in range(5, COUNT) if tokens[place] not in tokens[:place])
        params = replace(HOT, min_tokens=place, stop_token_ids=[tokens[place]], logprobs=3)
        stream = engine.generate_tokens(PROMPT, sampling_params=params, ignore_eos=True)
        assert list(stream) == tokens[:place] and stream.result.tokens == tokens[: place + 1]
        assert stream.result.finish_reason == "stop"
        assert [one.token for one in stream.result.logprobs] == stream.result.tokens
        assert set(stream.result.as_dict()["logprobs"][0]) == {"token", "logprob", "rank", "top"}
        sessions = on_the_host(engine.model)
        with sessions.open(replace(params, min_tokens=0)) as session:
            session.prefill(PROMPT)
            for one in stream.result.logprobs:
                (expected,) = token_logprobs(
                    [one.token], logprob_tensors(session.logits[None], torch.tensor([one.token])), 3
                )
                assert sessions.step([session]) == [one.token]
                for found in (one, session.logprobs):
                    assert found is not None and found.rank == expected.rank
                    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
                    assert [token for token, _ in found.top] == [token for token, _ in expected.top]


def test_a_bitmask_that_is_none(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine, engine.open_session() as session:
        session.prefill(PROMPT)
        words = words_of(engine.model.vocab)
        for wrong in (torch.ones(words - 1, dtype=torch.int32), torch.ones(words), [1] * words):
            session.token_bitmask = lambda tokens, wrong=wrong: wrong  # type: ignore[misc]
            with pytest.raises(InputError, match=f"a token bitmask is an int32 tensor of {words} words, got"):
                engine.step([session])
        session.token_bitmask = lambda tokens: torch.zeros(words, dtype=torch.int32)
        with pytest.raises(InputError, match=f"bitmask after {len(PROMPT)} tokens allows no token"):
            engine.step([session])
        session.token_bitmask = lambda tokens: bitmask([1200], 32 * words) if len(tokens) == len(PROMPT) else None
        session.sampling_params = SamplingParams(logprobs=1)
        assert engine.step([session]) == [1200]
        assert session.logprobs is not None and session.logprobs.rank > 1
        (after,) = engine.step([session])
        assert session.tokens == [*PROMPT, 1200, after]


def test_a_bitmask_that_fails_later(capitals_artifact: Path) -> None:
    """A step that went ahead asks for a bitmask in another session's step. Only the session's own step raises."""
    with Engine.load(capitals_artifact, sessions=2) as engine:
        expected = answer(engine, SamplingParams(), 3)
        steps: Any = engine.sessions.steps
        steps.goes_ahead, steps._pending = True, _HostTokens
        session, other = engine.open_session(), engine.open_session()
        for one in (session, other):
            one.prefill(PROMPT)
        asked = []

        def fails_twice(tokens: Sequence[int]) -> None:
            asked.append(len(tokens) - len(PROMPT))
            if asked[1:] in ([1], [1, 1]):
                raise KeyError("no state")

        session.token_bitmask = fails_twice
        assert engine.step([session, other], more=True) == [expected[0]] * 2
        assert engine.step([other]) == [expected[1]]
        with pytest.raises(KeyError, match="no state"):
            engine.step([session, other])
        assert engine.step([other, session]) == [expected[2], expected[1]]
        assert engine.step([session]) == [expected[2]] and asked == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "prefill",
    [
        lambda session: session.prefill(PROMPT),
        lambda session: list(session.prefill_logits(PROMPT)),
        lambda session: session.hidden_states(PROMPT),
    ],
    ids=["prefill", "prefill_logits", "hidden_states"],
)
@pytest.mark.parametrize("host", [False, True])
def test_every_prompt_is_counted(capitals_artifact: Path, prefill: Callable[[Session], object], host: bool) -> None:
    """Penalties take outputs and prompts for what they are, however a prompt comes."""
    best, second = 1001, 1002
    bias = {best: 100.0, second: 99.0}
    with Engine.load(capitals_artifact) as engine:
        sessions = on_the_host(engine.model) if host else engine.sessions
        with sessions.open(SamplingParams(frequency_penalty=2.0, logit_bias=bias)) as session:
            session.prefill(PROMPT)
            assert steps_of(sessions, session, 1) == [best]
            prefill(session)
            # What was an output belongs to the prompt now, and is not penalised.
            assert steps_of(sessions, session, 2) == [best, second]


def test_a_prompt_takes_the_place_of_a_token(capitals_artifact: Path) -> None:
    """A token that a step with `more` has begun is no part of the prompt, and a refused prompt is none either."""
    best, second, third = 1001, 1002, 1003
    bias = {best: 100.0, second: 99.0, third: 98.0}
    with Engine.load(capitals_artifact) as engine:
        steps: Any = engine.sessions.steps
        steps.goes_ahead, steps._pending = True, _HostTokens
        with engine.open_session(SamplingParams(repetition_penalty=1.5, logit_bias=bias)) as session:
            session.prefill(PROMPT)
            assert engine.step([session], more=True) == [best]
            session.prefill(PROMPT)
            with pytest.raises(InputError, match=r"values must lie in 0\.\."):
                session.prefill([second, engine.model.vocab])
            assert engine.step([session]) == [second]


def test_a_token_that_was_not_taken_counts(capitals_artifact: Path) -> None:
    """A session comes back from the host with its first output sampled, and a step goes ahead of it."""
    best, second = 1001, 1002
    with Engine.load(capitals_artifact) as engine:
        steps: Any = engine.sessions.steps
        steps.goes_ahead, steps._pending = True, _HostTokens
        params = SamplingParams(frequency_penalty=2.0, logit_bias={best: 100.0, second: 99.0})
        with engine.open_session(params) as session:
            session.prefill(PROMPT)
            session.offload()
            session.onload()
            assert [engine.step([session], more=True) for _ in range(2)] == [[best], [second]]


def test_the_host_samples_for_several_what_the_device_samples(capitals_artifact: Path) -> None:
    options = (SamplingParams(), HOT, SamplingParams(3.0, top_k=5, seed=4))
    found = []
    with Engine.load(capitals_artifact, sessions=len(options)) as engine:
        for sessions in (engine.sessions, on_the_host(engine.model)):
            opened = [sessions.open(sampling) for sampling in options]
            for place, session in enumerate(opened):
                session.prefill(PROMPT[place:])
            found.append([sessions.step(opened) for _ in range(COUNT)])
            for session in opened:
                session.close()
    assert found[0] == found[1]
    assert len({tuple(column) for column in zip(*found[0], strict=True)}) == len(options)


def test_host_and_device_keep_the_same_ties(capitals_artifact: Path) -> None:
    """A top_k of 2 keeps all tokens that are as likely as the second one: here three."""
    tied = [7, 300, 1201]
    sampling = SamplingParams(temperature=2.0, top_k=2)
    found = set()
    with load_program(capitals_artifact) as program:
        model = Model(program, cuda_graph=False)
        logits = torch.randn(1, model.vocab, generator=torch.Generator().manual_seed(0)).clamp(max=2)
        logits[0, tied] = 3.0
        for seed in range(40):
            params = replace(sampling, seed=seed)
            model.write_sampling(0, **params.numbers())
            token = int(model.sample(Outputs(logits, None), [seed % 5], [0]))
            assert token == int(sample(logits[0], torch.tensor([seed % 5 + 1]), params.tensors()))
            found.add(token)
    assert found == set(tied)


class FixedLogits:
    """Stands in for the `Model` of a program that gives logits, with the same logits for each token."""

    samples, has_state, cuda_graph, max_seq_len, max_rows = False, True, False, 1000, 1

    def __init__(self, program: Program, logits: torch.Tensor) -> None:
        self.program, self._logits = program, logits

    def step(self, runs: list[Run]) -> Outputs:
        return Outputs(self._logits[None], None)


def test_the_host_keeps_ties_and_moves_on(recurrent_artifact: Path) -> None:
    with load_program(recurrent_artifact) as program:
        model: Any = FixedLogits(program, torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0], dtype=torch.bfloat16))
        sessions = Sessions(model)
        assert isinstance(sessions.steps, HostSteps)
        assert walk(sessions, SamplingParams(), 5) == [1] * 5
        tokens = walk(sessions, SamplingParams(temperature=0.7, top_k=2, seed=1), 60)
        assert set(tokens) == {1, 2, 3}
        assert walk(sessions, SamplingParams(temperature=0.7, top_k=2, seed=1), 60) == tokens
        assert walk(sessions, SamplingParams(temperature=0.7, top_k=2), 60) != walk(
            sessions, SamplingParams(temperature=0.7, top_k=2), 60
        )


def test_a_program_that_samples_without_its_state(capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers_of = Program.buffers_of

    def all_but_the_seed(program: Program, kind: StateKind) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in buffers_of(program, kind).items() if not key.endswith(".seed")}

    monkeypatch.setattr(Program, "buffers_of", all_but_the_seed)
    with load_program(capitals_artifact) as program:
        model = Model(program, cuda_graph=False)
        assert model.samples
        with pytest.raises(ArtifactError, match="lacks the state for it: seed"):
            DeviceSteps(model)


@pytest.mark.parametrize("graph", [False, True])
def test_a_seed_repeats(capitals_artifact: Path, graph: bool) -> None:
    with Engine.load(capitals_artifact) as plain, Engine.load(capitals_artifact, cuda_graph=graph) as engine:
        expected = answer(plain, HOT)
        assert answer(engine, HOT) == expected
        # A second time, from the state that the first answer left; now every step is a replay.
        assert answer(engine, HOT) == expected
        assert answer(engine, SamplingParams(1.5, 40, 0.95, seed=12)) != expected
        # A shorter answer is the beginning of the longer one: noise depends on the position, not on the number of steps.
        assert answer(engine, HOT, 7) == expected[:7]
        assert engine.model.method_stats["decode_sample"]["fallbacks"] == 0


def test_whole_numbers_are_taken_for_floats(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        assert answer(engine, SamplingParams(temperature=2, top_p=1, seed=1)) == answer(
            engine, SamplingParams(2.0, seed=1)
        )


def test_without_a_seed_answers_differ(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        assert answer(engine, SamplingParams(temperature=2.0)) != answer(engine, SamplingParams(temperature=2.0))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_seeds(capitals_artifact: Path, seed: int) -> None:
    sampling = SamplingParams(temperature=1.5, seed=seed)
    with Engine.load(capitals_artifact) as engine:
        assert answer(engine, sampling, 8) == answer(engine, sampling, 8)


def test_options_change_without_a_new_capture(capitals_artifact: Path) -> None:
    """Sampling options are data of the captured step."""
    with Engine.load(capitals_artifact, cuda_graph=True) as engine:
        greedy = answer(engine, SamplingParams())
        assert answer(engine, HOT) != greedy
        assert answer(engine, SamplingParams(temperature=3.0, top_k=1, seed=5)) == greedy
        assert answer(engine, SamplingParams()) == greedy
        assert engine.model.method_stats["decode_sample"]["captures"] == 1


def test_resuming_goes_on_where_an_answer_was(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        expected = answer(engine, HOT)
        with engine.open_session(HOT) as session:
            session.prefill([*PROMPT, *expected[:9]])
            session.append(expected[9])
            assert steps_of(engine.sessions, session, 10) == expected[10:20]


def test_logits_are_there_for_who_asks(capitals_artifact: Path) -> None:
    """`decode_sample` gives the logits that `decode` gives, and samples from them."""
    tokens, positions, slot = torch.tensor([PROMPT]), torch.arange(len(PROMPT)), torch.tensor([0])
    slots = slot.repeat(len(PROMPT))
    with load_program(capitals_artifact) as program:
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        (logits,) = prefill.execute((tokens, positions, slots))
        before = torch.tensor([len(PROMPT) - 1])
        (first,) = program.load_method("sample").execute((logits, torch.tensor([0]), before, slot))
        assert int(first) == int(logits.argmax())
        second, after = program.load_method("decode_sample").execute((slot,))
        assert int(second) == int(after.argmax())
        state = {key.rpartition(".")[2]: tensor for key, tensor in program.buffers_of(StateKind.SAMPLING).items()}
        assert int(state["token"]) == int(second)
        assert int(state["position"]) == len(PROMPT) + 1
        prefill.execute((tokens, positions, slots))
        (expected,) = decode.execute((first[None], torch.tensor([len(PROMPT)]), slot))
        assert torch.equal(after, expected)
