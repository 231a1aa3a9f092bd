"""Sessions that stay when their answer has ended: what goes on from them is what it would be from all their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate import InputError
from ostinato.delegate.code.transfers import Mark
from ostinato.delegate.errors import CapacityError, SessionFileError
from ostinato.runner import Engine, Request, SamplingParams

from .driving import PAGE, PENALIZED, SEEDED, WAYS, Driven, alone, assert_all_free, loaded, prompt

HOT = SamplingParams(temperature=5.0, seed=2)


@pytest.fixture
def driven(engine: Engine, reference: Engine, mode: str) -> Iterator[Driven]:
    driven = Driven(engine, mode)
    driven.reference = reference
    yield driven
    driven.close()


class SlowCopies:
    """Copies to the host that are done when somebody has waited for them, or after `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ended, waited_for = False, set[Mark]()
        wait, is_done = Mark.wait, Mark.is_done.fget  # type: ignore[attr-defined]

        def waited(mark: Mark) -> None:
            wait(mark)
            waited_for.add(mark)

        monkeypatch.setattr(Mark, "wait", waited)
        slow = property(lambda mark: (self._ended or mark in waited_for) and is_done(mark))
        monkeypatch.setattr(Mark, "is_done", slow)

    def end(self) -> None:
        self._ended = True


def tokens_of(driven: Driven, name: str) -> list[int]:
    return list(driven.scheduler.kept.get(name).tokens)


def ran(driven: Driven, request: Request, history: list[int]) -> list[int]:
    """Run a request that goes on from a history, hold its answers to those of sessions alone, and return all tokens that its
    kept session must have."""
    while any(driven.of(request, index).reason is None for index in range(request.n)):
        driven.step()
    for index in range(request.n):
        tokens, reason, _ = alone(driven.reference, request, index, history)
        found = driven.of(request, index)
        assert (found.tokens, found.reason, found.error) == (tokens, reason, None)
    return [*history, *request.tokens, *driven.of(request).tokens]


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "penalties", "seed", "min_tokens"])
@pytest.mark.parametrize("more", [0, 1, 30])
def test_continue(driven: Driven, params: SamplingParams, more: int) -> None:
    """Tokens before the request are its prompt, whichever answer they were in. Another one steps beside it, so that steps go
    ahead of an answer's end."""
    other = driven.add(prompt(5, 5), 60, ignore_eos=True)
    driven.step(2)
    history = ran(driven, driven.add(prompt(1, 20), 9, keep="a", sampling_params=HOT, ignore_eos=True), [])
    assert tokens_of(driven, "a") == history
    for turn in range(2):
        request = driven.add(prompt(turn, more), 9, session="a", keep="a", sampling_params=params, ignore_eos=True)
        history = ran(driven, request, history)
        assert tokens_of(driven, "a") == history
    assert driven.of(other).reason is None
    ran(driven, other, [])


def test_continue_computes_nothing_again(driven: Driven) -> None:
    history = ran(driven, driven.add(prompt(1, 100), 9, keep="a", ignore_eos=True), [])
    before = driven.scheduler.stats.prompt_tokens
    ran(driven, driven.add(prompt(2, 7), 9, session="a", keep="a"), history)
    assert driven.scheduler.stats.prompt_tokens - before == 7


@pytest.mark.parametrize("more", [0, 12])
@pytest.mark.parametrize("n", [1, 3])
def test_fork(driven: Driven, more: int, n: int) -> None:
    """The session stays as it is. Without `keep`, nothing of the answers is kept."""
    history = ran(driven, driven.add(prompt(1, 20), 9, keep="a", ignore_eos=True), [])
    request = driven.add(prompt(2, more), 6, session="a", n=n, sampling_params=SEEDED, ignore_eos=True)
    ran(driven, request, history)
    other = ran(driven, driven.add(prompt(3, more), 6, session="a", keep="b", ignore_eos=True), history)
    assert (tokens_of(driven, "a"), tokens_of(driven, "b")) == (history, other)
    ran(driven, driven.add(prompt(4, 5), 6, session="a", keep="a", ignore_eos=True), history)
    assert len(driven.scheduler.kept) == 2


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("more", [0, 5])
def test_continue_with_several_answers(driven: Driven, n: int, more: int) -> None:
    """The first of them is kept."""
    history = ran(driven, driven.add(prompt(1, 20), 9, keep="a", ignore_eos=True), [])
    request = driven.add(prompt(2, more), 6, session="a", keep="a", n=n, sampling_params=SEEDED, ignore_eos=True)
    history = ran(driven, request, history)
    assert tokens_of(driven, "a") == history


def test_prompt_logprobs_are_of_the_new_tokens(driven: Driven) -> None:
    """Whether or not the session's state is still there."""
    params = SamplingParams(prompt_logprobs=2)
    driven.add(prompt(5, 5), 120, ignore_eos=True)
    driven.step(2)
    for gone in (False, True):
        name = f"gone {gone}"
        history = ran(driven, driven.add(prompt(1, 20), 9, keep=name, ignore_eos=True), [])
        if gone:
            driven.scheduler.kept.get(name).forget_state()
        request = driven.add(prompt(2, 30), 4, session=name, sampling_params=params)
        ran(driven, request, history)
        with driven.reference.open_session() as session:
            expected = session.prompt_logprobs([*history, *request.tokens], 2)[len(history) :]
        found = driven.of(request).prompt_logprobs
        assert found is not None and len(found) == len(expected) == 30
        for one, other in zip(found, expected, strict=True):
            assert one is not None and other is not None and one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_names(driven: Driven) -> None:
    first = driven.add(prompt(1, 20), 9, keep="a")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"session": "a"}, "session 'a' is busy: an answer goes on with it"),
        ({"session": "b"}, "no session is kept as 'b'"),
        ({"keep": "a"}, "a session is kept as 'a' already: close it first, or go on from it"),
    )
    for options, text in refused:
        with pytest.raises(InputError, match=text):
            driven.add([1], **options)
    kept = driven.scheduler.kept
    for use in (lambda: kept.rewind("a", 0), lambda: kept.save("a", "x"), lambda: kept.close("a")):
        with pytest.raises(InputError, match="session 'a' is busy"):
            use()
    history = ran(driven, first, [])
    with pytest.raises(InputError, match=rf"session 'a' has {len(history)} tokens, rewind takes 0 to that, got 99"):
        kept.rewind("a", 99)
    with pytest.raises(InputError, match=r"the prompt has 251 tokens, \d+ of them from its session"):
        driven.add(prompt(1, 251 - len(history)), session="a")
    kept.close("a")
    with pytest.raises(InputError, match="no session is kept as 'a'"):
        kept.close("a")


def test_cancelled(driven: Driven, engine: Engine) -> None:
    """A session stays under its name with the tokens that it has got, and a request that never began changes nothing."""
    first = driven.add(prompt(1, 20), 90, keep="a", ignore_eos=True)
    driven.step(8)
    driven.scheduler.cancel(first.id)
    driven.run()
    history = [*first.tokens, *driven.of(first).tokens]
    assert tokens_of(driven, "a") == history and driven.of(first).tokens
    waiting = driven.add(prompt(2, 20), session="a", keep="a")
    forked = driven.add(prompt(2, 20), keep="c")
    for request in (waiting, forked):
        driven.scheduler.cancel(request.id)
    assert tokens_of(driven, "a") == history and len(driven.scheduler.kept) == 1
    half = driven.add(prompt(2, 50), session="a", keep="a")
    other = driven.add(prompt(3, 5), 40, ignore_eos=True)
    driven.step(1)
    driven.scheduler.cancel(half.id)
    after = tokens_of(driven, "a")
    assert after == [*history, *half.tokens][: len(after)]
    ran(driven, other, [])
    ran(driven, driven.add(prompt(4, 5), session="a", keep="a"), after)


def test_rewind(driven: Driven) -> None:
    """To where the last request began there is a snapshot; to anywhere else it is computed again."""
    kept = driven.scheduler.kept
    first = ran(driven, driven.add(prompt(1, 30), 9, keep="a", ignore_eos=True, sampling_params=PENALIZED), [])
    second = ran(driven, driven.add(prompt(2, 10), 9, session="a", keep="a", ignore_eos=True), first)
    before = driven.scheduler.stats.prompt_tokens
    kept.rewind("a", len(second))
    kept.rewind("a", len(first))
    assert tokens_of(driven, "a") == first
    second = ran(driven, driven.add(prompt(3, 10), 9, session="a", keep="a", ignore_eos=True), first)
    assert driven.scheduler.stats.prompt_tokens - before == 10
    kept.rewind("a", len(first) + 4)
    third = ran(driven, driven.add(prompt(4, 10), 9, session="a", keep="a", ignore_eos=True), second[: len(first) + 4])
    assert driven.scheduler.stats.prompt_tokens - before == 10 + len(first) + 4 + 10
    kept.rewind("a", 0)
    assert tokens_of(driven, "a") == [] != third
    with pytest.raises(InputError, match="the prompt is empty"):
        driven.add([], session="a")
    ran(driven, driven.add(prompt(5, 10), 9, session="a", keep="a"), [])


@pytest.mark.parametrize("gone", [False, True])
def test_save_and_load(driven: Driven, tmp_path: Path, gone: bool) -> None:
    """Also a session whose state was dropped, and one without tokens."""
    kept = driven.scheduler.kept
    history = ran(driven, driven.add(prompt(1, 70), 9, keep="a", ignore_eos=True), [])
    if gone:
        kept.get("a").forget_state()
    kept.save("a", str(tmp_path / "a"))
    assert kept.load("b", str(tmp_path / "a")) == len(history)
    with pytest.raises(InputError, match="a session is kept as 'b' already"):
        kept.load("b", str(tmp_path / "a"))
    with pytest.raises(SessionFileError):
        kept.load("c", str(tmp_path / "missing"))
    for name in ("a", "b"):
        ran(driven, driven.add(prompt(2, 5), 9, session=name, keep=name, ignore_eos=True), history)
    kept.rewind("a", 0)
    kept.save("a", str(tmp_path / "a"))
    assert kept.load("c", str(tmp_path / "a")) == 0
    ran(driven, driven.add(prompt(2, 5), 9, session="c"), [])


def test_saved_while_others_have_everything(driven: Driven, engine: Engine, tmp_path: Path) -> None:
    """Kept sessions that are idle make room for one that is saved or loaded; if there is none, nothing has changed."""
    kept = driven.scheduler.kept
    histories = {}
    for name in "abcd":
        histories[name] = ran(driven, driven.add(prompt(ord(name), 60), 9, keep=name, ignore_eos=True), [])
    kept.save("d", str(tmp_path / "d"))
    kept.get("a").forget_state()
    with engine.open_session():
        kept.save("a", str(tmp_path / "a"))
        kept.load("e", str(tmp_path / "a"))
    assert tokens_of(driven, "e") == histories["a"]
    for name in "abcde":
        kept.get(name).forget_state()
    with engine.open_session() as other:
        other.prefill(prompt(1, 250))
        with engine.open_session() as another:
            another.prefill(prompt(1, 220))
            driven.scheduler.kept.get("a").tokens *= 2
            with pytest.raises(CapacityError, match=r"pages? of 64 positions"):
                kept.save("a", str(tmp_path / "a"))
            driven.scheduler.kept.get("a").tokens = histories["a"]
    kept.save("a", str(tmp_path / "f"))
    assert kept.load("f", str(tmp_path / "f")) == len(histories["a"])
    ran(driven, driven.add(prompt(2, 5), session="f"), histories["a"])


def test_idle_sessions_leave_the_device(driven: Driven, engine: Engine) -> None:
    """More are kept than there are slots, with more tokens than there are pages. Each comes back as it was."""
    names = [f"session {number}" for number in range(7)]
    histories = {}
    for number, name in enumerate(names):
        request = driven.add(prompt(number, 90), 9, keep=name, ignore_eos=True)
        histories[name] = ran(driven, request, [])
    for turn in range(2):
        for number, name in enumerate(names):
            request = driven.add(prompt(number + turn, 5), 9, session=name, keep=name, ignore_eos=True)
            histories[name] = ran(driven, request, histories[name])
    assert driven.scheduler.stats.put_back == 0
    # The one that was used longest ago leaves first.
    here = [name for name in names if (held := driven.scheduler.kept.get(name).session) and not held.is_offloaded]
    assert here == names[-len(here) :] and here


@pytest.mark.parametrize("stepping", [False, True])
def test_no_more_leave_than_must(driven: Driven, monkeypatch: pytest.MonkeyPatch, stepping: bool) -> None:
    """While the copy of one that leaves is under way, no other one leaves for the same room."""
    histories = {}
    for name in "abcd"[stepping:]:
        histories[name] = ran(driven, driven.add(prompt(ord(name), 20), 3, keep=name, ignore_eos=True), [])
    other = driven.add(prompt(5, 5), 40, ignore_eos=True) if stepping else None
    driven.step(2)
    slow = SlowCopies(monkeypatch)
    request = driven.add(prompt(6, 5), 9, ignore_eos=True)
    driven.step(5)
    slow.end()
    driven.run()
    here = [name for name in histories if (held := driven.scheduler.kept.get(name).session) and not held.is_offloaded]
    assert here == list(histories)[1:]
    for one in (request, *([other] if other else [])):
        ran(driven, one, [])


def test_pressure_while_kept_sessions_go_on(driven: Driven) -> None:
    """Answers that keep their session, or go on from one, are put back like others."""
    histories = {}
    for name in "abc":
        histories[name] = ran(driven, driven.add(prompt(ord(name), 58), 3, keep=name, ignore_eos=True), [])
    requests = {}
    for name in "abc":
        options = {"session": name, "keep": name, "sampling_params": PENALIZED, "ignore_eos": True}
        requests[name] = driven.add(prompt(ord(name) + 1, 4), 140, **options)
    new = driven.add(prompt(9, 58), 140, keep="d", ignore_eos=True)
    driven.run()
    assert driven.scheduler.stats.put_back
    for name, request in requests.items():
        histories[name] = ran(driven, request, histories[name])
        assert tokens_of(driven, name) == histories[name]
    histories["d"] = ran(driven, new, [])
    assert tokens_of(driven, "d") == histories["d"]


def test_a_snapshot_gives_its_pages_back(driven: Driven, engine: Engine) -> None:
    """What an answer goes on from is kept as a snapshot only while nobody needs its pages."""
    driven.run()
    with engine.open_session() as one, engine.open_session() as other:
        one.prefill(prompt(1, 4 * PAGE - 6))
        other.prefill(prompt(1, PAGE))
        history = ran(driven, driven.add(prompt(2, 100), 3, keep="a", ignore_eos=True), [])
        request = driven.add(prompt(3, 5), 120, session="a", keep="a", ignore_eos=True)
        # Four pages are free for 228 tokens, and the snapshot shares one of them.
        driven.run()
    ran(driven, request, history)


def test_a_session_that_is_waited_for_leaves_too(driven: Driven) -> None:
    """Whoever is served needs the slots and pages of sessions that others wait for."""
    histories = {}
    for name in "abc":
        histories[name] = ran(driven, driven.add(prompt(ord(name), 120), 9, keep=name, ignore_eos=True), [])
    first = [driven.add(prompt(number, 120), 110, ignore_eos=True) for number in range(4)]
    then = {name: driven.add(prompt(2, 5), 9, session=name, keep=name, ignore_eos=True) for name in "abc"}
    driven.run()
    for request in first:
        ran(driven, request, [])
    for name, request in then.items():
        ran(driven, request, histories[name])


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_fork_without_a_slot(request: pytest.FixtureRequest, mode: str, reference: Engine, sessions: int) -> None:
    """The session that it goes on from leaves its slot to it."""
    with loaded(request, mode, sessions=sessions, kv_tokens=4 * PAGE) as engine:
        driven = Driven(engine, mode)
        driven.reference = reference
        history = ran(driven, driven.add(prompt(1, 20), 5, keep="a", ignore_eos=True), [])
        for more in (7, 0):
            ran(driven, driven.add(prompt(2, more), 5, session="a", ignore_eos=True), history)
        ran(driven, driven.add(prompt(2, 7), 5, session="a", keep="b", ignore_eos=True), history)
        first, then = driven.add(prompt(5, 7), 5, n=sessions), driven.add(prompt(4, 7), 5, session="a", keep="a")
        ran(driven, first, [])
        ran(driven, then, history)
        driven.close()


def test_an_answer_that_fails_keeps_what_it_has(
    driven: Driven, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = ran(driven, driven.add(prompt(1, 20), 5, keep="a", ignore_eos=True), [])
    request = driven.add(prompt(2, 7), 50, session="a", keep="a", ignore_eos=True)
    driven.step(5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "step", lambda runs: 1 / 0)
        driven.run()
    found = driven.of(request)
    assert found.reason == "error"
    after = tokens_of(driven, "a")
    # The state may be that of half a step.
    assert driven.scheduler.kept.get("a").session is None
    assert after == [*history, *request.tokens, *found.tokens]
    ran(driven, driven.add(prompt(4, 7), 5, session="a", keep="a"), after)


def test_nothing_is_left(driven: Driven, engine: Engine) -> None:
    for name in "abc":
        ran(driven, driven.add(prompt(1, 20), 5, keep=name), [])
        history = tokens_of(driven, name)
        ran(driven, driven.add(prompt(1, 20), 5, session=name, keep=name), history)
    driven.scheduler.kept.forget_states()
    assert_all_free(engine)
    assert len(driven.scheduler.kept) == 3
