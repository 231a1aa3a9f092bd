"""Histories that share their tokens."""

from __future__ import annotations

import random

from ostinato.runner.sessions.history import History


def test_who_shares_sees_only_its_own() -> None:
    pick, histories, expected = random.Random(0), [History([1, 2, 3])], [[1, 2, 3]]
    for step in range(500):
        place = pick.randrange(len(histories))
        history, tokens = histories[place], expected[place]
        assert len(history) == len(tokens)
        match pick.randrange(4):
            case 0 if len(histories) < 6:
                histories.append(history.share())
                expected.append(list(tokens))
            case 0:
                histories.pop(place)
                expected.pop(place)
            case 1:
                added = [step] * pick.randrange(3)
                history.add(added)
                tokens += added
            case 2:
                first = pick.randrange(len(tokens) + 1)
                assert history.since(first) == tokens[first:]
            case _:
                assert history.tokens == tokens


def test_a_list_that_was_read_stays_the_histories_own() -> None:
    first = History([1])
    other = first.share()
    held = other.tokens
    first.add([2])
    assert (held, first.tokens) == ([1], [1, 2])
    other.add([3])
    assert held == other.tokens == [1, 3]


def test_nothing_is_copied_before_it_is_needed() -> None:
    first = History(list(range(1000)))
    copies = [first.share() for _ in range(3)]
    assert all(copy._tokens is first._tokens for copy in copies)
    first.add([5])
    assert copies[0].share()._tokens is first._tokens
    assert len(copies[0]) == 1000 and copies[0].tokens == list(range(1000))
