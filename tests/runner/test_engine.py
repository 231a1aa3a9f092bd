"""Tests of `Engine`, from prompts to tokens, on programs of every supported shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import ArtifactError, CapacityError, ClosedError, InputError, OptionError
from ostinato.delegate.artifact.records import Growth
from ostinato.runner import Engine, SamplingParams, TextRequest, answer_reader

from ..comparison import logits_of
from ..modules import MAX_SEQ_LEN, VOCAB, WIDTH, Recurrent, Stateless
from .conftest import EOS, ForwardArtifact

PROMPTS = ([5, 1, 7], [1, 2], [9], [4] * 20)


def eager_answer(step: Callable[[list[int], int], Tensor], prompt: list[int], count: int) -> list[int]:
    """Return the greedy answer of `step(tokens, position) -> logits [vocab]`. It does not stop at an end-of-sequence
    token."""
    logits = step(prompt, 0)
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(logits.argmax()))
        logits = step(answer[-1:], len(prompt) + len(answer) - 1)
    return answer


def recurrent_answer(prompt: list[int], count: int) -> list[int]:
    module = Recurrent()

    def step(tokens: list[int], position: int) -> Tensor:
        return module(torch.tensor([tokens]), torch.arange(position, position + len(tokens)))[0]

    return eager_answer(step, prompt, min(count, MAX_SEQ_LEN - len(prompt)))


def stateless_answer(prompt: list[int], count: int) -> list[int]:
    module, tokens = Stateless(), list(prompt)
    while len(tokens) < min(MAX_SEQ_LEN, len(prompt) + count):
        tokens.append(int(module(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


ANSWERS = {"static": recurrent_answer, "dynamic": recurrent_answer, "stateless": stateless_answer}


@pytest.fixture
def engine(recurrent_artifact: Path) -> Iterator[Engine]:
    with Engine.load(recurrent_artifact) as loaded:
        yield loaded


@pytest.mark.parametrize("graph", [False, True])
def test_prefill_and_decode_as_eager(recurrent_artifact: Path, graph: bool) -> None:
    with Engine.load(recurrent_artifact, cuda_graph=graph) as loaded:
        for prompt in PROMPTS:
            stream = loaded.generate_tokens(prompt, max_new_tokens=50, ignore_eos=True)
            answer = list(stream)
            assert answer == stream.result.tokens == recurrent_answer(prompt, 50)
            assert stream.result.finish_reason == "max_seq_len"
            assert len(prompt) + len(answer) == MAX_SEQ_LEN


def test_describe(recurrent_artifact: Path) -> None:
    with Engine.load(recurrent_artifact, cuda_graph=True) as loaded:
        before = loaded.describe()
        assert (before["device"], before["max_seq_len"], before["target"]["device"]) == ("cpu", MAX_SEQ_LEN, "cpu")
        assert before["program"]["constants"] > 0 and before["methods"]["decode"]["plans"] == []
        list(loaded.generate_tokens(PROMPTS[0], max_new_tokens=8, ignore_eos=True))
        (plan,) = json.loads(json.dumps(loaded.describe()))["methods"]["decode"]["plans"]
        assert (plan["pieces"], plan["captured"], plan["called"]) == (1, 1, 0)


def test_describe_capacity(capitals_artifact: Path, recurrent_artifact: Path) -> None:
    with Engine.load(capitals_artifact, cuda_graph=True, sessions=3, kv_tokens=5 * 64, row_buckets=(3, 2)) as loaded:
        described = json.loads(json.dumps(loaded.describe()))
        assert described["row_buckets"] == [2, 3]
        program, capacity = loaded.program, described["capacity"]
        bytes_of = {
            growth: sum(buffer.nbytes for buffer in program.buffers_that_grow(growth).values()) for growth in Growth
        }
        assert capacity == {
            "slots": 3,
            "page_size": 64,
            # A row for each session, and two for snapshots.
            "slot_bytes": bytes_of[Growth.SLOTS] // 5,
            "snapshots": 2,
            "free_slots": 3,
            "free_snapshots": 2,
            "groups": [
                {
                    "name": "global",
                    "window": 0,
                    "pages": 5,
                    "pages_per_session": 4,
                    "page_bytes": bytes_of[Growth.PAGES] // 5,
                    "free_pages": 5,
                }
            ],
        }
        with loaded.open_session() as session:
            session.prefill(list(range(65)))
            capacity = loaded.describe()["capacity"]
            assert (capacity["free_slots"], capacity["groups"][0]["free_pages"]) == (2, 3)
        capacity = loaded.describe()["capacity"]
        assert (capacity["free_slots"], capacity["groups"][0]["free_pages"]) == (3, 5)
    with Engine.load(recurrent_artifact) as loaded:
        described = json.loads(json.dumps(loaded.describe()))
        assert described["row_buckets"] == []
        capacity = described["capacity"]
        assert (capacity["slots"], capacity["free_slots"], capacity["groups"]) == (1, 1, [])


@pytest.mark.parametrize("kind", [*sorted(ANSWERS), "prefill and decode"])
def test_a_session_of_a_program_without_slots(
    forward_artifact: ForwardArtifact, recurrent_artifact: Path, kind: str
) -> None:
    """A program without slots has one session, which goes on and is restored like any other."""
    methods, prompt = kind not in ANSWERS, [5, 1, 7, 2, 2]
    expected = (recurrent_answer if methods else ANSWERS[kind])(prompt, 9)
    with Engine.load(recurrent_artifact if methods else forward_artifact(kind)) as loaded:
        session = loaded.open_session()
        with pytest.raises(CapacityError, match="all 1 sessions are open"):
            session.fork()
        session.prefill(prompt[:2])
        kept = session.snapshot()
        session.prefill(prompt[2:])
        assert list(session.generate(9, eos_ids=())) == expected
        session.restore(kept)
        session.prefill([9, 9, 9])
        session.restore(kept)
        session.prefill(prompt[2:])
        assert list(session.generate(3, eos_ids=())) == expected[:3]
        later = session.snapshot()
        assert list(session.generate(3, eos_ids=())) == expected[3:6]
        session.restore(later)
        assert list(session.generate(6, eos_ids=())) == expected[3:]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_a_lone_forward(forward_artifact: ForwardArtifact, kind: str, graph: bool) -> None:
    with Engine.load(forward_artifact(kind), cuda_graph=graph) as loaded:
        for prompt in PROMPTS:
            answer = loaded.generate_tokens(prompt, max_new_tokens=9, ignore_eos=True)
            assert list(answer) == ANSWERS[kind](prompt, 9)
            assert set(answer.result.methods) == {"forward"}
        stats = loaded.model.method_stats["forward"]
        if graph and kind != "stateless":
            assert (stats["next_phase"], stats["captures"], stats["fallbacks"]) == ("replay", 1, 0)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 10, 15, 16, 17, 18, 25])
def test_a_prompt_in_chunks_as_in_one(
    chunked_artifact: Path, recurrent_artifact: Path, length: int, graph: bool
) -> None:
    """A call takes 2 to 8 tokens. The lengths are around once, twice and three times 8."""
    prompt = [(7 * i + 2) % VOCAB for i in range(length)]
    with Engine.load(chunked_artifact, cuda_graph=graph) as chunked, Engine.load(recurrent_artifact) as whole:
        torch.testing.assert_close(logits_of(chunked.model, prompt), logits_of(whole.model, prompt))
        for name, tensor in whole.program.mutable_buffers.items():
            torch.testing.assert_close(chunked.program.mutable_buffers[name], tensor, msg=name)
        chunks = chunked.model.method_stats["prefill"]["runs"]
        # The rest is a single token, which `decode` takes, or one more chunk.
        assert chunks == length // 8 + (length % 8 > 1)
        assert sum(chunked.model.method_stats["decode"][key] for key in ("runs", "warmups")) == (length % 8 == 1)
        answer = list(chunked.generate_tokens(prompt, max_new_tokens=50, ignore_eos=True))
        assert answer == recurrent_answer(prompt, 50)


def test_prefill_goes_on_from_a_position(chunked_artifact: Path, recurrent_artifact: Path) -> None:
    prompt = [(5 * i + 1) % VOCAB for i in range(20)]
    with Engine.load(chunked_artifact) as chunked, Engine.load(recurrent_artifact) as whole:
        expected = logits_of(whole.model, prompt)
        for cut in (1, 3, 8, 19):
            logits_of(chunked.model, prompt[:cut])
            torch.testing.assert_close(logits_of(chunked.model, prompt[cut:], cut), expected)
        with pytest.raises(InputError, match="no token"):
            logits_of(chunked.model, [])


def test_end_of_sequence(engine: Engine) -> None:
    prompt = next(prompt for prompt in ([a, b] for a in range(VOCAB) for b in range(VOCAB)) if stops(prompt))
    expected = recurrent_answer(prompt, 50)
    at = expected.index(EOS)
    answer = engine.generate_tokens(prompt)
    assert list(answer) == expected[:at]
    assert answer.result.finish_reason == "stop"
    assert answer.result.tokens == expected[: at + 1]
    answer = engine.generate_tokens(prompt, ignore_eos=True)
    assert list(answer) == expected
    assert answer.result.finish_reason == "max_seq_len"


def stops(prompt: list[int]) -> bool:
    answer = recurrent_answer(prompt, 50)
    return EOS in answer[2:] and EOS not in answer[:2]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_new_tokens(engine: Engine, count: int) -> None:
    answer = engine.generate_tokens([5, 1, 7], max_new_tokens=count, ignore_eos=True)
    assert list(answer) == recurrent_answer([5, 1, 7], count)
    assert answer.result.finish_reason == "length"
    # The last token needs no step.
    assert answer.result.methods["decode"]["runs"] == count - 1


def test_figures(recurrent_artifact: Path) -> None:
    with Engine.load(recurrent_artifact, cuda_graph=True, warmup_steps=2) as loaded:
        answer = loaded.generate_tokens([5, 1, 7], max_new_tokens=9, ignore_eos=True)
        result = answer.result
        assert list(answer) == result.tokens
        assert (result.prompt_tokens, len(result.tokens)) == (3, 9)
        assert result.prefill_seconds > 0
        assert result.decode_seconds > 0
        assert result.prefill_tokens_per_second == pytest.approx(3 / result.prefill_seconds)
        assert result.decode_tokens_per_second == pytest.approx(8 / result.decode_seconds)
        assert list(result.methods) == ["prefill", "decode"]
        decode = result.methods["decode"]
        assert (decode["warmups"], decode["captures"], decode["replays"]) == (2, 1, 5)
        assert result.methods["prefill"]["runs"] == 1
        assert result.constants == {"count": 2, "shared": 2, "bytes_saved": 2 * VOCAB * WIDTH * 4}
        assert result.as_dict()["decode_tokens_per_second"] == result.decode_tokens_per_second


class Clock:
    """Stands in for `time`: each reading is one second after the last."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


def test_the_callers_time_is_not_decode_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(answer_reader, "time", clock)
    answer = engine.generate_tokens([5, 1, 7], max_new_tokens=4, ignore_eos=True)
    for _ in answer:
        clock.now += 1000
    # Two steps until the first token, of which one is the prompt's, and three after it.
    assert (answer.result.prefill_seconds, answer.result.decode_seconds) == (2, 3)


def test_stopping_early_keeps_the_figures(engine: Engine) -> None:
    steps = engine.generate_tokens([5, 1, 7], ignore_eos=True)
    taken = [next(steps) for _ in range(4)]
    steps.close()
    assert steps.result.finish_reason == "interrupted"
    assert steps.result.tokens == taken
    assert steps.result.methods["decode"]["runs"] == 3
    assert list(steps) == []
    # The next answer starts from the beginning.
    assert list(engine.generate_tokens([1, 2], max_new_tokens=5, ignore_eos=True)) == recurrent_answer([1, 2], 5)


def test_sampling_repeats_with_a_seed(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=2.0, seed=seed)
        return list(engine.generate_tokens([5, 1, 7], sampling_params=sampling, ignore_eos=True))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_checks_are_made_at_once(engine: Engine) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.generate_tokens([])
    with pytest.raises(InputError, match=f"has {MAX_SEQ_LEN} tokens and leaves no room"):
        engine.generate_tokens([1] * MAX_SEQ_LEN)
    with pytest.raises(OptionError, match="max_new_tokens must be 1 or more"):
        engine.generate_tokens([1], max_new_tokens=0)
    with pytest.raises(OptionError, match="cuda_graph_warmup_steps"):
        Engine.load(engine._path, cuda_graph=True, warmup_steps=0)
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        engine.encode_prompt("hello")
    with pytest.raises(InputError, match="takes a string"):
        engine.encode_prompt([{"role": "user", "content": "x"}], raw=True)
    for prompt in ([1, 2], ["a", "b"], b"hello", {"role": "user", "content": "x"}, 7):
        with pytest.raises(
            InputError, match=r"a prompt is text, or a list of messages .*generate_tokens takes token ids"
        ):
            engine.encode_prompt(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_waiting": 0}, r"max_waiting must be 1 or more \(requests\), got 0"),
        ({"max_waiting": -1}, "max_waiting must be 1 or more .*, got -1"),
        ({"max_waiting": 2.5}, "max_waiting must be 1 or more .*, got 2.5"),
        ({"max_waiting": None}, "max_waiting must be 1 or more .*, got None"),
        ({"max_step_ms": 0}, r"max_step_ms must be above 0 \(milliseconds\), got 0"),
        ({"max_step_ms": float("nan")}, "max_step_ms must be above 0 .*, got nan"),
        ({"host_cache_bytes": -1}, r"host_cache_bytes must be 0 or more \(bytes\), got -1"),
        ({"host_cache_bytes": 1e9}, "host_cache_bytes must be 0 or more .*, got 1000000000.0"),
        ({"max_step_ms": "16"}, "max_step_ms must be above 0 .*, got '16'"),
    ],
)
def test_options_of_the_scheduler(recurrent_artifact: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Engine.load(recurrent_artifact, **options)


def test_options_that_have_another_place(engine: Engine) -> None:
    """The error says what to write. Nothing has begun."""
    asks: list[Callable[..., Any]] = [engine.generate, engine.generate_tokens, engine.generate_all]
    for ask in asks:
        name = ask.__name__
        with pytest.raises(OptionError, match=f"^{name} takes no max_tokens: write max_new_tokens=5$"):
            ask([1], max_tokens=5)
        text = rf"{name} takes no top_k: write sampling_params=SamplingParams\(top_k=3\)"
        with pytest.raises(OptionError, match=text):
            ask([1], top_k=3)
        with pytest.raises(TypeError, match="'heat'"):
            ask([1], heat=3)


def test_a_request_that_is_refused_stops_no_other(capitals_artifact: Path) -> None:
    """It has one result. An option that all of `generate_all` share is refused for all of them."""
    asked = [TextRequest(prompt=prompt, n=2, max_new_tokens=3) for prompt in (" ", QUESTION, "a" * 2000)]
    asked.append(TextRequest(prompt=QUESTION, n=2, stop=""))
    asked.append(TextRequest(prompt=QUESTION, sampling_params=SamplingParams(logit_bias={10**6: 1.0})))
    with Engine.load(capitals_artifact, sessions=2) as loaded:
        found = {(number, index): result for number, index, result in loaded.generate_each(iter(asked))}
        assert set(found) == {(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)}
        assert [found[number, 0].error_type for number in range(5)] == [
            "InputError",
            None,
            "InputError",
            "OptionError",
            "OptionError",
        ]
        assert found[1, 1].text == "Paris" and found[1, 1].error is None
        assert [one.text for one in loaded.generate_all([QUESTION, "", QUESTION])] == ["Paris", "", "Paris"]
        with pytest.raises(OptionError, match="max_new_tokens must be 1 or more"):
            loaded.generate_all([QUESTION], max_new_tokens=0)


def test_each_answer_has_its_own_figures(engine: Engine) -> None:
    """Also if another one begins before its first token."""
    first = engine.generate_tokens([1], max_new_tokens=2, ignore_eos=True)
    second = engine.generate_tokens([1, 2], max_new_tokens=1, ignore_eos=True)
    assert list(first) == first.result.tokens and (first.result.prompt_tokens, second.result.tokens) == (1, [])
    assert list(second) == second.result.tokens and second.result.prompt_tokens == 2


def test_a_closed_engine(recurrent_artifact: Path) -> None:
    engine = Engine.load(recurrent_artifact)
    kept = engine.open_session()
    engine.close()
    for use in (engine.open_session, lambda: kept.prefill([1]), lambda: list(engine.generate_tokens([1]))):
        with pytest.raises(ClosedError, match="is closed"):
            use()


# --- the shipped language model

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", params=[False, True], ids=["disabled", "graph"])
def capitals(request: pytest.FixtureRequest, capitals_artifact: Path) -> Iterator[Engine]:
    with Engine.load(capitals_artifact, cuda_graph=request.param) as loaded:
        yield loaded


def test_capital_of_france(capitals: Engine) -> None:
    answer = capitals.generate(QUESTION)
    pieces = list(answer)
    assert "".join(pieces) == answer.result.text == "Paris"
    assert all(pieces)
    assert answer.result.finish_reason == "stop"
    assert answer.result.tokens[-1] in capitals.eos_ids
    assert "".join(capitals.generate([{"role": "user", "content": QUESTION}])) == "Paris"


def test_raw_prompt_goes_in_as_it_is(capitals: Engine) -> None:
    chat = capitals.tokenizer.render([{"role": "user", "content": QUESTION}])
    assert capitals.encode_prompt(chat, raw=True) == capitals.encode_prompt(QUESTION)
    assert capitals.encode_prompt(QUESTION, raw=True) == capitals.tokenizer.encode(QUESTION)
    assert "".join(capitals.generate(chat, raw=True)) == "Paris"


def test_a_long_answer_with_and_without_graph_is_the_same(capitals_artifact: Path) -> None:
    answers = []
    for graph in (False, True):
        with Engine.load(capitals_artifact, cuda_graph=graph) as loaded:
            prompt = loaded.encode_prompt(QUESTION)
            answers.append(list(loaded.generate_tokens(prompt, max_new_tokens=60, ignore_eos=True)))
            assert loaded.model.method_stats["decode_sample"]["replays"] == (55 if graph else 0)
    assert answers[0] == answers[1]


def test_greedy_tokens_of_transformers(capitals: Engine, capitals_checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(capitals_checkpoint, dtype=torch.float32)
    for question in (
        QUESTION,
        "Could you tell me which city is the capital of Andorra?",
        "Japan's capital?",
        "a",
        "Tell me about São Tomé. " * 4,
    ):
        prompt = capitals.encode_prompt(question)
        answer = capitals.generate_tokens(prompt, max_new_tokens=20)
        ours = list(answer)
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert answer.result.tokens == theirs, question
        assert ours == [token for token in theirs if token not in capitals.model.eos_ids]
