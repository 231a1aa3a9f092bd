"""A scheduler in the process of its callers: threads that wait for each other's steps, and many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.delegate.errors import InputError, OptionError, StepError
from ostinato.runner import Conversation, Engine, TextRequest
from ostinato.runner.answer_reader import AnswerReader
from ostinato.runner.stream import Stream

from .driving import SEEDED, alone, assert_all_free, prompt

SESSIONS = 4
QUESTION = "What is the capital of {}?"
COUNTRIES = ("France", "Japan", "Andorra", "Norway", "Kenya", "Peru", "Italy", "Egypt")


@pytest.fixture(scope="module")
def shared(capitals_artifact: Path) -> Iterator[Engine]:
    with Engine.load(capitals_artifact, sessions=SESSIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The engine of these tests. At the end nobody has anything."""
    yield shared
    assert_all_free(shared)
    scheduler = shared.driver.scheduler
    assert not scheduler._waiting and not scheduler._prefilling and not scheduler._decoding
    assert not shared.driver._arrived


def test_threads(engine: Engine) -> None:
    """Each gets its own answer, whoever runs the steps. Those that stop early hold nobody up."""

    def answer(country: str) -> str:
        left = engine.generate(QUESTION.format(country), max_new_tokens=200, ignore_eos=True)
        next(left)
        text = "".join(engine.generate(QUESTION.format(country)))
        left.close()
        return text

    expected = ["".join(engine.generate(QUESTION.format(country))) for country in COUNTRIES]
    with ThreadPoolExecutor(SESSIONS) as pool:
        for _ in range(3):
            assert list(pool.map(answer, COUNTRIES)) == expected
    assert expected[:2] == ["Paris", "Tokyo"]


def test_answers_that_are_taken_in_turns(engine: Engine) -> None:
    """Two answers in one thread step together: what comes for one while the other is taken is not lost."""
    requests = [prompt(1, 9), prompt(2, 30), prompt(3, 5)]
    expected = [list(engine.generate_tokens(tokens, max_new_tokens=20, ignore_eos=True)) for tokens in requests]
    before = engine.driver.scheduler.stats.steps
    streams = [engine.generate_tokens(tokens, max_new_tokens=20, ignore_eos=True) for tokens in requests]
    found = list(zip(*streams, strict=True))
    assert [list(column) for column in zip(*found, strict=True)] == expected
    assert engine.driver.scheduler.stats.steps - before < 2 * 20


def test_all(engine: Engine) -> None:
    """More prompts than slots, in their order. One that is too long has an error, and the others have none."""
    prompts = [QUESTION.format(country) for country in COUNTRIES * 3]
    prompts[5] = "long " * 300
    results = engine.generate_all(prompts)
    assert [result.finish_reason for result in results] == ["stop"] * 5 + ["error"] + ["stop"] * 18
    assert "no room for an answer" in (results[5].error or "") and results[5].tokens == []
    assert [result.text for result in results[8:16]] == [result.text for result in results[16:]]
    assert results[0].text == "Paris"


def test_all_of_the_wrong_things(engine: Engine) -> None:
    """One string would be a prompt per character."""
    with pytest.raises(InputError, match="put it into a list"):
        engine.generate_all(QUESTION)
    with pytest.raises(OptionError, match="stop takes strings that are not empty, got 5"):
        engine.generate_all([QUESTION], stop=5)


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """All answers of all requests on their way end, and nobody waits for ever; what comes later is as always."""
    # The first steps with company are timed, and fail in silence.
    engine.driver.scheduler.budget.measure()
    step, count = engine.model.step, 0

    def fails(runs: object) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise ZeroDivisionError("no step")
        return step(runs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "step", fails)
    asked = [TextRequest(prompt=QUESTION.format(country), n=n) for country in COUNTRIES]
    found = {(number, index): result for number, index, result in engine.generate_each(asked)}
    assert set(found) == {(number, index) for number in range(len(asked)) for index in range(n)}
    reasons = {result.finish_reason for result in found.values()}
    assert reasons == {"stop", "error"}
    assert {result.error for result in found.values()} == {None, "ZeroDivisionError: no step"}
    count = 1
    stream = engine.generate("Japan's capital?", max_new_tokens=50, ignore_eos=True)
    with pytest.raises(StepError, match="ZeroDivisionError: no step"):
        list(stream)
    result = stream.result
    assert (result.finish_reason, result.error, result.error_type) == (
        "error",
        "ZeroDivisionError: no step",
        "StepError",
    )


def test_beside_others_that_fill_the_queue(engine: Engine) -> None:
    asked = [TextRequest(prompt=QUESTION.format(country), max_new_tokens=30, ignore_eos=True) for country in COUNTRIES]
    first, second = engine.generate_each(iter(asked)), engine.generate_each(iter(asked[:2]))
    found = [next(first)]
    assert not engine.driver.scheduler.has_few_waiting
    assert {number for number, _, result in second if result.finish_reason == "length"} == {0, 1}
    found += first
    assert sorted(number for number, _, _ in found) == list(range(len(asked)))


def test_leaving_in_the_middle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that nobody takes any more are cancelled, and so is what came before an error of the iterator."""
    asked = [TextRequest(prompt=QUESTION.format(country), max_new_tokens=100, ignore_eos=True) for country in COUNTRIES]
    keep_generators(monkeypatch, engine.driver, "outputs_of_all")
    each = engine.generate_each(iter(asked))
    next(each)
    each.close()  # type: ignore[attr-defined]

    def lines() -> Iterator[TextRequest]:
        yield from asked[:2]
        raise OSError("no more lines")

    with pytest.raises(OSError, match="no more lines"):
        list(engine.generate_each(lines()))


@pytest.mark.parametrize("stream", ["generate", "answer", "generate_tokens", "chat"])
def test_closing_a_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    keep_generators(monkeypatch, AnswerReader, "read_all")
    keep_generators(monkeypatch, Engine, "_read")
    question = QUESTION.format("France")
    if stream == "generate":
        pieces: Stream[str] | Stream[int] = engine.generate(question, max_new_tokens=100, ignore_eos=True)
    elif stream == "answer":
        pieces = engine.answer(TextRequest(prompt=question, max_new_tokens=100, ignore_eos=True))
    elif stream == "generate_tokens":
        pieces = engine.generate_tokens(prompt(1, 9), max_new_tokens=100, ignore_eos=True)
    else:
        pieces = Conversation(engine).ask(question)
    next(pieces)
    stats = engine.driver.scheduler.stats
    assert stats.prefilling + stats.decoding == 1
    pieces.close()
    stats = engine.driver.scheduler.stats
    assert stats.prefilling + stats.decoding == 0


def keep_generators(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Keep what a method returns: some interpreters drop what a closed generator reads later."""
    make: Callable[..., Generator[object, None, None]] = getattr(owner, name)
    kept: list[Generator[object, None, None]] = []

    def keeps(*arguments: object) -> Generator[object, None, None]:
        kept.append(make(*arguments))
        return kept[-1]

    monkeypatch.setattr(owner, name, keeps)


def test_several_answers(engine: Engine) -> None:
    asked = TextRequest(
        prompt=QUESTION.format("France"), n=3, sampling_params=SEEDED, max_new_tokens=9, ignore_eos=True
    )
    request = asked.for_scheduler("alone", engine.tokenizer)
    found = {index: result.tokens for _, index, result in engine.generate_each([asked])}
    assert found == {index: alone(engine, request, index)[0] for index in range(3)}


def test_leaving_in_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close an answer that nobody has any more while this thread steps. It ends behind the step."""
    first, second = (
        engine.generate_tokens(prompt(number, 9), max_new_tokens=20, ignore_eos=True) for number in range(2)
    )
    expected = list(engine.generate_tokens(prompt(1, 9), max_new_tokens=20, ignore_eos=True))
    found = [next(first), next(second)][1:]
    step = engine.model.step

    def closes(runs: object) -> object:
        first.close()
        return step(runs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "step", closes)
    found += second
    assert found == expected
    assert engine.driver.scheduler.stats.decoding == 0
