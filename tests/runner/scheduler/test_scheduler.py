"""The rules of `runner/scheduler/README.md`, one by one: who steps when, how answers end, and what they are."""

from __future__ import annotations

import pytest

from ostinato.delegate import CapacityError, InputError
from ostinato.runner import Engine, QueueFullError, SamplingParams

from .conftest import SESSIONS, Driver, check
from .driving import PAGE, SEEDED, WAYS, alone, assert_all_free, prompt

# --- who goes when


def test_first_come_first_served(driver: Driver) -> None:
    """More requests than slots begin, and end, in their order. A short one overtakes nobody that waits."""
    driven = driver()
    requests = [driven.add(prompt(7 * number, 5), 6, ignore_eos=True) for number in range(11)]
    first: dict[str, int] = {}
    while driven.scheduler.busy:
        driven.step()
        for request in requests:
            if driven.of(request).tokens:
                first.setdefault(request.id, len(driven.steps))
        assert driven.scheduler.stats.decoding + driven.scheduler.stats.prefilling <= SESSIONS
    begun = [first[request.id] for request in requests]
    assert begun == sorted(begun) and len(set(begun[::SESSIONS])) == 3
    check(driven, *requests)
    assert driven.scheduler.stats.finished == len(requests)


def test_prompts_ride_in_parts_beside_others(driver: Driver) -> None:
    driven = driver(rows=20)
    first = driven.add(prompt(1, 5), 40, ignore_eos=True)
    driven.step(2)
    second = driven.add(prompt(2, 70), 5)
    driven.run()
    beside = [parts for count, parts in driven.steps if count and parts]
    assert beside == [[20], [20], [20], [10]]
    # Nobody waits: each of these steps has given the first answer a token.
    assert driven.of(first).reason == "length" and len(driven.steps) <= 42
    check(driven, first, second)


def test_two_prompts_in_one_step(driver: Driver) -> None:
    """What the first prompt leaves of a step is the next one's; their sessions then decode together."""
    driven = driver(rows=40)
    first = driven.add(prompt(1, 5), 30, ignore_eos=True)
    driven.step(2)
    others = [driven.add(prompt(3 + number, 30), 5) for number in range(2)]
    driven.run()
    assert [parts for count, parts in driven.steps if count and parts] == [[30, 10], [20]]
    check(driven, first, *others)


def test_a_long_prompt_leaves_half_to_others(driver: Driver) -> None:
    driven = driver(rows=20)
    first = driven.add(prompt(1, 5), 60, ignore_eos=True)
    driven.step(2)
    long, short = driven.add(prompt(2, 150), 5), driven.add(prompt(3, 25), 5)
    driven.run()
    beside = [parts for count, parts in driven.steps if count and parts]
    assert beside[:3] == [[10, 10], [10, 10], [15, 5]]
    # Once it is the only one it has whole steps.
    assert beside[3:] == [[20]] * 5 + [[15]]
    check(driven, first, long, short)


def test_prompts_alone_take_what_the_model_takes(driver: Driver) -> None:
    """Nobody decodes: the bound of steps beside others does not count."""
    driven = driver(rows=16)
    requests = [driven.add(prompt(number, 60), 3) for number in range(2)]
    driven.run()
    assert driven.steps[0] == (0, [60, 60])
    check(driven, *requests)


def test_one_row_for_two_prompts(driver: Driver) -> None:
    """A bound that leaves one row still brings two long prompts to their ends."""
    driven = driver(rows=1)
    first = driven.add(prompt(1, 5), 60, ignore_eos=True)
    driven.step(2)
    others = [driven.add(prompt(2 + number, 20), 3) for number in range(2)]
    driven.run()
    assert all(count for _, parts in driven.steps for count in parts)
    check(driven, first, *others)


def test_a_full_queue_refuses_at_once(driver: Driver) -> None:
    driven = driver(max_waiting=3)
    requests = [driven.add(prompt(number, 5), 4) for number in range(3)]
    with pytest.raises(QueueFullError, match="3 requests are waiting, which is the most: ask again later"):
        driven.add(prompt(5, 5))
    driven.step()
    # Those three have begun.
    requests += [driven.add(prompt(number, 5), 4) for number in range(3, 6)]
    assert driven.scheduler.stats.refused == 1
    driven.run()
    check(driven, *requests)


def test_what_is_refused(driver: Driver, engine: Engine) -> None:
    driven = driver()
    for tokens, error, text in (
        ([], InputError, "the prompt is empty"),
        ([1536], InputError, r"values must lie in 0\.\.1535, got 1536"),
        (prompt(1, 251), InputError, "has 251 tokens and leaves no room for an answer in max_seq_len 251"),
    ):
        with pytest.raises(error, match=text):
            driven.add(tokens)
    with pytest.raises(CapacityError, match=r"5 answers to one prompt need as many sessions, .* loaded for 4"):
        driven.add([1], n=5)
    assert not driven.scheduler.busy and driven.scheduler.stats.waiting == 0


# --- leaving


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["waiting", "in the middle of its prompt", "decoding"])
def test_cancel_frees_everything_at_once(driver: Driver, engine: Engine, when: str, n: int) -> None:
    driven = driver(rows=16)
    first = driven.add(prompt(1, 5), 30, ignore_eos=True)
    driven.step(2)
    before = engine.sessions.free, engine.sessions.free_pages
    other = driven.add(prompt(2, 40), 20, n=n, ignore_eos=True)
    driven.step({"waiting": 0, "in the middle of its prompt": 1, "decoding": 6}[when])
    if when != "waiting":
        assert engine.sessions.free < before[0]
    driven.scheduler.cancel(other.id)
    assert (engine.sessions.free, engine.sessions.free_pages) == before
    driven.step()
    for index in range(n):
        found = driven.of(other, index)
        assert (found.reason, found.error.type) == ("cancelled", "CancelledError")  # type: ignore[union-attr]
        assert found.tokens == alone(engine, other, index)[0][: len(found.tokens)]
        assert bool(found.tokens) == (when == "decoding")
    driven.scheduler.cancel(other.id)
    driven.scheduler.cancel("nobody")
    driven.run()
    check(driven, first)


def test_one_of_the_answers_is_cancelled(driver: Driver, engine: Engine) -> None:
    driven = driver()
    request = driven.add(prompt(2, 10), 12, n=3, sampling_params=SEEDED, ignore_eos=True)
    driven.step(4)
    driven.scheduler.cancel(request.id, 1)
    assert engine.sessions.free == 2
    driven.run()
    assert driven.of(request, 1).reason == "cancelled"
    for index in (0, 2):
        assert driven.of(request, index).tokens == alone(engine, request, index)[0]


# --- pages run out


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "penalties", "seed", "min_tokens"])
def test_put_back_and_the_same_tokens(driver: Driver, params: SamplingParams) -> None:
    """Four answers want 12 pages of 9: the youngest leave and come back, the oldest never does, and all are as alone."""
    driven = driver(rows=64)
    requests = [driven.add(prompt(40 * number, 58), 80, sampling_params=params, ignore_eos=True) for number in range(4)]
    left = set()
    while driven.scheduler.busy:
        driven.step()
        left |= {answer.request.id for answer in driven.scheduler._waiting if answer.put_back}
    assert left and requests[0].id not in left
    check(driven, *requests)


def test_nobody_starves(driver: Driver) -> None:
    """Each request needs three pages of nine, and new ones come while others were put back."""
    driven = driver(rows=64)
    requests = [driven.add(prompt(11 * number, 100), 70, ignore_eos=True) for number in range(6)]
    for number in range(6, 12):
        driven.step(40)
        requests.append(driven.add(prompt(11 * number, 100), 70, ignore_eos=True))
    driven.run()
    check(driven, *requests)


def test_answers_that_come_back_one_by_one(driver: Driver) -> None:
    """Whoever was put back goes on before all that came later."""
    driven = driver(rows=64)
    requests = [driven.add(prompt(11 * number, 58), 130, ignore_eos=True) for number in range(4)]
    ends = []
    while driven.scheduler.busy:
        driven.step()
        waiting = [answer.order for answer in driven.scheduler._waiting]
        assert waiting == sorted(waiting)
        ends += [one.id for one in requests if driven.of(one).reason and one.id not in ends]
    assert ends == [request.id for request in requests] and driven.scheduler.stats.put_back
    check(driven, *requests)


@pytest.mark.parametrize("n", [2, 3])
def test_put_back_in_the_middle_of_a_prompt(driver: Driver, n: int) -> None:
    """Forks are made when the prompt is in, however often it began."""
    driven = driver(rows=16)
    first = driven.add(prompt(1, 60), 120, ignore_eos=True)
    driven.step()
    request = driven.add(prompt(2, 150), 20, n=n, sampling_params=SEEDED, ignore_eos=True)
    driven.step(3)
    answer = next(one for one in driven.scheduler._prefilling if one.request is request)
    driven.scheduler._leave(answer)
    driven.scheduler._put_back(answer)
    driven.run()
    check(driven, first, request)


def test_slots_that_others_take_meanwhile(driver: Driver, engine: Engine) -> None:
    """Forks for which there is no slot any more are computed again, when there is one."""
    driven = driver(rows=16)
    params = SamplingParams(1.0, seed=3, prompt_logprobs=1)
    request = driven.add(prompt(2, 100), 10, n=4, sampling_params=params, ignore_eos=True)
    driven.scheduler._admit()
    others = [engine.open_session() for _ in range(2)]
    driven.run()
    for session in others:
        session.close()
    check(driven, request)
    assert driven.scheduler.stats.prompt_tokens > 100
    for index in range(4):
        found = driven.of(request, index).prompt_logprobs
        assert found is not None and [one.token for one in found if one] == request.tokens[1:]


def test_no_page_is_left_for_the_only_one(driver: Driver, engine: Engine) -> None:
    """Sessions of others have all pages but two: the answer ends where there is no page, with what it has."""
    others = [engine.open_session() for _ in range(2)]
    for session, length in zip(others, (4 * PAGE - 10, 3 * PAGE), strict=True):
        session.prefill(prompt(9, length))
    driven = driver()
    request = driven.add(prompt(1, 100), 120, ignore_eos=True)
    driven.run()
    found = driven.of(request)
    for session in others:
        session.close()
    tokens = alone(engine, request)[0]
    assert found.reason == "kv_tokens" and found.error is None
    # The token behind the last position is sampled too.
    assert found.tokens == tokens[: 2 * PAGE - 100 + 1]


def test_others_have_all_slots(driver: Driver, engine: Engine) -> None:
    others = [engine.open_session() for _ in range(SESSIONS)]
    driven = driver()
    request = driven.add(prompt(1, 5))
    driven.run()
    error = driven.of(request).error
    for session in others:
        session.close()
    assert error is not None and (error.type, error.message[:24]) == ("CapacityError", "all 4 sessions are open ")


# --- how answers end


def test_every_end(driver: Driver, engine: Engine) -> None:
    driven = driver(rows=250)
    length = driven.add(prompt(1, 5), 7, ignore_eos=True)
    full = driven.add(prompt(2, 245), 100, ignore_eos=True)
    tokens = alone(engine, driven.add(prompt(3, 9), 8, ignore_eos=True))[0]
    stopped = driven.add(prompt(3, 9), 8, ignore_eos=True, sampling_params=SamplingParams(stop_token_ids=[tokens[3]]))
    one = driven.add(prompt(4, 9), 1, ignore_eos=True)
    driven.run()
    assert [driven.of(request).reason for request in (length, full, stopped, one)] == [
        "length",
        "max_seq_len",
        "stop",
        "length",
    ]
    assert len(driven.of(full).tokens) == 6 and len(driven.of(one).tokens) == 1
    assert driven.of(stopped).tokens == tokens[: tokens.index(tokens[3]) + 1]
    check(driven, length, full, stopped, one)


def test_answers_by_forks_are_those_of_seeds(driver: Driver, engine: Engine) -> None:
    driven = driver()
    requests = [
        driven.add(prompt(5, 30), 10, n=4, sampling_params=SamplingParams(2.0, seed=2**64 - 2)),
        driven.add(prompt(6, 66), 10, n=2, sampling_params=SEEDED),
        driven.add(prompt(7, 20), 10, n=3),
    ]
    driven.run()
    # The prompt was run once.
    assert driven.scheduler.stats.prompt_tokens == 30 + 66 + 20
    check(driven, *requests)
    assert len({tuple(driven.of(requests[0], index).tokens) for index in range(4)}) == 4


def test_nothing_is_left(driver: Driver, engine: Engine) -> None:
    """`stats` count what was done."""
    driven = driver()
    assert_all_free(engine)
    requests = [driven.add(prompt(number, 10), 5, ignore_eos=True) for number in range(6)]
    driven.step()
    stats = driven.scheduler.stats
    assert (stats.waiting, stats.prefilling + stats.decoding, stats.kept_sessions) == (2, 4, 0)
    driven.run()
    stats = driven.scheduler.stats
    assert (stats.waiting, stats.prefilling, stats.decoding) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished, stats.put_back) == (60, 30, 6, 0)
    assert stats.steps == len(driven.steps)
    check(driven, *requests)
