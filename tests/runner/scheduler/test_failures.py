"""Log-probabilities, bitmasks, and what goes wrong: in one answer, in a step, and for good."""

from __future__ import annotations

import pytest

from ostinato.delegate import ClosedError
from ostinato.delegate.logits_processing import bitmask
from ostinato.runner import Engine, SamplingParams

from .conftest import PAGES, SESSIONS, Driver, check
from .driving import PAGE, Driven, alone, loaded, prompt

# --- log-probabilities and bitmasks


@pytest.mark.parametrize("length", [1, 30, 100])
def test_logprobs(driver: Driver, engine: Engine, length: int) -> None:
    """Of each token, and of the prompt's, beside others that ask for none."""
    driven = driver(rows=16)
    first = driven.add(prompt(1, 5), 40, ignore_eos=True)
    driven.step(2)
    params = SamplingParams(1.0, seed=5, logprobs=2, prompt_logprobs=3)
    request = driven.add(prompt(2, length), 6, sampling_params=params, n=2, ignore_eos=True)
    driven.run()
    check(driven, first, request)
    assert driven.of(first).logprobs == [] and driven.of(first).prompt_logprobs is None
    with engine.open_session() as session:
        expected = session.prompt_logprobs(request.tokens, 3)
    for index in range(2):
        found = driven.of(request, index)
        assert_close(found.logprobs, alone(engine, request, index)[2], 2)
        assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is expected[0] is None
        assert_close(found.prompt_logprobs[1:], expected[1:], 3)


def assert_close(found: list, expected: list, count: int) -> None:  # type: ignore[type-arg]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token, one.rank, len(one.top)) == (other.token, other.rank, count)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-3)


def test_a_bitmask(driver: Driver, engine: Engine) -> None:
    """The grammar holds for its own answer, whoever steps beside it, and after it was put back."""

    def allowed(history: list[int]) -> object:
        return bitmask([token for token in range(1536) if token % 5 == len(history) % 5], 1536)

    driven = driver()
    requests = [driven.add(prompt(3, 9), 12, bitmask=allowed), driven.add(prompt(4, 9), 12)]
    driven.step(5)
    answer = next(one for one in driven.scheduler._decoding if one.request is requests[0])
    driven.scheduler._leave(answer)
    driven.scheduler._put_back(answer)
    driven.run()
    assert driven.of(requests[0]).tokens == alone(engine, requests[0], bitmask=allowed)[0]
    assert all(token % 5 == place % 5 for place, token in enumerate(driven.of(requests[0]).tokens, 9))
    check(driven, requests[1])


@pytest.mark.parametrize("kind", ["raises", "has a wrong shape", "allows nothing"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_bitmask_ends_its_answer_alone(driver: Driver, engine: Engine, kind: str, after: int) -> None:
    def allowed(history: list[int]) -> object:
        if len(history) < 9 + after:
            return None
        if kind == "raises":
            raise ZeroDivisionError("no grammar")
        return bitmask([], 1536) if kind == "allows nothing" else bitmask([1], 99)

    driven = driver()
    other = driven.add(prompt(4, 9), 12)
    params = SamplingParams(logprobs=1)
    request = driven.add(prompt(3, 9), 12, bitmask=allowed, ignore_eos=True, sampling_params=params)
    driven.run()
    found = driven.of(request)
    assert found.reason == "error" and found.tokens == alone(engine, request)[0][:after]
    assert len(found.logprobs) == after
    expected = {
        "raises": ("StepError", "ZeroDivisionError: no grammar"),
        "has a wrong shape": ("InputError", "a token bitmask is an int32 tensor of 48 words"),
        "allows nothing": ("InputError", f"the token bitmask after {9 + after} tokens allows no token"),
    }[kind]
    assert found.error is not None and found.error.type == expected[0] and expected[1] in found.error.message
    check(driven, other)


# --- failures


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_that_raises_ends_its_answers(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Those that decode, and those whose prompt is on its way, with all their answers. Those that wait go on."""
    driven = driver(rows=16)
    first = driven.add(prompt(1, 5), 30, ignore_eos=True)
    driven.step(3)
    second = driven.add(prompt(2, 60), 30, n=n, ignore_eos=True)
    driven.step()
    third = driven.add(prompt(3, 30), 10, n=4)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "step", lambda runs: 1 / 0)
        driven.step()
    for found in (driven.of(first), *(driven.of(second, index) for index in range(n))):
        assert found.reason == "error" and found.error is not None
        assert (found.error.type, found.error.message) == ("StepError", "ZeroDivisionError: division by zero")
    assert driven.scheduler.failure is None
    assert (engine.sessions.free, engine.sessions.free_pages) == (SESSIONS, PAGES)
    driven.run()
    check(driven, third)


def test_a_measurement_that_raises_ends_no_answer(driver: Driver) -> None:
    """Prompts go in by few rows until there is one."""
    driven = driver()
    driven.scheduler.budget._find_step_times = lambda: 1 / 0  # type: ignore[assignment, return-value]
    first = driven.add(prompt(1, 5), 12, ignore_eos=True)
    driven.step(2)
    second = driven.add(prompt(2, 40), 5)
    driven.run()
    assert [parts for count, parts in driven.steps if count and parts] == [[16], [16], [8]]
    check(driven, first, second)


def test_an_interrupt_is_passed_on(driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: its answers end, and the next one is as always."""

    def interrupted(runs: object) -> None:
        raise KeyboardInterrupt

    driven = driver()
    first = driven.add(prompt(1, 5), 30)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            driven.step()
    second = driven.add(prompt(2, 5), 8)
    driven.run()
    assert driven.of(first).reason == "error"
    check(driven, second)


@pytest.mark.parametrize("n", [1, 2])
def test_a_closed_program(request: pytest.FixtureRequest, mode: str, n: int) -> None:
    """Everybody's answers end, and `failure` says why nothing more is taken."""
    with loaded(request, mode, sessions=2, kv_tokens=4 * PAGE) as engine:
        driven = Driven(engine, mode)
        requests = [driven.add(prompt(number, 5), 30, n=n, ignore_eos=True) for number in range(4)]
        driven.step(3)
        engine.program.close()
        driven.run()
        for one in requests:
            assert all(driven.of(one, index).reason == "error" for index in range(n))
        assert "load it again" in (driven.scheduler.failure or "")
        with pytest.raises(ClosedError, match="the engine can run nothing more, load it again"):
            driven.add(prompt(1, 5))


def test_a_program_that_is_closed_before_anybody_is_served(request: pytest.FixtureRequest, mode: str) -> None:
    with loaded(request, mode, sessions=2, kv_tokens=4 * PAGE) as engine:
        driven = Driven(engine, mode)
        requests = [driven.add(prompt(number, 5), n=2) for number in range(3)]
        engine.program.close()
        driven.run()
        for one in requests:
            for error in (driven.of(one, index).error for index in range(2)):
                assert error is not None and (error.type, error.message) == ("ClosedError", "the program is closed")
        with pytest.raises(ClosedError, match="the program is closed"):
            driven.add(prompt(1, 5))


def test_a_host_without_memory(driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be offloaded is computed again: answers that were put back, and kept sessions."""

    def full(session: object) -> None:
        raise MemoryError("no pinned memory")

    driven = driver()
    first = driven.add(prompt(1, 100), 8, keep="a", ignore_eos=True)
    driven.run()
    monkeypatch.setattr(engine.sessions.tier, "offload", full)
    requests = [driven.add(prompt(number, 60), 140, ignore_eos=True) for number in range(4)]
    driven.run()
    assert driven.scheduler.stats.put_back and driven.scheduler.kept.get("a").session is None
    check(driven, first, *requests)


def test_no_page_for_the_prompt(driver: Driver, engine: Engine) -> None:
    """An answer that had no token yet has an error, however many tokens it may have."""
    driven = driver()
    with engine.open_session() as one, engine.open_session() as other:
        one.prefill(prompt(9, 4 * PAGE - 10))
        other.prefill(prompt(9, 3 * PAGE))
        request = driven.add(prompt(1, 200), 1000)
        driven.run()
    found = driven.of(request)
    assert found.reason == "error" and found.tokens == []
    assert found.error is not None and found.error.type == "CapacityError"
